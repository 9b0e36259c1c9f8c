"""The GPU benchmarks in slices: several of them by one command, each in a process with a time of its own.

A slice is a name, ``KIND:PART:...``, and may say its seconds (``@150``) and options for its module behind them, quoted:

- ``startup:MODEL``, ``beside:MODEL``, ``overhead:MODEL``
- ``kernels:MODEL``, ``kernels:MODEL:theirs`` with transformers' own experts
- ``regret:MODEL[:LOAD,...]``: all loads of the shapes by default; ``conversation_x1`` is the load `conversation x1`
- ``e2e:MODEL:LOAD,...[:REQUESTS]``: 600 requests by default, of ``code_saturated`` and the like
- ``correct:MODEL:FIRST:COUNT``: steps in every mode, from the one with that number
- ``correct:MODEL:reference``: against float32
- ``overlap[:FIRST:COUNT]``, ``soak``: of the first of ``--small`` that there is a config of
- ``gpt2``, ``padded[:HEADS,...]``
- ``tests[:FILE,...]``: pytest of files in tests/gpu, or by their path; all of that folder by default

Slices run in the order given, ``--at-once`` at a time, each with its part of ``--cores`` for itself. Times of steps are
to be had with one at a time alone. ``--quiet N`` gives each the N quickest cores then (`benchmarks.quiet`).

None begins that could last beyond ``--limit``: one that goes on from a result file may get what is left of the time,
others need all of theirs. One that isn't done in its time is interrupted, then killed; what its file has stays.

``--results`` gets a result (NAME.json) and a log (NAME.log) of each, and slices.json, which says how each ended; files
of earlier calls that are there are gone on from. ``--pack FILE`` keeps an archive of the folder, made anew when a slice
ends. The command ends with 1 where a slice failed or wasn't begun.

Run: ``python -m benchmarks.gpu.slices --models DIR --traces DIR --results DIR --limit 330 startup:qwen05b@120 gpt2``,
where DIR has a folder with a config.json for each model; a dry run without a GPU with ``--tiny --device cpu``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.command import input_file, input_folder, made_file, made_folder, without_folders
from benchmarks.gpu.slice_kinds import ROOT, SHAPES, Call, Slice, read_slice
from benchmarks.quiet import POOLS, cores_of

GRACE_S = 8.0
"""For a slice that is interrupted to write what it has"""
RESERVE_S = 4.0
"""Of the limit, for the last archive"""
SAID_S = 30.0
"""Between lines that say what is under way"""


class Running(NamedTuple):
    """A slice under way."""

    slice: Slice
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    begun: float
    until: float
    cores: list[int]


class Runner:
    """Runs slices.

    Args:
        call: what they share.
        limit: seconds for all.
        places: cores of each that runs at a time; an empty list takes those that there are.
        quiet: the quickest cores that each gets instead; 0 for none.
        pack: an archive of the results to keep.
    """

    def __init__(self, call: Call, limit: float, places: Sequence[list[int]], quiet: int, pack: Path | None) -> None:
        self._call, self._places, self._quiet, self._pack = call, list(places), quiet, pack
        self._zero = time.monotonic()
        self._end = self._zero + limit - min(RESERVE_S, limit / 10)
        self._record = call.results / "slices.json"
        self.ended: list[dict[str, Any]] = json.loads(self._record.read_text()) if self._record.exists() else []
        self.failed = 0

    def say(self, text: str) -> None:
        """A line with the seconds since the beginning."""
        print(f"[{time.monotonic() - self._zero:4.0f} s] {text}", flush=True)

    def run(self, slices: Sequence[Slice]) -> int:
        """Run all that there is time for; how many failed or didn't begin."""
        waiting, free = list(slices), list(self._places)
        running: list[Running] = []
        said = time.monotonic()
        # By its default this signal would end the command alone.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            while waiting or running:
                while waiting and free:
                    begun = self._begin(waiting.pop(0), free[0])
                    if begun is not None:
                        running.append(begun)
                        free.pop(0)
                for each in [each for each in running if self._is_over(each)]:
                    running.remove(each)
                    free.append(each.cores)
                    self._ended(each)
                if running and time.monotonic() - said > SAID_S:
                    said = time.monotonic()
                    self.say("; ".join(f"{each.slice.name}: {last_line(each.log.name)}" for each in running))
                time.sleep(0.1)
        finally:
            signal.signal(signal.SIGTERM, before)
            for each in running:
                stop(each.process, 0.0)
                each.log.close()
        return self.failed

    def _begin(self, one: Slice, cores: list[int]) -> Running | None:
        left = self._end - time.monotonic()
        if left < one.shortest:
            self.say(f"{one.told}: not begun, {left:.0f} s are left and it takes {one.shortest:.0f}")
            self.failed += 1
            self._note(one, seconds=0.0, result="not begun")
            return None
        seconds = min(one.seconds, left)
        command = one.command(seconds)
        self.say(f"{one.told}: begins, {seconds:.0f} s")
        if self._quiet:
            quiet = ["benchmarks.quiet", "--cores", str(self._quiet), "--seconds", "3", "--follow", "--"]
            command = [sys.executable, "-m", *quiet, *command]
        log = (self._call.results / f"{one.name}.log").open("ab")
        log.write(f"$ {without_folders(command)}\n".encode())
        log.flush()
        here = os.sched_getaffinity(0) if cores else set()
        environment = {**os.environ, **dict.fromkeys(POOLS, "1"), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        try:
            if cores:
                os.sched_setaffinity(0, cores)
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment,
                start_new_session=True,
            )  # fmt: skip
        finally:
            if cores:
                os.sched_setaffinity(0, here)
        now = time.monotonic()
        return Running(one, process, log, now, now + seconds, cores)

    def _is_over(self, one: Running) -> bool:
        if one.process.poll() is not None:
            return True
        # What is interrupted in time writes what it has before its end.
        if time.monotonic() < one.until - min(GRACE_S, (one.until - one.begun) / 10):
            return False
        stop(one.process, max(1.0, one.until - time.monotonic()))
        return True

    def _ended(self, one: Running) -> None:
        one.log.close()
        seconds, code = time.monotonic() - one.begun, one.process.returncode
        cut = (seconds > one.until - one.begun - GRACE_S and code < 0) or code in (130, 143)
        result = "done" if code == 0 else "cut off" if cut else f"ended with {code}"
        found = tests_told(self._call.results / f"{one.slice.name}.xml")
        if found:
            (self._call.results / f"{one.slice.name}.json").write_text(json.dumps(found, indent=1) + "\n")
        self.failed += code != 0
        self._note(one.slice, seconds=round(seconds, 1), result=result)
        last = f"{found['passed']} passed, {len(found['failed'])} failed, {found['skipped']} skipped" if found else ""
        self.say(f"{one.slice.told}: {result} after {seconds:.0f} s: {last or last_line(one.log.name)}")

    def _note(self, one: Slice, **how: Any) -> None:
        began = round(time.monotonic() - self._zero - how["seconds"], 1)
        self.ended.append({"slice": one.told, "began_s": began, "commit": self._call.commit, **how})
        self._record.write_text(json.dumps(self.ended, indent=1) + "\n")
        if self._pack:
            pack(self._call.results, self._pack)


def stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a process and all that it started: interrupted first, killed where it isn't gone in time."""
    below = descendants(process.pid)
    for number, wait in ((signal.SIGINT, grace_s), (signal.SIGTERM, min(1.0, grace_s))):
        if wait and process.poll() is None:
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait)
    for pid in {*below, *descendants(process.pid), process.pid}:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """Processes that one started and that they did, where the system lists them."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def last_line(path: str) -> str:
    """The last line of a log that says something of the slice, cut."""
    lines = [
        line
        for line in Path(path).read_text(errors="replace").splitlines()
        if line.strip() and not line.startswith(("moved to a quicker core", "core "))
    ]
    return lines[-1][-160:] if lines else ""


def tests_told(path: Path) -> dict[str, Any]:
    """What a file of pytest's results comes to; nothing where it isn't there, or isn't whole."""
    try:
        root = ElementTree.parse(path).getroot()  # noqa: S314 - written by the process before
    except (OSError, ElementTree.ParseError):
        return {}
    cases = list(root.iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    reasons = [str(found.get("message"))[:200] for case in skipped if (found := case.find("skipped")) is not None]
    return {
        "passed": len(cases) - len(bad) - len(skipped), "skipped": len(skipped),
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in bad],
        "why_skipped": {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)},
        "seconds": round(sum(float(case.get("time", 0)) for case in cases), 1),
    }  # fmt: skip


def pack(folder: Path, archive: Path) -> None:
    """The folder as a .tar.gz, written beside its place and put there."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    part = archive.with_name(f".{archive.name}.part")
    with tarfile.open(part, "w:gz", compresslevel=3) as out:
        for path in sorted(folder.iterdir()):
            if path.is_file() and path not in (archive, part):
                out.add(path, arcname=path.name)
    part.replace(archive)


def places_of(cores: str, at_once: int) -> list[list[int]]:
    """The cores of each slice of those that run at a time.

    Raises:
        ValueError: there are fewer cores than slices at a time.
    """
    if not cores:
        return [[] for _ in range(at_once)]
    wanted = sorted(cores_of(cores) & os.sched_getaffinity(0))
    if len(wanted) < at_once:
        raise ValueError(f"--cores {cores} are {len(wanted)} that this process may use, for --at-once {at_once}")
    each = len(wanted) // at_once
    return [wanted[i * each : (i + 1) * each] for i in range(at_once)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run slices; 1 where one failed or wasn't begun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slices", nargs="+", metavar="SLICE", help="KIND:PART:...[@SECONDS], with options behind it")
    parser.add_argument("--models", type=input_folder, required=True, help="a folder with MODEL/config.json of each")
    parser.add_argument("--traces", type=input_folder, required=True, help="a folder with the traces' files")
    parser.add_argument("--results", type=made_folder, required=True, help="a folder for results, gone on from")
    parser.add_argument("--limit", type=float, default=580.0, help="seconds for all (580)")
    parser.add_argument("--at-once", type=int, default=1, help="slices that run at a time (1)")
    parser.add_argument("--cores", default="", help="cores for those, such as 2-15; shared out evenly")
    parser.add_argument("--quiet", type=int, default=0, help="give each so many of the quickest cores instead")
    parser.add_argument("--pack", type=made_file, help="a .tar.gz of the results, written when a slice ends")
    parser.add_argument("--shapes", type=input_file, default=SHAPES, help="regret's; those in the results by default")
    parser.add_argument("--plans", type=input_folder, help="a folder with MODEL.json of `kpolicy plan`, for startup")
    parser.add_argument("--small", nargs="+", default=["qwen05b"], help="models for overlap and soak, the first there")
    parser.add_argument("--device", default="cuda", help="that they run on (cuda)")
    parser.add_argument("--tiny", action="store_true", help="toys of the same architectures: a dry run")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"), help="written into results; today by default")
    parser.add_argument("--commit", default="unstated", help="of the code that runs, written into results")
    options = parser.parse_args(argv)
    if options.at_once < 1 or options.limit <= 0:
        parser.error(f"--at-once {options.at_once} --limit {options.limit:g}: both are above 0")
    if options.quiet and (options.at_once > 1 or options.cores):
        parser.error("--quiet chooses the cores of one slice at a time: leave --at-once and --cores out")
    options.results.mkdir(parents=True, exist_ok=True)
    call = Call(*(getattr(options, name) for name in Call._fields))._replace(
        models=options.models.resolve(), traces=options.traces.resolve(), results=options.results.resolve(),
        shapes=options.shapes.resolve(), plans=options.plans and options.plans.resolve(),
    )  # fmt: skip
    try:
        slices = [read_slice(text, call) for text in options.slices]
        places = places_of(options.cores, options.at_once)
    except ValueError as error:
        parser.error(str(error))
    names = [each.name for each in slices]
    if twice := {name for name in names if names.count(name) > 1}:
        parser.error(f"two slices write {', '.join(sorted(twice))}.json; put their parts into one")
    return 1 if Runner(call, options.limit, places, options.quiet, options.pack).run(slices) else 0


if __name__ == "__main__":
    sys.exit(main())
