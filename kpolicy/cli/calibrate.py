"""`kpolicy calibrate`: measures a model on this machine and writes the profile that ``--profile`` reads."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from json import loads as parse_json
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Annotated, Any

import attrs
from cyclopts import Parameter

from kpolicy.cli.options import COMMAND, MAX_NUM_REQS, Json, at_least, device_here, ladder_of, settings_of, whole
from kpolicy.cli.render import console, grid, print_json, show
from kpolicy.cli.run import found, needs_torch
from kpolicy.cli.run_model import size_on
from kpolicy.cli.turns import capture, check_files, progress_bar
from kpolicy.costs import CostTable
from kpolicy.device_names import DeviceName
from kpolicy.engine import Engine
from kpolicy.errors import ConfigError, KPolicyError
from kpolicy.host_speed import SpeedTimer
from kpolicy.ladders import CaptureSizes
from kpolicy.middle_profile import launching_us, middle
from kpolicy.schemas import read_profile, write_profile
from kpolicy.settings import Settings
from kpolicy.words import some

if TYPE_CHECKING:
    from rich.progress import Progress

    from kpolicy.served_host import ServedHost
    from kpolicy.serving.real_run import Serving

__all__ = ["calibrate_command"]

SECONDS = 60.0
_LEAST_ROUNDS = 2
"""Samples of every step, from which all figures are measured"""
_SIGNAL = 128
"""And a signal's number: a shell's code of what it ended"""
_WRITING_S = 30.0
"""Seconds that an interrupted repeat has to end"""
_BEYOND_S = 1.0
"""Seconds beyond what was asked that aren't told"""
_BOOT = (
    "import sys; end = 2 + int(sys.argv[1]); sys.path[:] = sys.argv[2:end]; from kpolicy.cli import main; "
    "main(sys.argv[end:])"
)
"""A repeat imports from where this process does, and not from the folder that it is in."""
_TOTALS = ("profile", "device", "model", "graphs", "capture_s", "not_captured")
"""What is said of a calibration beside its table"""


def calibrate_command(
    *,
    model: Annotated[Path, Parameter(help="A model's folder, or a config.json for random weights.")],
    out: Annotated[Path, Parameter(help="The profile to write; it is written whole, at the end.")],
    device: Annotated[
        str,
        Parameter(
            help="cpu, cuda (cuda:1 is the second one), ascend, kunlun, xpu or accelerator (what torch finds). auto "
            "takes the first that is there: an NPU, a GPU, an XPU, the CPU."
        ),
    ] = "auto",
    seconds: Annotated[
        float,
        Parameter(
            help="Seconds to spend on measuring, after capture; more where measuring everything twice takes more."
        ),
    ] = SECONDS,
    ladder: Annotated[
        str | None,
        Parameter(
            help="Capture sizes in tokens, such as 1,2,4,8, or a plan file (.json). By default those of auto, on "
            "a GPU with mixed batches up to the token budget."
        ),
    ] = None,
    max_num_reqs: Annotated[
        int | None,
        Parameter(converter=whole, help=f"Most requests in one step. By default {MAX_NUM_REQS}; 32 on a CPU."),
    ] = None,
    max_num_tokens: Annotated[
        int | None, Parameter(converter=whole, help="Token budget of a step. By default 2048; 256 on a CPU.")
    ] = None,
    kv_tokens: Annotated[
        int | None, Parameter(converter=whole, help="KV capacity in tokens. By default 262144; 32768 on a CPU.")
    ] = None,
    seed: Annotated[int, Parameter(converter=whole, help="Of random weights.")] = 0,
    repeats: Annotated[
        int,
        Parameter(
            converter=whole,
            help="Calibrate so often, each in a process of its own, and write the middle of each figure; the repeats "
            "stay beside it, NAME-1 and so on. For hosts whose speed changes, as virtual ones' does: 3.",
        ),
    ] = 1,
    json: Json = False,
) -> int:  # fmt: skip
    """Measure what steps of a model take on this machine, and write it as a profile.

    Every graph is captured and timed: device time by padded size, host time by mode, attention by KV and rows, what
    halves that run beside each other cost each other, and what capture took. On a device that the host launches on it
    then serves generated requests for some seconds, and notes what the host takes besides.
    """
    name = device_here(device)
    if not 0 < seconds < 1e6:
        raise ConfigError(f"--seconds is {seconds:g}; it takes seconds above 0, such as {SECONDS:g}.")
    parts = [] if at_least("--repeats", repeats, 1) == 1 else [_numbered(out, i + 1) for i in range(repeats)]
    written = [("--out", out), *(("--repeats", part) for part in parts)]
    check_files(written, [model, *([] if ladder is None else [Path(ladder)])])
    needs_torch("calibrate")
    at = found(name)
    size = size_on(at.kind)
    settings = settings_of(
        max_num_reqs=("--max-num-reqs", size.max_num_reqs if max_num_reqs is None else max_num_reqs),
        max_num_tokens=("--max-num-tokens", size.max_num_tokens if max_num_tokens is None else max_num_tokens),
    )
    kv = at_least("--kv-tokens", size.kv_tokens if kv_tokens is None else kv_tokens, size.block_size)
    sizes = ladder_of(ladder, settings, config=model) or _sizes(settings, at)
    if parts:
        given = {
            "--model": model, "--device": device, "--seconds": seconds, "--max-num-reqs": settings.max_num_reqs,
            "--max-num-tokens": settings.max_num_tokens, "--kv-tokens": kv, "--seed": at_least("--seed", seed, 0),
            "--ladder": ladder,
        }  # fmt: skip
        return _repeat(out, parts, given, json=json)
    return _calibrate(
        model, out, at=at, settings=settings, sizes=sizes, kv_tokens=kv, block_size=size.block_size,
        seconds=seconds, seed=at_least("--seed", seed, 0), json=json,
    )  # fmt: skip


def _sizes(settings: Settings, at: DeviceName) -> CaptureSizes:
    """The sizes to measure: those that policies have, and beyond."""
    if at.kind == "cpu":
        from kpolicy.serving.real_run import small_ladder

        return small_ladder(settings)
    default = CaptureSizes.default(settings)
    # Mixed batches in one graph are measured as far as in pieces.
    return CaptureSizes(default.decode, default.piecewise, default.piecewise)


def _numbered(out: Path, number: int) -> Path:
    return out.with_name(f"{out.stem}-{number}{out.suffix}")


def _repeat(out: Path, parts: Sequence[Path], given: Mapping[str, object], *, json: bool) -> int:
    """Each part by a process of its own, as the state of one's host and libraries is what differs; then their middle.

    A part that fails ends it with its code and message; those before it stay.
    """
    options = [str(each) for option, value in given.items() if value is not None for each in (option, value)]
    said: list[dict[str, Any]] = []
    code = 0
    for i, part in enumerate(parts):
        sys.stderr.write(f"kpolicy: calibration {i + 1} of {len(parts)}\n")
        sys.stderr.flush()
        paths = [str(len(sys.path)), *sys.path]
        command = [sys.executable, "-c", _BOOT, *paths, "calibrate", *options, "--out", str(part), "--json"]
        part_code, printed = _ran(command)
        if part_code < 0:
            name = Signals(-part_code).name
            sys.stderr.write(f"kpolicy: calibration {i + 1} of {len(parts)} was ended by {name}\n")
            return _SIGNAL - part_code
        told = _told(printed)
        if told is None or part_code not in (0, 1):
            return part_code or 1
        # With 1 it is whole but for what its host takes while it serves: it tells after it has written.
        code = max(code, part_code)
        said.append(told)
    profiles = [read_profile(part) for part in parts]
    made = middle(profiles, shlex.join(["kpolicy", *COMMAND.get()]))
    write_profile(out, made)
    costs = made.costs
    us = {str(part): launching_us(each.costs, costs) for part, each in zip(parts, profiles, strict=True)}
    totals = {**{name: said[-1][name] for name in _TOTALS}, "profile": str(out), "repeats_launching_us": us}
    if json:
        print_json({**totals, **_summary(costs)})
    else:
        _render(totals, costs)
    return code


def _ran(command: Sequence[str]) -> tuple[int, bytes]:
    """Run a part; its code, and what it printed. An interrupt is the part's too, which may write what it has."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: S603 - our own interpreter, no shell
    try:
        printed, _ = process.communicate()
    except BaseException:
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_WRITING_S)
        process.kill()
        raise
    return process.returncode, printed


def _told(printed: bytes) -> dict[str, Any] | None:
    """A part's result, in front of which a library may have written; None without one."""
    at = printed.find(b"{\n")
    while at >= 0:
        with suppress(ValueError):
            found = parse_json(printed[at:])
            return found if "graphs" in found else None
        at = printed.find(b"{\n", at + 1)
    return None


def _calibrate(
    source: Path, out: Path, *, at: DeviceName, settings: Settings, sizes: CaptureSizes, kv_tokens: int,
    block_size: int, seconds: float, seed: int, json: bool,
) -> int:  # fmt: skip
    from kpolicy.serving.calibrate import calibrate, device_name, save_profile
    from kpolicy.serving.real_run import Serving, open_model, quiet_transformers, share_cores

    if at.kind == "cpu":
        share_cores()
    quiet_transformers()
    model = open_model(source, settings, kv_tokens=kv_tokens, block_size=block_size, seed=seed, device=at.given)
    engine = Engine("auto", model=model, device=at.executor, ladder=sizes, settings=settings, calibrate=0)
    unserved, code = "", 0
    try:
        with progress_bar("", quiet=json) as shown:
            capture(engine, at.given, shown)
            task = shown.add_task("measuring what launches take", total=100, unit="%")
            begun_s = time.perf_counter()
            # What the host itself runs is brought to one speed by its own times, and has no host beside it.
            launches = at.kind != "cpu"
            with SpeedTimer() if launches else nullcontext():
                costs = calibrate(
                    engine.executor, engine.registry, model, settings, allowance_s=seconds, least_rounds=_LEAST_ROUNDS,
                    progress=lambda share: shown.update(task, completed=100 * share),
                )  # fmt: skip
                took_s = time.perf_counter() - begun_s
                if launches:
                    serving = Serving(model=model, settings=settings, ladder=sizes, costs=costs, verify=False)
                    served, unserved, code = _served(serving, engine, shown)
                    costs = attrs.evolve(costs, served=served)
        save_profile(out, costs, model, shlex.join(["kpolicy", *COMMAND.get()]))
        captured = engine.registry.captured()
        failed = {str(key): why for key, why in getattr(engine.executor, "capture_errors", {}).items()}
        capture_s = sum(engine.registry.record(key).seconds for key in captured)
        told = (str(out), device_name(model.device), model.full_name, len(captured), capture_s, failed)
        totals = dict(zip(_TOTALS, told, strict=True))
    finally:
        engine.release()
    if json:
        print_json({**totals, **_summary(costs)})
    else:
        _render(totals, costs)
    if unserved:
        sys.stderr.write(f"kpolicy: {unserved} The profile says nothing of the scheduler's time or of slow moments.\n")
    if took_s > seconds + _BEYOND_S:
        sys.stderr.write(f"kpolicy: it took {took_s:.1f} s to measure every step twice, beyond --seconds {seconds:g}\n")
    for key, why in list(failed.items())[:3]:
        sys.stderr.write(f"kpolicy: {key} has no graph and wasn't measured: {why}\n")
    return code


def _served(serving: Serving, engine: Engine, shown: Progress) -> tuple[ServedHost | None, str, int]:
    """What the host takes besides launching while it serves; else why that isn't known, and the command's code.

    What was measured before is kept whatever happens here.
    """
    from kpolicy.serving.served import serve_for

    shown.add_task("serving for some seconds", total=None)
    try:
        served = serve_for(serving, engine)
    except KPolicyError as error:
        return None, str(error), 1
    except KeyboardInterrupt:
        return None, "serving was interrupted from the keyboard.", 130
    except Exception as error:  # noqa: BLE001 - a model's or device's own
        return None, f"serving failed: {type(error).__name__}: {error}.", 1
    if served is None:
        return None, "serving was over after too few steps to tell what the host takes.", 1
    return served, "", 0


def _summary(costs: CostTable) -> dict[str, Any]:
    """What the table says, short."""
    return {
        "costs": costs.version,
        "device_us": {
            name: {str(size): us for size, us in zip(curve.sizes, curve.us, strict=True)}
            for name, curve in (
                ("full", costs.full), ("full, mixed", costs.mixed), ("piecewise", costs.piecewise),
                ("eager", costs.eager),
            )
            if curve is not None
        },
        "host_us": {
            name: {
                "decodes": host.base_for(decodes=True, prefills=False) + host.req_us,
                "prompt": host.base_for(decodes=False, prefills=True) + host.req_us,
                "both": host.base_for(decodes=True, prefills=True) + 2 * host.req_us,
            }
            for name, host in (
                ("full", costs.host_full), ("piecewise", costs.host_piecewise), ("eager", costs.host_eager)
            )
        },
        "decode_attention_us": {
            "base": costs.decode_attention.base_us, "row": costs.decode_attention.row_us,
            "kv_token": costs.decode_attention.unit_us,
        },
        "prefill_attention_us": {
            "base": costs.prefill_attention.base_us, "pair": costs.prefill_attention.unit_us,
            "kv_token": costs.prefill_attention.kv_us,
        },
        "both_us": {"full": costs.both_us[0], "piecewise": costs.both_us[1]},
        "overlap_cost": costs.overlap_cost,
        "decode_slowdown": costs.decode_slowdown,
        "step_us": costs.step_us,
        "served": None if costs.served is None else {
            "scheduler_us": costs.served.scheduler_us, "scheduler_prompt_us": costs.served.scheduler_prompt_us,
            "host_slower": costs.served.slower(costs.host_work_us) or None,
        },
    }  # fmt: skip


def _render(totals: dict[str, Any], costs: CostTable) -> None:
    out, said = console(), _summary(costs)
    out.print(f"{totals['model']} on {totals['device']}")
    out.print(f"{some(totals['graphs'], 'graph')} in {totals['capture_s']:.1f} s")
    numbers = ("device us, least size", "device us, largest", "host us, one decode", "one prompt", "both")
    table = grid("mode", *numbers, numbers=numbers)
    for mode, curve in said["device_us"].items():
        points: list[tuple[str, float]] = list(curve.items())
        (least, first), (most, last) = points[0], points[-1]
        host = (f"{us:,.0f}" for us in said["host_us"][mode.partition(",")[0]].values())
        table.add_row(mode, f"{first:,.0f} ({least})", f"{last:,.0f} ({most})", *host)
    show(table, out)
    out.print(
        f"attention: {costs.decode_attention.row_us:.3g} us a decode row, "
        f"{1e3 * costs.decode_attention.unit_us:.3g} ns a KV token of one, "
        f"{1e6 * costs.prefill_attention.unit_us:.3g} ps a query-key pair of a prompt and "
        f"{1e3 * costs.prefill_attention.kv_us:.3g} ns a KV token it goes through"
    )
    if costs.decode_slowdown is None:
        beside = f"halves beside each other: {costs.overlap_cost:.0%} of the shorter one's time is still paid"
    else:
        beside = (
            f"beside a prompt decode steps take {costs.decode_slowdown:.2f} times as long, and add "
            f"{costs.overlap_cost:.0%} of their own time to its"
        )
    out.print(f"{beside}; {costs.step_us:,.0f} us a step that nothing covers")
    if costs.served is not None:
        took = (
            f"serving: the scheduler takes {costs.served.scheduler_us:,.0f} us a step and "
            f"{costs.served.scheduler_prompt_us:,.0f} more with prompts"
        )
        if slower := said["served"]["host_slower"]:
            took += (
                f", the host {slower['least']:.2f} to {slower['most']:.2f} times as long, {slower['mean']:.2f} in the "
                "mean"
            )
        out.print(took)
    for part, us in totals.get("repeats_launching_us", {}).items():
        if not us:
            continue  # the host runs what it launches
        out.print(f"{part}: an eager prompt and a decode in pieces take {us:,.0f} us to launch")
    out.print(f"written to {totals['profile']}")
