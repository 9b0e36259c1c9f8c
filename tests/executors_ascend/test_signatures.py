"""The pretended torch_npu has the names and signatures of the published one, and so has what the adapter calls."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.fakes.signatures import OPERATORS, of_wheel, recorded
from tests.fakes.torch_npu import HANDLED, fake_torch_npu

RECORDED = recorded()
PYTHON: dict[str, Any] = {name: given for source in RECORDED["python"].values() for name, given in source.items()}


def arguments(function: Any) -> list[str]:
    """As `signatures.arguments_of` has them."""
    found = []
    for each in inspect.signature(function).parameters.values():
        mark = {each.VAR_KEYWORD: "**", each.VAR_POSITIONAL: "*"}.get(each.kind, "")
        default = "" if each.default is each.empty else f"={each.default!r}"
        found.append(f"{mark}{each.name}{default}")
    return found


FUNCTIONS = sorted(name for name, given in PYTHON.items() if isinstance(given, list) and name != "get_cann_version")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_published_arguments(name: str) -> None:
    """`torch.npu`'s functions take what they take."""
    assert arguments(getattr(fake_torch_npu().npu, name)) == PYTHON[name]


def test_versions_are_asked_for_as_published() -> None:
    """The toolkit's and the driver's version come from one function, by module."""
    assert arguments(fake_torch_npu().npu.utils.get_cann_version) == PYTHON["get_cann_version"]


@pytest.mark.parametrize("name", ["NPUGraph", "graph", "Stream", "Event", "ExternalEvent"])
def test_classes_have_the_published_methods(name: str) -> None:
    """Each method that the pretended class has is the published one's, with its arguments."""
    made, published = getattr(fake_torch_npu().npu, name), PYTHON[name]["methods"]
    own = {each: value for each, value in vars(made).items() if inspect.isfunction(value)}
    for method, function in own.items():
        if method in ("__eq__", "__hash__"):
            continue
        # torch_npu's streams and events take their arguments in __new__.
        given = published.get(method) or published[{"__init__": "__new__"}.get(method, method)]
        assert arguments(function)[1:] == given[1:], method


def test_what_a_graph_says_of_its_updates_is_published() -> None:
    """Names without which whole-graph updates can't be kept behind the previous replay."""
    assert {"auto_dispatch_capture", "graph_dispatch_mode"} <= set(PYTHON["NPUGraph"]["attributes"])
    assert {"update_stream", "graph_dispatch_records"} <= set(PYTHON["_GraphDispatchMode"]["attributes"])


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_take_what_the_kernels_give(name: str) -> None:
    """Every argument of the pretended operators is in the published schema."""
    schema = RECORDED["operators"][name]
    library = fake_torch_npu()
    own = library.npu_fused_infer_attention_score
    function = {"npu_fused_infer_attention_score.out": own.out, "npu_fused_infer_attention_score": own.out}.get(name)
    if function is None:
        return
    names = set(re.findall(r"(\w+)(?==|,|\))", schema.partition(") ->")[0] + ")"))
    given = set(inspect.signature(function).parameters)
    if not name.endswith(".out"):
        given -= {"out", "workspace"}
    assert given <= names, given - names


def test_handlers_are_the_published_ones() -> None:
    """What `NPUGraph.update` can rewrite."""
    assert set(RECORDED["handlers"]) >= HANDLED
    assert "_npu_paged_attention_mla" not in " ".join(RECORDED["handlers"])


@pytest.mark.skipif("KPOLICY_TORCH_NPU_WHEEL" not in os.environ, reason="KPOLICY_TORCH_NPU_WHEEL names no wheel")
def test_recorded_signatures_are_the_wheels() -> None:
    """What is recorded is what the wheel has now; see `tests/fakes/signatures.py`."""
    assert of_wheel(Path(os.environ["KPOLICY_TORCH_NPU_WHEEL"])) == RECORDED
