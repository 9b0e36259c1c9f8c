"""`KunlunExecutor`: runs a step model on a Kunlun card; and `proven`, which lets it have FULL graphs where they hold.

PIECEWISE needs no compiler here, so the vendor's mock of torch.compile doesn't matter. FULL graphs are captured where
the attention reads no lengths on the host, or where a trial has proved that a replay computes what eager does.

Unverified on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from kpolicy.attention import AttentionSupport, HostParams
from kpolicy.errors import CaptureError, ConfigError
from kpolicy.executors.base import CaptureReport
from kpolicy.executors.faults import Fault
from kpolicy.executors.kunlun.adapter import KunlunAdapter
from kpolicy.executors.kunlun.trial import Trial, try_kind
from kpolicy.executors.launcher import GraphLauncher, LauncherPool
from kpolicy.executors.runner import ModeRunner
from kpolicy.executors.segments import FullGraph, PieceGraph
from kpolicy.executors.step_model import StepModel
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.reasons import Reason

__all__ = ["KunlunExecutor", "proven"]

MOST_TRIED = 4
"""Tokens of the longest decode row that is tried, where nobody says"""
_MIXED = None


class _Launcher(GraphLauncher):
    """`GraphLauncher` that captures no FULL graph which a trial hasn't proved, where one is needed."""

    def __init__(self, adapter: KunlunAdapter, model: StepModel, *, max_num_reqs: int | None) -> None:
        super().__init__(adapter, model, max_num_reqs=max_num_reqs)
        self.trials: dict[int | None, Trial] = dict(getattr(model, "trials", {}))

    def capture(self, key: GraphKey, pool: LauncherPool) -> tuple[FullGraph | PieceGraph, CaptureReport]:
        support: AttentionSupport = getattr(self.model, "unproven_support", self.model.support)
        if key.part is Part.FULL and support.claims.host_params is not HostParams.NONE:
            trial = self.trial(key.query_len if key.query_len is not None else _MIXED)
            if not trial.passed:
                raise CaptureError(
                    Reason.HOST_LENGTHS_FROZEN,
                    f"{key}: its attention takes lengths on the host, which a graph here keeps, and {trial.problem}.",
                )
        return super().capture(key, pool)

    def trial(self, query_len: int | None) -> Trial:
        """The trial of one kind of graph, run once."""
        if query_len not in self.trials:
            self.trials[query_len] = try_kind(self.adapter, self.model, query_len)
        return self.trials[query_len]


class KunlunExecutor(ModeRunner):
    """A step model on a Kunlun card. Unverified on hardware.

    Where the attention takes lengths on the host, trials find out at once which FULL graphs hold: `model` is `proven`
    then, and an Engine plans by what was proved.

    Args:
        model: the model; its tensors are on the device, and nothing is running on it.
        device: the device, by `torch.cuda`'s name; the model's own, or the current one.
        max_num_reqs: most rows of a launch that replays; the model's own by default.
        query_len: tokens of the longest decode row that is tried, 1 + k where drafts are verified.
        xmlir, library, environ: see `KunlunAdapter`.
        faults, check: as `CudaExecutor` has them.

    Raises:
        ConfigError: there is no proof of a card, or a variable or an argument can't be used.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        device: Any = None,
        max_num_reqs: int | None = None,
        query_len: int = MOST_TRIED,
        xmlir: Any = None,
        library: Any = None,
        environ: Mapping[str, str] | None = None,
        faults: Iterable[Fault | str] = (),
        check: bool = False,
    ) -> None:
        at = getattr(model, "device", "cuda") if device is None else device
        self.adapter = KunlunAdapter(
            at, xmlir=xmlir, library=library, environ=environ, check=check,
            statics=getattr(model, "static_tensors", None), faults=faults,
        )  # fmt: skip
        self.model = model if isinstance(model, _Proven) else proven(model, self.adapter, query_len=query_len)
        self._kunlun = _Launcher(self.adapter, self.model, max_num_reqs=max_num_reqs)
        super().__init__(self._kunlun)

    @property
    def trials(self) -> tuple[Trial, ...]:
        """What was tried, and what came of it."""
        return tuple(self._kunlun.trials.values())


class _Proven:
    """A model with the support that trials proved; all else is the model's."""

    def __init__(self, model: Any, support: AttentionSupport, trials: Mapping[int | None, Trial]) -> None:
        self._model = model
        self.support = support
        self.unproven_support: AttentionSupport = model.support
        self.trials = dict(trials)
        # What each step looks up; anything else goes the long way.
        self.forward: Callable[..., Any] = model.forward
        self.head: Callable[..., Any] = model.head
        self.sample: Callable[..., Any] = model.sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def proven(model: Any, adapter: KunlunAdapter | None = None, *, query_len: int = 1) -> Any:
    """The model, with FULL graphs allowed where a trial on the device proves them. `KunlunExecutor` does it itself.

    Attention that claims to read no lengths on the host needs no trial. One that does may hold graphs if they hold
    over other lengths, tables and row counts; what isn't proved is taken from the claims.

    Args:
        model: the model, before an Engine gets it; nothing may be running on it.
        adapter: the device; the model's own by default.
        query_len: tokens of a decode row when drafts are verified, 1 without drafts.

    Raises:
        ConfigError: `query_len` isn't at least 1.
        StickyDeviceError: the device was lost in a trial.
    """
    if query_len < 1:
        raise ConfigError(f"query_len is {query_len}; decode rows have at least 1 token, 1 + k with drafts.")
    support: AttentionSupport = model.support
    claims = support.claims
    if claims.host_params is HostParams.NONE:
        return model
    device = KunlunAdapter(getattr(model, "device", "cuda")) if adapter is None else adapter
    wanted = [each for each in dict.fromkeys((1, min(query_len, claims.uniform_query_len))) if each]
    trials: dict[int | None, Trial] = {each: try_kind(device, model, each) for each in wanted}
    if claims.mixed:
        trials[_MIXED] = try_kind(device, model, None)
    most = 0
    for each in sorted(wanted):
        # Claims are of all lengths up to a limit, so one that fails rules out those beyond it.
        if not trials[each].passed:
            break
        most = each
    mixed = _MIXED in trials and trials[_MIXED].passed
    if not most:
        return _Proven(model, support, trials)
    found = attrs.evolve(
        claims, uniform_query_len=most, varlen_query_len=0, mixed=mixed and most == max(wanted),
        host_params=HostParams.NONE,
    )  # fmt: skip
    note = "; ".join(
        f"{each.kind}: {each.problem or f'{each.replays} replays equal eager'}" for each in trials.values()
    )
    granted = AttentionSupport.of(found, backend="kunlun, tried", source="kpolicy/executors/kunlun/trial.py", note=note)
    return _Proven(model, granted, trials)
