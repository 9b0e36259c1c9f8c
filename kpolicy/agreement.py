"""What ranks make equal before they decide: costs, and the set of graphs that may be replayed.

Rank 0's cost table and planned keys are broadcast with the policy and settings they belong to. Every rank says whether
it runs on the device and the model that the table was measured on and with: one that doesn't would be decided for by
another's times, and then so would all others, which wait for it. Then every rank votes which planned keys it lacks,
and a key that any rank lacks is withdrawn on all. After that the captured sets are equal, and every decision is made
from reduced votes, so ranks can't disagree.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kpolicy.costs import CostTable, analytic_costs
from kpolicy.errors import RankError
from kpolicy.reasons import Reason

if TYPE_CHECKING:
    from kpolicy.engine import Communicator, Engine
    from kpolicy.executors.base import Executor
    from kpolicy.policies.base import Policy

__all__ = ["other_device", "other_model", "synchronise"]


def other_device(costs: CostTable, executor: Executor | None) -> str:
    """The executor's device where measured costs are of another one and both say which; otherwise empty."""
    if not costs.measured or not costs.measured_on:
        return ""
    # Optional for an executor.
    here: str = getattr(executor, "device_name", "")
    return "" if here == costs.measured_on else here


def other_model(costs: CostTable, executor: Executor | None) -> str:
    """The executor's model where measured costs are of another one and both say which; otherwise empty.

    A rank's share of a model says so by having no name (`StepModel`), and so takes rank 0's costs.
    """
    if not costs.measured or not costs.measured_with:
        return ""
    # Optional for an executor, and for its model.
    here: str = getattr(getattr(executor, "model", None), "full_name", "")
    return "" if here == costs.measured_with else here


def synchronise(engine: Engine, communicator: Communicator, *, own: bool) -> tuple[CostTable, str]:
    """Make this rank's registry equal to the others'.

    Args:
        engine: this rank's.
        communicator: the other ranks.
        own: the Engine has measured its costs itself.

    Returns:
        (rank 0's costs, empty). Where rank 0 has measured them itself and another rank runs on another device or
        another model, analytic ones, and why.

    Raises:
        RankError: a rank has another policy, other settings or other planned keys than rank 0, or runs on another
            device or another model than the costs that rank 0 was given are of.
    """
    from kpolicy.schemas import Profile, dumps, loads

    mine = _terms(engine)
    profile = dumps(Profile(costs=engine.costs, device=engine.costs.measured_on, model=engine.costs.measured_with))
    told = json.loads(communicator.broadcast(json.dumps({"terms": mine, "profile": profile, "own": own})))
    different = [name for name in mine if mine[name] != told["terms"].get(name)]
    costs = loads(told["profile"], Profile).costs
    here = [other_device(costs, engine.executor), other_model(costs, engine.executor)]
    # Everyone learns of a disagreement, so that no rank waits for one that has raised.
    bad, *apart = communicator.all_reduce_max([int(bool(each)) for each in (different, *here)])
    if different:
        name = different[0]
        raise RankError(
            f"rank {communicator.rank} has {name} {_short(mine[name])}, rank 0 has {_short(told['terms'].get(name))}; "
            "start all ranks with the same policy, settings, attention and ladder."
        )
    if bad:
        raise RankError(f"rank {communicator.rank} agrees with rank 0, but another rank doesn't; its error says what.")
    why = ""
    if any(apart):
        why, remedy = _other(costs, here, communicator.rank, device=apart[0] > 0)
        if not told["own"]:
            raise RankError(f"{why}. {remedy}")
        costs, why = analytic_costs(), f"{why}: ranks decide by analytic costs"
    view = engine.registry.view(assumed=engine.executor is None)
    keys = sorted(engine.keys, key=str)
    missing = communicator.all_reduce_max([int(key not in view) for key in keys]) if keys else []
    for key, lacking in zip(keys, missing, strict=True):
        if lacking and key in view:
            engine.registry.withdraw(key, Reason.RANK_NEEDS_LESS)
    return costs, why


def _other(costs: CostTable, here: Sequence[str], rank: int, *, device: bool) -> tuple[str, str]:
    """What is wrong with costs of another device or model than a rank's, and what to do.

    Args:
        costs: rank 0's.
        here: this rank's device and model, empty where the costs are of it.
        rank: this rank.
        device: a rank is on another device; otherwise one has another model.
    """
    by = f"costs {costs.version!r}, by which all ranks decide, were measured "
    leave = "or leave costs out on every rank; with"
    if device:
        runs = f"rank {rank} runs on {here[0]}" if here[0] else "another rank runs on another device"
        return (
            f"{by}on {costs.measured_on}, and {runs}",
            f"Start all ranks on one kind of device, {leave} measured_on='' costs are taken as is.",
        )
    runs = f"rank {rank} runs {here[1]}" if here[1] else "another rank runs another model"
    return (
        f"{by}with {costs.measured_with}, and {runs}",
        f"Start all ranks with one model, {leave} measured_with='', or a model without a full_name such as a rank's "
        "share, costs are taken as is.",
    )


def _terms(engine: Engine) -> dict[str, Any]:
    """What must be equal on every rank, as JSON values."""
    return {
        "policy": _name(engine.policy),
        "settings": repr(engine.settings),
        "objective": repr(engine.objective),
        "attention": repr(engine.support.claims),
        "ladder": sorted(str(key) for key in engine.keys),
    }


def _name(policy: Policy) -> str:
    """The policy with its arguments; its name alone where its text would be an address, which differs by process."""
    return policy.name if type(policy).__repr__ is object.__repr__ else repr(policy)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
