"""Where `auto` takes more launches than vLLM would: not for gains that two seconds' timing can't be sure of."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from benchmarks.vllm.simulated import LIMITS, scaled
from kpolicy.costs import AttentionCost, CostTable, Curve, HostCost
from kpolicy.decision import Launch
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows
from kpolicy.schemas import read_profile
from kpolicy.settings import Settings
from kpolicy_vllm import dispatch
from kpolicy_vllm.dispatch import Chooser
from kpolicy_vllm.doubt import SLOWER_HOST
from kpolicy_vllm.steps import Step, numbers_of
from tests.integrations.vllm.test_dispatch import chooser
from tests.integrations.vllm.test_host import decider, raw_tables

H200 = Path(dispatch.__file__).parents[3] / "benchmarks" / "results" / "h200" / "vllm_costs_qwen05b.json"


def made_for(device_us: float, host_us: float, limits: Settings = LIMITS) -> Chooser:
    """A chooser whose graphs take 1 ms of the device and no more of the host, and EAGER so much."""
    made, graphs = chooser("auto", limits), Curve((1, 8192), (1000.0, 1000.0))
    free = HostCost(50.0)
    costs = attrs.evolve(
        made.state.costs, measured=True, step_us=0.0, full=graphs, mixed=graphs, piecewise=graphs,
        eager=Curve((1, 8192), (device_us, device_us)), host_full=free, host_piecewise=free,
        host_eager=HostCost(host_us), decode_attention=AttentionCost(), prefill_attention=AttentionCost(),
    )  # fmt: skip
    made.state.install_costs(costs)
    return made


@pytest.mark.parametrize(
    ("device_us", "host_us", "reason"),
    [
        (990.0, 100.0, "within_doubt"),  # 1% less, of which the next timing may say the opposite
        (900.0, 100.0, "eager_is_cheaper"),
        (900.0, 0.99 * 1000.0 / SLOWER_HOST, "eager_is_cheaper"),
        (900.0, 1.01 * 1000.0 / SLOWER_HOST, "within_doubt"),  # on a slow core it would wait for its launches
        (1010.0, 100.0, "cheapest_measured"),
    ],
)
def test_a_graph_is_given_up_where_eager_is_surely_cheaper(device_us: float, host_us: float, reason: str) -> None:
    """By more than noise, and on a slow host no later than the graph: decodes, and prompts beside them."""
    made, eager = made_for(device_us, host_us), reason == "eager_is_cheaper"
    for entry in (made.cell(500, 3), made.entry(Step(500, 500, 500, 1, 1))):
        assert entry.label == ("eager" if eager else "full", reason)
        assert (entry.key is None) is eager


def test_above_vllm_s_own_sizes_a_slow_host_gives_nothing_up() -> None:
    """There vLLM itself is eager: what is cheaper by more than noise is taken, and of ways as quick fewer launches."""
    near, clear = made_for(990.0, 900.0), made_for(970.0, 900.0)
    for made in (near, clear):
        assert made.cell(512, 0).label == ("full", "within_doubt")
    assert near.cell(513, 0).label == ("piecewise", "within_doubt")
    assert near.entry(Step(513, 513, 513, 1, 1)).label == ("full", "within_doubt")
    assert clear.cell(513, 0).label == clear.entry(Step(513, 513, 513, 1, 1)).label == ("eager", "eager_is_cheaper")
    # Above all graphs there is nothing to doubt.
    assert near.cell(near.largest + 1, 0).label == ("eager", "above_largest_size")
    # With fewer requests vLLM's own sizes end sooner.
    made = made_for(970.0, 900.0, Settings(max_num_reqs=100, max_num_tokens=2048))
    assert made.cell(200, 0).label == ("full", "within_doubt")
    assert made.cell(201, 0).label == ("eager", "eager_is_cheaper")


@pytest.mark.parametrize(
    ("device_us", "host_us", "ranks", "eager"),
    [
        (990.0, 0.99 * 1000.0 / SLOWER_HOST, 1, True),
        (990.0, 1.01 * 1000.0 / SLOWER_HOST, 1, False),  # on a slow core it would wait for its launches
        (1001.0, 100.0, 1, False),
        (990.0, 100.0, 2, False),  # and other engines' steps lose their graphs by it
        (970.0, 100.0, 2, True),
    ],
)
def test_prompts_that_vllm_runs_eagerly_stay_so_where_no_slow_host_makes_them_dearer(
    device_us: float, host_us: float, ranks: int, eager: bool
) -> None:
    """They run the graph's kernels without its padding, however little that is; decodes and vLLM's own sizes don't."""
    made = made_for(device_us, host_us)
    made.state.num_dp_ranks = ranks
    made.refresh()
    assert (made.entry(Step(513, 4, 3)).key is None) is eager
    clear = device_us < 980.0
    assert (made.entry(Step(513, 513, 513, 1, 1)).key is None) is (made.entry(Step(512, 4, 3)).key is None) is clear


def test_what_was_timed_less_far_goes_on_as_what_was_timed_further() -> None:
    """Pieces, eager steps and whole graphs of mixed batches have the same kernels; the table itself stays as timed."""
    made = made_for(990.0, 100.0)
    timed = attrs.evolve(
        made.state.costs, eager=Curve((256, 1024), (5000.0, 20000.0)), piecewise=Curve((256, 896), (5100.0, 16000.0)),
        mixed=Curve((16, 384), (4700.0, 9600.0)),
    )  # fmt: skip
    made.state.install_costs(timed)
    costs = made.state.costs
    assert made.state.timed is timed
    assert costs is not None
    assert costs.mixed is not None
    assert costs.eager == timed.eager
    apart = timed.piecewise.at(896) - timed.eager.at(896)
    for size in (1024, 2048, 4096):
        assert costs.piecewise.at(size) - costs.eager.at(size) == pytest.approx(apart)
        assert costs.mixed.at(size) - costs.piecewise.at(size) == pytest.approx(9600.0 - timed.piecewise.at(384))
    longer = attrs.evolve(timed, piecewise=Curve((256, 2048), (5100.0, 36000.0)), mixed=None)
    made.state.install_costs(longer)
    assert made.state.costs is not None
    assert made.state.costs.eager.at(4096) - made.state.costs.piecewise.at(4096) == pytest.approx(
        timed.eager.at(1024) - longer.piecewise.at(1024)
    )
    # Of what nothing was measured nothing is known.
    made.state.install_costs(attrs.evolve(timed, measured=False))
    assert made.state.costs.piecewise == timed.piecewise


def test_vllm_s_own_sizes_are_those_that_it_was_given() -> None:
    """By --cudagraph-capture-sizes: what those hold vLLM doesn't run eagerly."""
    made = made_for(990.0, 100.0)
    assert made.entry(Step(700, 4, 3)).label == ("eager", "eager_is_cheaper")
    made.state.listed = [8, 1024]
    given = Chooser(made.state, lambda _tokens, _reqs: None, lambda _part, desc: desc)
    given.set_keys(made.desc_of)
    assert given.entry(Step(700, 4, 3)).label == ("piecewise", "within_doubt")
    assert given.entry(Step(1025, 4, 3)).label[0] == "eager"


def test_beside_a_long_chunk_decodes_are_not_counted() -> None:
    """Every answer to a step with a chunk is there from the start, and those are half of them otherwise."""
    made = made_for(990.0, 900.0)
    assert made.cell(2048, 5) is not made.cell(2048, 700)
    made.prepare()
    known = dict(made.entries)
    assert made.cell(2049, 5) is made.cell(2049, 700)
    for tokens in (1, 600, 2048, 2049, 3000, 4096, 5000):
        for decodes in (0, 5, 700):
            made.cell(tokens, min(decodes, tokens - 1))
    assert made.entries == known


def test_the_graph_is_the_cheapest_and_the_log_has_the_policy_s_decision() -> None:
    made = made_for(990.0, 900.0)
    dear = attrs.evolve(made.state.costs, mixed=Curve((1, 8192), (1500.0, 1500.0)))
    made.state.install_costs(dear)
    entry = made.cell(500, 3)
    assert entry.key == GraphKey(Part.PIECEWISE, 512)
    assert entry.decision is not None
    assert entry.decision.launches[0].key == entry.key


@pytest.mark.parametrize("host_us", [400.0, 900.0])
def test_decodes_leave_their_whole_graph_for_pieces_only_where_those_are_surely_cheaper(host_us: float) -> None:
    """And prompts, which vLLM runs in pieces, where they are cheaper."""
    made = made_for(2000.0, 2000.0)
    cheap = Curve((1, 8192), (900.0, 900.0))
    made.state.install_costs(attrs.evolve(made.state.costs, piecewise=cheap, host_piecewise=HostCost(host_us)))
    wanted = ("full", "within_doubt") if host_us > 1000.0 / SLOWER_HOST else ("piecewise", "cheapest_measured")
    assert made.entry(Step(500, 500, 500, 1, 1)).label == wanted
    assert made.cell(500, 3).label == ("piecewise", "cheapest_measured")


@pytest.mark.parametrize("rows", [513, 768, 1000, 1024])
@pytest.mark.parametrize("host_us", [400.0, 900.0])
def test_so_do_decodes_past_vllm_s_own_sizes(host_us: float, rows: int) -> None:
    """A host with as many requests has more to do than launching, and no table knows how much."""
    made = made_for(2000.0, 2000.0)
    cheap = Curve((1, 8192), (900.0, 900.0))
    made.state.install_costs(attrs.evolve(made.state.costs, piecewise=cheap, host_piecewise=HostCost(host_us)))
    wanted = ("full", "within_doubt") if host_us > 1000.0 / SLOWER_HOST else ("piecewise", "cheapest_measured")
    assert made.entry(Step(rows, rows, rows, 1, 1)).label == wanted
    assert made.cell(rows, 3).label == ("piecewise", "cheapest_measured")


def test_deepseek_s_decodes_stay_in_their_whole_graphs() -> None:
    """By the costs that its start had on 2026-11-28 pieces of 768 seemed 10% cheaper, and took 7 to 37% longer."""
    costs = raw_tables(brought=True)["dsv2lite_kpolicy at 54c1189"]
    made = decider(costs, level="uniform")
    for rows in (64, 512, 600, 768, 900, 1000, 1024):
        entry = made.entry(Step(rows, rows, rows, 1, 1))
        assert entry.key is not None
        assert entry.key.part is Part.FULL
    cheapest = [costs.cost((Launch(Rows.ALL, key),), numbers_of(Step(768, 768, 768, 1, 1), 1)).cycle_us
                for key in (GraphKey(Part.FULL, 768, 768, query_len=1), GraphKey(Part.PIECEWISE, 768))]  # fmt: skip
    assert cheapest[1] < 0.95 * cheapest[0]


def test_llama_s_decodes_stay_in_their_whole_graphs() -> None:
    """By the costs that its start had on 2026-11-28 eager steps of 768, timed to 256, took 15.7 ms; they took 25.6."""
    costs = raw_tables()["llama8b_kpolicy at 54c1189"]
    made = decider(costs, wide=True, level="uniform")
    assert costs.eager.sizes[-1] == 256
    for rows in (768, 1000, 1024):
        assert made.entry(Step(rows, rows, rows, 1, 1)).label == ("full", "cheapest_measured")
    assert all(made.entry(Step(rows, rows, rows, 1, 1)).key is not None for rows in range(257, 1025))
    took = [costs.cost((Launch(Rows.ALL, key),), numbers_of(Step(768, 768, 768, 1, 1), 1)).cycle_us
            for key in (None, GraphKey(Part.FULL, 768, 768, query_len=1))]  # fmt: skip
    assert [f"{each / 1e3:.1f}" for each in took] == ["15.7", "18.6"]


@pytest.mark.parametrize("mode", ["eager", "piecewise"])
@pytest.mark.parametrize("rows", [400, 513, 768, 1000])
def test_decodes_leave_their_whole_graph_only_for_what_was_timed(rows: int, mode: str) -> None:
    """Prompts, and decodes of no more rows, go where it is cheapest, however little was timed."""
    made, host = made_for(2000.0, 2000.0), HostCost(50.0)
    few, all_of_them = (Curve((1, most), (500.0, 501.0)) for most in (rows - 1, 8192))
    reason = "eager_is_cheaper" if mode == "eager" else "cheapest_measured"
    for curve, wanted in ((few, ("full", "within_doubt")), (all_of_them, (mode, reason))):
        made.state.install_costs(attrs.evolve(made.state.costs, **{mode: curve, f"host_{mode}": host}))
        assert made.entry(Step(rows, rows, rows, 1, 1)).label == wanted
        assert made.entry(Step(rows, 9, 8)).label == (mode, reason)
    made.state.install_costs(attrs.evolve(made.state.costs, **{mode: few}))
    assert made.entry(Step(300, 300, 300, 1, 1)).label == (mode, reason)


def test_eager_decodes_of_no_whole_graph_that_were_not_timed_run_in_pieces() -> None:
    made = made_for(500.0, 50.0)
    few = attrs.evolve(made.state.costs, eager=Curve((1, 256), (500.0, 501.0)))
    made.state.install_costs(few)
    assert made.entry(Step(768, 768, 768, 1, 1, forbidden=Mode.FULL.bit)).label == ("piecewise", "within_doubt")


def test_eager_decodes_may_be_doubted_down_to_their_whole_graph() -> None:
    """Pieces are cheaper than that graph, and EAGER than pieces, by as little each."""
    made = made_for(980.0, 900.0)
    cheap = Curve((1, 8192), (990.0, 990.0))
    made.state.install_costs(attrs.evolve(made.state.costs, piecewise=cheap, host_piecewise=HostCost(900.0)))
    entry = made.entry(Step(500, 500, 500, 1, 1))
    assert entry.label == ("full", "within_doubt")
    assert made.entry(Step(500, 500, 500, 1, 1, forbidden=Mode.FULL.bit)).label == ("piecewise", "within_doubt")


def test_a_policy_with_a_rule_of_its_own_isn_t_doubted() -> None:
    made = chooser("eager", LIMITS)
    made.state.install_costs(made_for(990.0, 900.0).state.costs)
    assert made.cell(500, 3).key is None


def steps() -> Iterator[Step]:
    for rows in range(1, 513, 3):
        yield Step(rows, rows, rows, 1, 1)
    for decodes in (0, 48, 300):
        for tokens in range(decodes + 1, 513, 7):
            yield Step(tokens, decodes + 1, decodes)


def on_host(costs: CostTable, share: float) -> CostTable:
    """The costs with the host's times so much longer or shorter."""
    names = ("host_full", "host_piecewise", "host_eager")
    return attrs.evolve(costs, **{name: scaled(getattr(costs, name), share) for name in names})


def cycles_us(made: Chooser, true: CostTable, *, by_rule: bool = False) -> list[float]:
    """What steps take by the decisions, or by vLLM's rule in the modes of its own: FULL for decodes, else pieces."""

    def key_of(step: Step) -> GraphKey | None:
        if not by_rule:
            return made.entry(step).key
        return made.agreed(step if step.query_len else step._replace(forbidden=Mode.FULL.bit)).key

    return [true.cost((Launch(Rows.ALL, key_of(step)),), numbers_of(step, 1)).cycle_us for step in steps()]


def ratios(taken: list[float], base: list[float]) -> list[float]:
    return [each / us for each, us in zip(taken, base, strict=True)]


def with_pieces_for_mixed(costs: CostTable) -> CostTable:
    return attrs.evolve(costs, mixed=costs.piecewise)


PAGE = " ".join((Path(dispatch.__file__).parents[3] / "docs" / "measured_vllm.md").read_text().split())


@pytest.mark.parametrize(
    ("share", "late", "told"),
    [
        (0.35, 1.60, "0.6% of a step's time on average, and at one 8.7%"),
        (0.2, 1.33, "with a host in a fifth it is 2.9%, and at one 15.7%"),
    ],
)
def test_costs_timed_while_the_host_was_quick_make_no_step_late(
    monkeypatch: pytest.MonkeyPatch, share: float, late: float, told: str
) -> None:
    """By the costs of an H200, with the host in a share of its time when they were timed, and slow since.

    No step takes longer than by vLLM's rule on the same graphs, where some took half as long again. What that gives up
    where the host stays quick is as the page says.
    """
    quick = on_host(with_pieces_for_mixed(read_profile(H200).costs), share)
    slow = on_host(quick, SLOWER_HOST)
    made = chooser("auto", LIMITS)
    made.state.install_costs(quick)
    rule, doubting = cycles_us(made, slow, by_rule=True), cycles_us(made, quick)
    assert max(ratios(cycles_us(made, slow), rule)) < 1.005
    monkeypatch.setattr(dispatch, "surely_cheaper", lambda *_: True)
    made.refresh()
    assert max(ratios(cycles_us(made, slow), rule)) == pytest.approx(late, abs=0.005)
    given_up = [each - 1 for each in ratios(doubting, cycles_us(made, quick))]
    assert len(given_up) == 343
    assert re.findall(r"[\d.]+%", told) == [f"{statistics.fmean(given_up):.1%}", f"{max(given_up):.1%}"]
    assert told in PAGE
    assert "up to 1.60 times" in PAGE


@pytest.mark.parametrize(
    ("table", "doubted", "told"),
    [
        (H200, 0, "changes none of 343 batches"),
        (H200.with_name("profile_qwen05b.json"), 85, "by kpolicy's own profile of that model it changes 85."),
    ],
)
def test_how_many_steps_the_doubt_changes(table: Path, doubted: int, told: str) -> None:
    """By the table measured in vLLM none, by another of that model a quarter; the page says both."""
    made = chooser("auto", LIMITS)
    made.state.install_costs(with_pieces_for_mixed(read_profile(table).costs))
    assert sum(made.entry(step).label[1] == "within_doubt" for step in steps()) == doubted
    assert told in PAGE
