"""The two ends of a probe: `ask` and `ask_in_turn` start a child process, `main` is what runs in it.

Importing a device library can raise, crash, hang, print, or change the process for good, so no library is imported
here: a child does it and says what it sees, one JSON object a line, as it goes. What it said before it died counts.
Children look for modules where this process looks, so that what `find_spec` found is what they import.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

__all__ = ["Answer", "ask", "ask_in_turn", "main"]

_MARK = "kpolicy-probe:"
"""Begins our lines: hooks that run before `main` (a .pth file, sitecustomize) may print anything."""

_BOOT = "import sys; sys.path[:] = sys.argv[3:]; from kpolicy._probe_child import main; main(sys.argv[1], sys.argv[2])"

_LONGEST = 300
"""Characters kept of an error: the first line of a message is what identifies it."""


class Answer(NamedTuple):
    """What a child said.

    Facts hold whatever it found before it ended; `error` is None only where it came to its end.
    """

    facts: Mapping[str, Any]
    error: str | None


def ask(what: str, argument: str = "", *, environ: Mapping[str, str], timeout_s: float) -> Answer:
    """Probe one thing in a child process, which may end in any way.

    Args:
        what: a name in `_PROBES`.
        argument: what that probe takes; ``"count"`` makes a device probe stop before it touches a device.
        environ: the child's whole environment.
        timeout_s: seconds until the child and what it started are killed.
    """
    return _ask([what], argument, environ, timeout_s)[what]


def ask_in_turn(whats: Sequence[str], *, environ: Mapping[str, str], timeout_s: float) -> Mapping[str, Answer]:
    """Probe several things in one child process, which imports for the first what all of them need.

    The first answer is there whatever it is. Another is only there where it and all before it went well: what else
    there is to say of a thing takes a child of its own. `main` leaves out devices that this torch isn't built for.
    """
    first, *others = whats
    told = _ask(whats, "", environ, timeout_s)
    clean = {first: told[first]}
    for what in others:
        if what in told and told[what].error is None:
            clean[what] = told[what]
    return clean


def _ask(whats: Sequence[str], argument: str, environ: Mapping[str, str], timeout_s: float) -> dict[str, Answer]:
    """The answer to the first, and to those that the child came to."""
    command = [sys.executable or "python3", "-c", _BOOT, ",".join(whats), argument, *map(str, sys.path)]
    # Files, not pipes: a grandchild that outlives the child would keep a pipe open, and the reader waiting.
    with TemporaryFile() as out, TemporaryFile() as err:
        try:
            child = subprocess.Popen(  # noqa: S603 - our own interpreter, no shell
                command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except (OSError, ValueError) as error:
            return {whats[0]: Answer({}, f"no child process could be started: {_words(error)}")}
        try:
            code: int | None = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
        answers = {}
        for what, (facts, doing, error_text, done) in _read(out, whats[0]).items():
            if error_text is None and not done:
                error_text = f"{_ending(code, timeout_s)} while {doing or 'starting Python'}"
                last = _last_line(err)
                if last:
                    facts["stderr"] = last
            answers[what] = Answer(facts, error_text)
    return answers


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    if hasattr(os, "killpg"):
        os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    child.wait()


def _ending(code: int | None, timeout_s: float) -> str:
    if code is None:
        return f"no answer within {timeout_s:g} s"
    if code < 0:
        known = {each.value: each.name for each in signal.Signals}
        return f"the process died of {known.get(-code, f'signal {-code}')}"
    return f"the process exited with code {code} and no answer"


def _read(out: IO[bytes], first: str) -> dict[str, tuple[dict[str, Any], str, str | None, bool]]:
    """Of each thing asked facts, what was being done last, the error, and whether the child came to its end."""
    out.seek(0)
    what = first
    told: dict[str, tuple[dict[str, Any], str, str | None, bool]] = {first: ({}, "", None, False)}
    for line in out.read().decode("utf-8", "replace").splitlines():
        if not line.startswith(_MARK):
            continue
        try:
            said = json.loads(line[len(_MARK) :])
        except ValueError:
            continue  # the child died in the middle of a line
        what = said.pop("asked", what)
        facts, doing, error, done = told.get(what, ({}, "", None, False))
        doing, error, done = said.pop("doing", doing), said.pop("error", error), said.pop("done", done)
        told[what] = ({**facts, **said}, doing, error, done)
    return told


def _last_line(err: IO[bytes]) -> str:
    err.seek(0)
    lines = [line.strip() for line in err.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:_LONGEST] if lines else ""


def _words(error: BaseException) -> str:
    """Type and first line of an error, and of what it was raised from."""
    from kpolicy.errors import KPolicyError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = (lines[0] if lines else "")[:_LONGEST]
    if isinstance(error, KPolicyError):
        return first
    text = f"{type(error).__name__}: {first}".rstrip(": ")
    return f"{text} ({_words(error.__cause__)})" if error.__cause__ is not None else text


# What runs in the child

Say = Callable[..., None]


def main(whats: str, argument: str) -> None:
    """Run probes in this process, which is a child that `ask` started, up to one that fails. Doesn't return."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print, from C too, goes to stderr; the channel is ours alone
    _no_core_file()

    def say(**facts: Any) -> None:
        # A hook may have left a line open, so each of ours begins a new one.
        channel.write(f"\n{_MARK}{json.dumps(facts, default=str)}\n")
        channel.flush()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        imported = 0
        for i, what in enumerate(whats.split(",")):
            if i and not _built(what):
                continue
            say(asked=what)
            # The first imports for all, as each would alone; what any other warned of is its own.
            del caught[imported:]
            well = _run(say, what, argument)
            imported = imported if i else len(caught)
            told = [each for each in caught if issubclass(each.category, (UserWarning, RuntimeWarning))]
            texts = dict.fromkeys(str(each.message).strip().partition("\n")[0][:_LONGEST] for each in told)
            if texts:
                say(warnings=list(texts)[:3])
            if not well:
                break
    # Past the interpreter's own shutdown, in which device libraries are known to crash after all went well.
    os._exit(0)


def _run(say: Say, what: str, argument: str) -> bool:
    """Whether a probe came to its end."""
    try:
        _PROBES[what](say, argument)
        say(done=True)
    except BaseException as error:  # noqa: BLE001 - a library may call sys.exit when imported
        say(error=_words(error))
        return False
    return True


def _built(what: str) -> bool:
    """Whether the torch that is imported is built for what is asked; True of what needs no build."""
    builds = {"cuda": ("cuda", "hip"), "xpu": ("xpu",)}.get(what)
    version = getattr(sys.modules.get("torch"), "version", None)
    return builds is None or any(getattr(version, build, None) for build in builds)


def _no_core_file() -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _load(say: Say, name: str) -> Any:
    say(doing=f"importing {name}")
    return import_module(name)


def _torch(say: Say, _argument: str) -> None:
    torch = _load(say, "torch")
    say(
        version=str(torch.__version__),
        location=str(torch.__file__),
        cuda_build=getattr(torch.version, "cuda", None),
        hip_build=getattr(torch.version, "hip", None),
        xpu_build=getattr(torch.version, "xpu", None),
        accelerator_graph=hasattr(getattr(torch, "accelerator", None), "Graph"),
    )


def _ascend(say: Say, argument: str) -> None:
    torch = _load(say, "torch")
    torch_npu = _load(say, "torch_npu")
    npu = torch.npu
    say(
        torch_npu=str(torch_npu.__version__),
        graphs=hasattr(npu, "NPUGraph"),
        graph_updates=hasattr(npu, "graph_task_group_begin"),
        doing="counting NPUs",
    )
    version = getattr(getattr(npu, "utils", None), "get_cann_version", None)
    if version is not None:
        # An older torch_npu knows fewer modules.
        for module in ("DRIVER", "CANN"):
            with suppress(Exception):
                say(**{module.lower(): str(version(module))})
    _devices(say, torch, npu, "npu:0", npu.device_count(), argument)
    _graph(say, torch, npu, "NPUGraph", "npu:0", argument)


def _kunlun(say: Say, argument: str) -> None:
    torch = _load(say, "torch")
    torch_xmlir = _load(say, "torch_xmlir")
    say(torch_xmlir=str(getattr(torch_xmlir, "__version__", "unknown")), doing="counting Kunlun devices")
    counter = getattr(getattr(torch_xmlir, "_XMLIRC", None), "_xpu_get_devices_number", None)
    other = getattr(getattr(torch_xmlir, "xpu", None), "device_count", None)
    if counter is not None:
        count, proof = counter(), "torch_xmlir._XMLIRC._xpu_get_devices_number()"
    elif other is not None:
        count, proof = other(), "torch_xmlir.xpu.device_count()"
    else:
        raise RuntimeError("torch_xmlir is installed in part: it has neither _XMLIRC nor xpu.device_count")
    say(proof=proof)
    # The device itself is reached through torch.cuda, which torch_xmlir answers for.
    _devices(say, torch, torch.cuda, "cuda:0", count, argument)
    _graph(say, torch, torch.cuda, "CUDAGraph", "cuda:0", argument)


def _xpu(say: Say, argument: str) -> None:
    torch = _load(say, "torch")
    say(graphs=hasattr(torch.xpu, "XPUGraph"), doing="counting XPUs")
    _devices(say, torch, torch.xpu, "xpu:0", torch.xpu.device_count(), argument)
    _graph(say, torch, torch.xpu, "XPUGraph", "xpu:0", argument)


def _cuda(say: Say, argument: str) -> None:
    torch = _load(say, "torch")
    cuda = torch.cuda
    say(graphs=hasattr(cuda, "CUDAGraph"), doing="counting CUDA devices")
    count = cuda.device_count()
    _devices(say, torch, cuda, "cuda:0", count, argument)
    if not count and argument != "count":
        cuda.init()  # raises, and says why there is none: no driver, a driver too old, nothing visible


def _devices(say: Say, torch: Any, module: Any, device: str, count: int, argument: str) -> None:
    """Say what the devices are, and run one operator on the first: a count alone has been wrong before."""
    count = int(count)
    say(devices=count)
    if not count or argument == "count":
        return
    say(doing="asking for device names", names=sorted({str(module.get_device_name(i)) for i in range(count)}))
    capability = getattr(module, "get_device_capability", lambda _: None)(0)
    if isinstance(capability, tuple):  # torch.xpu answers with everything it knows
        say(capability=".".join(map(str, capability)))
    say(doing=f"running an operator on {device}")
    total = torch.ones(2, device=device).sum().item()
    if total != 2:
        raise RuntimeError(f"ones(2).sum() on {device} is {total}, not 2")


def _graph(say: Say, torch: Any, module: Any, name: str, device: str, argument: str) -> None:
    """Say whether a graph of one operator can be captured now: others may hold what graphs take of the device."""
    graph_type, capturing = getattr(module, name, None), getattr(module, "graph", None)
    blocking = os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1"
    if graph_type is None or capturing is None or argument == "count" or blocking or not module.device_count():
        return
    say(doing=f"capturing a graph on {device}")
    try:
        ones = torch.ones(2, device=device)
        graph = graph_type()
        with capturing(graph):
            total = ones + ones
        graph.replay()
        module.synchronize()
        if total.sum().item() != 4:
            raise RuntimeError(f"a graph of ones(2) + ones(2) on {device} gave {total.tolist()}")
        say(graph_captured=True)
    # Without graphs the device still runs eagerly.
    except Exception as error:  # noqa: BLE001
        say(graph_captured=False, graph_error=_words(error))


def _plugin(say: Say, argument: str) -> None:
    from kpolicy.plugins import load_plugin

    group, _, name = argument.partition(":")
    say(doing=f"loading {name}")
    factory = load_plugin(group, name, {})
    if not callable(factory):
        from kpolicy.errors import PluginError

        raise PluginError(f"{group} {name!r} is {factory!r}, which can't be called; register a class or a function.")


def _kernels(say: Say, _argument: str) -> None:
    # Serving stands above this module, so it is imported like a library.
    pages = _load(say, "kpolicy.serving.paged_flash").missing()
    say(flash_pages=f"gathers keys: {pages}" if pages else "reads pages where what is activated in torch does")
    for device, (chosen, others) in _load(say, "kpolicy.serving.kernels").kernels_chosen().items():
        say(**{device: chosen, f"{device}_others": {name: why or "can run too" for name, why in others.items()}})


_PROBES: Mapping[str, Callable[[Say, str], None]] = {
    "kernels": _kernels,
    "torch": _torch,
    "ascend": _ascend,
    "kunlun": _kunlun,
    "xpu": _xpu,
    "cuda": _cuda,
    "plugin": _plugin,
}
