"""The step log of `kpolicy run`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kpolicy import __version__
from kpolicy.cli.options import COMMAND
from kpolicy.engine import Engine
from kpolicy.errors import ConfigError
from kpolicy.executors.base import StepInputs, StepOutputs
from kpolicy.scheduling.batching import Batcher
from kpolicy.shapes import BatchShape

if TYPE_CHECKING:
    from kpolicy.schemas import StepLogWriter

__all__ = ["StepLog", "step_log_paths"]


def step_log_paths(path: Path | None, specs: Sequence[str]) -> list[Path | None]:
    """A file for each policy: the path itself for one, NAME-POLICY beside it for several.

    Raises:
        ConfigError: the path can't be a file there, or two policies would write one file. Said before anything runs,
            not when the second policy's turn comes.
    """
    if path is None:
        return [None] * len(specs)
    if path.is_dir() or not path.name:
        raise ConfigError(f"--step-log {path} is a folder; name a file in it, such as {path / 'steps.jsonl'}.")
    if not path.parent.is_dir():
        raise ConfigError(f"--step-log {path}: there is no folder {path.parent}; make it, or give another path.")
    if len(specs) == 1:
        return [path]
    paths: list[Path | None] = [path.with_stem(f"{path.stem}-{_file_name(spec)}") for spec in specs]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"--step-log {path}: {', '.join(specs)} would share a file; run them one by one.")
    return paths


def _file_name(spec: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in spec)


class StepLog:
    """Writes one policy's steps where a log is wanted: ``with StepLog(...) as log`` gives what to call each step.

    Args:
        path: the file; None writes nothing, and `log` is None.
        spec: the policy.
        engine: whose costs tell device and host time apart.
    """

    def __init__(self, path: Path | None, spec: str, engine: Engine) -> None:
        self._path = path
        self._spec = spec
        self._engine = engine
        self._writer: StepLogWriter | None = None

    def __enter__(self) -> Any:
        if self._path is None:
            return None
        from kpolicy.schemas import LogHeader, StepLogWriter

        header = LogHeader(
            policy=self._spec, device="simulated", versions={"kpolicy": __version__},
            costs_version=self._engine.costs.version, settings=self._engine.settings,
            started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=shlex.join(["kpolicy", *COMMAND.get()]),
        )  # fmt: skip
        self._writer = StepLogWriter(self._path, header)
        return self._write

    def _write(self, step: int, inputs: StepInputs, outputs: StepOutputs, batcher: Batcher) -> None:
        from kpolicy.schemas import QueueState, StepEntry

        numbers = inputs.numbers
        queue = QueueState(
            waiting=len(batcher.waiting), running=len(batcher.running),
            kv_tokens_used=(batcher.num_blocks - batcher.free_blocks) * batcher.block_size,
            kv_tokens_capacity=batcher.capacity, preempted=batcher.num_preemptions,
        )  # fmt: skip
        cost = self._engine.costs.cost(outputs.decision.launches, numbers)
        ready = {part.value: us for part, us in outputs.ready_us.items()}
        entry = StepEntry.of(
            step, _shape_of(inputs), outputs.decision, cycle_us=outputs.cycle_us, ready_us=ready, queue=queue,
            device_us=cost.device_us, host_us=cost.host_us,
        )  # fmt: skip
        if self._writer is not None:
            self._writer.write(entry)

    def __exit__(self, *failure: Any) -> None:
        if self._writer is not None:
            self._writer.close(whole=failure[0] is None)


def _shape_of(inputs: StepInputs) -> BatchShape:
    numbers = inputs.numbers
    chunks = zip(inputs.query_lens[numbers.num_decodes :], inputs.kv_lens[numbers.num_decodes :], strict=True)
    return BatchShape(
        decodes=((1, numbers.num_decodes),) if numbers.num_decodes else (),
        prefills=[(new, kv_len - new) for new, kv_len in chunks],
        decode_kv_tokens=numbers.decode_kv_tokens if numbers.num_decodes else None,
        max_kv_len=numbers.max_kv_len,
        max_decode_steps=numbers.max_decode_steps,
    )
