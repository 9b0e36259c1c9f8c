"""Which executor runs a model: the first that can, vendors before CUDA; a broken vendor costs its own device alone."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from kpolicy import executors
from kpolicy.engine import Engine
from kpolicy.errors import ConfigError, PluginError
from kpolicy.executors import first_executor
from kpolicy.executors.cuda.adapter import CudaAdapter
from kpolicy.executors.kunlun.proof import kunlun_behind_cuda
from kpolicy.executors.simulated import SimulatedExecutor

NVIDIA = "NVIDIA H200", (9, 0)
DISGUISED = "GPU", (8, 6)


def python(code: str, path: Path, **environ: str) -> Any:
    """What a fresh interpreter with a folder first on its path prints last, as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), *sys.path]), **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def vendor(folder: Path, name: str, text: str) -> None:
    """A vendor's package that torch loads with itself, as torch_npu registers."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)
    info = folder / f"{name}-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {name}:_autoload\n")


NO_CANN = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')\n"

GOES_ON = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import kpolicy.serving
import torch
from importlib.util import find_spec
from kpolicy.executors import get_executor
from kpolicy.errors import ConfigError, PluginError
try:
    get_executor("ascend", model=None)
    asked = "made"
except ConfigError as error:
    asked = str(error)
told = [str(each.message) for each in caught if "backend" in str(each.message)]
print(json.dumps([float(torch.ones(2).sum()), told, asked, find_spec("torch_npu") is None]))
"""


def test_torch_npu_without_cann_breaks_torch_and_not_us(tmp_path: Path) -> None:
    """Where plain `import torch` fails we go on with the CPU and say so; who asks for the NPU gets the cause."""
    vendor(tmp_path, "torch_npu", NO_CANN)
    plain = subprocess.run(
        [sys.executable, "-c", "import torch"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )  # fmt: skip
    assert "Failed to load the backend extension: torch_npu" in plain.stderr
    total, told, asked, gone = python(GOES_ON, tmp_path)
    assert total == 2.0
    assert gone  # or transformers would import it too
    assert len(told) == 1
    assert "torch_npu" in told[0]
    assert "libhccl.so" in told[0]
    assert "libhccl.so" in asked
    assert "set_env.sh" in asked


def test_torch_imported_before_us_is_no_matter(tmp_path: Path) -> None:
    """With autoload off torch imports, and transformers would still trip over torch_npu: it doesn't."""
    vendor(tmp_path, "torch_npu", NO_CANN)
    code = "import torch" + GOES_ON
    total, told, asked, gone = python(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (total, gone, len(told)) == (2.0, True, 1)
    assert "libhccl.so" in asked


@pytest.mark.parametrize("before", ["", "import triton\n"])
def test_a_mere_folder_called_triton_is_told(tmp_path: Path, before: str) -> None:
    """Without the package Python takes a folder for it, and torch doesn't import whole; with the package none is."""
    (tmp_path / "triton").mkdir()
    code = "import json, kpolicy.errors\ntry:\n    import kpolicy.serving\n    said = ''\n"
    code += "except kpolicy.errors.ConfigError as error:\n    said = str(error)\nprint(json.dumps(said))"
    if find_spec("triton") is not None:
        assert python(code, tmp_path) == ""
        return
    said = python(before + code, tmp_path)
    assert f"the folder {tmp_path / 'triton'} is on Python's import path and is taken for the package triton" in said
    assert "Start from another folder, or rename it." in said


def test_a_backend_that_loads_is_loaded(tmp_path: Path) -> None:
    """Backends that work are there as torch itself would have them, and the variable is as it was."""
    vendor(tmp_path, "good_backend", "loads = []\ndef _autoload():\n    loads.append(1)\n")
    code = "import json, os, kpolicy.serving, good_backend; print(json.dumps([good_backend.loads, {**os.environ}.get("
    code += "'TORCH_DEVICE_BACKEND_AUTOLOAD')]))"
    assert python(code, tmp_path) == [[1], None]
    assert python(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == [[], "0"]


def test_autoload_that_is_off_stays_off(tmp_path: Path) -> None:
    """With TORCH_DEVICE_BACKEND_AUTOLOAD=0 no backend is loaded; only who imports transformers looks at torch_npu."""
    vendor(tmp_path, "torch_npu", "def _autoload():\n    pass\n")
    code = "import json, sys\nfrom kpolicy.executors.importing import import_torch\nimport_torch()\n"
    code += "print(json.dumps([name in sys.modules for name in ('torch', 'torch_npu')]))"
    assert python(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == [True, False]
    assert python(code, tmp_path) == [True, True]


class Stepped:
    """All that a launch asks of a model."""

    device: Any = torch.device("cpu")
    max_blocks, pad_slot = 4, 64
    forward = head = sample = staticmethod(lambda *_: None)


class Anywhere(SimulatedExecutor):
    """An executor that takes a model wherever it is."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


def test_a_model_on_the_cpu_runs_there() -> None:
    """Without a device the model's own decides."""
    model = Stepped()
    executor, passed_over = first_executor(model)
    assert executor.name == "cpu"
    assert not passed_over
    # One that doesn't say is there, too.
    model.device = None
    assert first_executor(model)[0].name == "cpu"


def test_the_next_device_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that refuses is passed over with its reason; where all refuse, the error has every reason."""

    def refuses(**arguments: Any) -> Any:
        raise ConfigError("torch_xmlir isn't installed")

    monkeypatch.setitem(executors.OWN, "cuda", f"{__name__}:Anywhere")
    model = SimpleNamespace(device="cuda:0")
    executor, passed_over = first_executor(model)
    assert isinstance(executor, Anywhere)
    assert list(passed_over) == ["kunlun"]
    monkeypatch.undo()
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"no executor runs a model on 'cuda' \(kunlun: .*; cuda: "):
            first_executor(model)


def test_an_engine_says_what_it_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Engine(model=...)` goes on with the next device; one that was asked for stops it with a clear error."""
    from tests.executors_launcher.checker import load_family

    model = load_family("llama")
    assert Engine(model=model).passed_over == {}
    monkeypatch.setitem(executors.OF_TENSORS, "cpu", ("ascend", "kunlun", "cpu"))
    engine = Engine(model=model, device="auto")
    assert engine.executor is not None
    assert engine.executor.name == "cpu"
    assert set(engine.passed_over) == {"ascend", "kunlun"}
    for name in ("ascend", "kunlun", "xpu"):
        with pytest.raises(ConfigError):
            Engine(model=model, device=name)


def fake_xmlir(count: int) -> Any:
    return SimpleNamespace(_XMLIRC=SimpleNamespace(_xpu_get_devices_number=lambda: count))


@pytest.mark.parametrize(
    ("module", "device", "refused"),
    [
        (None, NVIDIA, ""), (None, DISGUISED, ""), (fake_xmlir(0), NVIDIA, ""),
        (fake_xmlir(4), NVIDIA, "finds 4 Kunlun"), (fake_xmlir(4), DISGUISED, "device='kunlun'"),
        (SimpleNamespace(), NVIDIA, ""), (SimpleNamespace(), DISGUISED, "installed in part"),
    ],
)  # fmt: skip
def test_cuda_is_not_kunlun(
    module: Any, device: tuple[str, tuple[int, int]], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card that torch_xmlir counts isn't CUDA's; half an installation matters only where the card looks like one."""
    if module is not None:
        monkeypatch.setitem(sys.modules, "torch_xmlir", module)
    why = kunlun_behind_cuda(*device)
    assert bool(why) == bool(refused)
    assert refused in why


def test_the_cuda_executor_refuses_a_kunlun_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says whose card it is and which executor to name."""
    from kpolicy.executors.cuda import adapter

    monkeypatch.setitem(sys.modules, "torch_xmlir", fake_xmlir(4))
    monkeypatch.setattr(adapter.torch, "empty", lambda *_, **__: None)
    for name, value in (("current_device", 0), ("get_device_name", "GPU"), ("get_device_capability", (8, 6))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    with pytest.raises(ConfigError, match=r"isn't for the CUDA executor: .* finds 4 Kunlun cards"):
        CudaAdapter("cuda")


def test_a_plugin_named_like_the_device_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that a package registers as ``musa`` runs models on musa; without one all that was tried is said."""
    model = SimpleNamespace(device="musa:0")
    with pytest.raises(ConfigError, match=r"no executor runs a model on 'musa' \(accelerator: "):
        first_executor(model)
    monkeypatch.setattr(executors, "executor_names", lambda: {"musa": "torch-musa-kpolicy"})
    monkeypatch.setattr(executors, "load_plugin", lambda _group, name, _own: {"musa": Anywhere}.get(name))
    executor, passed_over = first_executor(model)
    assert isinstance(executor, Anywhere)
    assert executor.model is model
    assert not passed_over


def _plugins(monkeypatch: pytest.MonkeyPatch, **made: Any) -> None:
    monkeypatch.setattr(executors, "executor_names", lambda: dict.fromkeys(made, "some-kpolicy"))
    monkeypatch.setattr(executors, "load_plugin", lambda _group, name, _own: made.get(name))


def test_a_plugin_that_raises_when_made_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever installed it would be served by another executor, and not hear of it; one that refuses is passed over."""

    def broken(model: Any) -> Any:
        raise RuntimeError("out of memory")

    def refuses(model: Any) -> Any:
        raise ConfigError("no card")

    monkeypatch.setitem(executors.OWN, "accelerator", f"{__name__}:Anywhere")
    model = SimpleNamespace(device="musa:0")
    _plugins(monkeypatch, musa=broken)
    with pytest.raises(PluginError, match="executor 'musa' raised when made: RuntimeError: out of memory"):
        first_executor(model)
    _plugins(monkeypatch, musa=refuses)
    assert first_executor(model)[1] == {"musa": "no card"}
    _plugins(monkeypatch, musa=3)
    assert "which makes nothing" in first_executor(model)[1]["musa"]


def test_what_a_plugin_lacks_and_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """How an Engine gives a model is told where that lacks; a value that it doesn't take isn't the package's fault."""

    def needs(model: Any, host: str, rows: int = 1) -> Any:
        raise ValueError("rows must be positive")

    _plugins(monkeypatch, odd=needs)
    with pytest.raises(ConfigError, match=r"executor 'odd' needs model\. An Engine makes one of its model"):
        executors.get_executor("odd", host="here")
    with pytest.raises(ConfigError, match=r"executor 'odd' needs host\.$"):
        executors.get_executor("odd", model=1)
    with pytest.raises(PluginError, match="ValueError: rows must be positive") as caught:
        executors.get_executor("odd", model=1, host="here", rows=-1)
    assert "ninstall" not in str(caught.value)


def test_a_plugin_of_c_code_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a class may not say what it takes; then it says so itself when it is made."""
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(dict)
    _plugins(monkeypatch, odd=dict)
    with pytest.raises(PluginError, match=r"executor 'odd' made \{'rows': 1\}, which lacks part of the Executor"):
        executors.get_executor("odd", rows=1)


def test_what_is_no_step_model_is_named() -> None:
    """A config or a model of transformers: what it lacks, and what makes one of it."""
    with pytest.raises(ConfigError, match=r"a dict isn't a step model: it lacks forward, head, .* kpolicy.load makes"):
        Engine(model={"model_type": "llama"}, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a Linear isn't a step model: it lacks head, sample, max_blocks, pad_slot"):
        first_executor(torch.nn.Linear(2, 2))


def test_the_cpu_executor_takes_models_on_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its static inputs are on the CPU: a model elsewhere would fail at its first step."""
    executors.get_executor("cpu", model=Stepped())
    monkeypatch.setattr(Stepped, "device", "cuda:0")
    with pytest.raises(ConfigError, match="the model is on 'cuda:0', and the CPU executor runs those on the CPU"):
        executors.get_executor("cpu", model=Stepped())


def test_rows_of_a_launch_are_the_models_where_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else 256."""
    rows = lambda **given: executors.get_executor("cpu", model=Stepped(), **given).launcher.max_num_reqs  # noqa: E731
    assert rows() == 256
    monkeypatch.setattr(Stepped, "max_num_reqs", 7, raising=False)
    assert (rows(), rows(max_num_reqs=9)) == (7, 9)


def test_without_torch_the_next_step_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that needs torch says so, with the command."""

    def missing() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(executors, "import_torch", missing)
    with pytest.raises(ConfigError, match=r"executor 'cpu' needs torch.*pip install 'kpolicy\[torch\]'"):
        executors.get_executor("cpu")
