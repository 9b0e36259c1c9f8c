"""Holds the vLLM replica to the real code, batch by batch."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs

from kpolicy.attention.support import SupportLevel
from kpolicy.costs import analytic_costs
from kpolicy.decision import Decision
from kpolicy.errors import LadderError, NoLegalModeError, SupportError
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder
from kpolicy.modes import Part
from kpolicy.policies.base import PolicyContext
from kpolicy.policies.vllm_resolve import VllmMode, resolve_mode
from kpolicy.policies.vllm_sizes import default_list, parse_drafts
from kpolicy.settings import Settings
from tests.oracle.configs import LEVELS, VLLM_LEVEL, Batch, Deployment, draw_batch, draw_deployment
from tests.oracle.loader import loaded
from tests.oracle.vllm_ranks import agreed
from tests.oracle.vllm_real import ASSERTED, Outcome, RealVllm, default_sizes

RUNNERS = (("0.23", "v1"), ("0.33", "v1"), ("0.23", "v2"), ("0.33", "v2"))
BATCHES_A_DEPLOYMENT = 40
_COSTS = analytic_costs()


@attrs.define
class Comparison:
    """What came of comparing one runner."""

    version: str
    runner: str
    batches: int = 0
    deployments: int = 0
    refused: int = 0
    """Deployments that neither starts."""
    none_though_forbidden: int = 0
    """Batches that vLLM runs eagerly though its caller didn't allow that; the replica raises NoLegalModeError."""
    outcomes: Counter[str] = attrs.field(factory=Counter)
    mismatches: list[str] = attrs.field(factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "runner": self.runner,
            "batches": self.batches,
            "deployments": self.deployments,
            "deployments_both_refuse": self.refused,
            "outcomes": dict(sorted(self.outcomes.items())),
            "eager_though_forbidden_in_vllm": self.none_though_forbidden,
            "mismatches": len(self.mismatches),
            "seconds": round(self.seconds, 1),
        }


def compare(folder: Path, version: str, runner: str, batches: int, seed: int = 0) -> Comparison:
    """Compare that many random batches.

    Args:
        folder: where the wheels are.
        version: "0.23" or "0.33".
        runner: "v1" or "v2".
        batches: how many batches to compare, over deployments of `BATCHES_A_DEPLOYMENT` each.
        seed: what the random deployments and batches come from.
    """
    rng = random.Random(f"{version} {runner} {seed}")  # noqa: S311  test data
    result = Comparison(version, runner)
    started = time.perf_counter()
    with loaded(folder, version) as modules:
        real = RealVllm(modules, version, runner)
        while result.batches < batches and len(result.mismatches) < 20:
            _compare_deployment(real, draw_deployment(rng, version, runner), rng, batches, result)
    result.seconds = time.perf_counter() - started
    return result


def _compare_deployment(
    real: RealVllm, deployment: Deployment, rng: random.Random, batches: int, result: Comparison
) -> None:
    result.deployments += 1
    policy, claims, settings = deployment.policy, deployment.claims, deployment.settings
    try:
        keys = policy.plan(deployment.capture_sizes, claims, settings)
    except (SupportError, LadderError) as error:
        refusal: Exception | None = error
    else:
        refusal = None
    try:
        real.start(deployment)
    except ValueError as error:
        if refusal is None:
            result.mismatches.append(f"{deployment}: vLLM refuses to start ({error}), the replica doesn't")
        result.refused += 1
        return
    if refusal is not None:
        result.mismatches.append(f"{deployment}: the replica refuses to start ({refusal}), vLLM doesn't")
        return
    wanted, got = real.graphs(), [_outcome(key, deployment) for key in keys]
    if set(wanted) != set(got) or _order(wanted) != _order(got):
        result.mismatches.append(f"{deployment}: vLLM captures {wanted}, the replica {got}")
        return
    context = PolicyContext(claims=claims, ladder=CaptureLadder(keys), costs=_COSTS, settings=settings)
    select = policy.compile(context).select
    for i in range(min(BATCHES_A_DEPLOYMENT, batches - result.batches)):
        batch = draw_batch(rng, deployment, beyond=True)
        shape = batch.shape
        answers = [_answer(lambda: select(*shape.numbers), batch, deployment)]  # noqa: B023  called at once
        if i % 8 == 0:
            answers.append(_answer(lambda: policy.decide(shape, context), batch, deployment))  # noqa: B023
        _check(real.dispatch(batch), answers, deployment, batch, result)


def _check(
    wanted: Outcome | str, answers: list[Outcome | str], deployment: Deployment, batch: Batch, result: Comparison
) -> None:
    result.batches += 1
    allowed = (batch.valid or {"NONE", "PIECEWISE", "FULL"}) - (batch.invalid or frozenset())
    if wanted[0] == "NONE" and "NONE" not in allowed:
        result.none_though_forbidden += 1
        wanted = ASSERTED
    else:
        result.outcomes[wanted if isinstance(wanted, str) else wanted[0]] += 1
    for answer in answers:
        if answer != wanted:
            result.mismatches.append(f"{deployment}, {batch}: vLLM {wanted}, the replica {answer}")


def _answer(decide: Any, batch: Batch, deployment: Deployment) -> Outcome | str:
    try:
        decision: Decision = decide()
    except NoLegalModeError:
        return ASSERTED
    if not decision.keys:
        return ("NONE", batch.num_tokens, None, None, None, None)
    return _outcome(decision.keys[0], deployment)


def _outcome(key: GraphKey, deployment: Deployment) -> Outcome:
    policy = deployment.policy
    mode = "FULL" if key.part is Part.FULL else "PIECEWISE"
    case = None if (policy.version, policy.runner) == ("0.23", "v2") else key.lora_case
    return (mode, key.num_tokens, key.num_reqs, key.query_len, key.max_query_len, case)


def _order(outcomes: list[Outcome]) -> list[tuple[str, int]]:
    return [(outcome[0], outcome[1]) for outcome in outcomes]


def compare_resolution(folder: Path, version: str, runner: str) -> tuple[int, list[str]]:
    """Every cell of the downgrade tables against the real function: cells compared, and those that differ."""
    differing, cells = [], 0
    with loaded(folder, version) as modules:
        real = RealVllm(modules, version, runner)
        for mode in VllmMode:
            for level in LEVELS:
                for query_len in (1, 2, 5):
                    for split in (True, False):
                        cells += 1
                        got = _resolved(mode, level, query_len, split)
                        try:
                            config = real.resolve(mode.value, VLLM_LEVEL[level], query_len, split, (5, 10))
                            wanted = str(config.cudagraph_mode.name)
                        except ValueError:
                            wanted = "RAISE"
                        if got != wanted:
                            differing.append(f"{mode} {level} q={query_len} split={split}: {wanted}, not {got}")
    return cells, differing


def _resolved(mode: VllmMode, level: SupportLevel, query_len: int, split: bool) -> str:
    try:
        return resolve_mode(mode, level, query_len, split).value
    except SupportError:
        return "RAISE"


def compare_default_sizes(folder: Path, version: str, count: int = 400, seed: int = 0) -> tuple[int, list[str]]:
    """The default capture sizes of random deployments against the real function."""
    rng, differing = random.Random(seed), []  # noqa: S311  test data
    with loaded(folder, version) as modules:
        for _ in range(count):
            k = rng.choice([0, 0, 1, 3, 6, 16])
            settings = Settings(
                max_num_reqs=rng.choice([1, 3, 6, 12, 100, 128, 256, 300, 511, 1024]),
                max_num_tokens=rng.choice([20, 100, 333, 512, 2048, 8192]),
                num_speculative_tokens=k,
            )
            drafts = parse_drafts(f"1-8:{k}/10-32:{k // 2}") if version == "0.33" and k and rng.random() < 0.5 else ()
            wanted = default_sizes(modules, version, settings, drafts)
            got = list(default_list(settings, version, drafts))
            if got != wanted:
                differing.append(f"{settings} {drafts}: {wanted}, not {got}")
    return count, differing


def compare_ranks(
    folder: Path, version: str, runner: str, steps: int, seed: int = 0
) -> tuple[int, Counter[str], list[str]]:
    """What 2 to 4 data-parallel ranks run against vLLM's own agreement.

    Returns:
        Steps compared, the modes agreed on, and the steps that differ.
    """
    rng = random.Random(f"ranks {version} {runner} {seed}")  # noqa: S311  test data
    compared, modes, differing = 0, Counter[str](), list[str]()
    with loaded(folder, version) as modules:
        real = RealVllm(modules, version, runner)
        while compared < steps and len(differing) < 20:
            deployment = draw_deployment(rng, version, runner)
            policy, claims, settings = deployment.policy, deployment.claims, deployment.settings
            try:
                keys = policy.plan(deployment.capture_sizes, claims, settings)
                real.start(deployment)
            except (SupportError, LadderError):
                continue
            context = PolicyContext(claims=claims, ladder=CaptureLadder(keys), costs=_COSTS, settings=settings)
            compiled = policy.compile(context)
            for _ in range(20):
                drawn = [draw_batch(rng, deployment) for _ in range(rng.randint(2, 4))]
                # v1 excludes FULL for a step with encoder inputs; v2 runs such a step eagerly.
                batches = [
                    attrs.evolve(each, valid=None, invalid=each.invalid and frozenset({"FULL"})) for each in drawn
                ]
                wanted = agreed(real, modules, version, runner, batches)
                numbers = [batch.shape.numbers for batch in batches]
                reduced = [max(column) for column in zip(*map(compiled.vote, numbers), strict=True)]
                decisions = [compiled.agree(reduced, each) for each in numbers]
                got = [
                    _outcome(decision.keys[0], deployment)
                    if decision.keys
                    else ("NONE", each.total_tokens + decision.padding(each), None, None, None, None)
                    for decision, each in zip(decisions, numbers, strict=True)
                ]
                compared += 1
                modes[wanted[0][0]] += 1
                if got != wanted:
                    differing.append(f"{deployment}, {batches}: vLLM {wanted}, the replica {got}")
    return compared, modes, differing
