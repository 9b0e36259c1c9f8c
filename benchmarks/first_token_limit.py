"""What prompts lose, and what is gained, where throughput may delay them for several decode steps beside them.

`auto` for throughput with a `first_token_limit` of 1, its default, and of 1.25, that of objectives that weigh the gap,
each against the replica of vLLM's rule on the same requests in simulated time. Ratios are above 1 where `auto` is
better. Load 0.7 asks 0.7 times of what the device can serve, 1.3 more than that: what it can is told by
`full_and_piecewise` with all requests there at once. Of each recorded trace a few requests are served, so that what is
asked beyond that has gone on for a short while only; of a generated one there are many.

Run from the repository root, with the traces in ``../shared/traces`` (or ``--traces``)::

    python -m benchmarks.first_token_limit --date YYYY-MM-DD --json benchmarks/results/first_token_limit.json

Costs are those of the profiles that ship: measured steps of four models on one H200. Without ``--json`` nothing is
written. Where a cell fails, or all is interrupted, the file has those that are done, and the exit status isn't 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import attrs

import kpolicy
from benchmarks import stretches
from benchmarks.command import command_line, commit_of, input_folder, output_file
from kpolicy.errors import TraceError
from kpolicy.profiles import load_profile
from kpolicy.scheduling.generator import generate_trace
from kpolicy.scheduling.traces import Trace, read_trace
from kpolicy.settings import GAP_FIRST_TOKEN_LIMIT, Objective, Settings
from kpolicy.simulate import Server, SimResult, simulate

RESULT = Path(__file__).parent / "results" / "first_token_limit.json"
PROFILES = ("llama-3.1-8b-h200", "qwen2.5-0.5b-h200", "llama-3.2-1b-h200", "deepseek-v2-lite-h200")
FILES = {
    "conversation": stretches.FILES["conversation"], "code": stretches.FILES["code"],
    "Mooncake": stretches.FILES["mooncake"], "BurstGPT": stretches.FILES["burstgpt"],
}  # fmt: skip
"""By the name that rows have"""
GENERATED = "generated"
LOADS = {1.3: 150, 0.7: 300}
"""Requests of a recorded trace by how many times what the device can serve is asked of it"""
MANY = 2_000
"""Requests of the generated one"""
LIMITS = (1.0, GAP_FIRST_TOKEN_LIMIT)
LONGEST = 16_384
"""Tokens of a request at most"""
SERVER = Server(settings=Settings(max_num_reqs=256, max_num_tokens=2048), kv_tokens=1 << 18, warm=True)
FIGURES = ("tokens_per_s", "ttft_p50_us", "ttft_p99_us", "gap_p50_us", "gap_p99_us")


def trace_folder(text: str) -> Path:
    """An option's folder, which has all the traces."""
    path = input_folder(text)
    missing = [name for name in FILES.values() if not (path / name).is_file()]
    if missing:
        raise argparse.ArgumentTypeError(
            f"{text} has no {', '.join(missing)}; give a folder that has {', '.join(FILES.values())}"
        )
    return path


def requests_of(trace: str, folder: Path, load: float) -> Trace:
    """The requests of that name, as they arrived."""
    if trace == GENERATED:
        return generate_trace(seed=0, num_requests=MANY)
    return stretches.middle(read_trace(folder / FILES[trace]), LOADS[load], longest=LONGEST)


def figures(result: SimResult) -> dict[str, float]:
    """Tokens a second, and percentiles of the time to the first token and of gaps in microseconds."""
    ttft, gap = result.ttft, result.gap
    values = (result.tokens / result.span_s, ttft.p50, ttft.p99, gap.p50, gap.p99)
    return {name: round(value, 1) for name, value in zip(FIGURES, values, strict=True)}


def ratio(figure: str, ours: dict[str, float], theirs: dict[str, float]) -> float:
    """Above 1 where ours is better; not a number where either is 0, as gaps are where nobody has two tokens."""
    if not ours[figure] or not theirs[figure]:
        return math.nan
    found = ours[figure] / theirs[figure]
    return found if figure == "tokens_per_s" else 1 / found


def ratios(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    """The ratio of each figure that has one."""
    found = {name: ratio(name, ours, theirs) for name in FIGURES}
    return {name: round(each, 3) for name, each in found.items() if not math.isnan(each)}


def cell(profile: str, trace: str, folder: Path, load: float) -> dict[str, Any]:
    """One trace at one load by one profile's costs."""
    of = load_profile(profile)
    server = attrs.evolve(SERVER, kv_bytes_per_token=of.kv_bytes_per_token)
    requests = requests_of(trace, folder, load)

    def served(arriving: Trace, policy: str, objective: Objective | str = "throughput") -> SimResult:
        return simulate(arriving, policy, server=server, costs=of.costs, objective=objective)

    at_once = attrs.evolve(requests, requests=[attrs.evolve(each, arrival_s=0.0) for each in requests.requests])
    rate = load * requests.span_s / served(at_once, "full_and_piecewise").span_s
    arriving = requests.scaled(rate)
    vllm = figures(served(arriving, "vllm"))
    found: dict[str, Any] = {
        "profile": profile, "trace": trace, "load": load, "requests": len(requests), "rate": round(rate, 4),
        "vllm": vllm, "auto": {},
    }  # fmt: skip
    for limit in LIMITS:
        result = served(arriving, "auto", Objective(first_token_limit=limit))
        ours = figures(result)
        found["auto"][str(limit)] = {
            **ours,
            "ratios": ratios(ours, vllm),
            "steps": {name: mode.steps for name, mode in result.modes.items()},
        }
    return found


def table(rows: list[dict[str, Any]], profiles: tuple[str, ...] = PROFILES) -> str:
    """The table of docs/simulate.md: each figure's ratios, from the least to the most of the four traces, or of one."""
    lines = [
        "| profile | requests | load | limit | tokens/s | first token p50 | p99 | gap p50 | p99 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups = (("recorded", tuple(FILES)), (GENERATED, (GENERATED,)))
    for profile, (name, traces), load, limit in itertools.product(profiles, groups, sorted(LOADS), LIMITS):
        of = [
            row["auto"][str(limit)]["ratios"]
            for row in rows
            if (row["profile"], row["load"]) == (profile, load) and row["trace"] in traces
        ]
        cells = [told([each[figure] for each in of if figure in each]) for figure in FIGURES]
        lines.append(f"| {' | '.join((profile.removesuffix('-h200'), name, str(load), str(limit), *cells))} |")
    return "\n".join(lines)


def told(ratios: list[float]) -> str:
    """From the least to the most, bold where what is told is below 0.99."""
    texts = [f"{each:.2f}" if each < 100 else f"{each:.0f}" for each in sorted(ratios)]
    texts = [f"**{each}**" if float(each) < 0.99 else each for each in texts]
    return " to ".join((texts[0], texts[-1])[: len(texts)]) if texts else "none"


def finished(cells: Sequence[tuple[str, str, Path, float]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The place of each cell and its row, as they are done; of one that fails only why is told."""
    with ProcessPoolExecutor() as pool:
        places = {pool.submit(cell, *each): place for place, each in enumerate(cells)}
        for future in as_completed(places):
            profile, trace, _, load = cells[places[future]]
            try:
                row = future.result()
            except Exception as error:  # noqa: BLE001 - the others are done all the same
                print(f"{profile} {trace} {load} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                continue
            print(f"{profile} {trace} {load}")
            for limit, ours in row["auto"].items():
                found = (f"{ours['ratios'].get(name, math.nan):6.3f}" for name in FIGURES)
                print(f"    {limit:5s}", *found, ours["steps"], flush=True)
            yield places[future], row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=trace_folder, default="../shared/traces", help="the folder with the traces")
    parser.add_argument("--date", default="", help="written into the result")
    parser.add_argument("--json", type=output_file, help="the file that the result is written to; without it none is")
    arguments = parser.parse_args(argv)
    try:
        for name in FILES.values():
            read_trace(arguments.traces / name)
    except TraceError as error:
        parser.error(f"argument --traces: {error}")
    commit = commit_of()
    cells = [*itertools.product(PROFILES, (*FILES, GENERATED), [arguments.traces], LOADS)]
    done: dict[int, dict[str, Any]] = {}
    try:
        for place, row in finished(cells):
            done[place] = row  # noqa: PERF403 - those before an interrupt are kept
    finally:
        rows = [done[place] for place in sorted(done)]
        if arguments.json is not None and rows:
            written = {
                "what": "auto for throughput by first_token_limit against the replica of vLLM's rule in simulated "
                "time; ratios above 1 favour auto",
                "date": arguments.date,
                "commit": commit,
                "command": command_line("benchmarks.first_token_limit", argv),
                "kpolicy": kpolicy.__version__,
                "python": platform.python_version(),
                "settings": attrs.asdict(SERVER.settings),
                "profiles": {name: load_profile(name).costs.version for name in PROFILES},
                "kv_tokens": SERVER.kv_tokens,
                "rows": rows,
            }
            text = json.dumps(written, indent=1, allow_nan=False) + "\n"
            arguments.json.write_text(text, encoding="utf-8")
    if len(rows) < len(cells):
        print(f"{len(cells) - len(rows)} of {len(cells)} cells failed, so there is no table.", file=sys.stderr)
        return 1
    print(f"\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
