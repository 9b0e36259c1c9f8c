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
from kpolicy.what_runs import WhatRuns

if TYPE_CHECKING:
    from kpolicy.engine import Communicator, Engine
    from kpolicy.executors.base import Executor
    from kpolicy.policies.base import Policy

__all__ = ["running", "synchronise"]


def running(executor: Executor | None) -> WhatRuns:
    """What an executor says that it runs, all of which is optional for it and for its model.

    A rank's share of a model says so by having no name (`StepModel`), and so takes rank 0's costs; a model with one is
    whole.
    """
    model = getattr(executor, "model", None)
    name: str = getattr(model, "full_name", "")
    # A share's widths are no whole model's.
    shape = getattr(model, "model_shape", {}) if name else {}
    return WhatRuns(getattr(executor, "device_name", ""), name, 1 if name else None, shape)


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
            device or another model than the costs that rank 0 was given are of, or one that is split otherwise.
    """
    from kpolicy.schemas import Profile, dumps, loads

    mine = _terms(engine)
    device, model, split, shape = engine.costs.measured_of
    profile = dumps(
        Profile(costs=engine.costs, device=device, model=model, tensor_parallel_size=split, model_shape=shape)
    )
    told = json.loads(communicator.broadcast(json.dumps({"terms": mine, "profile": profile, "own": own})))
    different = [name for name in mine if mine[name] != told["terms"].get(name)]
    costs = loads(told["profile"], Profile).costs
    unlike = costs.unlike(running(engine.executor))
    # Everyone learns of a disagreement, so that no rank waits for one that has raised.
    bad, *apart = communicator.all_reduce_max([int(bool(each)) for each in (different, *unlike)])
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
        why, remedy = _apart(costs, unlike, communicator.rank, apart.index(1))
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


def _apart(costs: CostTable, unlike: Sequence[str], rank: int, part: int) -> tuple[str, str]:
    """What is wrong with costs of something else than what a rank runs, and what to do.

    Args:
        costs: rank 0's.
        unlike: how what this rank runs isn't what they were measured of; see `WhatRuns.unlike`.
        rank: this rank.
        part: of these, the first that is so on any rank.
    """
    what, remedy, taken = _PARTS[part]
    differs = unlike[part] or f"{costs.measured_of.measured()[part]}, and another rank {what}"
    return (
        f"rank {rank}: costs {costs.version!r}, by which all ranks decide, were {differs}",
        f"Start all ranks {remedy}, or leave costs out on every rank; with {taken}, costs are taken as is.",
    )


_PARTS = (
    ("runs on another device", "on one kind of device", "measured_on=''"),
    ("runs another model", "with one model", "measured_with='', or a model without a full_name such as a rank's share"),
    ("runs a model that is split otherwise", "with costs of what they run", "measured_over=None"),
)
"""For each of `WhatRuns`: what another rank does, how ranks are to be started, and which costs aren't looked at"""


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
