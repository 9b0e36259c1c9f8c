"""What ranks make equal before they decide: costs, and the set of graphs that may be replayed.

Rank 0's cost table and planned keys are broadcast with the policy and settings they belong to. Then every rank votes
which planned keys it lacks, and a key that any rank lacks is withdrawn on all. After that the captured sets are equal,
and every decision is made from reduced votes, so ranks can't disagree.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kpolicy.costs import CostTable
from kpolicy.errors import RankError
from kpolicy.reasons import Reason

if TYPE_CHECKING:
    from kpolicy.engine import Communicator, Engine
    from kpolicy.policies.base import Policy

__all__ = ["synchronise"]


def synchronise(engine: Engine, communicator: Communicator) -> CostTable:
    """Make this rank's registry equal to the others'; rank 0's costs.

    Raises:
        RankError: a rank has another policy, other settings or other planned keys than rank 0.
    """
    from kpolicy.schemas import Profile, dumps, loads

    mine = _terms(engine)
    profile = dumps(Profile(costs=engine.costs, device=engine.costs.measured_on, model=""))
    told = json.loads(communicator.broadcast(json.dumps({"terms": mine, "profile": profile})))
    different = [name for name in mine if mine[name] != told["terms"].get(name)]
    # Everyone learns of a disagreement, so that no rank waits for one that has raised.
    bad = communicator.all_reduce_max([int(bool(different))])[0]
    if different:
        name = different[0]
        raise RankError(
            f"rank {communicator.rank} has {name} {_short(mine[name])}, rank 0 has {_short(told['terms'].get(name))}; "
            "start all ranks with the same policy, settings, attention and ladder."
        )
    if bad:
        raise RankError(f"rank {communicator.rank} agrees with rank 0, but another rank doesn't; its error says what.")
    view = engine.registry.view(assumed=engine.executor is None)
    keys = sorted(engine.keys, key=str)
    missing = communicator.all_reduce_max([int(key not in view) for key in keys]) if keys else []
    for key, lacking in zip(keys, missing, strict=True):
        if lacking and key in view:
            engine.registry.withdraw(key, Reason.RANK_NEEDS_LESS)
    return loads(told["profile"], Profile).costs


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
