"""Writes each step's batch and decision as a kpolicy decision log, which `kpolicy simulate --decisions` reads."""

from __future__ import annotations

import atexit
import json
import logging
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import attrs

from kpolicy import __version__
from kpolicy.decision import Decision, Launch
from kpolicy.modes import Mode, Part, Rows
from kpolicy.reasons import Reason
from kpolicy.schemas import DecisionEntry, DecisionLogWriter, LogHeader, Profile, dumps
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from kpolicy_sglang.phase import DECODE, Phase

__all__ = ["DecisionLog", "shape_of"]

logger = logging.getLogger(__name__)


def shape_of(phase: Phase, batch: Any) -> BatchShape | None:
    """The batch of one step, from SGLang's `ForwardBatch`; None where it has no rows, or doesn't tell them.

    Decode rows of a mixed batch are its extends of one token after a prefix, as SGLang has them.
    """
    size = batch.batch_size
    if not size:
        return None
    if phase.name == DECODE:
        width = phase.width
        kv_tokens = batch.seq_lens_sum
        known = None if kv_tokens is None else max(int(kv_tokens), size * width)
        return BatchShape.decode(size, known, query_len=width)
    new, prefix = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    if new is None or prefix is None:
        return None
    rows = [(int(a), int(b)) for a, b in zip(new, prefix, strict=True) if a]
    if not rows:
        return None
    mixed = getattr(batch.forward_mode, "name", "") == "MIXED"
    decodes = [row for row in rows if mixed and row[0] == 1 and row[1]]
    prompts = [row for row in rows if not (mixed and row[0] == 1 and row[1])]
    kv = sum(a + b for a, b in decodes)
    return BatchShape(
        decodes=[(1, len(decodes))] if decodes else [], prefills=prompts, decode_kv_tokens=kv if decodes else None,
        max_kv_len=max(a + b for a, b in rows),
    )  # fmt: skip


def _sizes(phases: Mapping[str, Phase]) -> dict[str, list[int]]:
    """The captured sizes in tokens by kind of graph, as `kpolicy simulate --decisions` reads them."""
    found = {}
    for name, phase in phases.items():
        whole = phase.keys[0].part is Part.FULL
        kind = "decode" if name == DECODE else "mixed" if whole else "piecewise"
        found[kind] = [key.num_tokens for key in phase.keys]
    return found


def _profiles(phases: Mapping[str, Phase], device: str, model: str) -> dict[str, Any]:
    """What the phases decide by, as profiles: without them nobody could decide the steps again."""
    return {
        name: json.loads(dumps(Profile(costs=phase.costs, device=device, model=model)))
        for name, phase in phases.items()
        if phase.costs is not None
    }


class DecisionLog:
    """The log of one scheduler process; the first rank writes it. A process forked off has none.

    Args:
        path: the file.
        version: SGLang's.
        model: the model's path.
        policy: the policy that decides.
        settings: the deployment's limits.
        phases: what was captured, and what it costs, by phase.
        device: the device's name.

    Raises:
        ConfigError: the file can't be written.
    """

    def __init__(
        self, path: str, *, version: str, model: str, policy: str, settings: Settings, phases: Mapping[str, Phase],
        device: str = "",
    ) -> None:  # fmt: skip
        extra: dict[str, Any] = {"sizes": _sizes(phases)}
        profiles = _profiles(phases, device, model)
        if profiles:
            extra["profiles"] = profiles
        header = LogHeader(
            policy=policy, device=device, model=model, versions={"kpolicy": __version__, "sglang": version},
            settings=settings, started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"), extra=extra,
            costs_version=", ".join(phase.costs.version for phase in phases.values() if phase.costs is not None),
        )  # fmt: skip
        self._writer: DecisionLogWriter | None = DecisionLogWriter(path, header)
        self.left_out = 0
        """Steps without rows, or whose rows SGLang doesn't tell."""
        atexit.register(self.close)
        self._writer.flush()

    def write(
        self, phase: Phase, batch: Any, size: int, refused: Reason | None = None, captured: int | None = None
    ) -> None:
        """Append a step. Whatever is wrong with it or the file ends the log, with a warning, and no more."""
        if self._writer is None or self._writer.forked:
            return
        try:
            self._append(self._writer, phase, batch, size, refused, captured)
        # A full disk, a batch of another kind: SGLang's step matters more than its record.
        except Exception as error:  # noqa: BLE001
            logger.warning("kpolicy: the decision log ends here: %s: %s", type(error).__name__, error)
            self._end()

    def _append(
        self, writer: DecisionLogWriter, phase: Phase, batch: Any, size: int, refused: Reason | None,
        captured: int | None,
    ) -> None:  # fmt: skip
        shape = shape_of(phase, batch)
        if shape is None:
            self.left_out += 1
            return
        decision = phase.decision(size)
        if refused is not None:
            launch = Launch(Rows.ALL, None)
            decision = Decision(Mode.EAGER, (launch,), refused, costs_version=decision.costs_version)
        elif captured is not None:
            key = phase.keys[phase.sizes.index(captured)]
            launch = Launch(Rows.ALL, key)
            decision = Decision(
                Mode(key.part.value), (launch,), Reason.GRAPH_FITS, costs_version=decision.costs_version
            )
        elif decision.keys and decision.keys[0].num_tokens != (phase.bucket(size) or 0) * phase.width:
            key = phase.keys[phase.sizes.index(phase.bucket(size) or phase.largest)]
            decision = attrs.evolve(decision, launches=(Launch(Rows.ALL, key),))
        writer.write(DecisionEntry.of(shape, decision))

    def flush(self) -> None:
        """Leave what was written so far to whoever reads the file while SGLang runs, or after it was killed."""
        try:
            if self._writer is not None:
                self._writer.flush()
        except Exception as error:  # noqa: BLE001  as above
            logger.warning("kpolicy: the decision log ends here: %s: %s", type(error).__name__, error)
            self._end()

    def _end(self) -> None:
        """Close a log that failed; its last words may fail too."""
        try:
            self.close()
        except Exception as error:  # noqa: BLE001
            logger.warning("kpolicy: the decision log can't be closed: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        """End the log."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            atexit.unregister(self.close)
