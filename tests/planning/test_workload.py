"""Histograms and cost tables as ladders: what they say of a step is what the simulator says."""

from __future__ import annotations

from math import lcm

import attrs
import numpy as np
import pytest

from kpolicy.attention.support import Claims
from kpolicy.costs import CostTable, Curve, HostCost
from kpolicy.errors import ConfigError, LadderError
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Part
from kpolicy.planning import Histogram, Layout, Workload, plan
from kpolicy.planning.workload import DECODE, LIST, OTHERS, token_candidates
from kpolicy.policies import get_policy
from kpolicy.scheduling.traces import Trace, TraceRequest
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from kpolicy.simulate import simulate
from kpolicy.step_effects import StepEffects
from kpolicy.trace_plan import layout_of, replayed
from tests.planning.workloads import costs, server, trace

CLAIMS = Claims.at_level("mixed")
#: FULL graphs that hold prompts have a curve of their own, and rows of both kinds take the device longer.
PADS = costs(padding_us=(170.0, 330.0))
MIXED = costs(mixed=Curve((1, 4096), (1500.0, 1500.0 + 30.0 * 4095)), both_us=(400.0, 250.0))
#: Rows of padding read few experts.
EXPERTS = costs(effects=StepEffects(padding_share=(0.25, 0.5)))


def workload(policy: str = "vllm", table: CostTable | None = None, **changed: int) -> Workload:
    """The steps of the test's trace under a policy."""
    made, host, table = get_policy(policy), server(**changed), table or costs()
    steps = replayed(trace(), policy, made.sizes(host.settings), server=host, costs=table, attention=CLAIMS)
    layout = layout_of(made, CLAIMS, host.settings)
    return Workload(histogram=steps, costs=table, settings=host.settings, layout=layout)


@pytest.mark.parametrize(
    "policy",
    ["vllm", "vllm:version=0.23,mode=FULL_DECODE_ONLY", "vllm:mode=PIECEWISE", "vllm:mode=FULL", "sglang", "nano_vllm"],
)
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("table", [costs(), MIXED, PADS, EXPERTS], ids=["one_curve", "mixed", "padding", "experts"])
def test_time_is_the_simulators(policy: str, num_drafts: int, table: CostTable) -> None:
    """The time of all steps that sizes are planned by is the time that the simulator takes for them."""
    if num_drafts and policy == "nano_vllm":
        pytest.skip("it drafts nothing")
    host = server(num_speculative_tokens=num_drafts)
    sizes = get_policy(policy).sizes(host.settings)
    result = simulate(trace(), policy, server=host, costs=table, attention=CLAIMS)
    planned = workload(policy, table, num_speculative_tokens=num_drafts)
    assert planned.steps == result.steps
    # With drafts SGLang runs some batches eagerly whatever their size, which isn't planned for.
    inexact = num_drafts and policy == "sglang"
    assert planned.time_us(sizes) == pytest.approx(result.step_us, rel=0.01 if inexact else 1e-9)


def test_cheap_padding_is_counted_by_hand() -> None:
    """Nine decodes in a graph of 16: ten tokens' time and a quarter of what six more take; with a prompt all of it."""
    host = server()
    steps = Histogram("by hand")
    steps.add(BatchShape.decode(9).numbers)
    planned = Workload(histogram=steps, costs=EXPERTS, settings=host.settings, layout=Layout())
    without = attrs.evolve(planned, costs=costs())
    sizes = CaptureSizes((16,), (), (64,))
    assert without.time_us(sizes) - planned.time_us(sizes) == pytest.approx(0.75 * 20.0 * 6)
    full = CaptureSizes((9,), (), (64,))
    assert planned.time_us(full) == without.time_us(full)
    steps.add(BatchShape(decodes=[(1, 9)], prefills=[(30, 0)]).numbers)
    assert without.time_us(sizes) - planned.time_us(sizes) == pytest.approx(0.75 * 20.0 * 6)


def test_cheap_padding_chooses_other_sizes() -> None:
    """Many steps of 20 lose more at 40 than few of 3 do; where padding takes nothing one row more is all they lose."""
    steps = Histogram("by hand")
    for reqs, times in ((3, 5), (20, 40), (40, 1)):
        steps.add_decodes(reqs, 1, times, 0)
    for share, chosen in ((1.0, (20, 40)), (0.0, (3, 40))):
        table = costs(effects=StepEffects(padding_share=(share, 1.0)), full=Curve((1, 4, 64), (1e3, 2e3, 2.2e3)))
        planned = Workload(histogram=steps, costs=table, settings=server().settings, layout=Layout(others=None))
        assert plan(planned, most_sizes=2, smoothing=0.0, largest={DECODE: 40}).lists[DECODE] == chosen, share


def test_cheap_padding_decides_nothing() -> None:
    """`auto` weighs a graph by its full time: it runs eagerly what a graph with cheap padding would take less for."""
    steps = Histogram("by hand")
    steps.add(BatchShape.decode(9).numbers)
    table = costs(effects=StepEffects(padding_share=(0.0, 0.0)), host_eager=HostCost(1500.0))
    layout = Layout(escape_when_cheaper=True)
    planned = Workload(histogram=steps, costs=table, settings=server().settings, layout=layout)
    eager = planned.time_us(CaptureSizes((), (), ()))
    assert planned.time_us(CaptureSizes((64,), (), ())) == eager == pytest.approx(1600.0)
    assert planned.time_us(CaptureSizes((16,), (), ())) == pytest.approx(1000.0 + 20.0 * 9 + 5 + 9 + 0.01 * 9 + 100.0)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("policy", ["vllm", "sglang"])
def test_time_without_graphs_is_the_simulators(policy: str, num_drafts: int) -> None:
    """Decode rows of several tokens run eagerly at their own tokens, whether a list counts requests or tokens."""
    host, table = server(num_speculative_tokens=num_drafts), costs(host_eager=HostCost(40.0))
    result = simulate(trace(), "eager", server=host, costs=table, attention=CLAIMS)
    nothing = CaptureSizes((), (), ())
    steps = replayed(trace(), "eager", nothing, server=host, costs=table, attention=CLAIMS)
    layout = layout_of(get_policy(policy), CLAIMS, host.settings)
    planned = Workload(histogram=steps, costs=table, settings=host.settings, layout=layout)
    assert planned.time_us(nothing) == pytest.approx(result.step_us, rel=1e-9)


def test_auto_is_close_to_the_simulator() -> None:
    """Where the policy weighs ways by cost, what sizes are planned by is within two per cent of what it does."""
    host = server()
    sizes = get_policy("auto").sizes(host.settings)
    result = simulate(trace(), "auto", server=host, costs=costs(), attention=CLAIMS)
    planned = workload("auto")
    assert planned.time_us(sizes) == pytest.approx(result.step_us, rel=0.02)


@pytest.mark.parametrize(
    ("policy", "layout"),
    [
        ("vllm", Layout(one_list=True)),
        ("vllm:mode=FULL_DECODE_ONLY", Layout(one_list=True, others=None)),
        ("vllm:mode=PIECEWISE", Layout(one_list=True, decode=None)),
        ("vllm:mode=FULL", Layout(one_list=True, decode=None, others=Part.FULL)),
        ("vllm:version=0.23", Layout(one_list=True)),
        ("ascend", Layout(one_list=True)),
        ("sglang", Layout(most_padding=2)),
        ("tensorrt_llm:prefill=breakable", Layout()),
        ("tensorrt_llm", Layout(others=None)),
        ("nano_vllm", Layout(others=None)),
        ("piecewise", Layout(decode=None)),
        ("full", Layout(others=Part.FULL)),
        ("full_and_piecewise", Layout(others=Part.FULL)),
        ("split", Layout()),
        ("auto", Layout(others=Part.FULL, escape_when_cheaper=True)),
        ("eager", Layout(decode=None, others=None)),
    ],
)
def test_layouts(policy: str, layout: Layout) -> None:
    """A policy's lists are read from the graphs that it plans, of replicas and of our own alike."""
    assert layout_of(get_policy(policy), CLAIMS, Settings()) == layout, policy


def test_a_layout_without_mixed_support() -> None:
    """Attention that captures decodes alone leaves pieces for the rest."""
    layout = layout_of(get_policy("auto"), Claims.at_level("uniform"), Settings())
    assert layout == Layout(escape_when_cheaper=True)


def test_usage_of_one_list() -> None:
    """A size of vLLM's list is two graphs where decode batches reach it, and one above."""
    found = workload("vllm").ladders()[0]
    by_size = dict(zip(found.sizes.tolist(), (found.usage_of(i) for i in range(len(found.sizes))), strict=True))
    assert (by_size[64].streams, by_size[64].graphs, by_size[64].bytes) == (2, 6, 4 << 20)
    assert (by_size[65].streams, by_size[65].graphs, by_size[65].bytes) == (1, 5, 3 << 20)


def test_usage_with_drafts() -> None:
    """A request count of kpolicy's own list has graphs for rows with all drafts, with fewer, and without."""
    apart = workload("full_and_piecewise", num_speculative_tokens=3)
    decode = next(each for each in apart.ladders() if each.name == DECODE)
    assert decode.usage_of(0).streams == 3
    assert layout_of(get_policy("vllm"), CLAIMS, Settings(num_speculative_tokens=3)).query_lens == (4,)
    assert apart.sizes_of({DECODE: (1, 5), OTHERS: (7,)}) == CaptureSizes((4, 20), (7,), ())
    assert apart.lists_of(CaptureSizes((4, 20), (7,), ())) == {DECODE: (1, 5), OTHERS: (7,)}


def test_smoothing_keeps_steps() -> None:
    """Smoothing moves steps, and neither makes nor loses any; every size up to the largest has some."""
    planned = workload("sglang")
    for plain, smooth in zip(planned.ladders(), planned.ladders(smoothing=0.1), strict=True):
        assert len(smooth.demands) >= smooth.sizes[-1]
        # Eager times differ by size, so sums are close, not equal.
        assert smooth.escape_us.sum() == pytest.approx(plain.escape_us.sum(), rel=0.25)
        assert (smooth.escape_us > 0).all()
        assert not set(range(1, int(smooth.sizes[-1]) + 1)) <= set(plain.demands.tolist())


def test_candidates_are_aligned() -> None:
    """Sizes are multiples of what is asked and, in one list with drafts, of whole decode rows."""
    planned = workload("vllm", num_speculative_tokens=2)
    assert all(size % 3 == 0 for size in planned.candidates(LIST))
    aligned = attrs.evolve(planned, layout=attrs.evolve(planned.layout, multiple_of=4))
    assert all(size % 12 == 0 for size in aligned.candidates(LIST))
    with pytest.raises(LadderError, match="multiple of 1024"):
        attrs.evolve(planned, layout=Layout(multiple_of=1024)).ladders()


def test_token_candidates() -> None:
    """Every size to 256, then steps of at most a 64th of the size, and always the largest."""
    sizes = np.array(token_candidates(5000))
    assert sizes[:256].tolist() == list(range(1, 257))
    assert (np.diff(sizes)[256:] <= sizes[256:-1] / 64).all()
    assert sizes[-1] == 5000
    assert token_candidates(100)[-1] == 100


def test_split_halves_count_apart() -> None:
    """The halves of a split are the decode batch and the prompt batch that they run as."""
    found = Histogram()
    numbers = BatchShape(decodes=[(1, 5)], prefills=[(40, 10)], decode_kv_tokens=60).numbers
    found.add(numbers, split=True, decode_steps=3)
    found.add(numbers)
    found.add(BatchShape(decodes=[(1, 2), (3, 1)]).numbers)
    found.add(BatchShape().numbers)
    found.settled()
    assert found.decodes[1][5][:3] == (3, 15, 180)
    assert found.others[40][:5] == (1, 0, 0, 50, 40)
    assert found.others[45][:5] == (1, 5, 60, 50, 40)
    assert found.others[5].steps == 1
    assert found.steps == 6
    assert (found.largest(1), found.largest(), found.largest(7)) == (5, 45, 0)
    assert found.as_dict()["decodes"] == {"1": {"5": 3}}


def test_nothing_to_plan() -> None:
    """A policy that captures nothing, and smoothing out of range, are errors."""
    planned = attrs.evolve(workload("vllm"), layout=Layout(decode=None, others=None))
    with pytest.raises(ConfigError, match="captures nothing here"):
        planned.ladders()
    with pytest.raises(ConfigError, match="smoothing is 1"):
        workload("vllm").ladders(smoothing=1.0)
    with pytest.raises(ConfigError, match="multiple_of is 0"):
        Layout(multiple_of=0)


def test_more_than_sglangs_padding_is_eager() -> None:
    """A prompt of 120 tokens replays a graph of 240, and none of 241: planning and the simulator agree."""
    made, host = get_policy("sglang"), server()
    for size, eager in ((240, False), (241, True), (300, True)):
        sizes = CaptureSizes((1,), (), (size,))
        one = Trace("t", "generated", [TraceRequest(0, 0.0, 120, 1)])
        steps = replayed(one, "sglang", sizes, server=host, costs=costs(), attention=CLAIMS)
        layout = layout_of(made, CLAIMS, host.settings)
        planned = Workload(histogram=steps, costs=costs(), settings=host.settings, layout=layout).time_us(sizes)
        result = simulate(one, "sglang", server=host, costs=costs(), attention=CLAIMS, ladder=sizes)
        assert planned == pytest.approx(result.step_us, rel=1e-9)
        assert ("eager" in result.modes) is eager


@pytest.mark.parametrize(("multiple_of", "drafts"), [(1, 0), (8, 0), (7, 0), (1, 2), (100, 3)])
def test_the_last_multiple_is_a_candidate(multiple_of: int, drafts: int) -> None:
    """Steps just below the largest need no smaller one; no candidate is beyond the largest step."""
    planned = workload(num_speculative_tokens=drafts, max_num_tokens=2048)
    aligned = attrs.evolve(planned, layout=attrs.evolve(planned.layout, multiple_of=multiple_of))
    align, largest = lcm(multiple_of, 1 + drafts), planned.settings.max_num_tokens
    found = aligned.candidates(LIST)
    assert max(found) == largest // align * align
    assert all(size % align == 0 for size in found)


def test_decode_sizes_of_drafts_are_aligned_in_tokens() -> None:
    """Requests of 1 + k tokens need only what is left of the alignment."""
    for drafts, wanted in ((0, 4), (1, 2), (2, 4), (3, 1)):
        settings = Settings(max_num_reqs=64, max_num_tokens=512, num_speculative_tokens=drafts)
        layout = layout_of(get_policy("auto"), CLAIMS, settings, multiple_of=4)
        assert layout.decode_multiple_of == wanted


def test_whole_numbers_of_numpy_are_taken_for_multiples() -> None:
    """As everywhere else; what isn't whole is named."""
    layout = Layout(multiple_of=np.int64(8), decode_keys=np.uint8(2))
    assert (layout, type(layout.multiple_of)) == (Layout(multiple_of=8, decode_keys=2), int)
    with pytest.raises(ConfigError, match=r"multiple_of is 1\.5"):
        Layout(multiple_of=1.5)  # type: ignore[arg-type]
