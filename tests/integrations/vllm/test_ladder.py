"""The capture sizes: what the defaults reach, and how users', plans' and ranks' sizes come out."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy.attention.support import Claims
from kpolicy.errors import ConfigError
from kpolicy.ladders import CaptureSizes
from kpolicy.policies import get_policy
from kpolicy.schemas import LadderPlan, write_plan
from kpolicy.settings import Settings
from kpolicy_vllm import plugin
from kpolicy_vllm.config import Config
from kpolicy_vllm.ladder import (
    DENSE_FROM,
    DENSE_STEP,
    default_sizes,
    describe,
    geometric,
    one_list,
    sizes_of,
    wide_layers,
)
from kpolicy_vllm.state import State


@given(st.integers(1, 5000))
def test_geometric(largest):
    """Sizes rise to the largest, and neighbours are at most twice apart, from 48 up at most half as large again."""
    sizes = geometric(largest)
    assert sizes[-1] == largest
    assert all(a < b <= 2 * a for a, b in itertools.pairwise(sizes))
    assert all(b <= 1.5 * a for a, b in itertools.pairwise(sizes) if a >= 48)


@given(st.integers(1, 2000), st.integers(1, 20000), st.integers(0, 7))
def test_defaults(reqs, tokens, drafts):
    """Every decode batch has a graph, whatever the limits; no size is over them, and all are multiples of 1 + k."""
    settings = Settings(max_num_reqs=reqs, max_num_tokens=max(tokens, reqs, 1 + drafts), num_speculative_tokens=drafts)
    sizes = sizes_of(Config(), settings)
    q = settings.query_len
    assert sizes.decode[-1] == min(reqs, settings.max_num_tokens // q) * q
    assert one_list(sizes)[-1] <= settings.max_num_tokens
    assert all(size % q == 0 for size in one_list(sizes))


def test_fewer_graphs_than_vllm():
    """By default at most half as many graphs are captured as by vLLM, with larger sizes among them."""
    sizes = default_sizes(Settings(max_num_reqs=1024))
    assert len(sizes.decode) + len(sizes.mixed) + len(sizes.piecewise) <= (51 + 51) // 2
    assert (sizes.decode[-1], sizes.piecewise[-1]) == (1024, 4096)


@pytest.mark.parametrize(
    ("config", "ranks", "wide"),
    [
        ({"hidden_size": 896, "intermediate_size": 4864}, 1, False),
        ({"hidden_size": 4096, "intermediate_size": 14336}, 1, True),
        ({"hidden_size": 4096, "intermediate_size": 14336}, 4, False),
        ({"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_experts_per_tok": 6,
          "n_shared_experts": 2}, 1, False),
        ({"hidden_size": 4096, "intermediate_size": 14336, "num_experts_per_tok": 2}, 1, True),
        ({"hidden_size": 2048, "intermediate_size": [16384] * 35}, 1, True),
        ({"hidden_size": 4096, "moe_topk": [2] * 4, "moe_intermediate_size": [3072] * 4}, 1, True),
        ({"hidden_size": 4096, "num_experts_per_tok": 2, "moe_intermediate_size": 1024,
          "shared_expert_intermediate_size": 2048}, 1, True),
        ({"hidden_size": 4096, "intermediate_size": "of each layer"}, 1, False),
        ({}, 1, False),
    ],
)  # fmt: skip
def test_where_the_device_bounds_a_layer_s_pieces_they_have_vllm_s_own_sizes(config, ranks, wide):
    """So that no step that vLLM would run in pieces is padded by more than there."""
    assert wide_layers(SimpleNamespace(**config), ranks) is wide
    settings = Settings(max_num_reqs=1024)
    pieces, vllm = (each.piecewise for each in (default_sizes(settings, wide=wide), get_policy("vllm").sizes(settings)))
    for tokens in range(DENSE_FROM, 513):
        ours, theirs = (next(size for size in each if size >= tokens) for each in (pieces, vllm))
        assert not wide or ours == theirs
    assert (set(vllm) - set(pieces) == {*range(1, 16), *range(16, 128, 8)} & set(vllm) - {16, 32, 64, 96}) is wide
    for tokens in range(513, 1025):
        padding = next(size for size in pieces if size >= tokens) - tokens
        assert not wide or padding < DENSE_STEP
    assert set(range(576, 1024, DENSE_STEP)).issubset(pieces) is wide


def test_wide_models_have_vllm_s_own_sizes_of_few_decodes():
    settings = Settings(max_num_reqs=1024)
    wide, thin, few = (
        default_sizes(each, wide=is_wide).decode
        for each, is_wide in ((settings, True), (settings, False), (Settings(max_num_reqs=20), True))
    )
    assert set(wide) - set(thin) == {24, 40, 56}
    assert {size for size in get_policy("vllm").sizes(settings).decode if size <= 64} <= set(wide)
    assert few == (1, 2, 4, 8, 16, 20)


def test_configs_by_layer():
    """Gemma 3n has a list of sizes; a config can raise where one number is asked for all layers, and counts as thin."""
    transformers = pytest.importorskip("transformers")
    assert wide_layers(transformers.Gemma3nTextConfig())
    assert not wide_layers(Raising())


class Raising:
    """A config that has no one number for all layers, and says so."""

    def __getattr__(self, name: str) -> int:
        raise ValueError(name)


class Runner:
    """What a worker's runner has of what is asked at its start."""


@pytest.mark.parametrize("name", ["hf_text_config", "hf_config"])
@pytest.mark.parametrize(("ranks", "wide"), [(1, True), (4, False)])
def test_how_wide_a_model_is_reaches_the_sizes_of_the_engine_and_of_its_workers(name, ranks, wide):
    """A Llama of 8B, and that shared by four ranks."""
    model = SimpleNamespace(hidden_size=4096, intermediate_size=14336)
    thin = SimpleNamespace(hidden_size=896, intermediate_size=4864)
    compilation = SimpleNamespace(
        cudagraph_capture_sizes=[1, 2, 4], max_cudagraph_capture_size=4, compile_sizes=None,
        pass_config=SimpleNamespace(enable_sp=False), post_init_cudagraph_sizes=lambda: None,
    )  # fmt: skip
    vllm_config = SimpleNamespace(
        additional_config={}, compilation_config=compilation, speculative_config=None, lora_config=None,
        instance_id="1", model_config=SimpleNamespace(**{"hf_config": thin, name: model}),
        parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=ranks),
        scheduler_config=SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=2048, scheduler_cls=None),
    )  # fmt: skip
    config, settings = Config(metrics=False), Settings(max_num_reqs=64, max_num_tokens=2048)
    wanted = default_sizes(settings, wide=wide)
    assert wanted != default_sizes(settings, wide=not wide)
    found = SimpleNamespace(version="0.23", check=lambda _: None, attach=lambda *_: None)
    plugin._configure(found, vllm_config, config, None)
    assert compilation.cudagraph_capture_sizes == one_list(wanted)
    state = State(config, settings)
    wrapper = SimpleNamespace(vllm_config=vllm_config, worker=SimpleNamespace(model_runner=Runner()))
    plugin._attach(found, wrapper, state)
    assert state.sizes == wanted


def test_how_wide_a_model_is_is_asked_only_for_the_default_sizes(tmp_path):
    """Nothing that a config holds can turn off sizes that don't depend on it."""

    def wide() -> bool:
        raise AssertionError("asked")

    path = tmp_path / "plan.json"
    plan_of(path)
    for config, listed in ((Config(plan=str(path)), None), (Config(), [1, 8]), (Config(policy="vllm"), None)):
        sizes_of(config, Settings(), listed=listed, wide=wide)
    with pytest.raises(AssertionError, match="asked"):
        sizes_of(Config(), Settings(), wide=wide)


def test_replica_has_no_sizes_of_its_own():
    """Under the replica vLLM's list stays."""
    assert sizes_of(Config(policy="vllm"), Settings()) is None


def test_sizes_given_to_vllm():
    """A list given to vLLM holds for every kind of graph."""
    sizes = sizes_of(Config(), Settings(max_num_reqs=64), listed=[1, 8, 96, 1024])
    assert sizes == CaptureSizes((1, 8), (1, 8, 96), (1, 8, 96, 1024))


def test_sizes_given_to_kpolicy():
    """Sizes in the settings replace the defaults of their kind; an empty list captures none."""
    sizes = sizes_of(Config(decode_sizes=(1, 5), mixed_sizes=()), Settings())
    assert sizes.decode == (1, 5)
    assert sizes.mixed == ()
    assert sizes.piecewise == default_sizes(Settings()).piecewise


def test_ranks_share_sizes():
    """With data-parallel ranks every size is there in pieces, and FULL graphs are of decodes."""
    sizes = sizes_of(Config(decode_sizes=(1, 5), piecewise_sizes=(16, 700)), Settings(max_num_reqs=64), ranks=2)
    assert sizes == CaptureSizes((1, 5, 16), (), (1, 5, 16, 700))


def test_multiples():
    """Under sequence parallelism sizes are rounded up to multiples."""
    assert sizes_of(Config(decode_sizes=(1, 5, 8), mixed_sizes=(), piecewise_sizes=()), Settings(), multiple_of=4) == (
        CaptureSizes((4, 8))
    )


@pytest.mark.parametrize(("kind", "most"), [("decode", 64), ("mixed", 2048), ("piecewise", 2048)])
def test_sizes_that_no_step_reaches(kind, most):
    """Sizes too large for any step are left out; where none of a kind is left, that is a mistake and said."""
    settings = Settings(max_num_reqs=64, max_num_tokens=2048)
    sizes = sizes_of(Config(**{f"{kind}_sizes": [8, 10**9]}), settings)
    assert getattr(sizes, kind) == (8,)
    with pytest.raises(ConfigError, match=rf"{kind}_sizes \[4096\].* at most {most} tokens"):
        sizes_of(Config(**{f"{kind}_sizes": [4096]}), settings)
    assert getattr(sizes_of(Config(**{f"{kind}_sizes": []}), settings), kind) == ()


def test_nothing_left():
    """No sizes at all are refused, with what to set instead."""
    with pytest.raises(ConfigError, match="eager"):
        sizes_of(Config(decode_sizes=(), mixed_sizes=(), piecewise_sizes=()), Settings())


def plan_of(path, mixed=(), pieces=(16,), model=None, **settings):
    made = Settings(**settings)
    q = made.query_len
    sizes = CaptureSizes((q, 2 * q), mixed, pieces)
    policy = get_policy("auto")
    keys = policy.plan(sizes, Claims.at_level("mixed"), made)
    planned_from = {} if model is None else {"model": model}
    attention = Claims.at_level("mixed")
    write_plan(path, LadderPlan(sizes=sizes, keys=keys, settings=made, attention=attention, planned_from=planned_from))


def test_plan(tmp_path):
    """A plan's sizes are taken."""
    path = tmp_path / "plan.json"
    plan_of(path)
    assert sizes_of(Config(plan=str(path)), Settings()) == CaptureSizes((1, 2), (), (16,))


@pytest.fixture
def mixed_plan(tmp_path):
    """A plan that has whole graphs for all mixed batches, as the planner makes them where attention allows it."""
    path = tmp_path / "plan.json"
    plan_of(path, mixed=(64, 512, 1072), pieces=())
    return str(path)


def test_larger_mixed_batches_of_a_plan_get_pieces(mixed_plan):
    """Whole graphs of them have attention of a fixed shape, which no cost of the planner's says."""
    settings = Settings(max_num_tokens=2048)
    assert sizes_of(Config(plan=mixed_plan), settings) == CaptureSizes((1, 2), (64, 512), (1072,))
    given = Config(plan=mixed_plan, mixed_sizes=(1072,), piecewise_sizes=())
    assert sizes_of(given, settings) == CaptureSizes((1, 2), (1072,), ())


def test_ranks_share_a_plan_s_sizes(mixed_plan):
    """Ranks that agree have no whole graphs of mixed batches, so all of the plan's are there in pieces."""
    sizes = sizes_of(Config(plan=mixed_plan), Settings(max_num_reqs=64, max_num_tokens=2048), ranks=2)
    assert sizes == CaptureSizes((1, 2, 64), (), (1, 2, 64, 512, 1072))


@pytest.mark.parametrize(
    ("level", "mixed", "pieces"), [("mixed", (64, 512), (1072,)), ("uniform", (), (64, 512, 1072))]
)
def test_mixed_batches_of_a_plan_get_pieces_where_whole_graphs_cannot_be_had(mixed_plan, level, mixed, pieces):
    """On vLLM 0.23's second runner, or where attention takes only decodes, they would all run eagerly."""
    settings = Settings(max_num_tokens=2048)
    state = State(Config(plan=mixed_plan), settings)
    state.claims = Claims.at_level(level)
    state.sizes = sizes_of(state.config, settings)
    assert state.wanted(pieces=True) == CaptureSizes((1, 2), mixed, pieces)
    state.config = Config(plan=mixed_plan, piecewise_sizes=())
    state.sizes = sizes_of(state.config, settings)
    assert state.wanted(pieces=True) == CaptureSizes((1, 2), mixed, ())


def test_plan_of_another_deployment(tmp_path):
    """A plan for other speculation is refused, with both values."""
    path = tmp_path / "plan.json"
    plan_of(path)
    with pytest.raises(ConfigError, match="num_speculative_tokens is 0 there and 2 here"):
        sizes_of(Config(plan=str(path)), Settings(num_speculative_tokens=2))


def test_described():
    """Logs say the sizes in a few words."""
    assert describe(None) == "vLLM's own sizes"
    assert describe(CaptureSizes((1, 2), (), (16,))) == "2 decode to 2, 1 piecewise to 16"
