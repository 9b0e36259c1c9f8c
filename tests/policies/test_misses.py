"""Why no graph holds a batch, and that ranks miss together."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kpolicy.attention import Claims
from kpolicy.costs import analytic_costs
from kpolicy.decision import Decision
from kpolicy.errors import NoLegalModeError
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder
from kpolicy.modes import Mode, Part, Rows
from kpolicy.policies import OWN, get_policy
from kpolicy.policies.base import PolicyContext, full_keys, miss_full, miss_piecewise, piecewise_keys
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import BatchNumbers, BatchShape
from kpolicy.testing.strategies import contexts, shapes

MIXED, UNIFORM, SINGLE = (Claims.at_level(level) for level in ("mixed", "uniform", "single"))
PIECE = GraphKey(Part.PIECEWISE, 8)


def plain(tokens: int, q: int = 1, **rest: Any) -> GraphKey:
    return GraphKey(Part.FULL, tokens, tokens // q, query_len=q, **rest)


def varlen(tokens: int, longest: int, reqs: int | None = None) -> GraphKey:
    return GraphKey(Part.FULL, tokens, reqs or tokens, max_query_len=longest)


def mixed(tokens: int, reqs: int = 64) -> GraphKey:
    return GraphKey(Part.FULL, tokens, reqs)


def context(claims: Claims, captured: list[GraphKey], withdrawn: list[GraphKey]) -> PolicyContext:
    ladder = CaptureLadder(captured, withdrawn=withdrawn)
    settings = Settings(max_num_reqs=64, num_speculative_tokens=3, max_loras=4)
    return PolicyContext(claims=claims, ladder=ladder, costs=analytic_costs(), settings=settings)


def decode(num_reqs: int, q: int = 1, **rest: Any) -> BatchShape:
    return BatchShape.decode(num_reqs, query_len=q, **rest)


UNEVEN = BatchShape(decodes=[(1, 2), (6, 1)])
PROMPT = BatchShape(decodes=[(1, 2)], prefills=[(6, 0)])


@pytest.mark.parametrize(
    ("claims", "captured", "withdrawn", "shape", "reason"),
    [
        # Attention.
        (SINGLE, [plain(8)], [], decode(2, 4), Reason.ATTENTION_NOT_CAPTURABLE),
        (Claims(4, 4), [varlen(16, 4)], [], decode(2, 6), Reason.ATTENTION_NOT_CAPTURABLE),
        (UNIFORM, [plain(8)], [], PROMPT, Reason.ATTENTION_NOT_CAPTURABLE),
        (UNIFORM, [plain(8)], [mixed(32)], PROMPT, Reason.ATTENTION_NOT_CAPTURABLE),
        # Withdrawn graphs, of kinds that would hold the rows and of others.
        (UNIFORM, [PIECE], [plain(8)], decode(3), Reason.GRAPH_WITHDRAWN),
        (MIXED, [PIECE], [mixed(8)], PROMPT, Reason.GRAPH_WITHDRAWN),
        (MIXED, [PIECE], [plain(8), mixed(4)], PROMPT, Reason.MIXED_NOT_CAPTURED),
        (UNIFORM, [plain(8)], [plain(32)], decode(20), Reason.GRAPH_WITHDRAWN),
        (MIXED, [plain(8)], [mixed(32)], decode(20), Reason.GRAPH_WITHDRAWN),
        (UNIFORM, [plain(8)], [mixed(999)], decode(20), Reason.ABOVE_LARGEST_SIZE),
        (MIXED, [plain(8)], [mixed(999, 4)], decode(20), Reason.ABOVE_LARGEST_SIZE),
        (UNIFORM, [plain(8)], [plain(32, 4)], decode(20), Reason.ABOVE_LARGEST_SIZE),
        (MIXED, [mixed(8)], [plain(999)], BatchShape(prefills=[(20, 0)]), Reason.ABOVE_LARGEST_SIZE),
        (UNIFORM, [plain(8, lora_case=0)], [plain(8, lora_case=4)], decode(3, num_active_loras=2),
         Reason.GRAPH_WITHDRAWN),
        (UNIFORM, [], [plain(8)], decode(3), Reason.GRAPH_WITHDRAWN),
        (UNIFORM, [], [plain(8)], decode(9), Reason.NO_GRAPHS),
        (UNIFORM, [], [], decode(3), Reason.NO_GRAPHS),
        # Query lengths.
        (Claims(16, 4), [varlen(32, 4)], [], decode(2, 6), Reason.QUERY_LEN_NOT_CAPTURED),
        (Claims(16, 4), [varlen(32, 4)], [], UNEVEN, Reason.DECODES_NOT_UNIFORM),
        (UNIFORM, [plain(8)], [], decode(2, 4), Reason.QUERY_LEN_NOT_CAPTURED),
        (UNIFORM, [plain(8)], [], UNEVEN, Reason.DECODES_NOT_UNIFORM),
        # Sizes, rows and adapters.
        (MIXED, [plain(8), varlen(8, 4), mixed(8)], [], decode(9), Reason.ABOVE_LARGEST_SIZE),
        (MIXED, [mixed(8, 2)], [], decode(3), Reason.TOO_MANY_REQS),
        (Claims(16, 8), [varlen(32, 8, 2), varlen(32, 4)], [], UNEVEN, Reason.TOO_MANY_REQS),
        (UNIFORM, [plain(8)], [], decode(3, num_active_loras=1), Reason.LORA_NOT_CAPTURED),
        # Nothing to run.
        (MIXED, [mixed(8)], [], BatchShape(), Reason.EMPTY_BATCH),
        (MIXED, [], [], BatchShape(forbidden=[Mode.FULL]), Reason.EMPTY_BATCH),
        (MIXED, [mixed(8)], [], decode(9, forbidden=[Mode.FULL]), Reason.MODE_FORBIDDEN),
    ],
)  # fmt: skip
def test_why_no_full_graph_holds_it(
    claims: Claims, captured: list[GraphKey], withdrawn: list[GraphKey], shape: BatchShape, reason: Reason
) -> None:
    """The reason is the cause that would have to go first, and `full` gives it on both paths."""
    read = context(claims, captured, withdrawn)
    assert miss_full(shape.numbers, read) is reason
    policy = get_policy("full")
    decision = policy.decide(shape, read)
    assert decision.reason is reason
    assert policy.compile(read).select(*shape.numbers) == decision


@pytest.mark.parametrize(
    ("claims", "captured", "withdrawn", "shape", "reason"),
    [
        (MIXED, [PIECE], [], BatchShape(), Reason.EMPTY_BATCH),
        (MIXED, [PIECE], [], decode(9), Reason.ABOVE_LARGEST_SIZE),
        (MIXED, [PIECE], [GraphKey(Part.PIECEWISE, 16)], decode(9), Reason.GRAPH_WITHDRAWN),
        (MIXED, [PIECE], [mixed(16)], decode(9), Reason.ABOVE_LARGEST_SIZE),
        (MIXED, [plain(4)], [PIECE], decode(5), Reason.GRAPH_WITHDRAWN),
        (MIXED, [], [], decode(5), Reason.NO_GRAPHS),
        (MIXED, [PIECE], [], decode(5, num_active_loras=1), Reason.LORA_NOT_CAPTURED),
        (MIXED, [PIECE], [], decode(9, forbidden=[Mode.PIECEWISE]), Reason.MODE_FORBIDDEN),
        (attrs.evolve(MIXED, piecewise=False), [], [PIECE], decode(5), Reason.NO_PIECEWISE),
    ],
)
def test_why_no_pieces_hold_it(
    claims: Claims, captured: list[GraphKey], withdrawn: list[GraphKey], shape: BatchShape, reason: Reason
) -> None:
    """Likewise for PIECEWISE graphs and the policy `piecewise`."""
    read = context(claims, captured, withdrawn)
    assert miss_piecewise(shape.numbers, read) is reason
    policy = get_policy("piecewise")
    decision = policy.decide(shape, read)
    assert decision.reason is reason
    assert policy.compile(read).select(*shape.numbers) == decision


def test_a_prefill_half_is_measured_by_its_own_rows() -> None:
    """Of a mixed batch the prefill half alone counts for its graph."""
    shape = BatchShape(decodes=[(1, 4)], prefills=[(6, 0)])
    read = context(MIXED, [GraphKey(Part.PIECEWISE, 4)], [PIECE])
    assert miss_piecewise(shape.numbers, read, Rows.PREFILL) is Reason.GRAPH_WITHDRAWN
    assert miss_piecewise(shape.numbers, read) is Reason.ABOVE_LARGEST_SIZE


@hypothesis_settings(max_examples=300, deadline=None)
@given(contexts(), shapes())
def test_withdrawn_is_said_exactly_where_a_withdrawn_graph_would_hold(read: PolicyContext, shape: BatchShape) -> None:
    """Had its withdrawn graphs stayed, such a batch, and no other that attention and the step allow, would replay."""
    numbers: BatchNumbers = shape.numbers
    ladder = read.ladder
    stayed = attrs.evolve(read, ladder=CaptureLadder(ladder.withdrawn)).ladder
    for part, keys, miss in ((Mode.FULL, full_keys, miss_full), (Mode.PIECEWISE, piecewise_keys, miss_piecewise)):
        if not numbers.total_tokens or numbers.forbidden & part.bit or keys(numbers, ladder):
            continue
        assert (miss(numbers, read) is Reason.GRAPH_WITHDRAWN) == bool(keys(numbers, stayed))


def answer(agree: Any, reduced: list[int], numbers: BatchNumbers) -> Decision | None:
    try:
        decided: Decision = agree(reduced, numbers)
    except NoLegalModeError:
        return None
    return decided


SPECS = [*OWN, "split:form=beside", "vllm:runner=v1", "vllm:version=0.23,runner=v1", "vllm:version=0.23,runner=v2"]


@pytest.mark.parametrize("spec", SPECS)
def test_all_ranks_decide_or_all_raise(spec: str) -> None:
    """Where ranks forbid eager, each rank votes, and then all decide on a graph or all raise; never a mix."""
    policy = get_policy(spec)

    @hypothesis_settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(contexts(policy), st.lists(shapes(forbid_eager=True), min_size=2, max_size=4))
    def run(read: PolicyContext, batches: list[BatchShape]) -> None:
        compiled = policy.compile(read)
        votes = [compiled.vote(shape.numbers) for shape in batches]
        reduced = [max(column) for column in zip(*votes, strict=True)]
        answers = [answer(compiled.agree, reduced, shape.numbers) for shape in batches]
        assert len({each is None for each in answers}) == 1, (batches, answers)
        if any(Mode.EAGER in shape.forbidden for shape in batches):
            assert all(each is None or each.mode is not Mode.EAGER for each in answers), (batches, answers)

    run()
