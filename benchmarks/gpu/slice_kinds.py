"""The slices that `benchmarks.gpu.slices` runs: each a benchmark's module with its options, or tests.

A slice's module is told to begin nothing new some time before the slice's seconds are over (``--seconds``), so that it
ends by itself.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "benchmarks" / "results" / "h200" / "raw" / "regret_shapes.json"
REQUESTS, ROUNDS, CALIBRATION_S = 600, 3, 14
START_S = 10.0
"""Until a process has its libraries, and the benchmark its clock"""
LOADING_S = {"qwen05b": 6.0, "llama1b": 6.0, "llama8b": 12.0, "dsv2lite": 25.0}
"""From there until it has its model and graphs; of others as much as the longest"""

__all__ = ["KINDS", "SHAPES", "Call", "Kind", "Slice", "read_slice"]


class Kind(NamedTuple):
    """One sort of slice."""

    module: str
    """In benchmarks.gpu; pytest where it is empty"""
    parts: tuple[int, int]
    """The fewest and the most that its name takes behind the kind"""
    arguments: Callable[[list[str], Call], list[str]]
    """The module's own, from its parts"""
    seconds: float
    """That a slice gets where it asks for none"""
    last: float = 0.0
    """Of these, seconds for what the module begins last"""
    worth: float | None = None
    """Seconds beyond loading that it is worth beginning for; None where it can't go on from a file, nor end in time"""


class Call(NamedTuple):
    """What all slices of a command share."""

    models: Path
    traces: Path
    results: Path
    shapes: Path
    plans: Path | None
    small: list[str]
    device: str
    tiny: bool
    date: str
    commit: str

    def config(self, model: str) -> str:
        """A model's config.json.

        Raises:
            ValueError: there is none.
        """
        path = self.models / model / "config.json"
        if not path.is_file():
            there = sorted(each.parent.name for each in self.models.glob("*/config.json"))
            raise ValueError(f"model {model!r}: {self.models} has {', '.join(there) or 'no config.json'}")
        return str(path)

    def smallest(self) -> str:
        """The config of what correctness of the runner itself is looked at with."""
        found = next((name for name in self.small if (self.models / name / "config.json").is_file()), self.small[0])
        return self.config(found)


class Slice(NamedTuple):
    """One process to run."""

    told: str
    """As the command line has it"""
    name: str
    """Of its files"""
    seconds: float
    """That it gets where there are as many"""
    shortest: float
    """What it may be cut to"""
    words: list[str]
    """Module and arguments, but for the seconds"""
    apart: float | None
    """Of its seconds, those that its module mustn't begin anything in; None where it isn't told of seconds"""

    def command(self, seconds: float) -> list[str]:
        """What runs, within so many seconds."""
        told = [] if self.apart is None else ["--seconds", f"{max(1.0, seconds - self.apart):.0f}"]
        return [sys.executable, "-m", *self.words, *told]


def _startup(parts: list[str], call: Call) -> list[str]:
    # A toy's limits aren't those of a plan.
    plan = call.plans / f"{parts[0]}.json" if call.plans and not call.tiny else None
    return ["--config", call.config(parts[0]), "--pairs", "1" if call.tiny else "6"] + (
        ["--plan", str(plan)] if plan and plan.is_file() else []
    )


def _config(parts: list[str], call: Call) -> list[str]:
    return ["--config", call.config(parts[0])]


def _regret(parts: list[str], call: Call) -> list[str]:
    loads = [each.replace("_", " ") for each in parts[1].split(",")] if len(parts) > 1 else []
    profile = call.results / f"profile-{parts[0]}.json"
    return ["--config", call.config(parts[0]), "--model", parts[0], "--shapes", str(call.shapes),
            "--save-profile", str(profile), *(["--loads", *loads] if loads else [])]  # fmt: skip


def _end_to_end(parts: list[str], call: Call) -> list[str]:
    loads = [each.replace("_", " ") for each in parts[1].split(",")]
    requests = _number(parts[2]) if len(parts) > 2 else REQUESTS
    return ["--config", call.config(parts[0]), "--traces", str(call.traces), "--loads", *loads, "--requests",
            str(requests), "--rounds", str(ROUNDS), "--calibrate", str(CALIBRATION_S)]  # fmt: skip


def _kernels(parts: list[str], call: Call) -> list[str]:
    if parts[1:] not in ([], ["theirs"]):
        raise ValueError("behind the model there is nothing, or theirs")
    return [*_config(parts, call), *(["--their-experts"] if parts[1:] else [])]


def _correct(parts: list[str], call: Call) -> list[str]:
    given = ["--config", call.config(parts[0]), "--commit", call.commit]
    if parts[1] == "reference":
        if len(parts) > 2:
            raise ValueError("the reference has no steps to share out; leave them out")
        return [*given, "--part", "reference"]
    if len(parts) < 3:
        raise ValueError("name the first step and how many, or reference")
    return [*given, "--part", "bits", "--first", str(_number(parts[1])), "--count", str(_number(parts[2]))]


def _overlap(parts: list[str], call: Call) -> list[str]:
    steps = ["--first", str(_number(parts[0])), "--count", str(_number(parts[1]))] if len(parts) > 1 else []
    return ["--config", call.smallest(), "--commit", call.commit, "--layers", "2", *steps]


def _soak(_: list[str], call: Call) -> list[str]:
    return ["--config", call.smallest(), "--layers", "6"]


def _padded(parts: list[str], _: Call) -> list[str]:
    return ["--models", *parts[0].split(",")] if parts else []


def _tests(parts: list[str], _: Call) -> list[str]:
    files = [each if "/" in each else f"tests/gpu/{each}" for each in parts[0].split(",")] if parts else ["tests/gpu"]
    if missing := [each for each in files if not (ROOT / each.partition("::")[0]).exists()]:
        raise ValueError(f"{', '.join(missing)}: no such file here")
    return [*files, "-p", "no:cacheprovider", "-rfE", "--durations=5"]


def _nothing(_: list[str], __: Call) -> list[str]:
    return []


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


KINDS: dict[str, Kind] = {
    "startup": Kind("startup", (1, 1), _startup, 120, last=30, worth=60),
    "beside": Kind("beside", (1, 1), _config, 110, last=15, worth=30),
    "regret": Kind("regret", (1, 2), _regret, 165, last=6, worth=60),
    "e2e": Kind("end_to_end", (2, 3), _end_to_end, 280, last=25, worth=100),
    "correct": Kind("correct", (2, 3), _correct, 300, last=30, worth=40),
    "overlap": Kind("overlap", (0, 2), _overlap, 300, last=15, worth=30),
    "soak": Kind("soak", (0, 0), _soak, 300, last=30, worth=60),
    "overhead": Kind("overhead", (1, 1), _config, 100),
    "kernels": Kind("kernels", (1, 2), _kernels, 90, last=15, worth=20),
    "gpt2": Kind("gpt2", (0, 0), _nothing, 60),
    "padded": Kind("padded", (0, 1), _padded, 90, last=15, worth=30),
    "tests": Kind("", (0, 1), _tests, 240),
}


def read_slice(text: str, call: Call) -> Slice:
    """A slice as a command line has it.

    Raises:
        ValueError: it is none, or names what isn't there.
    """
    try:
        return _read(text, call)
    except ValueError as error:
        raise ValueError(f"slice {text!r}: {error}") from None


def _read(text: str, call: Call) -> Slice:
    told, *options = shlex.split(text) or [""]
    told, at, asked = told.partition("@")
    word, *parts = told.split(":")
    kind = KINDS.get(word)
    if kind is None:
        raise ValueError(f"the kinds are {', '.join(KINDS)}")
    fewest, most = kind.parts
    if not fewest <= len(parts) <= most or not all(parts):
        wanted = str(fewest) if fewest == most else f"{fewest} to {most}"
        raise ValueError(f"{word} takes {wanted} parts behind colons; --help says which")
    seconds = float(_number(asked)) if at else kind.seconds
    # Loads of a model share a file, which says what its table was made of.
    name = re.sub(r"[^\w.-]", "_", "-".join([word, *(parts[:1] if word == "regret" else parts)]))[:120]
    arguments, out = kind.arguments(parts, call), call.results / f"{name}.json"
    loading = 0.0 if call.tiny else LOADING_S.get(parts[0] if fewest else "qwen05b", max(LOADING_S.values()))
    # A start-up's clock begins with its model there.
    apart = START_S + kind.last + (loading if word == "startup" else 0.0)
    words = [f"benchmarks.gpu.{kind.module}", *arguments, *_shared(word, call, out), *options]
    if not kind.module:
        words = ["pytest", *arguments, f"--junitxml={out.with_suffix('.xml')}", *options]
    if kind.worth is None:
        return Slice(text, name, seconds, seconds, words, None)
    shortest = min(seconds, START_S + loading + kind.worth)
    return Slice(text, name, seconds, shortest, words, min(apart, seconds / 2))


def _shared(word: str, call: Call, out: Path) -> list[str]:
    """What each module takes."""
    result = ["--json", str(out)] if word == "overhead" else ["--out", str(out), "--device", call.device]
    return [*result, "--date", call.date, *(["--tiny"] if call.tiny else [])]
