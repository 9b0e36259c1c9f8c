"""Raw rows of a benchmark: kept as they come, and read again by a call that goes on where another ended."""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kpolicy.errors import ConfigError

__all__ = ["Measurement", "Rows", "machine", "machines", "rotated", "say"]

MACHINE = ("gpu", "vllm", "torch")
"""What must be alike in rows that are compared"""


def machine(row: Mapping[str, Any]) -> dict[str, str]:
    """The device and versions that a row names; nothing where it names none."""
    told = row.get("cold", row)
    return {name: told[name] for name in MACHINE if told.get(name)}


def machines(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The devices and versions that rows were measured with, each once.

    Raises:
        ConfigError: they aren't all the same.
    """
    found = [dict(each) for each in dict.fromkeys(tuple(machine(row).items()) for row in rows) if each]
    if len(found) > 1:
        told = "; ".join(", ".join(f"{name} {value}" for name, value in each.items()) for each in found)
        raise ConfigError(f"rows of several devices or versions aren't compared: {told}. Keep each in its own folder.")
    return found


class Rows:
    """Rows of {model, load, side, repeat, ...} in a file of JSON lines.

    Args:
        path: takes each row as it comes; rows already there are read.
        done: files with rows of earlier calls.

    Raises:
        ConfigError: those rows are of several devices or versions.
    """

    def __init__(self, path: Path, done: Iterable[Path] = ()) -> None:
        self._path = path
        self.all: list[dict[str, Any]] = []
        for each in dict.fromkeys([path, *done]):
            if each.exists():
                self.all += [json.loads(line) for line in each.read_text().splitlines() if line]
        machines(self.all)

    def keep(self, **row: Any) -> None:
        """Add a row.

        Raises:
            ConfigError: it is of another device or other versions than the rows that are there.
        """
        self.check(row)
        self.all.append(row)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def check(self, row: Mapping[str, Any]) -> None:
        """Refuse a row of another device or other versions than the rows that are there.

        Raises:
            ConfigError: it is.
        """
        machines([*self.all, row])

    def has(self, model: str, load: str, sides: Iterable[str], repeat: int, requests: int | None = None) -> bool:
        """Whether one process measured that with all of these sides, with as many requests where it has any."""
        wanted, by_process = (model, load, repeat, requests), defaultdict[str, set[str]](set)
        for row in self.all:
            if (row["model"], row["load"], row["repeat"], row.get("requests")) == wanted:
                by_process[row.get("began", "")].add(row["side"])
        return any(found.issuperset(sides) for found in by_process.values())

    def summary(self, target: Path, content: dict[str, Any]) -> None:
        """Write what the rows come to, whole or not at all."""
        target.with_suffix(".tmp").write_text(json.dumps(content, indent=1))
        target.with_suffix(".tmp").replace(target)


class Measurement:
    """What measures within a budget: its rows, and a log of its children.

    Args:
        options: the command line's: ``budget`` in seconds, ``out``, and ``done``, files with rows of earlier calls.
        rows: the file of its rows, in ``out``.
        log: that of the log.
    """

    def __init__(self, options: argparse.Namespace, rows: str, log: str) -> None:
        self._options = options
        self._stop_s = time.monotonic() + options.budget
        options.out.mkdir(parents=True, exist_ok=True)
        self.rows = Rows(options.out / rows, options.done)
        self._log = (options.out / log).open("a")
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        call = next((row["call"] for row in reversed(self.rows.all) if "call" in row), now)
        self.about: dict[str, str] = {"call": call, "began": now}
        """When the call began, or the one that this goes on with; when this process did: its turns are compared"""

    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._stop_s - time.monotonic()

    def close(self) -> None:
        """Close the children's log."""
        self._log.close()


def rotated(names: Sequence[str], repeat: int) -> list[str]:
    """The names in an order in which each comes first in turn, and last too."""
    first = repeat % len(names)
    return [*names[first:], *names[:first]]


def say(text: str) -> None:
    """One line of progress."""
    print(text, flush=True)
