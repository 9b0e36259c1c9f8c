"""What `probe_all` says about devices, extras and plugins. Every device library here is a fake made of a few lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kpolicy import _probe_child, executors, policies
from kpolicy._probe_devices import Answer, Look, origin
from kpolicy.errors import ConfigError
from kpolicy.executors.base import ProbeReport, ProbeStatus
from kpolicy.probes import _kernels, probe_all

USABLE, ABSENT, BROKEN, MASKED = ProbeStatus.USABLE, ProbeStatus.ABSENT, ProbeStatus.BROKEN, ProbeStatus.MASKED
DEVICES = ["ascend", "kunlun", "xpu", "cuda", "cpu", "simulated"]
ROOT = Path(__file__).parents[1]

TORCH = """
import os, types
__version__ = {version!r}
version = types.SimpleNamespace(cuda={cuda!r}, hip={hip!r}, xpu={xpu!r})
accelerator = types.SimpleNamespace(Graph=object)

class _Ones:
    def sum(self): return self
    def item(self): return {total!r}

def ones(count, device):
    return _Ones()

class _Module:
    def __init__(self, count, name, hidden_by):
        self.count, self.name, self.hidden_by = count, name, hidden_by
    def device_count(self):
        return 0 if os.environ.get(self.hidden_by, "all") in ("", "-1") else self.count
    def get_device_name(self, index): return self.name
    def get_device_capability(self, index): return (9, 0)
    def init(self): raise RuntimeError({no_device!r})

cuda = _Module({devices!r}, "Test GPU", "CUDA_VISIBLE_DEVICES")
cuda.CUDAGraph = object
xpu = _Module({devices!r} if version.xpu else 0, "Test XPU", "ZE_AFFINITY_MASK")
{more}
"""

AUTOLOADS = """
if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
    try:
        import torch_npu
    except ImportError as error:
        raise RuntimeError("Failed to load the backend extension: torch_npu. More words.") from error
"""

TORCH_NPU = """
import torch
__version__ = "2.11.0"
torch.npu = torch._Module(2, "Ascend910B", "ASCEND_RT_VISIBLE_DEVICES")
torch.npu.NPUGraph = torch.npu.graph_task_group_begin = object
"""

TORCH_XMLIR = """
import types, torch
__version__ = "1.0"
torch.cuda = torch._Module(4, "GPU", "XPU_VISIBLE_DEVICES")
torch.cuda.get_device_capability = lambda index: (8, 6)
xpu = torch.cuda
"""


class Fakes:
    """Packages in a folder that is first on the import path, and what `probe_all` says with them there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environ = {"PATH": os.environ.get("PATH", "")}

    def package(self, name: str, text: str) -> None:
        (self.root / name).mkdir()
        (self.root / name / "__init__.py").write_text(text)

    def torch(self, **changes: Any) -> None:
        """A torch that works; by default 2.11 for CUDA with two devices."""
        values = {
            "version": "2.11.0+cu130", "cuda": "13.0", "hip": None, "xpu": None, "total": 2.0, "devices": 2,
            "no_device": "Found no NVIDIA driver on your system.", "more": "",
        }  # fmt: skip
        self.package("torch", TORCH.format_map(values | changes))

    def distribution(self, name: str, entry_points: str = "", metadata: str = "Name: {}\nVersion: 1.5\n") -> None:
        info = self.root / f"{name.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\n" + metadata.format(name))
        (info / "entry_points.txt").write_text(entry_points)

    def probe(self, timeout_s: float = 30.0, **environ: str) -> dict[str, ProbeReport]:
        reports = probe_all(timeout_s=timeout_s, environ=self.environ | environ)
        found = {each.name: each for each in reports}
        assert len(found) == len(reports)
        return found


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """No device library of the machine's own is found, only fakes."""
    monkeypatch.syspath_prepend(tmp_path)
    real = sys.modules.get("torch")
    if real is not None:
        monkeypatch.delitem(sys.modules, "torch")
    return Fakes(tmp_path)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`find_spec` finds none of these, installed or not."""
    for name in ("torch", "torch_npu", "torch_xmlir"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of all child processes started."""
    started: list[list[str]] = []
    real = subprocess.Popen

    def popen(command: list[str], *args: Any, **kwargs: Any) -> Any:
        started.append(command[3:5])
        return real(command, *args, **kwargs)

    monkeypatch.setattr(_probe_child.subprocess, "Popen", popen)
    return started


def statuses(found: Mapping[str, ProbeReport]) -> list[ProbeStatus]:
    return [found[f"device {name}"].status for name in DEVICES]


# Without torch


def test_without_torch_no_child_is_started(fakes: Fakes, no_torch: None, children: list[list[str]]) -> None:
    """Without torch no child runs, and devices but the simulated one are absent, with the command that gets torch."""
    found = fakes.probe()
    assert children == []
    assert statuses(found) == [ABSENT] * 5 + [USABLE]
    assert all("pip install 'kpolicy[torch]'" in found[f"device {name}"].reason for name in DEVICES[:5])
    assert found["extra torch"].status is ABSENT


def test_without_torch_it_is_quick(fakes: Fakes, no_torch: None) -> None:
    """Without torch a look at everything takes under 0.3 s."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        fakes.probe()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3


def test_vendor_packages_without_torch(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vendor package without torch is absent, and the reason says that torch is what is missing."""
    monkeypatch.setitem(sys.modules, "torch", None)
    fakes.package("torch_npu", "")
    report = fakes.probe()["device ascend"]
    assert report.status is ABSENT
    assert "torch_npu is there, but torch isn't installed" in report.reason


def test_a_mere_folder_is_no_package(fakes: Fakes) -> None:
    """A folder without `__init__.py` isn't taken for the package of that name; one with it is."""
    (fakes.root / "fake_folder").mkdir()
    fakes.package("fake_package", "")
    assert origin("fake_folder") is None
    assert origin("fake_package") == str(fakes.root / "fake_package" / "__init__.py")


def test_order(fakes: Fakes, no_torch: None) -> None:
    """Devices come first, vendors before CUDA, then extras with torch first, then policies, then executors."""
    names = list(fakes.probe())
    assert names[:6] == [f"device {name}" for name in DEVICES]
    assert names[6] == "extra torch"
    sections = [name.split()[0] for name in names]
    assert list(dict.fromkeys(sections)) == ["device", "extra", "policy", "executor"]


# torch that doesn't import


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise ImportError('libcudart.so.13: cannot open\\nmore')", "ImportError: libcudart.so.13: cannot open"),
        ("raise OSError('no file')", "OSError: no file"),
        ("raise RuntimeError('bad')", "RuntimeError: bad"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os.abort()", "died of SIGABRT while importing torch"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV while importing torch"),
        ("import os; os._exit(0)", "exited with code 0 and no answer while importing torch"),
        ("import os; os._exit(7)", "exited with code 7 and no answer while importing torch"),
        ("x = 1", "AttributeError: module 'torch' has no attribute '__version__'"),
        ("def f(:", "SyntaxError: invalid syntax"),
    ],
)
def test_broken_torch(fakes: Fakes, text: str, error: str, children: list[list[str]]) -> None:
    """However torch's import ends, torch, cuda and cpu are broken with the reason, and one child was enough to know."""
    fakes.package("torch", text)
    found = fakes.probe()
    assert found["extra torch"].status is BROKEN
    assert error in found["extra torch"].reason
    assert "more" not in found["extra torch"].reason
    assert statuses(found) == [ABSENT, ABSENT, BROKEN, BROKEN, BROKEN, USABLE]
    assert "see extra torch" in found["device cuda"].reason
    assert children == [["torch,xpu,cuda", ""]]


def test_a_dying_library_last_words(fakes: Fakes) -> None:
    """What a library wrote to stderr before it killed the process is among the facts."""
    fakes.package("torch", "import os, sys; print('terminate called', file=sys.stderr, flush=True); os.abort()")
    assert fakes.probe()["extra torch"].facts["stderr"] == "terminate called"


def test_hanging_torch(fakes: Fakes) -> None:
    """A torch that hangs is killed at the time limit, with the processes it started."""
    pid_file = fakes.root / "pid"
    fakes.package(
        "torch",
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n",
    )
    start = time.perf_counter()
    found = fakes.probe(timeout_s=3)
    assert time.perf_counter() - start < 18
    assert found["extra torch"].status is BROKEN
    assert "no answer within 3 s while importing torch" in found["extra torch"].reason
    assert _gone(int(pid_file.read_text()))


def _gone(pid: int) -> bool:
    """Whether a process ends within five seconds. One that is dead and not yet reaped counts as gone."""
    for _ in range(50):
        try:
            os.kill(pid, 0)
            if " Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False


def test_a_process_left_behind_does_not_hold_the_probe(fakes: Fakes) -> None:
    """A library that leaves a process behind, with the child's outputs open, doesn't make the probe wait for it."""
    fakes.torch(more="import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'])")
    start = time.perf_counter()
    assert fakes.probe()["extra torch"].status is USABLE
    assert time.perf_counter() - start < 18


def test_garbage_on_stdout(fakes: Fakes) -> None:
    """What libraries print to stdout, from Python or below it, complete or not, changes nothing."""
    shout = 'import os\nprint(\'{"version": 9}\')\nos.write(1, b\'kpolicy-probe:{"version": "9"}\\n\\xff half\')\n'
    fakes.torch(more=shout)
    (fakes.root / "sitecustomize.py").write_text("import os; os.write(1, b'hello without a line end')\n")
    found = fakes.probe(PYTHONPATH=str(fakes.root))
    assert found["extra torch"].facts["version"] == "2.11.0+cu130"
    assert found["device cuda"].status is USABLE


def test_old_torch_is_called_untested(fakes: Fakes) -> None:
    """A torch before 2.6 is usable, and said to be untested."""
    fakes.torch(version="2.5.1")
    report = fakes.probe()["extra torch"]
    assert report.status is USABLE
    assert "torch 2.5.1 is older than 2.6, untested" in report.reason


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0a0+git1234"])
def test_torch_that_everything_was_run_with_carries_no_remark(fakes: Fakes, version: str) -> None:
    """2.11 on a GPU, 2.13 on a CPU."""
    fakes.torch(version=version)
    assert fakes.probe()["extra torch"].reason == f"torch {version}"


@pytest.mark.parametrize("version", ["2.6.0", "2.12.1+cu130", "3.0", "custom"])
def test_other_torch_is_usable_and_called_untested(fakes: Fakes, version: str) -> None:
    """Whether it is newer, older or no number; what was run is named."""
    fakes.torch(version=version)
    report = fakes.probe()["extra torch"]
    assert report.status is USABLE
    assert report.reason == f"torch {version}, untested: kpolicy was run with 2.11 on a GPU and with 2.13 on a CPU"


# CUDA and the CPU


def test_good_cuda(fakes: Fakes) -> None:
    """A torch with CUDA devices makes cuda and cpu usable, with counts, names and builds as facts."""
    fakes.torch()
    found = fakes.probe()
    assert statuses(found) == [ABSENT, ABSENT, ABSENT, USABLE, USABLE, USABLE]
    cuda = found["device cuda"]
    assert "2 x Test GPU; an operator ran on the first" in cuda.reason
    assert "unverified" not in cuda.reason
    assert cuda.facts["platform"] == "CUDA 13.0"
    assert cuda.facts["capability"] == "9.0"
    assert found["extra torch"].facts["accelerator_graph"] is True


def test_missing_executors_are_named(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A usable device without an executor of its name says so, and stops saying so once there is one."""
    fakes.torch()
    monkeypatch.setattr(executors, "executor_names", lambda: ("cuda",))
    found = fakes.probe()
    assert "executor" not in found["device cuda"].reason
    assert "no cpu executor is installed yet" in found["device cpu"].reason


def test_hip_is_named_as_such(fakes: Fakes) -> None:
    """On a ROCm build the cuda device's facts name ROCm/HIP."""
    fakes.torch(cuda=None, hip="6.4")
    report = fakes.probe()["device cuda"]
    assert report.status is USABLE
    assert report.facts["platform"] == "ROCm/HIP 6.4"


def test_cpu_build(fakes: Fakes, children: list[list[str]]) -> None:
    """A CPU build of torch makes cuda absent with that reason, without a second child."""
    fakes.torch(version="2.13.0+cpu", cuda=None)
    found = fakes.probe()
    assert found["device cuda"].status is ABSENT
    assert "torch 2.13.0+cpu isn't built for cuda" in found["device cuda"].reason
    assert found["device cpu"].status is USABLE
    assert children == [["torch,xpu,cuda", ""]]


@pytest.mark.parametrize("error", ["Found no NVIDIA driver on your system.", "No CUDA GPUs are available"])
def test_no_device(fakes: Fakes, error: str) -> None:
    """Without a driver or a device cuda is absent, in torch's words."""
    fakes.torch(devices=0, no_device=error)
    report = fakes.probe()["device cuda"]
    assert report.status is ABSENT
    assert error in report.reason


def test_driver_too_old(fakes: Fakes) -> None:
    """A device that torch can't start is broken, not absent."""
    fakes.torch(devices=0, no_device="The NVIDIA driver on your system is too old (found version 11040).")
    report = fakes.probe()["device cuda"]
    assert report.status is BROKEN
    assert "too old" in report.reason
    assert "check that the driver" in report.reason


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_devices(fakes: Fakes, value: str) -> None:
    """Devices that CUDA_VISIBLE_DEVICES hides are masked; the reason names the variable, its value and their number."""
    fakes.torch(no_device="No CUDA GPUs are available")
    report = fakes.probe(CUDA_VISIBLE_DEVICES=value)["device cuda"]
    assert report.status is MASKED
    assert f"2 hidden by CUDA_VISIBLE_DEVICES={value!r}" in report.reason
    assert "unset CUDA_VISIBLE_DEVICES" in report.reason


def test_nothing_behind_the_variable(fakes: Fakes) -> None:
    """With CUDA_VISIBLE_DEVICES empty and no device behind it, cuda is absent."""
    fakes.torch(devices=0)
    assert fakes.probe(CUDA_VISIBLE_DEVICES="")["device cuda"].status is ABSENT


def test_a_wrong_operator_result_is_broken(fakes: Fakes) -> None:
    """A device that counts but computes wrongly is broken."""
    fakes.torch(total=3.0)
    report = fakes.probe()["device cuda"]
    assert report.status is BROKEN
    assert "ones(2).sum() on cuda:0 is 3.0, not 2" in report.reason


def test_a_device_that_hangs_costs_only_itself(fakes: Fakes) -> None:
    """A device that hangs is broken; torch and the CPU stay usable, and what was counted before is kept."""
    fakes.torch(more="import time\ndef ones(count, device): time.sleep(60)")
    found = fakes.probe(timeout_s=5)
    assert found["device cuda"].status is BROKEN
    assert "no answer within 5 s while running an operator on cuda:0" in found["device cuda"].reason
    assert found["device cuda"].facts["devices"] == 2
    assert found["device cpu"].status is USABLE


def test_one_child_tells_of_torch_and_of_its_device(fakes: Fakes, children: list[list[str]]) -> None:
    """What needs torch imported is asked of the child that imported it."""
    fakes.torch()
    found = fakes.probe()
    assert (found["extra torch"].status, found["device cuda"].status) == (USABLE, USABLE)
    assert children == [["torch,xpu,cuda", ""]]


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (
            {"triton": "it runs on CUDA devices, and this is cpu", "flash": "it runs on CUDA devices, and this is cpu"},
            "",
        ),
        (
            {
                "ascend": "it runs on Ascend NPUs, and this is cuda",
                "flash": "can run too",
                "flashinfer": "not there: get it",
            },
            " (also flash, which gathers keys; not flashinfer: not there: get it)",
        ),
        ({"triton": "too old", "flash": "too old"}, " (not triton, flash: too old)"),
    ],
)
def test_kernels_that_a_device_could_have_say_why_not(others: dict[str, str], said: str) -> None:
    """Those of other kinds of devices go without saying."""
    facts = {"flash_pages": "gathers keys", "cuda": "first", "cuda_others": others}
    report = _kernels(Look({}, 1.0, {"kernels": Answer(facts=facts, error=None)}))
    assert report.reason == f"cuda: first{said}"


def test_kernels_are_asked_of_that_child_too(children: list[list[str]]) -> None:
    """With a torch that is really there one child is enough for all."""
    pytest.importorskip("torch")
    names = [each.name for each in probe_all(kernels=True) if each.name.split()[0] in ("device", "extra", "attention")]
    assert names[names.index("extra torch") + 1] == "attention kernels"
    assert [asked for asked, _ in children if asked != "plugin"] == ["torch,kernels,xpu,cuda"]


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ("import os; os.abort()", "died of SIGABRT while counting CUDA devices"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise OSError('no')", "OSError: no"),
    ],
)
def test_what_one_probe_does_is_no_others_fault(fakes: Fakes, children: list[list[str]], ends: str, why: str) -> None:
    """A probe that ends the child that others shared is tried in one of its own, and what was said before stands."""
    fakes.torch(more=f"def _count():\n    {ends}\ncuda.device_count = _count")
    found = fakes.probe()
    assert (found["extra torch"].status, found["device cpu"].status) == (USABLE, USABLE)
    assert found["device cuda"].status is BROKEN
    assert why in found["device cuda"].reason
    assert [asked for asked, _ in children] == ["torch,xpu,cuda", "cuda"]


def test_a_device_that_torch_isnt_built_for_isnt_asked(fakes: Fakes, children: list[list[str]]) -> None:
    """Where asking for it would fail, the next one is still asked in the same child."""
    fakes.torch(more="def _fails(): raise OSError('no Level Zero')\nxpu.device_count = _fails")
    found = fakes.probe()
    assert (found["device xpu"].status, found["device cuda"].status) == (ABSENT, USABLE)
    assert [asked for asked, _ in children] == ["torch,xpu,cuda"]


def test_what_comes_after_one_that_fails_has_a_child_of_its_own(fakes: Fakes, children: list[list[str]]) -> None:
    """Kernels can't be had with a torch as poor as this one; its device is asked all the same."""
    fakes.torch()
    found = {each.name: each for each in probe_all(timeout_s=30, environ=fakes.environ, kernels=True)}
    assert (found["attention kernels"].status, found["device cuda"].status) == (BROKEN, USABLE)
    assert [asked for asked, _ in children] == ["torch,kernels,xpu,cuda", "cuda", "kernels"]


def test_a_probe_that_only_fails_after_others_is_cleared(fakes: Fakes, children: list[list[str]]) -> None:
    """What fails where something was asked before it, and not alone, is usable."""
    fakes.torch(
        xpu="20250101",
        more="_asked = []\nreal = cuda.device_count\n"
        "xpu.device_count = lambda: _asked.append(1) or 0\n"
        "def _count():\n    assert not _asked\n    return real()\ncuda.device_count = _count",
    )
    assert fakes.probe()["device cuda"].status is USABLE
    assert [asked for asked, _ in children] == ["torch,xpu,cuda", "cuda"]


@pytest.mark.parametrize("vendor", ["package", "entry point"])
def test_where_a_vendor_is_every_device_has_a_child_of_its_own(
    fakes: Fakes, children: list[list[str]], vendor: str
) -> None:
    """A vendor's package may change torch as it is imported, and is asked under another environment."""
    fakes.torch()
    if vendor == "package":
        fakes.package("torch_xmlir", "raise ImportError('broken')")
    else:
        fakes.distribution("vendor", "[torch.backends]\nvendor = nothing:load\n")
    fakes.probe()
    kunlun = [["kunlun", ""]] if vendor == "package" else []
    assert children == [["torch", ""], *kunlun, ["cuda", ""]]


def test_warnings_are_facts(fakes: Fakes) -> None:
    """Warnings about the device are among the facts, others aren't, and none is fatal."""
    fakes.torch(
        more="import warnings\nwarnings.warn('sm_120 is not compatible with this build')\n"
        "warnings.warn('old escape', SyntaxWarning)"
    )
    report = fakes.probe(PYTHONWARNINGS="error")["device cuda"]
    assert report.status is USABLE
    assert report.facts["warnings"] == ["sm_120 is not compatible with this build"]


# Ascend


def test_good_ascend(fakes: Fakes) -> None:
    """torch_npu with two devices is usable, with its API as facts, and said to be unverified."""
    fakes.torch(cuda=None)
    fakes.package("torch_npu", TORCH_NPU)
    report = fakes.probe(HCCL_OP_EXPANSION_MODE="AIV")["device ascend"]
    assert report.status is USABLE
    assert "2 x Ascend910B" in report.reason
    assert report.reason.endswith("unverified on hardware")
    assert report.facts["graph_updates"] is True
    assert report.facts["HCCL_OP_EXPANSION_MODE"] == "AIV"
    assert report.facts["ASCEND_HOME_PATH"] == "(unset)"


def test_launch_blocking_is_noted(fakes: Fakes) -> None:
    """ASCEND_LAUNCH_BLOCKING=1 leaves the device usable, and the reason says that graphs are ruled out."""
    fakes.torch(cuda=None)
    fakes.package("torch_npu", TORCH_NPU)
    report = fakes.probe(ASCEND_LAUNCH_BLOCKING="1")["device ascend"]
    assert report.status is USABLE
    assert "ASCEND_LAUNCH_BLOCKING=1 rules graphs out" in report.reason


GRAPHS = """
class _Graph:
    def replay(self): pass

class _graph:
    def __init__(self, graph): pass
    def __enter__(self): {enter}
    def __exit__(self, *error): pass

torch.npu.NPUGraph, torch.npu.graph, torch.npu.synchronize = _Graph, _graph, lambda: None
import types
torch.npu.utils = types.SimpleNamespace(get_cann_version=lambda module: {versions}[module])
"""
OLD_STACK = {"DRIVER": "24.1.rc3", "CANN": "8.2.RC1"}
NEW_STACK = {"DRIVER": "25.5.1", "CANN": "8.5.0"}


def with_graphs(fakes: Fakes, enter: str, versions: dict[str, str]) -> ProbeReport:
    """The report on an Ascend device whose captures begin so."""
    more = "class _Sum(_Ones):\n    def item(self): return 2.0\n    def sum(self): return self\n"
    more += "    def __add__(self, other):\n        found = _Sum(); found.item = lambda: 4.0; return found\n"
    more += "def ones(count, device): return _Sum()\n"
    fakes.torch(cuda=None, more=more)
    fakes.package("torch_npu", TORCH_NPU + GRAPHS.format(enter=enter, versions=versions))
    return fakes.probe()["device ascend"]


def test_a_graph_is_captured_where_it_can_be(fakes: Fakes) -> None:
    """A usable device captured and replayed a graph; a new driver carries no remark."""
    report = with_graphs(fakes, "pass", NEW_STACK)
    assert report.status is USABLE
    assert report.facts["graph_captured"] is True
    assert report.facts["driver"] == "25.5.1"
    assert "1,800 streams" not in report.reason


def test_streams_taken_by_another_process_are_told(fakes: Fakes) -> None:
    """A device without streams for a graph is usable, and the reason has its words and who may hold them."""
    report = with_graphs(fakes, "raise RuntimeError('code 207008, Stream resources are insufficient')", NEW_STACK)
    assert report.status is USABLE
    assert "no graph can be captured now (RuntimeError: code 207008" in report.reason
    assert "other processes may hold the device's streams" in report.reason
    assert report.reason.endswith("unverified on hardware")


def test_an_old_driver_is_told(fakes: Fakes) -> None:
    """A driver and toolkit from before the ceiling was lifted are named, with those that lift it."""
    report = with_graphs(fakes, "raise RuntimeError('Alloc sq cq fail, not enough space')", OLD_STACK)
    assert report.status is USABLE
    assert "driver 24.1.rc3 and CANN 8.2.RC1 hold graphs to about 1,800 streams; driver 25.5.1" in report.reason
    assert "Alloc sq cq fail" in report.reason


def test_both_vendors_name_each_other(fakes: Fakes) -> None:
    """Where both have devices each is usable and says that the other is there and how to choose."""
    fakes.torch(cuda=None)
    fakes.package("torch_npu", TORCH_NPU)
    fakes.package("torch_xmlir", TORCH_XMLIR)
    found = fakes.probe()
    assert statuses(found)[:2] == [USABLE, USABLE]
    assert "Kunlun devices are here too" in found["device ascend"].reason
    assert "Ascend devices are here too" in found["device kunlun"].reason
    assert "Engine(device=...)" in found["device kunlun"].reason


def test_half_installed_torch_xmlir(fakes: Fakes) -> None:
    """A torch_xmlir without anything to count by is broken, and said to be installed in part."""
    fakes.torch()
    fakes.package("torch_xmlir", "__version__ = '1.0'")
    found = fakes.probe()
    assert found["device kunlun"].status is BROKEN
    assert "installed in part" in found["device kunlun"].reason
    assert "may be Kunlun's" in found["device cuda"].reason


def test_broken_torch_npu_breaks_torch_only_through_autoload(fakes: Fakes) -> None:
    """A torch_npu without its libraries is broken; torch, which autoloads it, is found usable without autoload."""
    fakes.torch(more=AUTOLOADS)
    fakes.package("torch_npu", "raise ImportError('libhccl.so: cannot open shared object file: No such file')")
    found = fakes.probe()
    ascend, torch = found["device ascend"], found["extra torch"]
    assert ascend.status is BROKEN
    assert "ImportError: libhccl.so: cannot open shared object file" in ascend.reason
    assert "set_env.sh" in ascend.reason
    assert torch.status is USABLE
    assert "imports only with TORCH_DEVICE_BACKEND_AUTOLOAD=0" in torch.reason
    assert "Failed to load the backend extension: torch_npu" in torch.facts["autoload_error"]
    assert "libhccl.so" in torch.facts["autoload_error"]
    assert found["device cuda"].status is USABLE
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found["device cpu"].reason


def test_a_backend_that_kills_torch(fakes: Fakes) -> None:
    """An autoloaded backend that kills the process is found out the same way as one that raises."""
    fakes.torch(more=AUTOLOADS)
    fakes.package("torch_npu", "import os; os.abort()")
    found = fakes.probe()
    assert found["extra torch"].status is USABLE
    assert "SIGABRT while importing torch" in found["extra torch"].reason
    assert found["device ascend"].status is BROKEN
    assert "SIGABRT while importing torch_npu" in found["device ascend"].reason


def test_what_was_answered_with_autoload_isnt_taken_for_without(fakes: Fakes, children: list[list[str]]) -> None:
    """Torch that autoloads a package which isn't there is asked again without, and so are its devices."""
    fakes.torch(more=AUTOLOADS)
    found = fakes.probe()
    assert found["extra torch"].status is found["device cuda"].status is USABLE
    assert "imports only with TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found["extra torch"].reason
    assert [asked for asked, _ in children] == ["torch,xpu,cuda", "torch", "cuda"]


def test_kernels_are_asked_in_the_environment_as_it_is(fakes: Fakes) -> None:
    """A model is loaded with autoload, which torch alone is asked without."""
    fakes.torch(more=AUTOLOADS)
    found = {each.name: each for each in probe_all(timeout_s=30, environ=fakes.environ, kernels=True)}
    assert found["extra torch"].status is USABLE
    assert "Failed to load the backend extension" in found["attention kernels"].reason


def test_autoload_already_off(fakes: Fakes) -> None:
    """Where autoload is off already, a good torch_npu is still found by its own import."""
    fakes.torch(more=AUTOLOADS)
    fakes.package("torch_npu", TORCH_NPU)
    found = fakes.probe(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found["device ascend"].status is USABLE
    assert found["extra torch"].reason == "torch 2.11.0+cu130"


def test_ascend_without_devices(fakes: Fakes) -> None:
    """torch_npu that imports and counts none is absent; devices that its variable hides are masked."""
    fakes.torch(cuda=None)
    fakes.package("torch_npu", TORCH_NPU)
    report = fakes.probe(ASCEND_RT_VISIBLE_DEVICES="-1")["device ascend"]
    assert report.status is MASKED
    assert "2 hidden by ASCEND_RT_VISIBLE_DEVICES='-1'" in report.reason
    (fakes.root / "torch_npu" / "__init__.py").write_text(TORCH_NPU.replace("(2,", "(0,  "))
    report = fakes.probe()["device ascend"]
    assert report.status is ABSENT
    assert "torch_npu imports and finds no device" in report.reason


def test_executors_that_never_met_their_hardware_say_so(fakes: Fakes) -> None:
    """Each of them, and none of the others."""
    fakes.torch()
    found = fakes.probe()
    told = {name for name, each in found.items() if name.startswith("executor") and "unverified" in each.reason}
    assert told == {f"executor {name}" for name in ("ascend", "kunlun", "xpu", "accelerator")}


# Kunlun


@pytest.mark.parametrize(
    ("more", "proof"),
    [
        ("", "torch_xmlir.xpu.device_count()"),
        ("_XMLIRC = types.SimpleNamespace(_xpu_get_devices_number=lambda: 4)", "_xpu_get_devices_number()"),
    ],
)
def test_kunlun_masks_cuda(fakes: Fakes, more: str, proof: str, children: list[list[str]]) -> None:
    """Where torch_xmlir counts devices kunlun is usable and cuda masked, whatever torch.cuda claims."""
    fakes.torch()
    fakes.package("torch_xmlir", TORCH_XMLIR + more)
    found = fakes.probe()
    kunlun, cuda = found["device kunlun"], found["device cuda"]
    assert kunlun.status is USABLE
    assert "4 x GPU" in kunlun.reason
    assert kunlun.reason.endswith("unverified on hardware")
    assert kunlun.facts["proof"].endswith(proof)
    assert cuda.status is MASKED
    assert "torch.cuda is torch_xmlir's here" in cuda.reason
    assert cuda.facts["capability"] == "8.6"
    assert ["cuda", ""] not in children


@pytest.mark.parametrize(("value", "mocked"), [(None, True), ("true", True), ("false", False), ("0", False)])
def test_mock_compile(fakes: Fakes, value: str | None, mocked: bool) -> None:
    """Unless it is switched off, the reason says that PIECEWISE through torch.compile would silently be eager."""
    fakes.torch()
    fakes.package("torch_xmlir", TORCH_XMLIR)
    environ = {} if value is None else {"XMLIR_ENABLE_MOCK_TORCH_COMPILE": value}
    report = fakes.probe(**environ)["device kunlun"]
    assert ("would silently be eager" in report.reason) is mocked
    assert report.facts["XMLIR_ENABLE_MOCK_TORCH_COMPILE"] == (value or "(unset)")


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_a_kunlun_without_its_allocator_is_told(fakes: Fakes, value: str | None) -> None:
    """The executor refuses to start so; the doctor says it before."""
    fakes.torch()
    fakes.package("torch_xmlir", TORCH_XMLIR)
    environ = {} if value is None else {"XMLIR_DISABLE_CUDA_ALLOCATOR": value}
    report = fakes.probe(**environ)["device kunlun"]
    assert ("XMLIR_DISABLE_CUDA_ALLOCATOR" in report.reason) is (value == "1")


@pytest.mark.parametrize(("value", "wrong"), [("1", False), ("0", False), ("true", True), ("", True)])
def test_force_graph_variable(fakes: Fakes, value: str, wrong: bool) -> None:
    """XMLIR_FORCE_USE_XPU_GRAPH is a fact, and one that isn't a whole number is remarked on."""
    fakes.torch()
    fakes.package("torch_xmlir", TORCH_XMLIR)
    report = fakes.probe(XMLIR_FORCE_USE_XPU_GRAPH=value)["device kunlun"]
    assert report.facts["XMLIR_FORCE_USE_XPU_GRAPH"] == value
    assert ("isn't a whole number" in report.reason) is wrong


def test_a_variable_that_breaks_torch_xmlir_is_named(fakes: Fakes) -> None:
    """It is read with int() when torch_xmlir is imported: the next step is the variable, not a new installation."""
    fakes.torch()
    fakes.package("torch_xmlir", "import os\nint(os.environ['XMLIR_FORCE_USE_XPU_GRAPH'])\n" + TORCH_XMLIR)
    report = fakes.probe(XMLIR_FORCE_USE_XPU_GRAPH="true")["device kunlun"]
    assert report.status is BROKEN
    assert "XMLIR_FORCE_USE_XPU_GRAPH='true' isn't a whole number" in report.reason
    assert "reinstall" not in report.reason
    assert fakes.probe(XMLIR_FORCE_USE_XPU_GRAPH="1")["device kunlun"].status is USABLE


def test_kunlun_that_counts_and_then_fails_still_masks_cuda(fakes: Fakes) -> None:
    """A Kunlun device that can't run an operator is broken, and its claim to CUDA still masks cuda."""
    fakes.torch(total=1.0)
    fakes.package("torch_xmlir", TORCH_XMLIR)
    found = fakes.probe()
    assert found["device kunlun"].status is BROKEN
    assert found["device cuda"].status is MASKED


def test_hidden_kunlun_still_masks_cuda(fakes: Fakes) -> None:
    """Kunlun devices hidden by XPU_VISIBLE_DEVICES are masked, and so is cuda."""
    fakes.torch()
    fakes.package("torch_xmlir", TORCH_XMLIR)
    found = fakes.probe(XPU_VISIBLE_DEVICES="")
    assert found["device kunlun"].status is MASKED
    assert "4 hidden by XPU_VISIBLE_DEVICES=''" in found["device kunlun"].reason
    assert found["device cuda"].status is MASKED


@pytest.mark.parametrize(
    "text", ["raise ImportError('libxpurt.so')", TORCH_XMLIR.replace("(4,", "(0,") + "torch.cuda.count = 0"]
)
def test_without_proof_cuda_speaks_for_itself(fakes: Fakes, text: str) -> None:
    """torch_xmlir that doesn't import, or counts nothing, proves nothing: cuda is judged by its own facts."""
    fakes.torch()
    fakes.package("torch_xmlir", text)
    found = fakes.probe()
    assert found["device kunlun"].status in (BROKEN, ABSENT)
    assert found["device cuda"].status is USABLE


def test_broken_torch_xmlir_casts_doubt_on_cuda(fakes: Fakes) -> None:
    """Where torch_xmlir is there and doesn't import, a usable cuda says that it may be Kunlun's."""
    fakes.torch()
    fakes.package("torch_xmlir", "raise OSError('libxpurt.so')")
    found = fakes.probe()
    assert found["device kunlun"].status is BROKEN
    assert "reinstall the vendor's xpytorch" in found["device kunlun"].reason
    assert "on a Kunlun machine this may be Kunlun's" in found["device cuda"].reason


# XPU


def test_good_xpu(fakes: Fakes) -> None:
    """An XPU build of torch with devices is usable, unverified, and one without a graph class says what that costs."""
    fakes.torch(cuda=None, xpu="20250302")
    report = fakes.probe()["device xpu"]
    assert report.status is USABLE
    assert report.facts["platform"] == "XPU 20250302"
    assert "no graph class (torch 2.11 has it), so only EAGER can run" in report.reason
    assert report.reason.endswith("unverified on hardware")


def test_xpu_with_graphs(fakes: Fakes) -> None:
    """An XPU build with a graph class carries no remark on graphs."""
    fakes.torch(cuda=None, xpu="20250302", more="xpu.XPUGraph = object")
    report = fakes.probe(ZE_AFFINITY_MASK="0,1")["device xpu"]
    assert report.status is USABLE
    assert "EAGER" not in report.reason
    assert report.facts["ZE_AFFINITY_MASK"] == "0,1"


def test_what_one_device_warns_of_is_no_other_ones(fakes: Fakes, children: list[list[str]]) -> None:
    """What importing torch warns of is told of each, as each alone would."""
    warns = (
        "import warnings\nwarnings.warn('numpy is missing')\n"
        "def _old(): warnings.warn('XPU driver is too old'); return 1\nxpu.device_count = _old"
    )
    fakes.torch(xpu="20250302", more=warns)
    found = fakes.probe()
    assert children == [["torch,xpu,cuda", ""]]
    assert found["device xpu"].facts["warnings"] == ["numpy is missing", "XPU driver is too old"]
    assert found["device cuda"].facts["warnings"] == ["numpy is missing"]


# Extras


def test_extras(fakes: Fakes, no_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extra that is found is usable, without being imported; one of which only the record is left is broken."""
    fakes.package("flashinfer", "raise RuntimeError('never imported')")
    fakes.distribution("flashinfer-python")
    monkeypatch.setitem(sys.modules, "polars", None)
    fakes.distribution("polars")
    found = fakes.probe()
    assert found["extra flashinfer-python"].status is USABLE
    assert found["extra flashinfer-python"].facts["version"] == "1.5"
    assert found["extra polars"].status is BROKEN
    assert "there is no module polars" in found["extra polars"].reason


def test_absent_extra(fakes: Fakes, no_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extra that isn't there says how to get it."""
    monkeypatch.setattr("kpolicy.probes.origin", lambda _: None)
    monkeypatch.setattr("kpolicy.probes._version", lambda _: None)
    found = fakes.probe()
    assert found["extra transformers"].status is ABSENT
    assert "pip install 'kpolicy[models]'" in found["extra transformers"].reason
    assert "pip install prometheus-client" in found["extra prometheus-client"].reason


# Plugins


def test_own_policies_and_executors_load(fakes: Fakes, no_torch: None) -> None:
    """Every policy and executor of ours is usable."""
    found = fakes.probe()
    targets = {f"executor {name}": target for name, target in executors.OWN.items()}
    ours = [f"policy {name}" for name in policies.OWN]
    ours += [name for name, target in targets.items() if target.partition(":")[0] not in executors.NEED_TORCH]
    assert {found[name].status for name in ours} == {USABLE}


def test_a_policy_of_ours_that_fails_to_import(fakes: Fakes, no_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy of ours whose module or factory is missing is broken, and the rest are reported."""
    monkeypatch.setattr(policies, "OWN", {"a": "kpolicy.nowhere:A", "b": "kpolicy.policies.fixed:B", **policies.OWN})
    found = fakes.probe()
    assert found["policy a"].status is found["policy b"].status is BROKEN
    assert found["policy auto"].status is USABLE


def test_plugins(fakes: Fakes, no_torch: None) -> None:
    """Plugins load one by one in children: a good one is usable, others broken each for its own reason."""
    (fakes.root / "fake_plugins.py").write_text("import os\nclass Good: pass\nnothing = None\n")
    (fakes.root / "fake_raises.py").write_text("raise RuntimeError('no licence')\n")
    (fakes.root / "fake_dies.py").write_text("import os; os.abort()\n")
    fakes.distribution(
        "fakes-one",
        "[kpolicy.policies]\ngood=fake_plugins:Good\nraises=fake_raises:X\ndies=fake_dies:X\nnone=fake_plugins:nothing\n"
        "twice=fake_plugins:Good\nauto=fake_plugins:Good\n[kpolicy.executors]\nbox=fake_plugins:Good\n",
    )
    fakes.distribution("fakes-two", "[kpolicy.policies]\ntwice=fake_plugins:nothing\n")
    found = fakes.probe()
    assert found["policy good"].status is found["executor box"].status is USABLE
    assert found["policy good"].facts["origin"] == "fakes-one"
    reasons = {name: found[f"policy {name}"].reason for name in ("raises", "dies", "none", "twice")}
    assert {found[f"policy {name}"].status for name in reasons} == {BROKEN}
    assert "of fakes-one (fake_raises:X) raised when loaded: RuntimeError: no licence" in reasons["raises"]
    assert "from fakes-one; the process died of SIGABRT while loading dies" in reasons["dies"]
    assert "can't be called" in reasons["none"]
    assert "fakes-one (fake_plugins:Good)" in reasons["twice"]
    assert "fakes-two (fake_plugins:nothing)" in reasons["twice"]
    assert found["policy auto"].status is USABLE
    assert found["policy auto of fakes-one"].status is MASKED
    assert "fake_plugins" not in sys.modules


def test_unreadable_entry_points(fakes: Fakes, no_torch: None) -> None:
    """A package whose entry points can't be parsed is reported, and our own policies beside it."""
    fakes.distribution("fakes-cut", "[kpolicy.policies]\nhalf\n")
    found = fakes.probe()
    assert found["policy plugins"].status is BROKEN
    assert "kpolicy.policies can't be read" in found["policy plugins"].reason
    assert found["policy auto"].status is USABLE


# The process itself


def test_this_process_stays_clean(fakes: Fakes) -> None:
    """With torch and a vendor there, a fresh interpreter that probes everything has imported neither, nor numpy."""
    fakes.torch(more=AUTOLOADS)
    fakes.package("torch_npu", TORCH_NPU)
    script = (
        "import json, sys; from kpolicy.probes import probe_all; reports = probe_all()\n"
        "print(json.dumps([[name for name in ('torch', 'torch_npu', 'numpy', 'structlog') if name in sys.modules],\n"
        "                  [each.status.value for each in reports][:6]]))"
    )
    path = os.pathsep.join([str(fakes.root), *filter(None, sys.path)])
    ran = subprocess.run(
        [sys.executable, "-c", script], env={**fakes.environ, "PYTHONPATH": path}, cwd=ROOT, capture_output=True,
        check=True, timeout=120,
    )  # fmt: skip
    imported, first = json.loads(ran.stdout)
    assert imported == []
    assert first == ["usable", "absent", "absent", "usable", "usable", "usable"]


def test_an_interpreter_that_cannot_start(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no child can be started torch is broken with that reason, and the rest is reported."""
    fakes.torch()
    monkeypatch.setattr(sys, "executable", str(fakes.root / "no-python"))
    found = fakes.probe()
    assert found["extra torch"].status is BROKEN
    assert "no child process could be started" in found["extra torch"].reason


def test_reports_are_json(fakes: Fakes) -> None:
    """Every fact can be written as JSON, for `kpolicy doctor --json`."""
    fakes.torch()
    fakes.package("torch_xmlir", TORCH_XMLIR)
    for report in fakes.probe().values():
        assert json.loads(json.dumps(dict(report.facts))) == dict(report.facts)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), "5", None])
def test_time_limits_that_mean_nothing(timeout_s: Any) -> None:
    """A time limit that isn't a positive, finite number of seconds is an error that says so."""
    with pytest.raises(ConfigError, match="positive, finite number of seconds"):
        probe_all(timeout_s=timeout_s)


def test_own_executors_that_need_torch_say_so_without_it(fakes: Fakes, no_torch: None) -> None:
    """Without torch the cpu executor is absent, and the next step is named."""
    report = fakes.probe()["executor cpu"]
    assert report.status is ProbeStatus.ABSENT
    assert "needs torch" in report.reason
    assert "pip install 'kpolicy[models]'" in report.reason


def test_own_executors_that_need_torch_are_usable_with_it(fakes: Fakes) -> None:
    """With torch there, the cpu executor is usable."""
    fakes.torch()
    assert fakes.probe()["executor cpu"].status is ProbeStatus.USABLE


def test_an_executor_is_as_usable_as_its_device(fakes: Fakes) -> None:
    """One of a device that isn't there, or is another vendor's, isn't usable, whatever is installed."""
    fakes.torch(cuda="13.0", devices=1)
    found = fakes.probe()
    assert found["device cuda"].status is found["executor cuda"].status is USABLE
    assert found["device kunlun"].status is found["executor kunlun"].status is ABSENT
    assert "its device is absent, see device kunlun" in found["executor kunlun"].reason
    # No device is called like this one.
    assert "the device that it finds there isn't looked at" in found["executor accelerator"].reason
    assert "looked at" not in found["executor cuda"].reason
    found = fakes.probe(CUDA_VISIBLE_DEVICES="-1")
    assert found["device cuda"].status is found["executor cuda"].status is MASKED
