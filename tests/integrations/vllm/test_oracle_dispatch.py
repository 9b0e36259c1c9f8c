"""vLLM's own dispatcher and manager, out of the wheels, driven by kpolicy's shim."""

import itertools
import random

import attrs
import numpy as np
import pytest

from kpolicy.attention.support import Claims, SupportLevel
from kpolicy.costs import Curve, HostCost, analytic_costs
from kpolicy.modes import Part
from kpolicy.policies import get_policy
from kpolicy.policies.vllm import vllm
from kpolicy.settings import Settings
from kpolicy_vllm.config import Config
from tests.integrations.vllm.shimmed import ShimmedVllm
from tests.oracle.configs import Deployment, draw_batch, draw_deployment
from tests.oracle.loader import loaded, oracle_folder
from tests.oracle.vllm_ranks import agreed
from tests.oracle.vllm_real import ASSERTED, RealVllm
from tests.oracle.wheels import VLLM_WHEELS

BATCHES = 20_000
VERSIONS = ("0.23", "0.33")
RUNNERS = [(version, runner) for runner in ("v1", "v2") for version in VERSIONS]

pytestmark = VLLM_WHEELS


def told(shim, batch):
    """Let the first runner's dispatcher see the batch, as its runner does."""
    dispatcher = shim.state.dispatcher
    if hasattr(dispatcher, "facts"):
        dispatcher.facts = (len(batch.rows), np.array([row.new for row in batch.rows], dtype=np.int32))


def deployment(
    version, runner, sizes, *, mode="FULL_AND_PIECEWISE", reqs=8, drafts=0, loras=0, level="mixed", schedule="", **more
):
    """A deployment with the replica as its policy."""
    policy = vllm(version=version, runner=runner, mode=mode, drafts=schedule, **more)
    settings = Settings(max_num_reqs=reqs, max_num_tokens=4096, num_speculative_tokens=drafts, max_loras=loras)
    return Deployment(policy, SupportLevel(level), Claims.at_level(level), settings, tuple(sizes))


def started(modules, version, runner, made, **shim):
    """The shim on a real vLLM of that deployment, everything captured."""
    real = ShimmedVllm(modules, version, runner, **shim)
    real.start(made)
    real.captured()
    return real


@pytest.mark.parametrize(("version", "runner"), RUNNERS)
def test_replica_through_the_shim_is_stock(version, runner):
    """With the replica as its policy the shim answers 20,000 random batches as stock vLLM does."""
    rng, seen, outcomes = random.Random(f"{version} {runner}"), 0, set()  # noqa: S311
    with loaded(oracle_folder(), version) as modules:
        while seen < BATCHES:
            made = draw_deployment(rng, version, runner)
            stock = RealVllm(modules, version, runner)
            try:
                stock.start(made)
            except ValueError:
                continue
            shim = started(modules, version, runner, made)
            for _ in range(40):
                batch = draw_batch(rng, made)
                wanted = stock.dispatch(batch)
                told(shim, batch)
                assert shim.dispatch(batch) == wanted, (made, batch)
                outcomes.add(wanted if wanted == ASSERTED else wanted[0])
                seen += 1
            assert not shim.state.counters.counts, (made, shim.state.counters.counts)
    assert {"FULL", "PIECEWISE", "NONE"} <= outcomes


def random_costs(rng):
    """A measured table where any mode may be the cheapest, by size and by rows, and larger sizes may cost less."""

    def curve():
        return Curve((1, 16, 64, 256, 1024, 4096), tuple(rng.uniform(100, 5000) for _ in range(6)))

    return attrs.evolve(
        analytic_costs(), version="random", measured=True, full=curve(), piecewise=curve(), eager=curve(),
        mixed=rng.choice([None, curve()]),
        **{f"host_{way}": HostCost(rng.uniform(10, 4000), rng.choice([0.0, 20.0, 400.0]))
           for way in ("full", "piecewise", "eager")},
    )  # fmt: skip


def draw_config(rng, settings):
    """Ladders of their own for each kind of graph."""

    def sizes(most, q=1):
        return tuple(sorted({rng.randint(1, max(1, most // q)) * q for _ in range(rng.randint(1, 9))}))

    q = settings.query_len
    most = min(300, settings.max_num_tokens)
    return Config(
        policy="auto",
        decode_sizes=sizes(settings.max_num_reqs * q, q),
        mixed_sizes=sizes(most // 2),
        piecewise_sizes=sizes(most),
    )


def legal(shim, batch, outcome, version, runner):
    """Hold an answer to what the wrappers and the manager would do with it."""
    mode, tokens, reqs, uniform, longest, case = outcome
    assert tokens >= batch.num_tokens
    if mode == "NONE":
        assert tokens == batch.num_tokens
        return
    q = shim.state.settings.query_len
    chosen = [key for key in shim.state.ladder.keys if (key.part is Part.FULL) == (mode == "FULL")]
    found = [key for key in chosen if (key.num_tokens, key.num_reqs, key.query_len) == (tokens, reqs, uniform)]
    assert found, f"{outcome} isn't captured"
    assert reqs is None or reqs >= len(batch.rows)
    if uniform is not None:
        assert {row.new for row in batch.rows} == {uniform}
        assert uniform == q or runner == "v2"
    if longest is not None:
        assert batch.longest <= longest
        assert not any(row.prefilling for row in batch.rows)
    if case is not None and (version, runner) != ("0.23", "v2"):
        assert bool(case) == bool(batch.loras)
        assert case >= min(batch.loras, case or batch.loras)


@pytest.mark.parametrize(("version", "runner"), RUNNERS)
def test_never_an_illegal_graph(version, runner):
    """Whatever costs and ladders are, `auto` answers random batches with graphs that are captured and hold them."""
    rng, seen, modes = random.Random(f"legal {version} {runner}"), 0, set()  # noqa: S311
    with loaded(oracle_folder(), version) as modules:
        while seen < BATCHES // 4:
            made = draw_deployment(rng, version, runner)
            if made.policy.varlen or made.policy.drafts:
                continue
            shim = ShimmedVllm(
                modules, version, runner, policy=get_policy("auto"), costs=random_costs(rng),
                config=draw_config(rng, made.settings),
            )  # fmt: skip
            try:
                shim.start(made)
            except ValueError:
                continue
            shim.captured()
            assert shim.state.ready
            for _ in range(40):
                batch = draw_batch(rng, made)
                told(shim, batch)
                outcome = shim.dispatch(batch)
                if outcome != ASSERTED:
                    legal(shim, batch, outcome, version, runner)
                    modes.add(outcome[0])
                seen += 1
            assert not shim.state.counters.counts, shim.state.counters.counts
    assert modes == {"FULL", "PIECEWISE", "NONE"}


CALLS = ("8 tokens", "8 uniform", "15 tokens", "8 without FULL", "8 with NONE only")
FULL_8, FULL_8_U, PIECES_8 = ("FULL", 8, 8, False), ("FULL", 8, 8, True), ("PIECEWISE", 8, None, False)
NONE_8, NONE_15 = ("NONE", 8, None, False), ("NONE", 15, None, False)
TABLE_6_1 = {
    "FULL": (FULL_8, FULL_8, NONE_15, NONE_8, NONE_8),
    "FULL_DECODE_ONLY": (NONE_8, FULL_8_U, NONE_15, NONE_8, NONE_8),
    "PIECEWISE": (PIECES_8, PIECES_8, NONE_15, PIECES_8, NONE_8),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mode", sorted(TABLE_6_1))
@pytest.mark.parametrize("call", range(len(CALLS)), ids=CALLS)
def test_dispatcher_cases(version, mode, call):
    """vLLM's own test of its dispatcher: sizes 1 and 8, eight requests."""
    with loaded(oracle_folder(), version) as modules:
        split = mode == "PIECEWISE"
        shim = started(modules, version, "v1", deployment(version, "v1", [1, 8], mode=mode, piecewise_split=split))
        modes = modules.module("config.compilation").CUDAGraphMode
        asked = (
            {"num_tokens": 8},
            {"num_tokens": 8, "uniform_decode": True},
            {"num_tokens": 15},
            {"num_tokens": 8, "invalid_modes": {modes.FULL}},
            {"num_tokens": 8, "valid_modes": {modes.NONE}},
        )[call]
        got, desc = shim.state.dispatcher.dispatch(**asked)
        assert (got.name, desc.num_tokens, desc.num_reqs, desc.uniform) == TABLE_6_1[mode][call]


@pytest.mark.parametrize("version", VERSIONS)
def test_dispatcher_keys(version):
    """The keys of vLLM's own test: two of a mode, ten with four adapters, largest first."""
    with loaded(oracle_folder(), version) as modules:
        made = deployment(version, "v1", [1, 8], mode="PIECEWISE", loras=4, specialize_active_lora=True)
        shim = started(modules, version, "v1", made)
        listed = shim.state.dispatcher.get_capture_descs()
        assert [(mode.name, len(descs)) for mode, descs in listed] == [("PIECEWISE", 10)]
        assert [desc.num_tokens for desc in listed[0][1]] == [8] * 5 + [1] * 5
        assert {desc.num_active_loras for desc in listed[0][1]} == {0, 1, 2, 4, 5}


GOLDEN = {
    "PIECEWISE": "P1 P1 P4 P4 P16 P24 P24 P32 E33",
    "FULL": "F1/1 F1/1 F4/4 F4/4 F16/16 F24/16 F24/16 F32/16 E33",
    "FULL_DECODE_ONLY": "F1/1 E1 F4/4 E3 F16/16 E17 E24 E32 E33",
    "FULL_AND_PIECEWISE": "F1/1 P1 F4/4 P4 F16/16 P24 P24 P32 E33",
}
ASKED = [(1, True), (1, False), (3, True), (3, False), (9, True), (17, False), (24, True), (32, False), (33, False)]


def short(mode, desc):
    letter = {"FULL": "F", "PIECEWISE": "P", "NONE": "E"}[mode.name]
    return f"{letter}{desc.num_tokens}" + (f"/{desc.num_reqs}" if letter == "F" else "")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mode", sorted(GOLDEN))
def test_golden_table(version, mode):
    """The table that both releases of vLLM give, through the shim."""
    with loaded(oracle_folder(), version) as modules:
        made = deployment(version, "v1", [1, 2, 4, 8, 16, 24, 32], mode=mode, reqs=16)
        dispatch = started(modules, version, "v1", made).state.dispatcher.dispatch
        assert " ".join(short(*dispatch(tokens, uniform)) for tokens, uniform in ASKED) == GOLDEN[mode]


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_speculation(version):
    """Three drafts, six requests: the last batch over the largest decode graph is in pieces, others in FULL graphs."""
    with loaded(oracle_folder(), version) as modules:
        made = deployment(version, "v1", [4, 8, 16, 24, 32], reqs=6, drafts=3)
        dispatch = started(modules, version, "v1", made).state.dispatcher.dispatch
        asked = [(12, True), (20, True), (28, True), (6, False), (33, False)]
        assert [short(*dispatch(*each)) for each in asked] == ["F16/4", "F24/6", "P32", "P8", "E33"]


MANAGER_CASES = [
    ((4, 12, 3), ("FULL", 18, 6)),
    ((3, 9, 3), ("FULL", 9, 3)),
    ((2, 12, None), ("PIECEWISE", 16, None)),
    ((9, 27, 3), ("NONE", 27, 9)),
    *[((1, tokens, None), ("PIECEWISE", None, None)) for tokens in (3, 6, 9, 18)],
]


@pytest.mark.parametrize(("asked", "wanted"), MANAGER_CASES)
def test_manager_cases(asked, wanted):
    """vLLM's own test of 0.33's manager: two drafts, sizes to 24, eight requests."""
    with loaded(oracle_folder(), "0.33") as modules:
        made = deployment("0.33", "v2", [1, 2, 4, 8, 16, 24], drafts=2)
        manager = started(modules, "0.33", "v2", made).state.dispatcher
        desc = manager.dispatch(*asked, num_active_loras=0)
        mode, tokens, reqs = wanted
        assert (desc.cg_mode.name, desc.num_reqs) == (mode, reqs)
        assert desc.num_tokens == tokens if tokens else desc.num_tokens >= asked[1]


@pytest.mark.parametrize(("bound", "mode"), [(3, "FULL"), (None, "PIECEWISE"), (4, "PIECEWISE")])
def test_manager_varlen(bound, mode):
    """A graph of decodes of varying lengths takes a step only where the runner bounds every row."""
    with loaded(oracle_folder(), "0.33") as modules:
        made = deployment("0.33", "v2", [1, 2, 4, 8, 16, 24], drafts=2, varlen=True)
        manager = started(modules, "0.33", "v2", made).state.dispatcher
        assert manager.dispatch(3, 6, None, num_active_loras=0, max_query_len=bound).cg_mode.name == mode


@pytest.mark.parametrize("drafts", [0, 1, 7])
def test_manager_divided_sizes(drafts):
    """Where 1 + k divides the sizes, decodes get the smallest size that holds them."""
    q, sizes = 1 + drafts, [8, 16, 24]
    with loaded(oracle_folder(), "0.33") as modules:
        made = deployment("0.33", "v2", sizes, drafts=drafts, reqs=24)
        manager = started(modules, "0.33", "v2", made).state.dispatcher
        for reqs in range(1, 24 // q + 1):
            desc = manager.dispatch(reqs, reqs * q, q, num_active_loras=0)
            tokens = next(size for size in sizes if size >= reqs * q)
            assert (desc.cg_mode.name, desc.num_tokens, desc.num_reqs) == ("FULL", tokens, tokens // q)


def test_manager_dynamic_drafts():
    """Every decode graph of a schedule of drafts is reached at its own size."""
    with loaded(oracle_folder(), "0.33") as modules:
        made = deployment("0.33", "v2", [2, 4, 6, 8], drafts=3, reqs=8, schedule="1-2:3/3-8:1")
        manager = started(modules, "0.33", "v2", made).state.dispatcher
        full = [desc for _, desc in manager.desc_of.values() if desc.uniform_token_count]
        assert len({desc.uniform_token_count for desc in full}) > 1
        for desc in full:
            got = manager.dispatch(desc.num_reqs, desc.num_tokens, desc.uniform_token_count, num_active_loras=0)
            assert (got.cg_mode.name, got.num_tokens) == ("FULL", desc.num_tokens)


KINDS = [[1], [1] * 3, [1] * 9, [1] * 16, [20], [1, 1, 5], [31], [200], [40, 1]]
"""Steps of a rank; an idle one runs a dummy decode."""


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("version", "runner"), RUNNERS)
def test_ranks_agree(version, runner, ranks):
    """Data-parallel ranks under `auto` end at one mode and size, for every combination of what they may vote."""
    rng = random.Random(f"ranks {version} {runner}")  # noqa: S311
    made = deployment(version, runner, [1, 2, 4, 8, 16, 24, 32], reqs=16)
    batches = [batch_of(new) for new in KINDS]
    with loaded(oracle_folder(), version) as modules:
        seen = set()
        for _ in range(30 if ranks == 2 else 15):
            shim = ShimmedVllm(
                modules, version, runner, policy=get_policy("auto"), costs=random_costs(rng), ranks=ranks,
                config=Config(policy="auto", decode_sizes=(2, 8, 12), mixed_sizes=(16,), piecewise_sizes=(8, 32, 64)),
            )  # fmt: skip
            shim.start(made)
            shim.captured()
            for votes in itertools.product(batches, repeat=ranks):
                outcomes = agreed(shim, modules, version, runner, list(votes))
                modes = {outcome[0] for outcome in outcomes}
                assert len(modes) == 1, (votes, outcomes)
                seen |= modes
                if modes != {"NONE"}:
                    assert len({outcome[1] for outcome in outcomes}) == 1, (votes, outcomes)
        assert seen == {"FULL", "PIECEWISE", "NONE"}


@pytest.mark.parametrize("version", VERSIONS)
def test_ranks_are_given_the_size_they_agreed_on_though_a_larger_one_is_cheaper(version):
    """What the first runner asks once ranks agreed isn't the policy's: it would name another size, and vLLM end."""
    dear = HostCost(10_000.0)
    costs = attrs.evolve(
        analytic_costs(), version="pieces of 16", measured=True, host_eager=dear,
        full=Curve((4, 8, 16), (1000.0, 1000.0, 5000.0)), piecewise=Curve((4, 8, 16), (2000.0, 5000.0, 2500.0)),
    )  # fmt: skip
    made, decodes, mixed = deployment(version, "v1", [], reqs=16), batch_of([1] * 7), batch_of([1, 2])
    with loaded(oracle_folder(), version) as modules:
        modes = modules.module("config.compilation").CUDAGraphMode
        shim = ShimmedVllm(
            modules, version, "v1", policy=get_policy("auto"), costs=costs, ranks=2,
            config=Config(policy="auto", decode_sizes=(4, 8, 16), mixed_sizes=(), piecewise_sizes=(4, 8, 16)),
        )  # fmt: skip
        shim.start(made)
        shim.captured()
        dispatch = shim.state.dispatcher.dispatch
        assert short(*dispatch(7, True)) == "F8/8"
        assert short(*dispatch(8, True, invalid_modes={modes.FULL})) == "P16"
        assert short(*dispatch(8, True, valid_modes={modes.PIECEWISE})) == "P8"
        outcomes = agreed(shim, modules, version, "v1", [decodes, mixed])
    assert [outcome[:2] for outcome in outcomes] == [("PIECEWISE", 8)] * 2


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("version", "runner"), RUNNERS)
def test_ranks_have_no_whole_graphs_of_mixed_batches(version, runner, ranks):
    """Not even where the model isn't cut into pieces: another rank's step might take the size for decodes."""
    made = deployment(version, runner, (), mode="FULL_DECODE_ONLY", reqs=16)
    with loaded(oracle_folder(), version) as modules:
        shim = ShimmedVllm(
            modules, version, runner, policy=get_policy("full"), config=Config(policy="full"), ranks=ranks
        )
        shim.start(made)
        shim.captured()
        keys = shim.state.ladder.keys
    assert any(key.decode_only for key in keys)
    assert any(key.part is Part.FULL and not key.decode_only for key in keys) is (ranks == 1)


@pytest.mark.parametrize(("version", "runner"), RUNNERS)
def test_answers_have_no_history(version, runner):
    """Ranks that see the same steps in another order, or other steps between, are told the same of each."""
    rng = random.Random(f"history {version} {runner}")  # noqa: S311
    made = deployment(version, runner, [1, 2, 4, 8], reqs=64, drafts=0)
    batches = [draw_batch(rng, made) for _ in range(400)]
    costs = random_costs(rng)
    with loaded(oracle_folder(), version) as modules:
        answers = []
        for order in (batches, batches[::-1], sorted(batches, key=lambda batch: batch.num_tokens)):
            shim = ShimmedVllm(
                modules, version, runner, policy=get_policy("auto"), costs=costs,
                config=Config(policy="auto", decode_sizes=(2, 8, 48), mixed_sizes=(16, 100), piecewise_sizes=(8, 300)),
            )  # fmt: skip
            shim.start(made)
            shim.captured()
            if order is batches:
                shim.state.dispatcher.chooser.prepare()
            found = {}
            for batch in order:
                told(shim, batch)
                found[batch] = shim.dispatch(batch)
            answers.append(found)
        assert answers[0] == answers[1] == answers[2]


def batch_of(new):
    """Decodes for ones, prompt chunks for the rest."""
    from tests.oracle.configs import Batch, Row

    return Batch(tuple(Row(n, 50 if n == 1 else 0, n != 1) for n in new), 0, None, None)
