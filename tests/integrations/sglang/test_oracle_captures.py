"""One warm-up inside the real backends' own procedures, on pretended graphs."""

import __future__

import ast
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kpolicy_sglang.captures import OneWarmUp
from kpolicy_sglang.failures import Failures
from kpolicy_sglang.versions import KNOWN
from tests.integrations.sglang.test_mirror import Frozen
from tests.integrations.sglang.test_oracle import release_of
from tests.oracle.sglang_real import MARKS

pytestmark = MARKS
BACKENDS = {"FullCudaGraphBackend": "full", "BreakableCudaGraphBackend": "breakable"}


def real_capture(version, name, device):
    """`capture_one` of a release, over a self that has what it asks for and a device that captures nothing."""

    @contextmanager
    def capturing(*_, **__):
        device.now = True
        try:
            yield
        finally:
            device.now = False

    device.graph = capturing
    path = f"sglang/srt/model_executor/runner_backend/{BACKENDS[name]}_cuda_graph_backend.py"
    (cls,) = (
        node for node in ast.parse(release_of(version).read(path)).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )  # fmt: skip
    (method,) = (node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "capture_one")
    code = compile(ast.Module([method], []), path, "exec", __future__.annotations.compiler_flag)
    names: dict[str, Any] = {
        "torch": SimpleNamespace(cuda=SimpleNamespace(CUDAGraph=object)), "partial": partial, "Any": Any,
        "graph_pool_capture_scope": nullcontext, "BreakableCUDAGraph": lambda *_: object(),
        "BreakableCUDAGraphCapture": capturing,
    }  # fmt: skip
    exec(code, names)  # noqa: S102  the release's own function
    backend = SimpleNamespace(
        _device_module=device, _tp_group=SimpleNamespace(barrier=lambda: None), _memory_saver_adapter=None, _pool=None,
        _capture_stream=None, _graphs={}, _outputs={}, _capture_inputs={}, _output_buffer=None, _debug_eager=False,
        _precarve=SimpleNamespace(measure=nullcontext, mint=lambda: None), _reuse_output_buffer=False,
        _cuda_graph_runner=SimpleNamespace(cuda_graph_output_capacity_rows=lambda _: None), deduped_cuda_graph=None,
        _shared_output_buffer=None, _alloc_full_buffer=lambda output, _: [output], _output_rows=lambda *_: 1,
        _copy_output_to_buffer=lambda output, buffer, _: buffer.__setitem__(0, output),
        _slice_output=lambda buffer, _: buffer[0],
    )  # fmt: skip
    return partial(names["capture_one"], backend), backend


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("version", KNOWN)
def test_real_backends_capture_the_step_itself(version, name):
    """The first graph has SGLang's three calls; a later one has one warm-up, and its capture runs the step."""
    device = SimpleNamespace(now=False, synchronize=lambda: None)
    device.is_current_stream_capturing = lambda: device.now
    capture, backend = real_capture(version, name, device)
    failures = Failures()
    quick, calls = OneWarmUp(capture, device, failures), []

    def step(size):
        calls.append((size, device.now))
        return size, device.now

    for size in (8, 4):
        quick(Frozen(size), partial(step, size), post_warmup_hook=None)
    assert calls == [(8, False), (8, False), (8, True), (4, False), (4, True)]
    assert list(backend._graphs) == [Frozen(8), Frozen(4)]
    assert backend._outputs == {Frozen(8): (8, True), Frozen(4): (4, True)}
    assert not failures.total
