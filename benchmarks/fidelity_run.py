"""A whole fidelity run by one command, on a machine with a GPU: calibrations and the run.

Three calibrations one after the other, the profile of their middle (`kpolicy.middle_profile`), and a run of every
policy three times by that profile, each under ``benchmarks.quiet --follow`` and all within one limit::

    python -m benchmarks.fidelity_run --config config.json --trace azure_llm_2023_code.csv --start 600 --window 20
        --rate 0.7 --policy auto --policy piecewise --policy vllm --limit 880 --out DIR

The run decides by that profile, P.json, and is held to it (`benchmarks.fidelity`, `benchmarks.fidelity_verdict`).

Runs until 2026-11-30, 08:16 UTC, were held to more (docs/measured_fidelity.md): ``--later 2`` calibrates once behind
the run and once behind its repeats, and Q.json is the middle of all; ``--again 150`` runs the steps that the rule of
then wanted again (`benchmarks.gpu.again`).

All run in DIR, which gets links to config and trace, so that no result names a folder of the machine. What is in DIR
already isn't made again. What fails ends the command: a run by fewer calibrations is none. Where less than ``--again``
is left for the steps that run again, too few would run three times: it ends before them, and the same command, called
again, goes on with all of its limit. At the end it prints the commands that hold each profile to what is in DIR, which
need no GPU (`benchmarks.fidelity`).
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.command import input_file, input_path, made_folder
from benchmarks.gpu.slices import stop
from kpolicy.cli.step_log import step_log_paths
from kpolicy.errors import ConfigError
from kpolicy.simulate.repeats import LEAST_REPEATS

ROOT = Path(__file__).parents[1]
GRACE_S = 5.0
"""For what is interrupted to write what it has"""
AROUND_S = 15.0
"""Of the seconds for steps that run again: for looking at cores and importing before they count, and closing after"""
LATE_S = 1.0
"""A call's own start: with so little missing the steps run again all the same"""
PART = "part-"
"""Before the names of files of steps that run again, until they have all run"""
AGAIN = "steps again"
MIDDLE = "the middle"
MODES = ("eager", "piecewise")
"""Those whose steps a core that turns slow makes longer, so that the machine itself differs by 3% or more"""
AROUND = Path("Q.json")
"""The profile of the calibrations before and after the run"""
KPOLICY = [sys.executable, "-m", "kpolicy"]


def log_names(policies: Sequence[str], repeats: int) -> list[list[Path]]:
    """Step logs by turn: each one's of every policy, in the order given; as ``kpolicy run --step-log`` names them."""
    names = [spec if turn == 1 else f"{spec}-{turn}" for turn in range(1, repeats + 1) for spec in policies]
    paths = [path for path in step_log_paths(Path("S.jsonl"), names) if path is not None]
    return [paths[i : i + len(policies)] for i in range(0, len(paths), len(policies))]


def calls(options: argparse.Namespace) -> list[tuple[str, Path, list[str], float]]:
    """(what it is, what it writes, its command, seconds at most) of all that runs in the folder, in its order."""
    config = "config.json"
    made = [Path(f"C-{i + 1}.json") for i in range(options.calibrations + options.later)]
    profile, run, again = Path("P.json"), Path("R.json"), Path("A.jsonl")
    served = ["--trace", options.trace.name, "--start", f"{options.start:g}", "--window", f"{options.window:g}"]
    policies = [word for policy in options.policy for word in ("--policy", policy)]
    first = log_names(options.policy, options.repeats)[0]
    calibrations = [
        (f"calibration {i + 1}", path,
         [*KPOLICY, "calibrate", "--device", options.device, "--model", config, "--seconds", f"{options.seconds:g}",
          "--out", str(path), "--json"], options.calibration_limit)
        for i, path in enumerate(made)
    ]  # fmt: skip

    def middle(of: int, path: Path) -> tuple[str, Path, list[str], float]:
        words = [sys.executable, "-m", "benchmarks.middle_profile", *map(str, made[:of]), "--out", str(path)]
        return MIDDLE, path, words, 60.0

    found = [*calibrations[: options.calibrations], middle(options.calibrations, profile)]
    later = calibrations[options.calibrations :]
    # What replays differ by from capture to capture is then in what turns are apart.
    anew = ["--recapture"] if options.repeats > 1 else []
    ran = [
        *KPOLICY, "run", "--device", options.device, "--model", config, *served, "--rate", f"{options.rate:g}",
        *policies, "--repeats", str(options.repeats), *anew, "--no-verify", "--profile", str(profile),
        "--step-log", "S.jsonl", "--json",
    ]  # fmt: skip
    found.append(("the run", run, ran, options.limit))
    repeated = [
        sys.executable, "-m", "benchmarks.gpu.again", "--device", options.device, "--config", config,
        "--profile", str(profile), "--run", str(run), *served, *(w for log in first for w in ("--log", str(log))),
        *(w for mode in options.mode for w in ("--mode", mode)), *(["--turns"] if options.turns else []),
        "--most", str(options.most), "--passes", str(options.passes),
        "--seconds", f"{options.again - AROUND_S:g}", "--out", f"{PART}{again}",
    ]  # fmt: skip
    # One behind the run, where there are several, and the others behind what runs again.
    found += later[: len(later) // 2]
    if options.again:
        found.append((AGAIN, again, repeated, options.again + GRACE_S))
    found += later[len(later) // 2 :]
    if later:
        found.append(middle(len(made), AROUND))
    return found


def fidelity_commands(options: argparse.Namespace) -> list[str]:
    """The commands that hold each profile to what was measured, to be run in the folder; the one that judges first."""
    logs = [log for turn in log_names(options.policy, options.repeats) for log in turn]
    again = sorted(path.name for path in options.out.glob("A*.jsonl"))
    words = [word for log in logs for word in ("--log", str(log))]
    words += [word for log in again for word in ("--again", log)]
    words += ["--run", "R.json", "--trace", options.trace.name, "--start", f"{options.start:g}"]
    words += ["--window", f"{options.window:g}"]
    count = options.calibrations + options.later
    told = f"the middle of each figure of {count} calibrations, {options.calibrations} before the run"
    profiles = [["--profile", str(AROUND), "--table", f"{told} and {options.later} after it"]] if options.later else []
    profiles.append(["--profile", "P.json"])
    return [shlex.join(["python", "-m", "benchmarks.fidelity", *profile, *words]) for profile in profiles]


def is_there(path: Path) -> bool:
    """Whether it was made, or for several policies files of its name."""
    return path.exists() or any(path.parent.glob(f"{path.stem}-*.jsonl"))


def ran(command: Sequence[str], out: Path, written: Path, seconds: float, *, quiet: int) -> int:
    """Run a command for so long at most; its exit code. What it prints is in NAME.log, the run's result in R.json.

    Of steps that run again no file has its name before all have run: what was cut short isn't taken for done.
    """
    if quiet:
        look = ["benchmarks.quiet", "--cores", str(quiet), "--seconds", "4", "--follow", "--"]
        command = [sys.executable, "-m", *look, *command]
    for path in out.glob(f"{PART}{written.stem}*"):
        path.unlink()
    printed = written.name == "R.json"
    answer, environment = out / "R.json.part", os.environ.copy()
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
    with (out / f"{written.stem}.log").open("ab") as log, answer.open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said if printed else log, stderr=log, cwd=out, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(max(seconds - GRACE_S, 0.0))
        except subprocess.TimeoutExpired:
            stop(process, GRACE_S)
        except BaseException:
            stop(process, 0.0)
            raise
    if printed and process.returncode == 0:
        answer.rename(out / written)
    if process.returncode == 0:
        for path in out.glob(f"{PART}{written.stem}*"):
            path.rename(out / path.name.removeprefix(PART))
    answer.unlink(missing_ok=True)
    return process.returncode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=input_path, required=True, help="the model's folder or config.json")
    parser.add_argument("--trace", type=input_file, required=True, help="the trace to serve")
    parser.add_argument("--start", type=float, default=0.0, help="second of the trace to start at")
    parser.add_argument("--window", type=float, default=30.0, help="seconds of the trace to serve (30)")
    parser.add_argument("--rate", type=float, required=True, help="how much faster requests arrive than in the trace")
    parser.add_argument("--policy", action="append", required=True, help="a policy; repeat the option for several")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each policy (3)")
    parser.add_argument("--device", default="cuda", help="what serves the model (cuda)")
    parser.add_argument("--calibrations", type=int, default=3, help="before the run, by whose middle it decides (3)")
    parser.add_argument("--later", type=int, default=0, help="calibrations after the run and what runs again (0)")
    parser.add_argument("--seconds", type=float, default=25.0, help="of measuring in each calibration (25)")
    parser.add_argument("--calibration-limit", type=float, default=120.0, help="a calibration's seconds at most (120)")
    parser.add_argument("--again", type=float, default=0.0, help="seconds for steps that run again; 0 for none (0)")
    parser.add_argument("--mode", action="append", help="every step of this mode runs again (eager and piecewise)")
    parser.add_argument("--most", type=int, default=5000, help="steps of a policy and mode that run again (5,000)")
    parser.add_argument(
        "--passes", type=int, default=9,
        help="times that a step runs again at most, with --turns on each kind of core (9)",
    )  # fmt: skip
    parser.add_argument(
        "--turns", action="store_true",
        help="of steps that run again every other pass is on the slowest of all cores, with those beside it kept busy, "
        "so that the host bounds those that it bounded in the run; each then runs twice as often, and --again should "
        "be twice as long",
    )  # fmt: skip
    parser.add_argument("--quiet", type=int, default=4, help="quick cores for each; 0 takes those that there are (4)")
    parser.add_argument("--limit", type=float, default=580.0, help="seconds for all (580)")
    parser.add_argument("--out", type=made_folder, required=True, help="a folder for all that is made")
    options = parser.parse_args(argv)
    if min(options.calibrations, options.repeats) < 1:
        parser.error(f"--calibrations {options.calibrations} --repeats {options.repeats}: both are from 1 up")
    if options.passes < LEAST_REPEATS:
        parser.error(f"--passes {options.passes}: from {LEAST_REPEATS} up, of which the middle is looked at")
    if options.later < 0:
        parser.error(f"--later {options.later}: 0 for none, or how many calibrations run after the run")
    if options.again and not AROUND_S < options.again <= options.limit - GRACE_S:
        parser.error(
            f"--again {options.again:g}: 0 for none, or over {AROUND_S:g} seconds, which go for starting and ending, "
            f"and at most {GRACE_S:g} less than --limit {options.limit:g}"
        )
    options.mode = options.mode or [*MODES]
    options.out.mkdir(exist_ok=True)
    config = options.config / "config.json" if options.config.is_dir() else options.config
    for name, path in (("config.json", config), (options.trace.name, options.trace)):
        link = options.out / name
        if link.exists() and not link.samefile(path):
            parser.error(f"--out {options.out} has another {name}; give another folder")
        if not link.exists():
            link.symlink_to(path.resolve())
    zero = time.monotonic()
    try:
        todo = calls(options)
    except ConfigError as error:
        parser.error(str(error))
    for what, written, command, most in todo:
        if is_there(options.out / written):
            print(f"{what}: is there", flush=True)
            continue
        left = options.limit - (time.monotonic() - zero)
        if left <= 2 * GRACE_S:
            sys.stderr.write(f"{what}: no time left within --limit {options.limit:g}; call it again to go on\n")
            return 1
        if what == AGAIN and left < most - LATE_S:
            told = (
                f"{left:.0f} s are left within --limit {options.limit:g}, and --again {options.again:g} takes {most:g}"
            )
            sys.stderr.write(f"{what}: {told}; call it again to go on\n")
            return 1
        # With turns it chooses its cores itself.
        alone = what == MIDDLE or (what == AGAIN and options.turns)
        code = ran(command, options.out, written, min(most, left), quiet=0 if alone else options.quiet)
        print(f"[{time.monotonic() - zero:4.0f} s] {what}: {'done' if code == 0 else f'ended with {code}'}", flush=True)
        if code:
            log = options.out / f"{written.stem}.log"
            with suppress(OSError):
                sys.stderr.write("".join(log.read_text(errors="replace").splitlines(keepends=True)[-5:]))
            return 1
    for line in fidelity_commands(options):
        print(f"in {options.out}: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
