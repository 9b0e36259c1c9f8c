"""kpolicy's prefill hooks over 0.5.23's own vote and checks, out of its wheel: ranks with unlike costs stay one."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

from kpolicy.settings import Objective
from kpolicy_sglang import dispatch
from kpolicy_sglang.phase import PREFILL, Phase, table_of
from tests.integrations.sglang.fake_sglang import Tokens
from tests.integrations.sglang.test_oracle_ranks import Deployment, Rank, Real
from tests.oracle.sglang_real import MARKS

pytestmark = MARKS
DEPLOYMENTS, STEPS = 25, 80


def hooked(real: Real) -> None:
    """Put kpolicy's hooks around the runner's own rules."""
    replays, runs = real.prefill.can_replay_locally, real.prefill.can_run_graph

    def can_replay_locally(self: Any, **asked: Any) -> bool:
        return dispatch.prefill_can_replay_locally(replays, self, **asked)

    def can_run_graph(self: Any, batch: Any) -> Any:
        batch.input_ids, batch.extend_seq_lens_cpu = Tokens(batch.input_ids), None
        return dispatch.prefill_can_run(runs, self, batch)

    real.prefill.can_replay_locally, real.prefill.can_run_graph = can_replay_locally, can_run_graph


def phase_of_a_rank(deployment: Deployment, rng: random.Random) -> Phase:
    """A phase whose costs no other rank has."""
    sizes = tuple(sorted(deployment.prefill.capture_num_tokens))
    phase = Phase(PREFILL, sizes, sizes[-1] + 10, full=deployment.full)
    graphs = {size: rng.randint(1, 100) for size in sizes}
    phase.install("auto", table_of("of one rank", graphs, {1: rng.randint(1, 120)}), Objective())
    return phase


def step(deployment: Deployment, ranks: list[Rank], phases: list[Phase]) -> tuple[list[bool], bool]:
    """Whether each busy rank replays its prompts, and whether all voted for it."""
    runner, tokens, votes = deployment.prefill, [rank.tokens for rank in ranks], []
    for rank, phase in zip(ranks, phases, strict=True):
        dispatch.attach(runner, phase)
        votes.append(
            deployment.real.prefill_vote(
                local_batch=rank.scheduled, num_tokens=rank.tokens, prefill_graph_runner=runner,
                coordinated_prefill=True, breakable_prefill=not deployment.full, model_config=None,
                spec_algorithm=SimpleNamespace(is_none=lambda: True),
            )
        )  # fmt: skip
    voted, found = all(votes), []
    for rank, phase in zip(ranks, phases, strict=True):
        converted = rank.kind == "DECODE" and voted and min(tokens) > 0
        if rank.kind in ("EXTEND", "MIXED") or converted:
            dispatch.attach(runner, phase)
            found.append(deployment._extends(rank, tokens, voted, converted))
        elif rank.kind == "DECODE":
            found.append(False)  # SGLang's decode vote is a no beside prompts
    return found, voted


def test_ranks_with_costs_of_their_own_replay_all_or_none():
    """Whatever each rank's costs say of its own tokens, a step with prompts is a replay on all ranks or on none."""
    real, rng, outcomes = Real(), random.Random(4), Counter()  # noqa: S311  not for secrets
    hooked(real)
    for _ in range(DEPLOYMENTS):
        deployment = Deployment(real, rng)
        pool = [phase_of_a_rank(deployment, rng) for _ in range(3)]
        for _ in range(STEPS):
            kinds = rng.choice([["EXTEND", "MIXED", "DECODE"], ["EXTEND", "MIXED", "DECODE", "DECODE", "IDLE"]])
            ranks = [Rank(rng.choice(kinds), rng) for _ in range(rng.choice([2, 2, 3]))]
            if not any(rank.kind in ("EXTEND", "MIXED") for rank in ranks):
                continue
            found, voted = step(deployment, ranks, pool[: len(ranks)])
            assert len(set(found)) == 1, [(rank.kind, rank.tokens) for rank in ranks]
            if any(rank.kind == "IDLE" for rank in ranks):
                assert not found[0]
                outcomes["idle"] += 1
            else:
                outcomes["told"] += sum(phase.idle_rank for phase in pool)
            outcomes["found"] += sum(phase.idle_rank for phase in pool)
            for phase in pool:
                phase.idle_rank = False
            outcomes[found[0], voted] += 1
    assert outcomes[True, True] > 20, outcomes
    assert outcomes[False, False] > 20, outcomes
    # An idle rank keeps all eager, and a rank whose own no it wasn't notes it; without one none does.
    assert outcomes["idle"] > 20 <= outcomes["found"], outcomes
    assert not outcomes["told"]
