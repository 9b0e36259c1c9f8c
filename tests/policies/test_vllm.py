"""The vLLM replica's dispatch, against tables taken from vLLM and never from our own output."""

from pathlib import Path

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kpolicy.attention.support import Claims, HostParams
from kpolicy.costs import analytic_costs
from kpolicy.errors import NoLegalModeError, SupportError
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder, CaptureSizes
from kpolicy.modes import Mode, Part
from kpolicy.policies import get_policy
from kpolicy.policies.base import PolicyContext
from kpolicy.policies.vllm import vllm
from kpolicy.policies.vllm_keys import PreparedKeys
from kpolicy.policies.vllm_resolve import VllmMode
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from tests import strategies

GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = (1, 2, 4, 8, 16, 24, 32)


def make_context(policy, sizes=SIZES, *, level="mixed", reqs=16, k=0, loras=0, lost=(), **claims):
    """A context with the policy's own graphs, less those lost."""
    settings = Settings(max_num_reqs=reqs, num_speculative_tokens=k, max_loras=loras)
    claimed = Claims.at_level(level, **claims)
    keys = policy.plan(CaptureSizes((), tuple(sizes), ()), claimed, settings)
    ladder = CaptureLadder([key for key in keys if key not in lost], withdrawn=lost)
    return PolicyContext(claims=claimed, ladder=ladder, costs=analytic_costs(), settings=settings)


def result(decision, shape):
    """A decision in the short form of the golden files."""
    if not decision.keys:
        return f"E{shape.num_tokens + decision.padding(shape.numbers)}"
    (key,) = decision.keys
    if key.part is Part.PIECEWISE:
        return f"P{key.num_tokens}"
    return f"F{key.num_tokens}/{key.num_reqs}" + ("u" if key.decode_only else "")


def decide_both(policy, context, shape):
    """The decision, the same on both paths."""
    decision = policy.decide(shape, context)
    assert policy.compile(context).select(*shape.numbers) == decision
    return decision


def sections(name):
    """(title, parameters, rows of cells) of a golden file."""
    found, rows = [], None
    for line in (GOLDEN / name).read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if line.startswith("["):
            title, _, text = line[1:].partition("]")
            rows = []
            found.append((title, dict(pair.split("=") for pair in text.split()), rows))
        else:
            rows.append([cell.strip() for cell in line.split("|")])
    return found


def sizes_of(parameters):
    return tuple(int(size) for size in parameters["sizes"].split(","))


def v1_cells():
    for title, parameters, (header, *rows) in sections("vllm_v1.txt"):
        for batch, *cells in rows:
            for mode, wanted in zip(header[1:], cells, strict=True):
                yield pytest.param(parameters, batch, mode, wanted, id=f"{title}: {batch}, {mode}")


def v1_shape(batch, query_len):
    """The batch of a golden row; None where only the dispatcher, not a batch, can be so."""
    tokens, kind = int(batch.split()[0]), batch.split()[1]
    forbidden = {"-FULL": {Mode.FULL}, "=NONE": {Mode.FULL, Mode.PIECEWISE}}.get(batch.split()[-1], set())
    if kind == "U" and tokens % query_len == 0:
        return BatchShape.decode(tokens // query_len, query_len=query_len, forbidden=forbidden)
    if tokens == query_len:
        return None
    return BatchShape(prefills=[(tokens, 0)], forbidden=forbidden)


@pytest.mark.parametrize("version", ["0.23", "0.33"])
@pytest.mark.parametrize(("parameters", "batch", "mode", "wanted"), list(v1_cells()))
def test_golden_v1(parameters, batch, mode, wanted, version):
    """Every golden batch of the v1 runner gets vLLM's mode, size and rows."""
    policy = vllm(version=version, runner="v1", mode=mode)
    k = int(parameters["k"])
    context = make_context(policy, sizes_of(parameters), level=parameters["level"], reqs=int(parameters["reqs"]), k=k)
    shape = v1_shape(batch, 1 + k)
    if shape is not None:
        assert result(decide_both(policy, context, shape), shape) == wanted
        return
    # One row of 1 + k tokens that isn't uniform: the runner can't make it, the dispatcher can be asked for it.
    tokens = int(batch.split()[0])
    key, _ = policy.dispatch(PreparedKeys(policy.keys(context)), tokens, 1, 0, 0, 0)
    got = f"E{tokens}" if key is None else f"P{tokens}" if key.part is Part.PIECEWISE else f"F{tokens}/{key.num_reqs}"
    assert got == wanted


def v2_cells():
    for title, parameters, rows in sections("vllm_v2.txt"):
        for batch, wanted in rows:
            yield pytest.param(parameters, batch, wanted, id=f"{title}: {batch}")


def v2_shape(batch):
    reqs, tokens, kind = int(batch.split()[0]), int(batch.split()[1]), batch.split()[2]
    if kind.isdigit():
        return BatchShape.decode(reqs, query_len=int(kind))
    if kind.startswith("q<="):
        longest = int(kind[3:])
        rest = tokens - longest - (reqs - 2)
        return BatchShape(decodes=[(longest, 1), (rest, 1), (1, reqs - 2)])
    decodes = [(1, reqs - 1)] if reqs > 1 else []
    return BatchShape(decodes=decodes, prefills=[(tokens - reqs + 1, 0)])


@pytest.mark.parametrize(("parameters", "batch", "wanted"), list(v2_cells()))
def test_golden_v2(parameters, batch, wanted):
    """Every golden batch of the v2 runner gets vLLM's mode, size and rows."""
    varlen = "varlen" in parameters
    policy = vllm(version=parameters["version"], runner="v2", mode=parameters["mode"], varlen=varlen)
    context = make_context(policy, sizes_of(parameters), reqs=int(parameters["reqs"]), k=int(parameters["k"]))
    shape = v2_shape(batch)
    assert result(decide_both(policy, context, shape), shape).rstrip("u") == wanted


def ranks_rows():
    (header, *rows) = [
        [cell.strip() for cell in line.split("|")]
        for line in (GOLDEN / "vllm_ranks.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert header == ["runner", "ranks", "results"]
    return rows


def rank_shape(text):
    kind, _, count = text.partition(" ")
    if kind == "idle":
        return BatchShape()
    return BatchShape.decode(int(count)) if kind == "decode" else BatchShape(prefills=[(int(count), 0)])


def agree(compiled, shapes):
    """What each rank decides from the votes, reduced with a maximum."""
    reduced = [max(column) for column in zip(*(compiled.vote(shape.numbers) for shape in shapes), strict=True)]
    return [compiled.agree(reduced, shape.numbers) for shape in shapes]


@pytest.mark.parametrize("version", ["0.23", "0.33"])
@pytest.mark.parametrize(("runner", "ranks", "results"), ranks_rows())
def test_golden_ranks(runner, ranks, results, version):
    """Data-parallel ranks take the least mode and the most tokens; eager v1 ranks keep their padded size."""
    policy = vllm(version=version, runner=runner)
    shapes = [rank_shape(text) for text in ranks.split(" + ")]
    decisions = agree(policy.compile(make_context(policy)), shapes)
    got = [result(decision, shape).rstrip("u") for decision, shape in zip(decisions, shapes, strict=True)]
    assert " + ".join(got) == results


def test_ranks_say_why():
    """A rank that would replay more alone says so, and an idle one follows."""
    policy = vllm()
    compiled = policy.compile(make_context(policy))
    decode, prefill, long, idle = (rank_shape(text) for text in ("decode 3", "prefill 20", "prefill 600", "idle"))
    assert [each.reason for each in agree(compiled, [decode, prefill])] == [Reason.RANK_NEEDS_LESS, Reason.NEXT_MODE]
    reasons = [each.reason for each in agree(compiled, [decode, long, idle])]
    assert reasons == [Reason.RANK_NEEDS_EAGER, Reason.ABOVE_LARGEST_SIZE, Reason.RANKS_AGREED]
    assert [each.reason for each in agree(compiled, [idle, idle])] == [Reason.EMPTY_BATCH] * 2


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_step_that_no_rank_may_run_raises_on_all(runner):
    """A rank that forbids eager, with a batch over every graph, votes; then all ranks raise and none waits."""
    compiled = vllm(runner=runner).compile(make_context(vllm(runner=runner)))
    long = BatchShape(prefills=[(3000, 0)], forbidden=[Mode.EAGER])
    for other in (rank_shape("decode 3"), rank_shape("idle"), rank_shape("prefill 600")):
        for shapes in ([long, other], [other, long]):
            reduced = [max(column) for column in zip(*(compiled.vote(each.numbers) for each in shapes), strict=True)]
            for shape in shapes:
                with pytest.raises(NoLegalModeError, match=r"step of 3000 tokens.*forbidden are eager"):
                    compiled.agree(reduced, shape.numbers)


def test_forbidden_eager_stays_without_effect_where_a_graph_holds_all_ranks():
    """Ranks that replay alike aren't bothered by a rank that forbids eager."""
    compiled = vllm().compile(make_context(vllm()))
    shapes = [BatchShape.decode(3, forbidden=[Mode.EAGER]), rank_shape("decode 5"), rank_shape("idle")]
    assert [decision.keys[0].num_tokens for decision in agree(compiled, shapes)] == [8, 8, 8]


@pytest.mark.parametrize("version", ["0.23", "0.33"])
def test_ranks_with_different_query_lengths_share_pieces(version):
    """A v2 rank of 1 + k tokens a row follows a rank of single tokens to PIECEWISE: no decode graph holds both."""
    policy = vllm(version=version, runner="v2")
    compiled = policy.compile(make_context(policy, (4, 8, 16), k=3))
    shapes = [BatchShape.decode(2, query_len=4), BatchShape.decode(3)]
    assert [compiled.select(*shape.numbers).mode for shape in shapes] == [Mode.FULL, Mode.PIECEWISE]
    assert [decision.keys for decision in agree(compiled, shapes)] == [(GraphKey(Part.PIECEWISE, 8),)] * 2


def test_full_decode_only_ranks_all_eager():
    """Under FULL_DECODE_ONLY one rank with a prefill makes every rank eager."""
    policy = vllm(mode="FULL_DECODE_ONLY")
    decisions = agree(policy.compile(make_context(policy)), [rank_shape("decode 3"), rank_shape("prefill 4")])
    assert {decision.mode for decision in decisions} == {Mode.EAGER}


def test_idle_rank_without_plain_graphs_makes_all_eager():
    """In v1 an idle rank has no adapters, so with no graph for that every rank leaves graph mode."""
    policy = vllm(runner="v1", specialize_lora=False)
    compiled = policy.compile(make_context(policy, loras=2))
    busy = BatchShape.decode(3, num_active_loras=1)
    assert compiled.select(*busy.numbers).mode is Mode.FULL
    assert {decision.mode for decision in agree(compiled, [busy, BatchShape()])} == {Mode.EAGER}


@pytest.mark.parametrize(
    ("mode", "piecewise", "full"), [("PIECEWISE", 2, 0), ("FULL", 0, 2), ("FULL_DECODE_ONLY", 0, 2)]
)
def test_upstream_key_counts(mode, piecewise, full):
    """Sizes 1 and 8 give two graphs in each single mode."""
    policy = vllm(runner="v1", mode=mode)
    keys = make_context(policy, (1, 8), reqs=8).ladder.keys
    assert [sum(key.part is part for key in keys) for part in (Part.PIECEWISE, Part.FULL)] == [piecewise, full]


def test_upstream_lora_key_count():
    """With 4 adapters and counts specialised, two sizes give ten graphs: cases 0, 1, 2, 4 and 5."""
    policy = vllm(runner="v1", mode="PIECEWISE", specialize_active_lora=True)
    keys = make_context(policy, (1, 8), reqs=8, loras=4).ladder.keys
    assert len(keys) == 10
    assert {key.lora_case for key in keys} == {0, 1, 2, 4, 5}


@pytest.mark.parametrize(
    ("mode", "parts"),
    [("FULL", {Part.FULL}), ("PIECEWISE", {Part.PIECEWISE}), ("FULL_DECODE_ONLY", {Part.FULL}), ("NONE", set())],
)
def test_capture_lists(mode, parts):
    """Graphs are planned largest first, of one part and one kind in the single modes."""
    policy = vllm(runner="v1", mode=mode)
    settings = Settings(max_num_reqs=16)
    keys = policy.plan(CaptureSizes((), (1, 4, 8, 16), ()), Claims.at_level("mixed"), settings)
    assert {key.part for key in keys} == parts
    assert [key.num_tokens for key in keys] == ([16, 8, 4, 1] if parts else [])
    assert len({key.decode_only for key in keys}) <= 1


def test_pieces_are_captured_first():
    """PIECEWISE graphs come before FULL ones, as vLLM captures them."""
    keys = vllm().plan(CaptureSizes((), SIZES, ()), Claims.at_level("uniform"), Settings(max_num_reqs=16))
    parts = [key.part for key in keys]
    assert parts == sorted(parts, key=lambda part: part is Part.FULL)


def test_spec_keys():
    """With 3 drafts and 6 requests the decode graphs are (4,1) (8,2) (16,4) (24,6)."""
    policy = vllm(runner="v1")
    keys = make_context(policy, (4, 8, 16, 24, 32), reqs=6, k=3).ladder.uniform[4]
    assert [(key.num_tokens, key.num_reqs) for key in keys] == [(4, 1), (8, 2), (16, 4), (24, 6)]


@pytest.mark.parametrize(
    ("runner", "arguments", "cases"),
    [
        ("v1", {"specialize_active_lora": True}, {0, 1, 2, 4, 5}),
        ("v1", {}, {0, 5}),
        ("v1", {"specialize_lora": False}, {5}),
        ("v1", {"specialize_lora": False, "specialize_active_lora": True}, {5}),
        ("v2", {"specialize_active_lora": True}, {0, 1, 2, 4, 5}),
        ("v2", {}, {0, 5}),
        ("v2", {"specialize_lora": False}, {0, 5}),
    ],
)
def test_lora_cases(runner, arguments, cases):
    """Graphs are captured for vLLM's LoRA cases, and a batch takes the smallest that serves it."""
    policy = vllm(runner=runner, **arguments)
    context = make_context(policy, loras=4)
    assert {key.lora_case for key in context.ladder.keys} == cases
    for active in range(1, 5):
        shape = BatchShape.decode(3, num_active_loras=active)
        (key,) = decide_both(policy, context, shape).keys
        assert key.lora_case == min(case for case in cases if case >= active)


@pytest.mark.parametrize("version", ["0.23", "0.33"])
def test_no_adapters_without_plain_graphs_runs_eagerly(version):
    """v1 keeps vLLM's flaw: with specialize_lora off a batch without adapters has no graph; v2 of 0.33 has one."""
    policy = vllm(version=version, runner="v1", specialize_lora=False)
    decision = decide_both(policy, make_context(policy, loras=4), BatchShape.decode(3))
    assert (decision.mode, decision.reason) == (Mode.EAGER, Reason.LORA_NOT_CAPTURED)
    newer = vllm(runner="v2", specialize_lora=False)
    assert decide_both(newer, make_context(newer, loras=4), BatchShape.decode(3)).mode is Mode.FULL


def test_one_graph_for_all_adapters_in_v2_of_023():
    """v2 of 0.23 doesn't look at adapters: one graph serves batches with and without."""
    policy = vllm(version="0.23", runner="v2")
    context = make_context(policy, loras=4)
    keys = {decide_both(policy, context, BatchShape.decode(3, num_active_loras=n)).keys for n in range(5)}
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("version", "runner", "passes"),
    [("0.23", "v1", True), ("0.33", "v1", True), ("0.23", "v2", True), ("0.33", "v2", False)],
)
def test_prompt_chunk_shaped_like_a_decode(version, runner, passes):
    """Prompt chunks of exactly 1 + k tokens replay a decode graph, except in v2 of 0.33."""
    policy = vllm(version=version, runner=runner)
    shape = BatchShape(prefills=[(4, 0), (4, 9)])
    decision = decide_both(policy, make_context(policy, (4, 8, 16), k=3), shape)
    assert (decision.mode is Mode.FULL) is passes
    assert decision.mode is not Mode.EAGER


def test_last_prompt_token_runs_as_a_decode():
    """In v2 of 0.33 a one-token chunk over existing context counts as a decode, one without context doesn't."""
    policy = vllm()
    context = make_context(policy)
    assert decide_both(policy, context, BatchShape(decodes=[(1, 2)], prefills=[(1, 50)])).mode is Mode.FULL
    assert decide_both(policy, context, BatchShape(decodes=[(1, 2)], prefills=[(1, 0)])).mode is Mode.PIECEWISE


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_partial_drafts_leave_full(runner):
    """Rows of fewer than 1 + k tokens have no decode graph: partial drafts, and steps with no drafts at all."""
    policy = vllm(runner=runner)
    context = make_context(policy, (4, 8, 16), k=3)
    for shape in (BatchShape(decodes=[(4, 2), (2, 1)]), BatchShape.decode(3)):
        assert decide_both(policy, context, shape).mode is Mode.PIECEWISE


@pytest.mark.parametrize("version", ["0.23", "0.33"])
def test_large_decode_batches_run_eagerly_by_default(version):
    """With 1,024 requests the default sizes still end at 512, so larger decode batches have no graph."""
    policy, settings = vllm(version=version), Settings(max_num_reqs=1024)
    claims = Claims.at_level("mixed")
    ladder = CaptureLadder(policy.plan(policy.sizes(settings), claims, settings))
    context = PolicyContext(claims=claims, ladder=ladder, costs=analytic_costs(), settings=settings)
    modes = {reqs: decide_both(policy, context, BatchShape.decode(reqs)).mode for reqs in (512, 513, 1024)}
    assert modes == {512: Mode.FULL, 513: Mode.EAGER, 1024: Mode.EAGER}


def dynamic(sizes, schedule, reqs, k):
    policy = vllm(drafts=schedule)
    settings = Settings(max_num_reqs=reqs, num_speculative_tokens=k)
    claims = Claims.at_level("uniform")
    chosen = policy.sizes(settings) if sizes is None else CaptureSizes((), sizes, ())
    ladder = CaptureLadder(policy.plan(chosen, claims, settings))
    return policy, PolicyContext(claims=claims, ladder=ladder, costs=analytic_costs(), settings=settings), chosen


def test_dynamic_drafts_reach_every_graph():
    """With draft tiers every captured decode graph is taken at its own size."""
    policy, context, _ = dynamic((2, 4, 6, 8), "1-2:3/3-4:1/5-8:0", 8, 3)
    full = [key for key in context.ladder.keys if key.part is Part.FULL]
    assert {key.query_len for key in full} == {1, 2, 4}
    for key in full:
        shape = BatchShape.decode(key.num_reqs, query_len=key.query_len)
        assert decide_both(policy, context, shape).keys == (key,)


def test_dynamic_drafts_shadow_each_other():
    """Tiers shadow each other: with 150 FULL graphs, 27 of 128 batch sizes find none though one of their own fits."""
    policy, context, sizes = dynamic(None, "1-8:6/9-32:4/33-128:3", 128, 6)
    full = [key for key in context.ladder.keys if key.part is Part.FULL]
    assert len(sizes.piecewise) == 57
    assert len(full) == 150
    missed = 0
    for reqs in range(1, 129):
        query_len = 7 if reqs <= 8 else 5 if reqs <= 32 else 4
        fits = any(key.query_len == query_len and key.num_reqs >= reqs for key in full)
        decision = decide_both(policy, context, BatchShape.decode(reqs, query_len=query_len))
        missed += fits and decision.mode is not Mode.FULL
    assert missed == 27


@pytest.mark.parametrize("query_len", [1, 2, 8])
def test_decode_graph_is_the_smallest_that_fits(query_len):
    """Where 1 + k divides every size, a decode batch takes the smallest size that holds it."""
    sizes = (8, 16, 24, 32)
    policy = vllm()
    context = make_context(policy, sizes, reqs=32, k=query_len - 1)
    for reqs in range(1, 32 // query_len + 1):
        (key,) = decide_both(policy, context, BatchShape.decode(reqs, query_len=query_len)).keys
        wanted = min(size for size in sizes if size >= reqs * query_len)
        assert (key.num_tokens, key.num_reqs, key.part) == (wanted, wanted // query_len, Part.FULL)


U3, MIX = BatchShape.decode(3), BatchShape(decodes=[(1, 2)], prefills=[(9, 0)])


@pytest.mark.parametrize(
    ("arguments", "options", "shape", "reason"),
    [
        ({}, {}, U3, Reason.GRAPH_FITS),
        ({}, {}, MIX, Reason.NEXT_MODE),
        ({"mode": "PIECEWISE"}, {}, MIX, Reason.GRAPH_FITS),
        ({}, {"level": "none"}, U3, Reason.GRAPH_FITS),
        ({"mode": "NONE"}, {}, U3, Reason.POLICY_IS_EAGER),
        ({}, {"level": "none", "piecewise": False}, U3, Reason.ATTENTION_NOT_CAPTURABLE),
        ({"version": "0.23"}, {"piecewise": False}, U3, Reason.NO_PIECEWISE),
        ({}, {"host_params": HostParams.FROZEN, "piecewise": False}, U3, Reason.HOST_LENGTHS_FROZEN),
        ({}, {}, BatchShape(), Reason.EMPTY_BATCH),
        ({}, {}, BatchShape(prefills=[(33, 0)]), Reason.ABOVE_LARGEST_SIZE),
        ({"mode": "FULL_DECODE_ONLY"}, {}, BatchShape.decode(17), Reason.ABOVE_LARGEST_SIZE),
        ({"mode": "FULL_DECODE_ONLY"}, {}, MIX, Reason.MIXED_NOT_CAPTURED),
        ({"mode": "FULL_DECODE_ONLY"}, {"k": 1}, BatchShape(decodes=[(2, 1), (1, 1)]), Reason.DECODES_NOT_UNIFORM),
        ({"mode": "FULL_DECODE_ONLY"}, {"k": 1}, BatchShape.decode(4), Reason.QUERY_LEN_NOT_CAPTURED),
        ({"mode": "FULL"}, {}, BatchShape.decode(17), Reason.TOO_MANY_REQS),
        ({}, {}, BatchShape.decode(3, num_active_loras=1), Reason.LORA_NOT_CAPTURED),
        ({}, {}, BatchShape.decode(3, forbidden={Mode.FULL, Mode.PIECEWISE}), Reason.MODE_FORBIDDEN),
        ({}, {}, BatchShape.decode(3, forbidden={Mode.FULL}), Reason.NEXT_MODE),
        # 6 tokens pad to 6, which is a graph of rows of 3; the graph of rows of 2 with 8 tokens isn't looked for.
        ({"mode": "FULL_DECODE_ONLY", "drafts": "1-2:2/3-8:1"}, {"k": 2, "sizes": (4, 8)},
         BatchShape.decode(3, query_len=2), Reason.SIZE_NOT_CAPTURED),
    ],
)  # fmt: skip
def test_reasons(arguments, options, shape, reason):
    """Where vLLM answers "none" for many causes, the reason says which."""
    policy = vllm(**arguments)
    decision = decide_both(policy, make_context(policy, **options), shape)
    assert decision.reason is reason


def test_no_ladder():
    """Without a graph the reason is that nothing is captured, or that all of it was withdrawn."""
    policy = vllm()
    context = make_context(policy)
    empty = attrs.evolve(context, ladder=CaptureLadder([]))
    assert decide_both(policy, empty, U3).reason is Reason.NO_GRAPHS
    gone = attrs.evolve(context, ladder=CaptureLadder([], withdrawn=context.ladder.keys))
    assert decide_both(policy, gone, U3).reason is Reason.GRAPH_WITHDRAWN


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_withdrawn_key_falls_to_the_next_mode(runner):
    """A withdrawn graph isn't replaced by a larger one: vLLM pads to one size, so the next mode runs."""
    policy = vllm(runner=runner)
    full, piece = GraphKey(Part.FULL, 4, 4, query_len=1), GraphKey(Part.PIECEWISE, 4)
    decision = decide_both(policy, make_context(policy, lost=(full,)), U3)
    assert (decision.keys, decision.reason) == ((piece,), Reason.NEXT_MODE)
    decision = decide_both(policy, make_context(policy, lost=(full, piece)), U3)
    assert (decision.mode, decision.reason) == (Mode.EAGER, Reason.GRAPH_WITHDRAWN)


def test_only_allowed_mode_without_a_graph():
    """Where a caller allows one mode only and no graph is of it, there is no legal mode, as vLLM asserts."""
    policy = vllm(runner="v1", mode="FULL_DECODE_ONLY")
    context = make_context(policy)
    only_full = {Mode.PIECEWISE, Mode.EAGER}
    shape = BatchShape(prefills=[(9, 0)], forbidden=only_full)
    for decide in (lambda: policy.decide(shape, context), lambda: policy.compile(context).select(*shape.numbers)):
        with pytest.raises(NoLegalModeError, match="no mode is left"):
            decide()
    assert decide_both(policy, context, BatchShape.decode(3, forbidden=only_full)).mode is Mode.FULL


def test_reached_by_name():
    """The factory's arguments are reachable from a string."""
    policy = get_policy("vllm:runner=v1,version=0.23,mode=FULL,specialize_lora=false,drafts=")
    assert (policy.runner, policy.version, policy.mode) == ("v1", "0.23", VllmMode.FULL)
    assert policy.specialize_lora is False


@st.composite
def policies(draw):
    """Any vLLM."""
    version, runner = draw(st.sampled_from(["0.23", "0.33"])), draw(st.sampled_from(["v1", "v2"]))
    mode = draw(st.sampled_from(list(VllmMode)))
    arguments = {name: draw(st.booleans()) for name in ("specialize_lora", "specialize_active_lora", "breakable")}
    if (version, runner) == ("0.33", "v2"):
        arguments["drafts"] = draw(st.sampled_from(["", "", "1-3:3/4-9:1"]))
        arguments["varlen"] = mode.decode is Mode.FULL and draw(st.booleans())
    split = draw(st.booleans())
    return vllm(version=version, runner=runner, mode=mode, piecewise_split=split, **arguments)


@st.composite
def policies_in_context(draw):
    """Any vLLM in a context of its own graphs."""
    policy = draw(policies())
    try:
        return policy, draw(strategies.contexts(policy))
    except SupportError:
        assume(False)


def answer(call):
    """The decision, or that there is none."""
    try:
        return call()
    except NoLegalModeError:
        return "no legal mode"


@hypothesis_settings(max_examples=400, deadline=None)
@given(policies_in_context(), strategies.shapes(), st.booleans())
def test_select_equals_decide(drawn, shape, forbid_eager):
    """The prepared path and the readable one agree for every vLLM, batch and set of withdrawn graphs."""
    policy, context = drawn
    shape = attrs.evolve(shape, forbidden=shape.forbidden | {Mode.EAGER}) if forbid_eager else shape
    compiled = policy.compile(context)
    wanted = answer(lambda: policy.decide(shape, context))
    assert answer(lambda: compiled.select(*shape.numbers)) == wanted
    numbers = shape.numbers
    plain = numbers.query_len and not (numbers.num_prefills or numbers.forbidden or numbers.num_active_loras)
    if plain and numbers.max_decode_steps == 1:
        assert answer(lambda: compiled.select(numbers.num_decodes, numbers.query_len)) == wanted


@hypothesis_settings(max_examples=200, deadline=None)
@given(policies_in_context(), strategies.shapes(forbid=False))
def test_one_rank_agrees_with_itself(drawn, shape):
    """A rank alone decides by vote and agreement what it decides without them, unless a graph was withdrawn."""
    policy, context = drawn
    assume(not context.ladder.withdrawn)
    compiled = policy.compile(context)
    (decision,) = agree(compiled, [shape])
    assert decision == compiled.select(*shape.numbers)


@hypothesis_settings(max_examples=300, deadline=None)
@given(policies_in_context(), st.lists(strategies.shapes(forbid=False), min_size=2, max_size=4))
def test_ranks_run_one_mode_and_size(drawn, shapes):
    """Ranks agree on the mode and, where a graph replays, on its size; each rank's own adapters choose among cases."""
    policy, context = drawn
    # vLLM's scheduler never schedules more requests than it may.
    assume(all(shape.num_reqs <= context.settings.max_num_reqs for shape in shapes))
    decisions = agree(policy.compile(context), shapes)
    assert len({(each.mode, *(key.num_tokens for key in each.keys)) for each in decisions}) == 1
    for each, shape in zip(decisions, shapes, strict=True):
        assert all(key in context.ladder for key in each.keys)
        assert each.padding(shape.numbers) >= 0


@hypothesis_settings(max_examples=100, deadline=None)
@given(policies_in_context())
def test_padding_is_monotone(drawn):
    """More decode rows never pad to a smaller graph of the same mode, and captured sizes are left alone."""
    policy, context = drawn
    assume(not context.ladder.withdrawn and not policy.drafts)
    compiled = policy.compile(context)
    largest = {}
    for reqs in range(1, context.settings.max_num_reqs + 1):
        decision = compiled.select(reqs, context.settings.query_len)
        for key in decision.keys:
            assert key.num_tokens >= largest.get(key.part, 0)
            largest[key.part] = key.num_tokens
