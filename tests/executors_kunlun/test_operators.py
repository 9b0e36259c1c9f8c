"""Attention through the vendor's operators over a pretended card, and FULL graphs that trials at warm-up allow."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.decision import Decision, Launch  # noqa: E402
from kpolicy.engine import Engine  # noqa: E402
from kpolicy.errors import ConfigError, SupportError  # noqa: E402
from kpolicy.executors.cpu import CpuExecutor  # noqa: E402
from kpolicy.executors.kunlun import KunlunAdapter, KunlunExecutor  # noqa: E402
from kpolicy.executors.kunlun.trial import _cases, try_kind  # noqa: E402
from kpolicy.modes import Mode, Part, Rows  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.registry import GraphRegistry  # noqa: E402
from kpolicy.serving.kunlun import KunlunKernels, load_operators  # noqa: E402
from kpolicy.testing import EXECUTOR_CHECKS, Sequences  # noqa: E402
from tests.executors_launcher.checker import (  # noqa: E402
    BLOCK_SIZE,
    NUM_BLOCKS,
    Checker,
    batcher_steps,
    drafting_steps,
    load_family,
    plan,
)
from tests.executors_launcher.conftest import SMALL  # noqa: E402
from tests.fakes.torch_npu import fake_torch_npu  # noqa: E402
from tests.fakes.torch_xmlir import SOUND, fake_cuda, fake_kunlun_ops, fake_xmlir  # noqa: E402

EAGER = Decision(Mode.EAGER, (Launch(Rows.ALL, None),), Reason.POLICY_IS_EAGER)
FAMILIES = ["llama", "mistral", "deepseek_v2"]
HELD = {
    "modes_agree_with_eager",
    "padding_never_leaks",
    "repeats_equal_single_steps",
    "outputs_survive_the_next_replay",
}


def on_card(family: str | Any, *, reads: str, keeps_tables: bool = False) -> tuple[Any, dict[str, Any]]:
    """A model over kunlun_ops that read that copy of lengths, and what an executor of it takes."""
    model, library = load_family(family) if isinstance(family, str) else family, fake_torch_npu()
    kernels = KunlunKernels(torch.device("cpu"), fake_kunlun_ops(library, reads=reads, keeps_tables=keeps_tables))
    kernels.block_size = model.block_size
    for layer in model.layers:
        layer.kernels = kernels
    model._support = kernels.support(latent=any(hasattr(layer, "rank") for layer in model.layers))
    return model, {"xmlir": fake_xmlir(), "library": fake_cuda(library), "environ": SOUND}


@pytest.mark.parametrize("reads", ["host", "device"])
@pytest.mark.parametrize("family", FAMILIES)
def test_eager_is_the_plain_kernels_attention(family: str, reads: str) -> None:
    """Both copies of lengths, tables and the KV's layout are right: logits are those of kpolicy's plain kernels."""
    model, options = on_card(family, reads=reads)
    executor, reference = KunlunExecutor(model, **options), CpuExecutor(load_family(family))
    sequences = Sequences(7, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab=128)
    for _ in range(25):
        rows = sequences.random_rows(6, 40, 3)
        inputs = sequences.inputs(rows)
        mine, other = (each.run(EAGER, inputs).outputs for each in (executor, reference))
        for a, b in zip(mine, other, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)
        sequences.advance(rows, accepted=1)


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_trial_tells_which_copy_an_operator_reads(family: str, query_len: int) -> None:
    """One that reads the device's holds over other lengths, tables and rows; one that reads the host's doesn't."""
    found = {}
    for reads in ("device", "host"):
        model, options = on_card(family, reads=reads)
        found[reads] = try_kind(KunlunAdapter("cpu", **options), model, query_len)
    assert found["device"].passed
    assert found["device"].replays >= 3
    assert not found["host"].passed


@pytest.mark.parametrize("query_len", [1, 3])
def test_the_trial_tells_tables_that_a_graph_keeps(query_len: int) -> None:
    """Lengths that are live prove nothing of block tables: replays over other blocks do."""
    model, options = on_card("llama", reads="device", keeps_tables=True)
    found = try_kind(KunlunAdapter("cpu", **options), model, query_len)
    assert "isn't what eager computes" in found.problem
    assert not found.passed


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 3, 3], [1, 4, 2]])
def test_what_the_trial_replays(query_lens: list[int]) -> None:
    """Three replays and more, none over the capture's lengths: shorter, longer, in other blocks, of other numbers."""
    capture, *replays = _cases(query_lens, BLOCK_SIZE, 96)
    assert len(replays) >= 3
    assert all(case.kv_lens != capture.kv_lens for case in replays)
    assert any(all(a < b for a, b in zip(case.kv_lens, capture.kv_lens, strict=False)) for case in replays)
    assert any(all(a > b for a, b in zip(case.kv_lens, capture.kv_lens, strict=False)) for case in replays)
    assert any(case.first_block != capture.first_block for case in replays)
    assert any(len(case.kv_lens) != len(capture.kv_lens) for case in replays)


def one_kv_head() -> Any:
    """A model whose KV lies by slot also where it lies by head within a block, as `Checker` wants it."""
    from kpolicy.serving.load import load
    from tests.serving_models.families import FAMILIES

    config = {**FAMILIES["llama"], "num_key_value_heads": 1}
    model = load(config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=96, max_num_reqs=8)
    model.poison_padding()
    return model


@pytest.mark.parametrize(
    "check", [check for check in EXECUTOR_CHECKS if check.__name__ in HELD], ids=lambda c: c.__name__
)
def test_contract(check: Callable[..., None]) -> None:
    """Steps in every mode are eager ones, and padding doesn't leak, with KV by head within a block."""
    from kpolicy.serving.load import load

    def make() -> KunlunExecutor:
        model = load(SMALL, num_blocks=64, block_size=16, max_model_len=512, max_num_reqs=8)
        made, options = on_card(model, reads="device")
        return KunlunExecutor(made, **options)

    fewer = {"seeds": range(2)} if "seeds" in signature(check).parameters else {}
    check(make, close=lambda a, b: bool(torch.allclose(a, b, rtol=1e-3, atol=1e-4)), **fewer)


@pytest.mark.parametrize(("family", "mixed"), [("one KV head", True), ("deepseek_v2", False)])
def test_full_graphs_that_warm_up_proved_equal_eager(family: str, mixed: bool) -> None:
    """The executor tries by itself; random steps in each mode then have eager's bits."""
    model, options = on_card(one_kv_head() if mixed else family, reads="device")
    executor, registry = KunlunExecutor(model, **options), GraphRegistry()
    claims = executor.model.support.claims
    assert claims.full.mixed is mixed
    assert claims.full.uniform_query_len == 4 or mixed
    keys = plan(executor.model)
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    assert set(registry.captured()) == set(keys)
    checker = Checker(executor, executor.model)  # type: ignore[arg-type]
    for steps in (batcher_steps, drafting_steps):
        for _ in steps(checker, registry.captured(), 25, seed=2):
            pass
    assert {"full", "piecewise", "split/in_turn"} <= {label.split()[0] for label in checker.steps}


@pytest.mark.parametrize(("reads", "parts"), [("device", set(Part)), ("host", {Part.PIECEWISE})])
def test_an_engine_plans_by_what_was_proved(reads: str, parts: set[Part], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word from the caller: what the trials allow is captured, and nothing else is planned."""
    from kpolicy import executors

    model, options = on_card("llama", reads=reads)
    monkeypatch.setitem(executors.OWN, "kunlun", "tests.executors_kunlun.test_operators:_made")  # type: ignore[index]
    monkeypatch.setitem(globals(), "_options", options)
    engine = Engine("full_and_piecewise", model=model, device="kunlun", ladder=[8, 16], calibrate=0)
    engine.capture()
    assert {key.part for key in engine.registry.captured()} == parts
    assert len(engine.registry.captured()) == len(engine.keys)


_options: dict[str, Any] = {}


def _made(**arguments: Any) -> KunlunExecutor:
    return KunlunExecutor(**arguments, **_options)


def test_layers_that_the_operators_do_not_hold_are_refused() -> None:
    """A soft cap, or values of another size than keys, are said with the way out."""
    kernels = KunlunKernels(torch.device("cpu"), SimpleNamespace())
    spec: Any = SimpleNamespace(softcap=30.0, head_dim=16, value_dim=16)
    nothing: Any = None
    with pytest.raises(SupportError, match="kernels='plain'"):
        kernels.attend(nothing, spec, nothing, nothing)


def test_missing_operators_are_said() -> None:
    """kunlun_ops isn't on any registry: the error says where it comes from."""
    with pytest.raises(ConfigError, match="kunlun_ops doesn't import"):
        load_operators()
