"""Request traces: when requests arrive, how long their prompts are and how much they generate.

`read_trace` takes the published files as they are; docs/traces.md describes each format.
"""

from __future__ import annotations

import bisect
import codecs
import csv
import functools
import json
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from kpolicy.errors import ConfigError, TraceError, check_kind
from kpolicy.reading import MOST_LINES_BYTES, read_whole
from kpolicy.shapes import LARGEST_COUNT, plain_int
from kpolicy.words import some

__all__ = [
    "DEFAULT_FILE", "DROP_REASONS", "TRACES_VARIABLE", "FailedTrace", "Trace", "TraceRequest", "default_path",
    "default_trace", "read_trace",
]  # fmt: skip

TRACES_VARIABLE = "KPOLICY_TRACES"
"""Environment variable that names the folder `default_trace` looks in."""

DEFAULT_FILE = "azure_llm_2023_conv.csv"
"""The file of that folder that `default_trace` reads."""

DROP_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "zero_prompt_tokens": "The row has no prompt tokens, so there is nothing to prefill.",
        "zero_output_tokens": "The row generates no tokens.",
        "failed_request": "BurstGPT only: no response tokens, which is how its publishers mark a failed request.",
        "over_max_tokens": "Prompt and output together are longer than `Trace.limited` allows.",
    }
)
"""Every name that `Trace.dropped` can hold, and what it means."""

_PIECE = 1 << 16
"""Bytes that are unzipped at once"""
_GZIP_MAGIC = b"\x1f\x8b"
_ZEROS = re.compile(rb"\0*")
_LATEST_TIME = 2**53  # larger times aren't exact as floats
_BLOCK_TOKENS = 512  # prompt tokens behind one Mooncake hash id, as its publishers say


@attrs.frozen
class TraceRequest:
    """One request of a trace.

    Args:
        index: the 0-based row of the trace it came from, dropped rows counted. It stays with the request through
            windows and limits, so it names the request but isn't its position.
        arrival_s: seconds from the trace's start.
        prompt_tokens: tokens of the prompt, at least 1.
        output_tokens: tokens generated, at least 1.
        hash_ids: one id a prompt block, where the trace has them; equal ids mean a shared prefix block.
    """

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def _requests(value: Iterable[TraceRequest]) -> tuple[TraceRequest, ...]:
    check_kind("requests", value, Iterable, "[TraceRequest(0, 0.0, 100, 20)]")
    return tuple(value)


def _read_only(value: Mapping[str, int]) -> Mapping[str, int]:
    check_kind("dropped", value, Mapping, '{"over_max_tokens": 3}')
    return MappingProxyType(dict(value))


@attrs.frozen
class Trace:
    """Requests in order of arrival, and an account of the rows that were left out.

    Args:
        source: where the requests came from and what was done to them, in words.
        format: ``azure``, ``mooncake``, ``mooncake-jsonl``, ``burstgpt`` or ``generated``.
        requests: in order of arrival; times may repeat.
        dropped: how many requests were left out, by a name of `DROP_REASONS`. It stays whole in windows.

    Raises:
        ConfigError: the arrival times decrease, are negative or not finite, a request has a token count outside 1 to
            `LARGEST_COUNT`, or what was given isn't requests of such numbers.
    """

    source: str
    format: str
    requests: tuple[TraceRequest, ...] = attrs.field(converter=_requests)
    dropped: Mapping[str, int] = attrs.field(factory=dict, converter=_read_only, hash=False)

    def __attrs_post_init__(self) -> None:
        previous = 0.0
        for request in self.requests:
            _check_kind(self.source, request)
            if not previous <= request.arrival_s < math.inf:
                raise ConfigError(
                    f"request {request.index} of {self.source} arrives at {request.arrival_s} s, after one at "
                    f"{previous} s; arrivals must be finite, not negative and in order. Sort the requests."
                )
            previous = request.arrival_s
            if not (1 <= request.prompt_tokens <= LARGEST_COUNT and 1 <= request.output_tokens <= LARGEST_COUNT):
                raise ConfigError(
                    f"request {request.index} of {self.source} has {request.prompt_tokens} prompt and "
                    f"{request.output_tokens} output tokens; both must be 1 to {LARGEST_COUNT}. Leave such requests "
                    "out and count them in `dropped`."
                )

    def __len__(self) -> int:
        return len(self.requests)

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only view of a dict can't travel to another process.
        return Trace, (self.source, self.format, self.requests, dict(self.dropped))

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last; 0 for fewer than two requests."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0

    def window(self, start_s: float, duration_s: float) -> Trace:
        """The requests that arrive in [start_s, start_s + duration_s), with times from start_s; may be empty.

        Raises:
            ConfigError: start_s is negative or not finite, or duration_s isn't above 0 (infinity is the rest).
        """
        start_s, duration_s = real("start_s", start_s), real("duration_s", duration_s)
        if not 0 <= start_s < math.inf or not duration_s > 0:
            raise ConfigError(
                f"a window starting at {start_s:g} s for {duration_s:g} s can't be cut; the start must be at least 0 "
                "and finite, the duration above 0."
            )
        low = bisect.bisect_left(self.requests, start_s, key=_arrival)
        high = bisect.bisect_left(self.requests, start_s + duration_s, key=_arrival)
        moved = (_moved(request, request.arrival_s - start_s) for request in self.requests[low:high])
        return self._but(f"from {start_s:g} s " + ("on" if duration_s == math.inf else f"for {duration_s:g} s"), moved)

    def first(self, n: int) -> Trace:
        """The first n requests, or all if there are fewer.

        Raises:
            ConfigError: n isn't a whole number of at least 0.
        """
        n = plain_int(n)
        if type(n) is not int or n < 0:
            raise ConfigError(f"the first {n!r:.80} requests were asked for; ask for a whole number of at least 0.")
        return self._but(f"first {some(n, 'request')}", self.requests[:n])

    def scaled(self, rate: float) -> Trace:
        """The same requests, arriving `rate` times as fast; below 1 they come more slowly.

        Raises:
            ConfigError: rate isn't above 0 and finite, or so small that times overflow.
        """
        rate = real("rate", rate)
        if not 0 < rate < math.inf:
            raise ConfigError(
                f"a rate of {rate:g} can't be had: requests arrive so many times as fast, above 0 and finite."
            )
        faster = (_moved(request, request.arrival_s / rate) for request in self.requests)
        return self._but(f"arriving {rate:g} times as fast", faster)

    def limited(self, max_tokens: int) -> Trace:
        """The requests whose prompt and output together fit `max_tokens`; the others count as ``over_max_tokens``.

        Raises:
            ConfigError: max_tokens isn't a whole number of at least 1.
        """
        max_tokens = plain_int(max_tokens)
        if type(max_tokens) is not int or max_tokens < 1:
            raise ConfigError(f"max_tokens is {max_tokens!r:.80}; it is a whole number, and no request fits below 1.")
        kept = tuple(one for one in self.requests if one.prompt_tokens + one.output_tokens <= max_tokens)
        lost = len(self.requests) - len(kept)
        dropped = Counter(self.dropped)
        if lost:
            dropped["over_max_tokens"] += lost
        return attrs.evolve(self._but(f"up to {max_tokens} tokens a request", kept), dropped=dropped)

    def _but(self, what: str, requests: Iterable[TraceRequest]) -> Trace:
        return attrs.evolve(self, source=f"{self.source}, {what}", requests=tuple(requests))


@attrs.frozen
class FailedTrace:
    """One of several traces that can't be served. It stands where its `Trace` would, so that the others are kept.

    Args:
        source: the file, as it was named.
        error: what is wrong and what to do, in words; it names the file.
    """

    source: str
    error: str


def _check_kind(source: str, request: Any) -> None:
    """Refuse what is no request of numbers; comparing would end in Python's own error, or take 1.5 tokens."""
    if type(request) is TraceRequest:
        counts = type(request.prompt_tokens) is type(request.output_tokens) is int
        if counts and type(request.arrival_s) in (float, int):
            return
        counts = counts or all(type(plain_int(each)) is int for each in (request.prompt_tokens, request.output_tokens))
        if counts and isinstance(request.arrival_s, Real) and not isinstance(request.arrival_s, bool):
            return
    raise ConfigError(
        f"{source} holds {request!r:.160}; give TraceRequest(index, arrival_s, prompt_tokens, output_tokens), with "
        "seconds and whole numbers of tokens."
    )


def real(name: str, value: Any) -> float:
    """A number of any library as a float.

    Raises:
        ConfigError: it isn't one.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} is {value!r:.80}; it must be a number.")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{name} is {value!r:.80}; it is too large.") from None


def _arrival(request: TraceRequest) -> float:
    return request.arrival_s


def _moved(request: TraceRequest, arrival_s: float) -> TraceRequest:
    # A third of attrs.evolve's time, which counts with every request of a trace.
    return TraceRequest(request.index, arrival_s, request.prompt_tokens, request.output_tokens, request.hash_ids)


def default_path() -> Path | None:
    """The file that `default_trace` reads; None where it generates requests.

    Raises:
        TraceError: the variable is set and isn't a folder with that file.
    """
    folder = os.environ.get(TRACES_VARIABLE)
    if folder:
        advice = f"Set ${TRACES_VARIABLE} to the folder that holds {DEFAULT_FILE}, or unset it."
        if not os.path.isdir(folder):
            raise TraceError(folder, None, f"${TRACES_VARIABLE} names this, and it isn't a folder. {advice}")
        if not os.path.isfile(os.path.join(folder, DEFAULT_FILE)):
            raise TraceError(folder, None, f"${TRACES_VARIABLE} names this, and it has no {DEFAULT_FILE}. {advice}")
        return Path(folder, DEFAULT_FILE)
    beside = Path("..", "shared", "traces", DEFAULT_FILE)
    return beside if beside.is_file() else None


def default_trace() -> Trace:
    """The trace to use when none was named: real if there is one, else generated; `source` says which.

    Looks for `DEFAULT_FILE` in the folder ``$KPOLICY_TRACES`` if that is set, else in ``../shared/traces``.

    Raises:
        TraceError: see `default_path`, or the file can't be read.
    """
    path = default_path()
    if path is not None:
        trace = read_trace(path)
        why = f"by ${TRACES_VARIABLE}" if os.environ.get(TRACES_VARIABLE) else f"found; ${TRACES_VARIABLE} isn't set"
        return attrs.evolve(trace, source=f"{trace.source} ({why})")
    from kpolicy.scheduling.generator import generate_trace  # it builds on this module

    trace = generate_trace()
    return attrs.evolve(trace, source=f"{trace.source} (no trace file found; ${TRACES_VARIABLE} isn't set)")


def read_trace(path: str | os.PathLike[str], *, until_s: float = math.inf) -> Trace:
    """Read a published request trace: Azure, Mooncake (CSV or JSON lines) or BurstGPT, gzipped or not.

    The format is recognised by column names as published; order and further columns don't matter. Times count from
    the first row. Rows without tokens are dropped and counted, everything else that isn't as it should be is an error.

    Args:
        path: the file.
        until_s: where gzip data is cut short, what came before the cut is the trace as long as it reaches this second,
            and `Trace.source` says so. By default a cut is an error.

    Raises:
        TraceError: the file can't be read, is cut short or isn't such a trace; it names the line.
    """
    name = os.fspath(path)
    text, cut_at = _text(name)
    lines = text.split("\n")
    whole = not lines[-1]
    while lines and not lines[-1].strip():
        lines.pop()
    if cut_at is not None and len(lines) < _HEADER_AND_ROW:
        raise TraceError(name, cut_at, "the gzip data is cut short here; fetch the file again.")
    if not lines:
        raise TraceError(name, None, f"the file is empty. {_known()}")
    rows: Iterator[_Row]
    if lines[0].lstrip()[:1] in ("{", "["):
        layout, rows = _MOONCAKE, _json_rows(name, lines)
        kind, sort = "mooncake-jsonl", "jq -sc 'sort_by(.timestamp)[]' FILE > SORTED"
    else:
        layout, columns = _header(name, _fields(name, 1, lines[0]))
        kind, rows = layout.name, _csv_rows(name, lines, layout, columns, whole)
        key = f"-k{columns[layout.time] + 1},{columns[layout.time] + 1}{'' if layout is _AZURE else 'n'}"
        sort = f"(head -n 1 FILE; tail -n +2 FILE | LC_ALL=C sort -s -t, {key}) > SORTED"
    requests, dropped, reached_s = _collect(name, layout, rows, f"Sort the (unzipped) file: {sort}")
    if cut_at is None:
        return Trace(name, kind, requests, dropped)
    if reached_s < until_s:
        raise TraceError(
            name,
            cut_at,
            f"the gzip data is cut short here, {reached_s:.1f} s into the trace; fetch the file again, or take a "
            "window that ends before that.",
        )
    return Trace(f"{name} (gzip data cut short at line {cut_at})", kind, requests, dropped)


_HEADER_AND_ROW = 2
"""Lines without which nothing can be said of a file that is cut short"""
_Row = tuple[int, Any, Any, Any, tuple[int, ...]]
"""Line, time as it stands, prompt tokens, output tokens, hash ids."""


def _collect(
    path: str, layout: _Layout, rows: Iterator[_Row], advice: str
) -> tuple[tuple[TraceRequest, ...], Counter[str], float]:
    """The requests, the rows that were dropped, and how many seconds from the first row the last one comes."""
    requests: list[TraceRequest] = []
    dropped: Counter[str] = Counter()
    start = previous = None
    reached_s = 0.0
    shown: Any = None
    for index, (line, stamp, prompt, output, hash_ids) in enumerate(rows):
        time = layout.parse_time(path, line, layout.time, stamp)
        if start is None or previous is None:
            start = previous = time
        if time < previous:
            raise TraceError(path, line, f"{layout.time} goes back from {shown} to {stamp}. {advice}")
        previous, shown = time, stamp
        reached_s = (time - start) / layout.ticks_per_s
        prompt_tokens = _count(path, line, layout.prompt, prompt)
        output_tokens = _count(path, line, layout.output, output)
        if prompt_tokens and output_tokens:
            requests.append(TraceRequest(index, reached_s, prompt_tokens, output_tokens, hash_ids))
        elif layout.failures and not output_tokens:
            dropped["failed_request"] += 1
        else:
            dropped["zero_output_tokens" if prompt_tokens else "zero_prompt_tokens"] += 1
    return tuple(requests), dropped, reached_s


def _json_rows(path: str, lines: list[str]) -> Iterator[_Row]:
    for line, text in enumerate(lines, 1):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            problem = f"this isn't one whole JSON object a line ({error}); the file may be cut short."
            raise TraceError(path, line, problem) from None
        if not isinstance(row, dict):
            raise TraceError(path, line, f"this is a JSON {type(row).__name__}; each line must be an object.")
        missing = [column for column in _MOONCAKE.columns if column not in row]
        if missing:
            raise TraceError(path, line, f"missing {', '.join(missing)} (found: {_listed(row)}). {_known()}")
        hash_ids = row.get(_HASH_IDS, [])
        if type(hash_ids) is not list or not all(type(one) is int and one >= 0 for one in hash_ids):
            raise TraceError(path, line, f"{_HASH_IDS} is {_shown(hash_ids)}; it must be a list of whole numbers.")
        yield line, row[_MOONCAKE.time], row[_MOONCAKE.prompt], row[_MOONCAKE.output], tuple(hash_ids)


def _csv_rows(path: str, lines: list[str], layout: _Layout, columns: Mapping[str, int], whole: bool) -> Iterator[_Row]:
    if len(lines) == 1:
        raise TraceError(path, 1, "the file has column names and no rows; it may be cut short.")
    time, prompt, output = (columns[name] for name in layout.columns)
    ids_at = columns.get(_HASH_IDS) if layout is _MOONCAKE else None
    has_ids = False
    for line, text in enumerate(lines[1:], 2):
        fields = _fields(path, line, text)
        if len(fields) != len(columns):
            raise TraceError(
                path,
                line,
                f"{len(fields)} fields ({_shown(text)}) where the header has {len(columns)}; the row or the file may "
                "be cut short.",
            )
        hash_ids: tuple[int, ...] = ()
        if ids_at is not None:
            hash_ids = _ids(path, line, fields[ids_at])
            has_ids = has_ids or bool(hash_ids)
            if has_ids and line == len(lines) and not whole:
                _check_last(path, line, fields[prompt], hash_ids)
        yield line, fields[time], fields[prompt], fields[output], hash_ids


def _check_last(path: str, line: int, prompt: str, hash_ids: tuple[int, ...]) -> None:
    """Refuses a last line that was cut within its hash ids, where a cut leaves a row that still looks whole."""
    if len(hash_ids) * _BLOCK_TOKENS < _count(path, line, _MOONCAKE.prompt, prompt):
        raise TraceError(
            path,
            line,
            f"the last line has no end and only {len(hash_ids)} {_HASH_IDS} for {prompt} prompt tokens (one is "
            f"{_BLOCK_TOKENS}); the file may be cut short. If it is whole, end it with a newline.",
        )


def _header(path: str, names: list[str]) -> tuple[_Layout, Mapping[str, int]]:
    """The format with all its columns among `names`, and where each column stands."""
    found = f"found: {_listed(names)}"
    matching = [layout for layout in _LAYOUTS if set(layout.columns) <= set(names)]
    if len(matching) > 1:
        raise TraceError(
            path, 1, f"the columns of {' and '.join(one.name for one in matching)} ({found}); keep one set."
        )
    if not matching:
        near = max(_LAYOUTS, key=lambda layout: len(set(layout.columns) & set(names)))
        missing = [column for column in near.columns if column not in names]
        problem = f"missing {', '.join(missing)} of {near.name}" if len(missing) == 1 else "unknown columns"
        raise TraceError(path, 1, f"{problem} ({found}). {_known()}")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise TraceError(path, 1, f"column {twice[0]} stands twice ({found}); remove or rename one.")
    return matching[0], {name: at for at, name in enumerate(names)}


def _fields(path: str, line: int, text: str) -> list[str]:
    if '"' not in text:
        return [field.strip() for field in text.split(",")]
    try:
        return [field.strip() for field in next(csv.reader([text], strict=True))]
    except csv.Error as error:
        raise TraceError(path, line, f"a quoted field of {_shown(text)} can't be read ({error}).") from None


def _text(path: str) -> tuple[str, int | None]:
    """The file's text, unzipped and without a byte order mark, and in which line gzip data is cut short, if it is.

    Of a file that is cut short it is the whole lines before the cut.
    """
    cut_at = None
    try:
        data = bytes(read_whole(Path(path), MOST_LINES_BYTES))
    except FileNotFoundError:
        raise TraceError(path, None, "no such file. Check the name, or leave it out for the default trace.") from None
    except IsADirectoryError:
        raise TraceError(path, None, "this is a folder; name one trace file in it.") from None
    except (OSError, ValueError) as error:
        raise TraceError(path, None, f"it can't be read: {error}.") from None
    if data[:2] == _GZIP_MAGIC:
        data, whole = _unzipped(path, data)
        if not whole:
            data = data[: data.rfind(b"\n") + 1]
            cut_at = data.count(b"\n") + 1
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        return data.decode("utf-8"), cut_at
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError(path, line, f"byte {data[error.start]:#04x} isn't UTF-8 text; is this a trace?") from None


def _unzipped(path: str, data: bytes) -> tuple[bytes, bool]:
    """All members of a gzip file, and whether they are whole; zlib hands back what came before a cut, gzip doesn't."""
    text, at, view = bytearray(), 0, memoryview(data)
    while at < len(view):
        # By pieces: what a member doesn't use is copied each time, and some files have a member for every 64 KiB.
        member = zlib.decompressobj(wbits=31)
        while not member.eof and at < len(view):
            piece = view[at : at + _PIECE]
            try:
                text += member.decompress(piece)
            except zlib.error as error:
                raise TraceError(path, None, f"the gzip data is damaged ({error}); fetch the file again.") from None
            if len(text) > MOST_LINES_BYTES:
                raise TraceError(path, None, f"it unzips to over {MOST_LINES_BYTES >> 20} MiB; no trace is so long.")
            at += len(piece) - len(member.unused_data)
        if not member.eof:
            return bytes(text), False
        zeros = _ZEROS.match(view, at)
        at = zeros.end() if zeros else at
    return bytes(text), True


def _count(path: str, line: int, column: str, value: Any) -> int:
    """A token count, from CSV text or a JSON value."""
    if type(value) is str and value.isascii() and value.isdigit() and len(value) <= 10:
        value = int(value)
    if type(value) is int and 0 <= value <= LARGEST_COUNT:
        return value
    raise TraceError(
        path, line, f"{column} is {_shown(value)}; it must be a whole number of tokens from 0 to {LARGEST_COUNT}."
    )


def _ids(path: str, line: int, text: str) -> tuple[int, ...]:
    words = text.split()
    if not all(word.isascii() and word.isdigit() and len(word) <= 20 for word in words):
        raise TraceError(path, line, f"{_HASH_IDS} is {_shown(text)}; it must be whole numbers between spaces.")
    return tuple(map(int, words))


def _plain_time(path: str, line: int, column: str, value: Any) -> float:
    """Seconds or milliseconds, from CSV text or a JSON value."""
    time = value
    if type(value) is str and _NUMBER.fullmatch(value):
        time = float(value) if "." in value else int(value) if len(value) <= 18 else math.inf
    if type(time) in (int, float) and 0 <= time <= _LATEST_TIME:
        return time  # type: ignore[no-any-return]
    raise TraceError(path, line, f"{column} is {_shown(value)}; it must be a number from 0 to {_LATEST_TIME}.")


def _clock_time(path: str, line: int, column: str, value: Any) -> int:
    """Nanoseconds from a date and time, exact: Azure's seventh decimal is more than datetime holds."""
    match = _CLOCK.fullmatch(value)
    day = _days(match[1]) if match else None
    if match is None or day is None:
        raise TraceError(
            path, line, f"{column} is {_shown(value)}; it must be a date and time such as 2023-11-16 18:17:03.9799600."
        )
    minutes = (day * 24 + int(match[2])) * 60 + int(match[3])
    if match[6] and match[6] != "Z":
        offset = int(match[6][1:3]) * 60 + int(match[6][4:])
        minutes += offset if match[6][0] == "-" else -offset
    return (minutes * 60 + int(match[4])) * 10**9 + int((match[5] or "0").ljust(9, "0"))


@functools.lru_cache(maxsize=64)
def _days(text: str) -> int | None:
    try:
        return date.fromisoformat(text).toordinal()
    except ValueError:
        return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _listed(names: Iterable[str]) -> str:
    text = ", ".join(name if name.isprintable() else repr(name) for name in names) or "none"
    return text if len(text) <= 300 else f"{text[:297]}..."


_CLOCK = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T]([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII
)
_NUMBER = re.compile(r"\d+(\.\d*)?", re.ASCII)
_HASH_IDS = "hash_ids"


@attrs.frozen(eq=False)
class _Layout:
    name: str
    time: str
    prompt: str
    output: str
    parse_time: Callable[[str, int, str, Any], float]
    ticks_per_s: int
    failures: bool = False

    @property
    def columns(self) -> tuple[str, str, str]:
        return self.time, self.prompt, self.output


_AZURE = _Layout("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _clock_time, 10**9)
_MOONCAKE = _Layout("mooncake", "timestamp", "input_length", "output_length", _plain_time, 1000)
_BURSTGPT = _Layout("burstgpt", "Timestamp", "Request tokens", "Response tokens", _plain_time, 1, failures=True)
_LAYOUTS = (_AZURE, _MOONCAKE, _BURSTGPT)


def _known() -> str:
    formats = "; ".join(f"{layout.name} ({', '.join(layout.columns)})" for layout in _LAYOUTS)
    return f"Known formats by column, capitals as written: {formats}."
