"""What every policy must keep: totality, determinism, legality, and `select` equal to `decide`.

Each check takes a function that makes the policy and raises AssertionError with the batch that broke the rule.

A replica may replay what `GraphKey.holds` refuses, where the original does so and its results are right. It declares
that in an attribute, which counts as False where it is missing:

- ``treats_chunks_as_decodes``: a decode graph of query length q may replay a batch in which every row, prompt chunks
  included, has q tokens. Such a graph computes a chunk as it computes a verification of q tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import attrs
import hypothesis
from hypothesis import strategies as st

from kpolicy.decision import Decision, Launch
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows
from kpolicy.policies.base import Policy, PolicyContext, admits
from kpolicy.reasons import Reason
from kpolicy.shapes import BatchNumbers, BatchShape
from kpolicy.testing.strategies import contexts, shapes

__all__ = ["POLICY_CHECKS"]

MakePolicy = Callable[[], Policy]
Check = Callable[[Policy, PolicyContext, BatchShape], None]

MAX_EXAMPLES = 30
"""Drawn contexts a check; each comes with up to `BATCHES` batches."""
BATCHES = 6


def _for_any_batch(check: Check, policy: Policy, max_examples: int = MAX_EXAMPLES) -> None:
    @hypothesis.settings(
        max_examples=max_examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(st.data())
    def run(data: st.DataObject) -> None:
        context = data.draw(contexts(policy))
        for shape in data.draw(st.lists(shapes(), min_size=1, max_size=BATCHES)):
            check(policy, context, shape)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
        run()


def decides_every_batch(make: MakePolicy) -> None:
    """Every batch is decided where eager is allowed, the same way each time, with a reason from the list."""

    def check(policy: Policy, context: PolicyContext, shape: BatchShape) -> None:
        decision = policy.decide(shape, context)
        assert isinstance(decision.reason, Reason), f"{shape}: the reason is {decision.reason!r}"
        assert policy.decide(shape, context) == decision, f"{shape}: decided differently the second time"

    _for_any_batch(check, make())


def select_equals_decide(make: MakePolicy) -> None:
    """The prepared path and the readable one agree on every batch."""

    def check(policy: Policy, context: PolicyContext, shape: BatchShape) -> None:
        wanted = policy.decide(shape, context)
        compiled = policy.compile(context)
        for _ in range(2):
            got = compiled.select(*shape.numbers)
            assert got == wanted, f"{shape}: select gives {got}, decide {wanted}"
        numbers = shape.numbers
        uniform = numbers.num_decodes and numbers.query_len and not numbers.num_prefills
        if uniform and not (numbers.forbidden or numbers.num_active_loras or numbers.max_decode_steps > 1):
            got = compiled.select(numbers.num_decodes, numbers.query_len, numbers.decode_kv_tokens)
            assert got == wanted, f"{shape}: the short form of select gives {got}, decide {wanted}"

    _for_any_batch(check, make(), 3 * MAX_EXAMPLES)


def replays_only_captured_graphs(make: MakePolicy) -> None:
    """Every graph of a decision is captured and admitted by attention."""

    def check(policy: Policy, context: PolicyContext, shape: BatchShape) -> None:
        for key in policy.decide(shape, context).keys:
            assert key in context.ladder, f"{shape}: {key} isn't captured"
            assert admits(context.claims, key), f"{shape}: attention doesn't admit {key}"

    _for_any_batch(check, make())


def graphs_hold_their_rows(make: MakePolicy) -> None:
    """Every launch's rows may be padded into its graph: tokens, rows, query lengths, decode rows only, LoRAs."""

    def check(policy: Policy, context: PolicyContext, shape: BatchShape) -> None:
        decision, numbers = policy.decide(shape, context), shape.numbers
        for launch in decision.launches:
            assert launch.padding(numbers) >= 0, f"{shape}: {launch} is too small"
            _holds(policy, launch, numbers)

    _for_any_batch(check, make())


def _holds(policy: Policy, launch: Launch, numbers: BatchNumbers) -> None:
    """The launch's graph holds the launch's rows, where it has any."""
    key, tokens = launch.key, launch.num_tokens(numbers)
    if key is None or not tokens:
        return
    reqs, query_len, longest, decode = numbers.total_reqs, numbers.query_len, numbers.longest_decode, True
    if launch.rows is Rows.DECODE:
        reqs = numbers.num_decodes
    elif numbers.num_prefills:
        if launch.rows is Rows.PREFILL:
            reqs = numbers.num_prefills
        longest, decode = numbers.longest_query, False
        same = longest * reqs == tokens
        if same and getattr(policy, "treats_chunks_as_decodes", False):
            query_len, decode = longest, True
    held = key.holds(tokens, reqs, query_len, longest, decode, numbers.num_active_loras)
    assert held, f"{numbers}: {launch} doesn't hold its rows"


def runs_every_row_once(make: MakePolicy) -> None:
    """The launches of a decision cover every row of the batch, none twice; a split keeps decode and prefill whole."""

    def check(policy: Policy, context: PolicyContext, shape: BatchShape) -> None:
        decision, numbers = policy.decide(shape, context), shape.numbers
        rows = [launch.rows for launch in decision.launches]
        if not numbers.total_tokens:
            assert decision.mode is Mode.EAGER
        elif decision.mode is Mode.SPLIT:
            assert rows == [Rows.DECODE, Rows.PREFILL], f"{shape}: {decision}"
            assert sum(launch.num_tokens(numbers) for launch in decision.launches) == numbers.total_tokens
            assert decision.form is not None
        else:
            assert rows == [Rows.ALL], f"{shape}: {decision}"
        assert decision.decode_steps <= numbers.max_decode_steps, f"{shape}: {decision}"

    _for_any_batch(check, make())


def mode_says_what_replays(make: MakePolicy) -> None:
    """FULL and PIECEWISE replay a graph of their own part, EAGER none, SPLIT a FULL graph for decode rows."""

    def check(policy: Policy, context: PolicyContext, shape: BatchShape) -> None:
        decision = policy.decide(shape, context)
        parts = [launch.part for launch in decision.launches]
        wanted: dict[Mode, list[list[Part | None]]] = {
            Mode.FULL: [[Part.FULL]],
            Mode.PIECEWISE: [[Part.PIECEWISE]],
            Mode.EAGER: [[None], []],
            Mode.SPLIT: [[Part.FULL, Part.PIECEWISE], [Part.FULL, None]],
        }
        assert parts in wanted[decision.mode], f"{shape}: {decision}"

    _for_any_batch(check, make())


def forbidden_modes_stay_unused(make: MakePolicy) -> None:
    """A mode that is forbidden for a step isn't chosen."""

    def check(policy: Policy, context: PolicyContext, shape: BatchShape) -> None:
        decision = policy.decide(shape, context)
        assert decision.mode not in shape.forbidden, f"{shape}, forbidden {shape.forbidden}: {decision}"

    _for_any_batch(check, make())


def ranks_decide_alike(make: MakePolicy) -> None:
    """Ranks that reduce their votes take the same mode and graphs, which hold every rank's rows."""

    @hypothesis.settings(
        max_examples=MAX_EXAMPLES, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(st.data())
    def run(data: st.DataObject) -> None:
        policy = make()
        context = data.draw(contexts(policy))
        ranks = [shape.numbers for shape in data.draw(st.lists(shapes(), min_size=1, max_size=4))]
        compiled = policy.compile(context)
        reduced = [max(column) for column in zip(*(compiled.vote(numbers) for numbers in ranks), strict=True)]
        decisions = [compiled.agree(reduced, numbers) for numbers in ranks]
        first = _shared(decisions[0])
        for numbers, decision in zip(ranks, decisions, strict=True):
            assert _shared(decision) == first, f"{ranks}: {decision} against {decisions[0]}"
            _fits(policy, numbers, decision, context)

    run()


def _shared(decision: Decision) -> tuple[Mode, tuple[GraphKey | None, ...]]:
    """What ranks must share: the mode, and graphs of one size. Adapters don't talk across ranks, so LoRA may differ."""
    keys = (launch.key for launch in decision.launches)
    return decision.mode, tuple(key and attrs.evolve(key, lora_case=0) for key in keys)


def _fits(policy: Policy, numbers: BatchNumbers, decision: Decision, context: PolicyContext) -> None:
    """This rank's rows may be padded into the graphs that ranks agreed on; a rank without rows fits anything."""
    for launch in decision.launches:
        if launch.key is not None:
            assert launch.key in context.ladder
            assert launch.padding(numbers) >= 0, f"{numbers}: {launch} is too small for this rank"
            _holds(policy, launch, numbers)


POLICY_CHECKS = (
    decides_every_batch,
    select_equals_decide,
    replays_only_captured_graphs,
    graphs_hold_their_rows,
    runs_every_row_once,
    mode_says_what_replays,
    forbidden_modes_stay_unused,
    ranks_decide_alike,
)
"""All of the above."""
