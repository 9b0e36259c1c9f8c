"""Versioned files that pass between parts: profile, ladder plan, decision log, step log.

Every file says what it is: ``{"schema": "kpolicy/profile", "version": [1, 0]}``. The same major number reads; a higher
minor one reads too, with fields this kpolicy doesn't know ignored (those at the top level are kept in `extra` and
written back). Anything else (a newer major, another kind, a file cut short, a missing or wrong field, NaN) is a
`SchemaError` that names the field, its value and what is wanted. docs/schemas.md lists the fields. cattrs and json
load on first use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast
from weakref import WeakSet

import attrs

from kpolicy.attention.support import Claims
from kpolicy.budgets import Budget
from kpolicy.costs import CostTable
from kpolicy.decision import Decision
from kpolicy.errors import ConfigError, SchemaError, check_kind
from kpolicy.host_speed import INTERPRETER, ONCE
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Rows
from kpolicy.reading import MOST_BYTES, MOST_LINES_BYTES, read_whole
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from kpolicy.step_effects import StepEffects
from kpolicy.writing import refused, write_text, write_whole

if TYPE_CHECKING:
    from cattrs import Converter
    from typing_extensions import Self

__all__ = [
    "DecisionEntry",
    "DecisionLogWriter",
    "LadderPlan",
    "Log",
    "LogHeader",
    "Profile",
    "QueueState",
    "StepEntry",
    "StepLaunch",
    "StepLogWriter",
    "dumps",
    "loads",
    "read_decision_log",
    "read_plan",
    "read_profile",
    "read_step_log",
    "write_plan",
    "write_profile",
    "write_text",
]

MOST_KV_BYTES = 1 << 40
"""Bytes of KV a token that a profile may say, at most"""

T = TypeVar("T")
E = TypeVar("E", "DecisionEntry", "StepEntry")
PathLike = Path | str


def _free() -> Any:
    """A field of any JSON values by name, empty by default."""
    return attrs.field(factory=dict, hash=False)


@attrs.frozen(kw_only=True)
class Profile:
    """What launches take on one device for one model, and how it was measured.

    Args:
        costs: the cost table, every number of it. Measured ones are told device, model and tensor_parallel_size too.
        device: the device's full name.
        model: the model, or what its shape is.
        versions: versions by name: driver, torch, kpolicy, ...
        measured_at: when, as ISO 8601; empty where nothing was measured.
        command: what measures it again.
        tensor_parallel_size: how many such devices each layer was split over; None where nobody said.
        model_shape: what tells the model from others of its name, by name (`LoadedModel.model_shape`): numbers and
            text. Empty where nobody said.
        kv_bytes_per_token: bytes of KV cache that a token takes on one of the devices, over all layers; None where
            nobody said. By it simulations take graphs' bytes out of KV.
        extra: top-level fields of a newer minor version.
    """

    costs: CostTable
    device: str
    model: str
    versions: Mapping[str, str] = _free()
    measured_at: str = ""
    command: str = ""
    tensor_parallel_size: int | None = None
    model_shape: Mapping[str, Any] = _free()
    kv_bytes_per_token: int | None = None
    extra: Mapping[str, Any] = _free()

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.costs, CostTable):
            raise ConfigError(f"costs is a {type(self.costs).__name__}; a profile has the CostTable that it came from.")
        if self.tensor_parallel_size is not None and self.tensor_parallel_size < 1:
            raise ConfigError(f"tensor_parallel_size is {self.tensor_parallel_size}; give 1 or more, or None.")
        for name, value in self.model_shape.items():
            if type(value) not in (int, str):
                raise ConfigError(f"model_shape has {name} {value!r:.80}; it is a whole number or text. Leave it out.")
        kv_bytes = self.kv_bytes_per_token
        if kv_bytes is not None and (type(kv_bytes) is not int or not 1 <= kv_bytes <= MOST_KV_BYTES):
            raise ConfigError(
                f"kv_bytes_per_token is {kv_bytes!r:.80}; it is a whole number from 1 to {MOST_KV_BYTES}, the bytes of "
                "KV cache that a token takes over all layers. Leave it out where they aren't known."
            )
        if self.costs.measured:
            named = attrs.evolve(
                self.costs, measured_on=self.device, measured_with=self.model, measured_over=self.tensor_parallel_size,
                measured_shape=self.model_shape,
            )  # fmt: skip
            object.__setattr__(self, "costs", named)


@attrs.frozen(kw_only=True)
class LadderPlan:
    """Which graphs to capture, and what that was planned from.

    Args:
        sizes: capture sizes by kind of graph.
        keys: the keys that the sizes stand for, in capture order.
        settings: the deployment's limits.
        attention: what attention supports.
        budget: what the graphs may cost together.
        policy: the policy that wanted the keys.
        costs_version: the cost table it was planned with; empty without one.
        planned_from: what else it was planned from, by name: a trace, a histogram of sizes, a budget model's source.
        extra: top-level fields of a newer minor version.
    """

    sizes: CaptureSizes
    keys: tuple[GraphKey, ...]
    settings: Settings
    attention: Claims
    budget: Budget = attrs.field(factory=Budget)
    policy: str = ""
    costs_version: str = ""
    planned_from: Mapping[str, Any] = _free()
    extra: Mapping[str, Any] = _free()

    def made_for_another(self, config: object) -> str:
        """How the model that this was planned for differs from another, in words; empty if it doesn't or isn't noted.

        Args:
            config: the other's, as of `kpolicy.attention.fields.read_config`.

        Raises:
            SupportError: the config can't be read.
        """
        from kpolicy.attention.fields import identity_differs

        noted = self.planned_from.get("model")
        differs = identity_differs(noted, config) if isinstance(noted, Mapping) else ""
        return f"made for another model: {differs}" if differs else ""


@attrs.frozen(kw_only=True)
class LogHeader:
    """The first line of a log: where its lines come from.

    Args:
        policy: the policy that decided.
        device, model: where the steps ran and what they ran; empty or ``simulated`` without a device.
        versions: versions by name.
        started_at: when, as ISO 8601.
        command: what ran.
        costs_version: the cost table of the decisions.
        settings: the deployment's limits.
        host_probe: which of `kpolicy.host_speed`'s fixed work was timed beside the steps.
        inside_probe: likewise inside them.
        extra: header fields of a newer minor version.
    """

    policy: str = ""
    device: str = ""
    model: str = ""
    versions: Mapping[str, str] = _free()
    started_at: str = ""
    command: str = ""
    costs_version: str = ""
    settings: Settings | None = None
    host_probe: str = INTERPRETER
    inside_probe: str = ONCE
    extra: Mapping[str, Any] = _free()


@attrs.frozen(kw_only=True)
class DecisionEntry:
    """One decision: the batch, `Decision.as_dict` and the reason's value.

    A reason is text here, so that logs of newer kpolicys and of plugins read.
    """

    shape: BatchShape
    decision: Mapping[str, Any] = attrs.field(hash=False)
    reason: str

    @classmethod
    def of(cls, shape: BatchShape, decision: Decision) -> DecisionEntry:
        """The entry of a decision for a batch."""
        return cls(shape=shape, decision=decision.as_dict(shape.numbers), reason=decision.reason.value)


@attrs.frozen(kw_only=True)
class _DecidedLaunch:
    """What must be right of a launch in `DecisionEntry.decision` where it is there."""

    rows: Rows
    graph: str | None = None
    tokens: int = 0
    padding: int = 0
    stream: int = 0
    repeat: int = 1

    def __attrs_post_init__(self) -> None:
        if min(self.tokens, self.padding, self.stream) < 0 or self.repeat < 1:
            raise SchemaError(
                f"tokens are {self.tokens}, padding {self.padding}, stream {self.stream} and repeat {self.repeat}; "
                "counts start at 0, repeat at 1."
            )


@attrs.frozen(kw_only=True)
class _Decided:
    """Likewise of a decision."""

    mode: str
    form: str | None = None
    launches: tuple[_DecidedLaunch, ...] = ()
    why: str = ""


@attrs.frozen(kw_only=True)
class StepLaunch:
    """One launch of a step: `kpolicy.decision.Launch`, with its padding over all repeats in tokens."""

    rows: Rows
    key: GraphKey | None = None
    padding: int = 0
    stream: int = 0
    repeat: int = 1
    reason: str | None = None
    wait_share: float | None = None


@attrs.frozen(kw_only=True)
class QueueState:
    """The scheduler's queues when the step was scheduled.

    Args:
        waiting, running: requests.
        kv_tokens_used, kv_tokens_capacity: KV slots taken, and slots there are, in tokens.
        preempted: preemptions since the start.
    """

    waiting: int
    running: int
    kv_tokens_used: int | None = None
    kv_tokens_capacity: int | None = None
    preempted: int | None = None


@attrs.frozen(kw_only=True)
class StepEntry:
    """One step that ran: enough to run it again and to hold a cost table or a simulator to it.

    Args:
        step: the step's index from 0.
        shape: the batch: decode runs, prefill (new, context) pairs, KV tokens.
        mode: the mode, with the form of a split: `Decision.label`.
        launches: what was launched, in launch order.
        reason: the reason's value.
        decode_steps: decode steps that it ran for each decode row.
        device_us: time that the device was busy with it.
        host_us: time that the host took to launch it.
        cycle_us: time from this step's start to the next one's.
        ready_us: by part (``decode``, ``prefill``), time from the step's start until its outputs were there.
        queue: the scheduler's queues.
        host_work_us: time of `kpolicy.host_speed`'s fixed work just after the step; None where its table has none.
        host_work_inside_us: mean time of the work that a timer runs inside the step, in a short one before its end too
            (`kpolicy.host_speed.SpeedTimer`); None where its table has none.
        start_us: the step's start, from the run's; with `cycle_us` when it ended, and so who had arrived.
    """

    step: int
    shape: BatchShape
    mode: str
    launches: tuple[StepLaunch, ...] = ()
    reason: str
    decode_steps: int = 1
    device_us: float | None = None
    host_us: float | None = None
    cycle_us: float | None = None
    ready_us: Mapping[str, float] | None = attrs.field(default=None, hash=False)
    queue: QueueState | None = None
    host_work_us: float | None = None
    host_work_inside_us: float | None = None
    start_us: float | None = None

    @classmethod
    def of(cls, step: int, shape: BatchShape, decision: Decision, **measured: Any) -> StepEntry:
        """The entry of a step that ran as decided; `measured` are times and queues."""
        launches = tuple(
            StepLaunch(
                rows=launch.rows,
                key=launch.key,
                padding=launch.padding(shape.numbers),
                stream=launch.stream,
                repeat=launch.repeat,
                reason=None if launch.reason is None else launch.reason.value,
                wait_share=launch.wait_share,
            )
            for launch in decision.launches
        )
        return cls(
            step=step,
            shape=shape,
            mode=decision.label,
            launches=launches,
            reason=decision.reason.value,
            decode_steps=decision.decode_steps,
            **measured,
        )

    @property
    def num_decodes(self) -> int:
        """Decode rows."""
        return self.shape.numbers.num_decodes

    @property
    def kv_tokens(self) -> int:
        """KV tokens that all rows attend to."""
        return self.shape.numbers.decode_kv_tokens + self.shape.numbers.prefill_kv_tokens


@attrs.frozen
class Log(Generic[E]):
    """A log as read.

    Args:
        header: its first line.
        entries: its lines.
        cut_short: whether the writer didn't come to its end: the process died, or the file was cut. A last line that
            was cut is left out.
    """

    header: LogHeader
    entries: tuple[E, ...]
    cut_short: bool


_KINDS: dict[type, str] = {Profile: "profile", LadderPlan: "ladder_plan"}
_DECISION_LOG, _STEP_LOG = "decision_log", "step_log"
VERSIONS: Mapping[str, tuple[int, int]] = {
    "profile": (1, 0),
    "ladder_plan": (1, 0),
    _DECISION_LOG: (1, 0),
    _STEP_LOG: (1, 0),
}
"""The version of each kind that this kpolicy writes; it reads every minor number of the same major one."""


# Whole files.


def dumps(value: Profile | LadderPlan) -> str:
    """The value as the text of its file.

    Raises:
        SchemaError: a number is NaN or infinite, or a free field holds what JSON can't.
    """
    label = _KINDS[type(value)]
    return _encode(_with_header(label, value), f"the {label}", indent=1) + "\n"


def loads(text: str | bytes, kind: type[T], *, name: str = "") -> T:
    """The value that a file's text holds.

    Args:
        text: the text, in UTF-8 where it is bytes.
        kind: `Profile` or `LadderPlan`.
        name: what to call the file in an error; by default its kind.

    Raises:
        SchemaError: it isn't such a file; see the module.
    """
    label = _KINDS[kind]
    return _structured(_decode(text, name or label), label, kind, name or label)


def read_profile(path: PathLike) -> Profile:
    """The profile in that file.

    Raises:
        ConfigError: the file can't be read.
        SchemaError: it isn't a profile.
    """
    return loads(_read(path, MOST_BYTES), Profile, name=str(path))


def write_profile(path: PathLike, profile: Profile) -> None:
    """Write a profile: all of it or, where that fails, nothing.

    Raises:
        ConfigError: the file can't be written.
        SchemaError: the profile can't be encoded.
    """
    write_whole(path, dumps(profile))


def read_plan(path: PathLike, config: object = None) -> LadderPlan:
    """The ladder plan in that file.

    Args:
        path: the file.
        config: the config of the model that it has to be of, where it notes one; None for any.

    Raises:
        ConfigError: the file can't be read, or is another model's.
        SchemaError: it isn't a plan.
    """
    plan = loads(_read(path, MOST_BYTES), LadderPlan, name=str(path))
    differs = "" if config is None else plan.made_for_another(config)
    if differs:
        raise ConfigError(f"the plan {path} was {differs}. Plan for this one.")
    return plan


def write_plan(path: PathLike, plan: LadderPlan) -> None:
    """Write a ladder plan; as `write_profile`."""
    write_whole(path, dumps(plan))


# Logs: a header line, one line an entry, and a last line that says how many there are.


class _LogWriter(Generic[E]):
    """Writes a log line by line. Use it as a context manager: a log that leaves it by an error is marked cut short.

    In a process forked off it is closed: the log stays the other's, whose lines are written once.

    Args:
        path: the file; what is there is replaced.
        header: where the lines come from.

    Raises:
        ConfigError: the file can't be written.
    """

    kind = ""
    entry: type

    def __init__(self, path: PathLike, header: LogHeader | None = None) -> None:
        self.path = path
        self._count = 0
        first = _encode(_with_header(self.kind, header if header is not None else LogHeader()), f"the {self.kind}")
        self._file: IO[str] = _written(path, lambda: open(path, "w", encoding="utf-8", newline="\n"))  # noqa: SIM115
        self._forked = False
        self._line(first)
        _OPEN.add(self)

    def _line(self, line: str) -> None:
        _written(self.path, lambda: self._file.write(line + "\n"))

    def write(self, entry: E) -> None:
        """Append an entry.

        Raises:
            ConfigError: the log is closed, this process was forked off, the entry is of another kind of log, or the
                file can't be written.
            SchemaError: a number is NaN or infinite, or a free field holds what JSON can't.
        """
        if self._forked:
            raise ConfigError(f"{self.path} is another process's, which forked this one; write a log of its own here.")
        if self._file.closed:
            raise ConfigError(f"{self.path} is closed; write entries inside the writer's `with` block.")
        check_kind(f"entry {self._count} of {self.path}", entry, self.entry, f"{self.entry.__name__}.of(...)")
        self._line(_encode(_sparse().unstructure(entry), f"entry {self._count} of {self.path}"))
        self._count += 1

    def flush(self) -> None:
        """Hand over to the system what was written, so that a process which is killed leaves it behind.

        Raises:
            ConfigError: the file can't be written.
        """
        if not self._file.closed:
            _written(self.path, self._file.flush)

    @property
    def forked(self) -> bool:
        """Whether this process was forked off the one that writes the log."""
        return self._forked

    def close(self, *, whole: bool = True) -> None:
        """Close the file; `whole` says in its last line that the log came to its end."""
        if self._file.closed:
            return
        _OPEN.discard(self)
        try:
            if whole:
                self._line(_encode({_END: self._count}, "the last line"))
        finally:
            _written(self.path, self._file.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self.close(whole=kind is None)
        return False


_OPEN: WeakSet[_LogWriter[Any]] = WeakSet()


def _before_fork() -> None:
    # A file's buffer is copied too, and would be written by both processes.
    for writer in list(_OPEN):
        with suppress(Exception):
            writer.flush()


def _after_fork_in_child() -> None:
    for writer in list(_OPEN):
        _OPEN.discard(writer)
        writer._forked = True
        with suppress(Exception):
            writer._file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


class DecisionLogWriter(_LogWriter["DecisionEntry"]):
    """Writes a decision log."""

    kind = _DECISION_LOG
    entry = DecisionEntry


class StepLogWriter(_LogWriter["StepEntry"]):
    """Writes a step log."""

    kind = _STEP_LOG
    entry = StepEntry


def read_decision_log(path: PathLike) -> Log[DecisionEntry]:
    """The decision log in that file.

    A log cut short reads up to there, and says so. Raises as `read_profile`; a bad line is named by its number.
    """
    return _read_log(_read(path, MOST_LINES_BYTES), _DECISION_LOG, DecisionEntry, str(path))


def read_step_log(path: PathLike) -> Log[StepEntry]:
    """The step log in that file; as `read_decision_log`."""
    return _read_log(_read(path, MOST_LINES_BYTES), _STEP_LOG, StepEntry, str(path))


_END = "end"


def _read_log(data: bytes, label: str, kind: type[E], name: str) -> Log[E]:
    lines = data.split(b"\n")
    # What follows the last line break: empty in a log that wasn't cut.
    rest = lines.pop()
    if not lines:
        _decode(rest, name)
        raise SchemaError(f"{name} has no whole first line; a {label} begins with its header. The file is cut short.")
    header = _structured(_decode(lines[0], f"{name}, line 1"), label, LogHeader, f"{name}, line 1")
    entries: list[E] = []
    ended = False
    for number, line in enumerate(lines[1:], 2):
        where = f"{name}, line {number}"
        if ended:
            raise SchemaError(f"{where} follows the log's last line; two logs in one file can't be read.")
        data_of_line = _decode(line, where)
        if _END in data_of_line:
            if type(data_of_line[_END]) is not int or data_of_line[_END] != len(entries):
                raise SchemaError(
                    f"{where} says that {data_of_line[_END]!r:.80} lines came before it, and {len(entries)} did; lines "
                    "were lost or added."
                )
            ended = True
        else:
            entry = _structure(data_of_line, kind, where)
            if isinstance(entry, DecisionEntry):
                if not _well_decided(entry.decision):
                    _structure(dict(entry.decision), _Decided, f"{where}, decision")
            else:
                _check_step(entry, where)
            entries.append(entry)
    if ended and rest:
        raise SchemaError(f"{name} goes on after its last line; two logs in one file can't be read.")
    return Log(header, tuple(entries), not ended)


_ROWS = frozenset(each.value for each in Rows)
_TEXT_OR_NONE = (str, type(None))


def _well_decided(decision: Mapping[str, Any]) -> bool:
    """Whether `_Decided` takes a decision, in a tenth of the time; where this says no, that says why, or takes it."""
    look = decision.get
    mode, form, why, launches = look("mode"), look("form"), look("why", ""), look("launches", [])
    if type(mode) is not str or type(why) is not str or type(form) not in _TEXT_OR_NONE or type(launches) is not list:
        return False
    for launch in launches:
        if type(launch) is not dict:
            return False
        rows, look = launch.get("rows"), launch.get
        if type(rows) is not str or rows not in _ROWS or type(look("graph")) not in _TEXT_OR_NONE:
            return False
        counts = look("tokens", 0), look("padding", 0), look("stream", 0), look("repeat", 1)
        if any(type(count) is not int for count in counts) or min(counts) < 0 or counts[3] < 1:
            return False
    return True


_TIMES = ("device_us", "host_us", "cycle_us", "host_work_us", "host_work_inside_us", "start_us")


def _check_step(entry: StepEntry, where: str) -> None:
    """See that what was measured is a time, and that launches ran as often as they can have.

    Raises:
        SchemaError: it isn't so.
    """
    for name in _TIMES:
        value = getattr(entry, name)
        if value is not None and value < 0:
            raise SchemaError(f"{where}: {name} is {value}; wanted microseconds from 0 up.")
    if entry.step < 0 or entry.decode_steps < 1:
        raise SchemaError(
            f"{where}: step is {entry.step} and decode_steps {entry.decode_steps}; wanted an index from 0 up and a "
            "count from 1 up."
        )
    for i, launch in enumerate(entry.launches):
        if launch.repeat < 1 or launch.padding < 0 or launch.stream < 0:
            raise SchemaError(
                f"{where}: launches[{i}] has repeat {launch.repeat}, padding {launch.padding} and stream "
                f"{launch.stream}; wanted a count from 1 up and two from 0 up."
            )


# Between values and plain data.


def _with_header(label: str, value: Any) -> dict[str, Any]:
    header = {"schema": f"kpolicy/{label}", "version": list(VERSIONS[label])}
    # The header stands first; fields that we know win over what a newer version left in `extra`.
    return {**header, **value.extra, **_whole().unstructure(value), **header}


def _structured(data: dict[str, Any], label: str, kind: type[T], name: str) -> T:
    """The value of an object with a header, and its unknown fields in `extra`."""
    _check_header(data, label, name)
    value = _structure(data, kind, name)
    known = {field.name for field in attrs.fields(cast("Any", kind))} - {"extra"} | {"schema", "version"}
    extra = {key: each for key, each in data.items() if key not in known}
    return attrs.evolve(cast("Any", value), extra=extra) if extra else value


def _check_header(data: dict[str, Any], label: str, name: str) -> None:
    schema, version, (major, minor) = data.get("schema"), data.get("version"), VERSIONS[label]
    if schema != f"kpolicy/{label}":
        raise SchemaError(f"{name}: schema is {schema!r:.80}; wanted 'kpolicy/{label}'. Is it another kind of file?")
    if (
        not isinstance(version, list)
        or len(version) != 2
        or not all(type(part) is int and part >= 0 for part in version)
    ):
        raise SchemaError(f"{name}: version is {version!r:.80}; wanted two whole numbers, [major, minor].")
    if version[0] != major:
        step = "Upgrade kpolicy." if version[0] > major else "Write the file again."
        raise SchemaError(
            f"{name} is a {label} of version {version[0]}.{version[1]}; this kpolicy reads {major}.x (it writes "
            f"{major}.{minor}). {step}"
        )


def _structure(data: dict[str, Any], kind: type[T], name: str) -> T:
    from cattrs.errors import BaseValidationError

    try:
        return _whole().structure(data, kind)
    except BaseValidationError as error:
        problems = list(_problems(error, ""))
    except Exception as error:  # noqa: BLE001 - any other failure of a hook is a file that can't be used all the same
        problems = [str(error)]
    more = f" ({len(problems) - 1} more fields are wrong.)" if len(problems) > 1 else ""
    raise SchemaError(f"{name}: {problems[0]}{more}")


_PLAIN: dict[Any, str] = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}


class _BadValueError(ValueError):
    """A field holds a value of the wrong kind."""

    def __init__(self, value: object, wanted: str) -> None:
        super().__init__(f"is {value!r:.80}; wanted {wanted}.")


def _problems(error: Exception, path: str, kind: Any = None) -> Iterator[str]:
    """Every wrong field under an error of cattrs, with its path; `kind` is what the field should be."""
    from cattrs.errors import AttributeValidationNote, BaseValidationError, IterableValidationNote

    if not isinstance(error, BaseValidationError):
        yield _problem(error, path, kind)
        return
    for each in error.exceptions:
        below, below_kind = path, kind
        for note in getattr(each, "__notes__", ()):
            if isinstance(note, AttributeValidationNote):
                below_kind = note.type
                if note.name not in _BESIDE:
                    below = f"{path}.{note.name}" if path else note.name
            elif isinstance(note, IterableValidationNote):
                below = f"{path}[{note.index!r}]"
        yield from _problems(each, below, below_kind)


def _problem(error: Exception, path: str, kind: Any) -> str:
    where = path or "the file"
    if isinstance(error, KeyError):
        wanted = _PLAIN.get(kind) or (f"an object ({kind.__name__})" if attrs.has(kind) else str(kind))
        return f"{where} is missing; wanted {wanted}."
    if isinstance(error, _BadValueError):
        return f"{where} {error}"
    return f"{where} can't be used: {error}"


@lru_cache(maxsize=1)
def _whole() -> Converter:
    """The converter that reads files, and writes every field."""
    return _converter(sparse=False)


@lru_cache(maxsize=1)
def _sparse() -> Converter:
    """The converter for log lines, which leave out fields at their defaults."""
    return _converter(sparse=True)


_ELSEWHERE = ("extra", "measured_on", "measured_with", "measured_over", "measured_shape")
"""Fields that stand elsewhere in a file"""
_BESIDE: dict[str, type] = {"effects": StepEffects}
"""Fields whose own fields stand beside the others in a file"""


def _converter(*, sparse: bool) -> Converter:
    from enum import Enum

    from cattrs import Converter
    from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

    converter = Converter(detailed_validation=True)
    for kind in (int, str, bool):
        converter.register_structure_hook(kind, _plain)
    converter.register_structure_hook(float, _finite)
    converter.register_structure_hook_func(lambda kind: _origin(kind) in (tuple, frozenset), _listed(converter))
    converter.register_structure_hook_func(lambda kind: _origin(kind) is Mapping, _named(converter))
    converter.register_unstructure_hook(Enum, lambda member: member.value)
    converter.register_unstructure_hook_func(
        lambda kind: _origin(kind) is frozenset, lambda members: sorted(member.value for member in members)
    )

    def without_extra(kind: Any) -> Any:
        return {name: override(omit=True) for name in _ELSEWHERE if name in attrs.fields_dict(kind)}

    def beside(kind: Any) -> dict[str, tuple[str, ...]]:
        return {name: tuple(attrs.fields_dict(of)) for name, of in _BESIDE.items() if name in attrs.fields_dict(kind)}

    def reads(kind: Any) -> Callable[[Any, Any], Any]:
        fields, groups = make_dict_structure_fn(kind, converter, **without_extra(kind)), beside(kind)

        def hook(value: Any, of: Any) -> Any:
            found = _expected(value, dict, "an object of fields")
            parts = {group: {name: found[name] for name in names if name in found} for group, names in groups.items()}
            return fields({**found, **parts}, of)

        return hook

    def writes(kind: Any) -> Callable[[Any], Any]:
        fields = make_dict_unstructure_fn(kind, converter, _cattrs_omit_if_default=sparse, **without_extra(kind))
        groups = beside(kind)

        def hook(value: Any) -> Any:
            data = fields(value)
            for group in groups:
                data |= data.pop(group, {})
            return data

        return hook if groups else fields

    converter.register_structure_hook_factory(attrs.has, reads)
    converter.register_unstructure_hook_factory(attrs.has, writes)
    return converter


def _origin(kind: Any) -> Any:
    return getattr(kind, "__origin__", None)


def _expected(value: Any, plain: type[T], wanted: str) -> T:
    """The value, of that very JSON type: cattrs would take a text for a list of characters."""
    if type(value) is not plain:
        raise _BadValueError(value, wanted)
    return value


def _plain(value: Any, kind: Any) -> Any:
    # cattrs finds this for subclasses too, and our enums are texts.
    return _expected(value, kind, _PLAIN[kind]) if kind in _PLAIN else _member(value, kind)


def _finite(value: Any, _: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= _LARGEST:
        raise _BadValueError(value, _PLAIN[float])
    return float(value)


_LARGEST = 1.7976931348623157e308


def _member(value: Any, kind: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise _BadValueError(value, "one of " + ", ".join(str(member.value) for member in kind)) from None


def _listed(converter: Converter) -> Callable[[Any, Any], Any]:
    """Reads a list as the tuple or frozenset that a field is."""

    def hook(value: Any, kind: Any) -> Any:
        items = _expected(value, list, "a list")
        kinds = kind.__args__
        if len(kinds) == 1 or kinds[1] is ...:
            kinds = (kinds[0],) * len(items)
        if len(kinds) != len(items):
            raise _BadValueError(value, f"a list of {len(kinds)} values")
        return _origin(kind)(_each(converter, kind, list(enumerate(items)), kinds))

    return hook


def _named(converter: Converter) -> Callable[[Any, Any], Any]:
    """Reads an object as the mapping from names that a field is."""

    def hook(value: Any, kind: Any) -> Any:
        items = _expected(value, dict, "an object of values by name")
        read = _each(converter, kind, list(items.items()), (kind.__args__[1],) * len(items))
        return dict(zip(items, read, strict=True))

    return hook


def _each(converter: Converter, kind: Any, items: list[tuple[Any, Any]], kinds: tuple[Any, ...]) -> list[Any]:
    """Every (place, value) as its kind; errors carry the place, as those of cattrs' own hooks."""
    from cattrs.errors import IterableValidationError, IterableValidationNote

    read, errors = [], []
    for (place, value), item_kind in zip(items, kinds, strict=True):
        try:
            read.append(converter.structure(value, item_kind))
        except Exception as error:  # noqa: BLE001, PERF203 - each is raised again below, in the group
            notes = [*getattr(error, "__notes__", ()), IterableValidationNote(f"at {place!r}", place, item_kind)]
            error.__dict__["__notes__"] = notes
            errors.append(error)
    if errors:
        raise IterableValidationError("wrong items", errors, kind)
    return read


# Between plain data and files.


def _encode(data: Any, name: str, *, indent: int | None = None) -> str:
    import json

    separators = (",", ":") if indent is None else None
    try:
        return json.dumps(data, allow_nan=False, indent=indent, separators=separators)
    except (ValueError, TypeError, RecursionError) as error:
        raise SchemaError(
            f"{name} can't be written as JSON: {error}. Numbers are finite, and free fields hold text, numbers, lists "
            "and objects only."
        ) from None


def _decode(data: str | bytes, name: str) -> dict[str, Any]:
    """The JSON object that a text holds."""
    import json

    try:
        text = data.decode() if isinstance(data, bytes) else data
        value = json.loads(text, parse_constant=_no_constant, parse_float=_parsed_float)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
        said = "is cut short" if cut else "isn't JSON"
        raise SchemaError(f"{name} {said}: {error}. Write the file again.") from None
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"{name} isn't JSON that can be used: {error}.") from None
    if not isinstance(value, dict):
        raise SchemaError(f"{name} holds {value!r:.80}; wanted an object of fields.")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}; numbers must be finite")


def _parsed_float(text: str) -> float:
    value = float(text)
    if not abs(value) <= _LARGEST:
        raise ValueError(f"it holds {text:.80}; numbers must be finite")
    return value


def _written(path: PathLike, action: Callable[[], T]) -> T:
    """What `action` returns; where the file system refuses, a ConfigError."""
    try:
        return action()
    # open() raises ValueError for a path with a null character.
    except (OSError, ValueError) as error:
        raise refused(path, error) from None


def _read(path: PathLike, most: int) -> bytes:
    try:
        return bytes(read_whole(Path(path), most))
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {getattr(error, 'strerror', None) or error}. Check the path.") from None
