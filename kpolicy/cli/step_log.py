"""What `kpolicy run` writes of every step: the step log and the Perfetto trace."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kpolicy import __version__
from kpolicy.cli.options import COMMAND
from kpolicy.engine import Engine
from kpolicy.errors import ConfigError
from kpolicy.executors.base import StepInputs, StepOutputs
from kpolicy.host_speed import INSIDE, INTERPRETER, ONCE, SpeedTimer, host_work_us, work_inside_us
from kpolicy.scheduling.batching import Batcher
from kpolicy.shapes import BatchShape

if TYPE_CHECKING:
    from kpolicy.costs import CostTable
    from kpolicy.decision import Decision
    from kpolicy.observe.perfetto import PerfettoWriter
    from kpolicy.schemas import LogHeader, QueueState, StepLogWriter
    from kpolicy.shapes import BatchNumbers
    from kpolicy.trace_run import OnStep

__all__ = ["AT_ONCE", "RunsOn", "StepLog", "files_of", "step_log_paths"]


AT_ONCE = 64
"""Steps that are written together."""


@attrs.frozen
class RunsOn:
    """Device, model and versions, as a log's header says them."""

    device: str = "simulated"
    model: str = ""
    versions: dict[str, str] = attrs.field(factory=dict)


def step_log_paths(path: Path | None, specs: Sequence[str]) -> list[Path | None]:
    """`files_of` for ``--step-log``."""
    return files_of("--step-log", path, specs, "steps.jsonl")


def files_of(option: str, path: Path | None, specs: Sequence[str], example: str) -> list[Path | None]:
    """A file for each policy: the path itself for one, NAME-POLICY beside it for several.

    Raises:
        ConfigError: the path can't be a file there, or two policies would write one file. Said before anything runs,
            not when the second policy's turn comes.
    """
    if path is None:
        return [None] * len(specs)
    if path.is_dir() or not path.name:
        raise ConfigError(f"{option} {path} is a folder; name a file in it, such as {path / example}.")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it, or give another path.")
    if len(specs) == 1:
        return [path]
    paths: list[Path | None] = [path.with_stem(f"{path.stem}-{_file_name(spec)}") for spec in specs]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"{option} {path}: {', '.join(specs)} would share a file; run them one by one.")
    return paths


def _file_name(spec: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in spec)


class StepLog:
    """Writes one policy's steps where they are wanted: ``with StepLog(...) as log`` gives what to call each step.

    Steps are written `AT_ONCE` at a time: turning each into a line between two steps would leave the host's caches to
    that, and the next step would take longer than a server's.

    Args:
        path: the step log; None writes none.
        spec: the policy.
        engine: whose costs tell device and host time apart.
        perfetto: the Perfetto trace; None writes none. Without either file `log` is None.
        runs_on: what ran where, for the header.
    """

    def __init__(
        self, path: Path | None, spec: str, engine: Engine, *, perfetto: Path | None = None,
        runs_on: RunsOn | None = None,
    ) -> None:  # fmt: skip
        self._path = path
        self._perfetto = perfetto
        self._spec = spec
        self._engine = engine
        self._runs_on = runs_on or RunsOn()
        self._writer: StepLogWriter | None = None
        self._trace: PerfettoWriter | None = None
        self._open = ExitStack()
        self._noted: list[_Noted] = []
        # Times of other work couldn't be held to the costs.
        self._notes_speed = engine.costs.host_work_us > 0 and engine.costs.host_probe == INTERPRETER
        # A simulated step has nothing inside.
        self._notes_inside = self._notes_speed and engine.costs.notes_inside and bool(self._runs_on.model)

    def __enter__(self) -> OnStep | None:
        if self._path is None and self._perfetto is None:
            return None
        header = self._header()
        with ExitStack() as opened:
            if self._notes_inside:
                opened.enter_context(SpeedTimer())
            if self._path is not None:
                from kpolicy.schemas import StepLogWriter

                self._writer = StepLogWriter(self._path, header)
                opened.push(self._close_log)
            if self._perfetto is not None:
                from kpolicy.observe.perfetto import PerfettoWriter

                self._trace = opened.enter_context(PerfettoWriter(self._perfetto, header))
            # First of all at the end: where the last steps can't be written, the files are told of it.
            opened.callback(self._write)
            self._open = opened.pop_all()
        return self._note

    def _header(self) -> LogHeader:
        from kpolicy.schemas import LogHeader

        where = self._runs_on
        return LogHeader(
            policy=self._spec, device=where.device, model=where.model,
            versions={"kpolicy": __version__, **where.versions},
            costs_version=self._engine.costs.version, settings=self._engine.settings,
            started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=shlex.join(["kpolicy", *COMMAND.get()]), inside_probe=INSIDE if self._notes_inside else ONCE,
        )  # fmt: skip

    def _note(self, step: int, inputs: StepInputs, outputs: StepOutputs, batcher: Batcher, start_us: float) -> None:
        from kpolicy.schemas import QueueState

        queue = QueueState(
            waiting=len(batcher.waiting), running=len(batcher.running),
            kv_tokens_used=(batcher.num_blocks - batcher.free_blocks) * batcher.block_size,
            kv_tokens_capacity=batcher.capacity, preempted=batcher.num_preemptions,
        )  # fmt: skip
        costs, now_s = self._engine.costs, time.perf_counter()
        self._noted.append(
            _Noted(
                step, _shape_of(inputs), outputs.decision, inputs.numbers, costs, outputs.cycle_us,
                {part.value: us for part, us in outputs.ready_us.items()}, queue,
                host_work_us() if self._notes_speed else None,
                work_inside_us(now_s - outputs.cycle_us * 1e-6, now_s) or None, start_us,
            )
        )  # fmt: skip
        if len(self._noted) >= AT_ONCE:
            self._write()

    def _write(self) -> None:
        """Write what was noted, in its order."""
        from kpolicy.schemas import StepEntry

        noted, self._noted = self._noted, []
        for each in noted:
            cost = each.costs.cost(each.decision.launches, each.numbers)
            entry = StepEntry.of(
                each.step, each.shape, each.decision, cycle_us=each.cycle_us, ready_us=each.ready_us,
                queue=each.queue, device_us=cost.device_us, host_us=cost.host_us, host_work_us=each.host_work_us,
                host_work_inside_us=each.host_work_inside_us, start_us=each.start_us,
            )  # fmt: skip
            if self._writer is not None:
                self._writer.write(entry)
            if self._trace is not None:
                from kpolicy.observe.perfetto import StepTiming

                self._trace.write(entry, StepTiming(start_us=each.start_us))

    def _close_log(self, *failure: Any) -> None:
        if self._writer is not None:
            self._writer.close(whole=failure[0] is None)

    def __exit__(self, *failure: Any) -> None:
        self._open.__exit__(*failure)


@attrs.frozen
class _Noted:
    """A step as it was, until it is written."""

    step: int
    shape: BatchShape
    decision: Decision
    numbers: BatchNumbers
    costs: CostTable
    cycle_us: float
    ready_us: dict[str, float]
    queue: QueueState
    host_work_us: float | None
    host_work_inside_us: float | None
    start_us: float


def _shape_of(inputs: StepInputs) -> BatchShape:
    numbers = inputs.numbers
    chunks = zip(inputs.query_lens[numbers.num_decodes :], inputs.kv_lens[numbers.num_decodes :], strict=True)
    return BatchShape(
        decodes=((1, numbers.num_decodes),) if numbers.num_decodes else (),
        prefills=[(new, kv_len - new) for new, kv_len in chunks],
        decode_kv_tokens=numbers.decode_kv_tokens if numbers.num_decodes else None,
        max_kv_len=numbers.max_kv_len,
        max_decode_steps=numbers.max_decode_steps,
        facts=numbers.facts,
    )
