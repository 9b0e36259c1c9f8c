"""A trace served on a GPU by every policy: the same arrivals, by the wall clock, repeated in turn.

The pieces are those of `kpolicy run`: one model, `serve_model`, and an Engine a policy over one executor's graphs.
Fixed policies have the default ladder; replicas of serving engines have those engines' own lists. `auto` decides by a
table measured in the same process, or by ``--profile``. Rounds go over all policies, in another order each time.

A policy may have an objective behind it, and then ``paced``: steps that have decodes take as many prompt tokens as that
objective says of the gap, within what the replica's whole steps would take (`kpolicy run --pace vllm`). ``auto 1:1:1
paced`` weighs both alike and has no first token later than the best way, or the replica, gives it. Policies of
``--also`` are served in the first ``--also-rounds`` rounds alone.

A load is a trace's name and how its arrivals are spaced: ``x6`` is six times as fast, ``saturated`` asks 1.3 times of
what the machine can do, by the measured table under `auto`.

Figures: generated tokens a second, until the last request is done (`tokens_per_s`), and until the last one comes
(`tokens_per_s_arriving`): with few requests a good part of the whole time is the last ones' own steps, which no policy
shortens, so that policies that keep up look alike. `after_arrivals_s` says how long that is. p50 and p99 of time to
first token and of the gap between a request's tokens, by when each was there (`kpolicy.scheduling.token_gaps`):
beside a prompt when the decode half was done on the device. `steps` and failures are the round's own.
`value`, `low` and `high` are the mean of the rounds and its 95% interval; `ratio_to_vllm_replica` is the mean of the
rounds' own ratios, above 1 where the policy is better, with the interval from `ratio_low` to `ratio_high`. `served` is
the requests that every round served at least. Runs are short and many, as hosts change their speed; a round that a run
was cut off in is served again, whole. The table has whole rounds alone: one that not every policy of its round served
to its end is left out. `date` is the run's, as a load may have been served in two: of those the table has the older one
too where the newer one has fewer rounds, requests or policies.

Run: ``python -m benchmarks.gpu.end_to_end --config FILE --traces ../shared/traces --out FILE``; a run goes on where its
file ends. ``--summary FILES... --json end_to_end.json`` makes the table.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import input_file, input_folder, output_file, profile
from benchmarks.gpu.common import (
    Results,
    add_options,
    config_of,
    header,
    host_noise,
    interval_of_mean,
    load_model,
    open_engines,
)
from benchmarks.stretches import FILES, middle

POLICIES = ("auto", "vllm", "sglang", "full_and_piecewise", "piecewise", "full", "split", "eager")
PACED_BY = "vllm"
SATURATED = 1.3
WARM = 4
"""Such a part of the requests is served once by each policy, unmeasured"""
BETTER_UP = {
    "tokens_per_s": True, "tokens_per_s_arriving": True, "ttft_p50_us": False, "ttft_p99_us": False,
    "gap_p50_us": False, "gap_p99_us": False,
}  # fmt: skip


def requests_of(folder: Path, load: str, model: Any, count: int) -> Any:
    """`count` requests from a trace's middle, as they arrived, those that the model has positions for."""
    from kpolicy.scheduling.traces import read_trace

    return middle(read_trace(folder / FILES[load.partition(" ")[0]]), count, longest=model.max_model_len)


def positive(text: str) -> int:
    """A number of rounds as an option has it.

    Raises:
        argparse.ArgumentTypeError: it isn't a whole number from 1 up.
    """
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rounds; give a whole one from 1 up")
    return int(text)


def load_of(text: str) -> str:
    """A load as an option has it.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    name, _, spacing = text.partition(" ")
    if name not in FILES or not re.fullmatch(r"saturated|x\d+(\.\d+)?", spacing) or spacing.strip("x0.") == "":
        raise argparse.ArgumentTypeError(
            f"{text!r} is no load: a trace, one of {', '.join(FILES)}, and how its arrivals are spaced, as in "
            "'code x6' or 'code saturated'"
        )
    return text


def paced(spec: str) -> bool:
    """Whether a policy's steps are bounded."""
    return spec.split()[2:] == ["paced"]


def policy_of(text: str) -> str:
    """A policy as an option has it.

    Raises:
        argparse.ArgumentTypeError: it is none, or its objective isn't.
    """
    from kpolicy.errors import ConfigError
    from kpolicy.policies import get_policy
    from kpolicy.settings import Objective

    policy, *more = text.split() or [""]
    try:
        get_policy(policy)
        if more:
            Objective.parse(more[0])
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if more[1:] not in ([], ["paced"]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is a policy, an objective and {' '.join(more[1:])!r}; behind an objective may be 'paced' alone, "
            "as in 'auto 1:1:1 paced'"
        )
    return " ".join([policy, *more])


def in_round(policies: Sequence[str], round_: int, also: Sequence[str], also_rounds: int) -> list[str]:
    """The policies of a round, in its order: each round begins with the next policy."""
    here = [spec for spec in policies if round_ < also_rounds or spec not in also]
    return here[round_ % len(here) :] + here[: round_ % len(here)]


def rate_of(load: str, trace: Any, engine: Any, model: Any) -> float:
    """The factor on the arrivals."""
    from kpolicy.serving.real_run import saturated_s

    spacing = load.partition(" ")[2]
    if spacing != "saturated":
        return float(spacing.removeprefix("x"))
    work_s = saturated_s(trace, engine, engine.costs, num_blocks=model.num_blocks, block_size=model.block_size)
    return SATURATED * trace.span_s / work_s if trace.span_s else 1.0


class Arriving:
    """Told each step: the tokens of those that end before the last request comes.

    Args:
        trace: the requests.
    """

    def __init__(self, trace: Any) -> None:
        self.span_s: float = trace.requests[-1].arrival_s - trace.requests[0].arrival_s
        self.tokens = 0

    def __call__(self, _index: int, inputs: Any, outputs: Any, _batcher: Any, start_us: float) -> None:
        if start_us + outputs.cycle_us <= self.span_s * 1e6:
            self.tokens += len(inputs.wanted) + inputs.numbers.num_decodes * (max(1, len(outputs.tokens)) - 1)


def counted(engine: Any) -> tuple[Counter[str], int]:
    """Steps by mode and failed replays of an Engine's whole life."""
    stats = engine.stats
    return Counter({mode: of_mode.steps for mode, of_mode in stats.by_mode.items()}), stats.replay_failures


def figures(result: Any, arriving: Arriving, steps: Counter[str], replay_failures: int) -> dict[str, Any]:
    """What one run comes to; steps and failures are its own."""
    return {
        "tokens_per_s": result.tokens / result.span_s if result.span_s else math.nan,
        "tokens_per_s_arriving": arriving.tokens / arriving.span_s if arriving.span_s else math.nan,
        "after_arrivals_s": result.span_s - arriving.span_s,
        "ttft_p50_us": result.ttft_us[0], "ttft_p99_us": result.ttft_us[1],
        "gap_p50_us": result.gap_us[0], "gap_p99_us": result.gap_us[1],
        "served": result.served, "span_s": result.span_s, "interrupted": result.interrupted,
        "refused": dict(result.refused), "replay_failures": replay_failures, "steps": dict(steps),
    }  # fmt: skip


def collect(options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Serve the loads of one model: rounds that the file doesn't have."""
    import attrs
    import torch

    from kpolicy.heap import frozen_heap
    from kpolicy.serving.real_run import Serving, quiet_transformers, serve_model
    from kpolicy.settings import Settings
    from kpolicy.trace_run import Prompts

    quiet_transformers()
    config, tiny = config_of(options), options.tiny
    results = Results(options.out, header(options, "end_to_end", argv))
    if results.data.setdefault("requests", options.requests) != options.requests:
        sys.exit(
            f"{options.out} has rounds of {results.data['requests']} requests and --requests is {options.requests}; "
            "give another --out."
        )
    policies = [*options.policies, *options.also]
    if twice := sorted(spec for spec, count in Counter(policies).items() if count > 1):
        sys.exit(f"{', '.join(twice)}: given twice. A policy is in --policies or in --also, once.")
    also = {"policies": options.also, "rounds": options.also_rounds if options.also else 0}
    if results.cells:
        # A file of before had none, and all of its rounds are whole.
        results.data.setdefault("also", {"policies": [], "rounds": 0})
    if results.data.setdefault("also", also) != also:
        sys.exit(f"{options.out} has rounds by --also {results.data['also']} and now it is {also}; give another --out.")
    settings = Settings(max_num_reqs=8 if tiny else 256, max_num_tokens=64 if tiny else 2048)
    model = load_model(
        config,
        options,
        kv_tokens=1 << 16 if tiny else 1 << 18,
        max_model_len=16_384,
        max_num_reqs=settings.max_num_reqs,
    )
    results.data["host_noise"] = host_noise()
    costs = None
    if options.profile:
        from kpolicy.profiles import load_profile

        costs = load_profile(options.profile).costs
    with torch.no_grad():
        from kpolicy.ladders import default_sizes

        engines, took = open_engines(
            model, settings, policies, ladder=default_sizes(64 if tiny else 2048), costs=costs,
            calibrate_s=0.5 if tiny else options.calibrate, correct=not options.no_correct,
        )  # fmt: skip
        results.data |= {**took, "support": str(model.support)}
        print(f"{model!r}: {took}, {results.elapsed():.0f} s", flush=True)
        filled, prompts = Serving(model=model, settings=settings, verify=False), Prompts(0, vocab=model.vocab)
        servings = {spec: attrs.evolve(filled, pace=PACED_BY if paced(spec) else None) for spec in policies}
        rates = results.data.setdefault("rates", {})
        for load in options.loads:
            trace = requests_of(options.traces, load, model, options.requests)
            rates.setdefault(load, rate_of(load, trace, engines.get("auto", engines[policies[0]]), model))
            scaled = trace.scaled(rates[load])
            _forget_parts(results.cells, load, policies, also)
            warm = trace.window(0, max(trace.span_s / WARM, 1e-3)).scaled(1e3)
            for spec, engine in engines.items():  # kernels are compiled when a step first needs them
                if results.elapsed() < options.seconds:
                    serve_model(warm, engine, servings[spec], prompts)
            print(f"{load}: {len(trace)} requests, rate {rates[load]:.3g}, {results.elapsed():.0f} s", flush=True)
            for round_ in range(options.rounds):
                for spec in in_round(policies, round_, options.also, options.also_rounds):
                    name = f"{load}/{round_}/{spec}"
                    if (
                        not results.cells.get(name, {"interrupted": True})["interrupted"]
                        or results.elapsed() > options.seconds
                    ):
                        continue
                    host = host_noise(0.05)
                    arriving, (steps, failures) = Arriving(scaled), counted(engines[spec])
                    with frozen_heap():
                        result, _ = serve_model(
                            scaled, engines[spec], servings[spec], prompts, label=spec, on_step=arriving
                        )  # fmt: skip
                    if result.interrupted:
                        sys.exit(f"{name} was interrupted: it doesn't count, and is run again when this goes on.")
                    steps_now, failures_now = counted(engines[spec])
                    found = figures(result, arriving, steps_now - steps, failures_now - failures)
                    results.put(name, {**found, "host_us": host["p50_us"]})
                    print(name, {k: round(v) for k, v in found.items() if k in BETTER_UP}, flush=True)
    results.data["costs"] = {
        spec: engine.costs.version for spec, engine in engines.items() if spec.split()[0] == "auto"
    }  # fmt: skip
    results.write()
    for row in summarise(results.data):
        if row["figure"] in ("tokens_per_s", "tokens_per_s_arriving", "gap_p99_us"):
            ratio = [row[name] for name in ("ratio_to_vllm_replica", "ratio_low", "ratio_high")]
            print(row["load"], row["figure"], row["policy"], row["value"], *ratio, row["repeats"], flush=True)
    return 0


def _forget_parts(cells: dict[str, Any], load: str, policies: Sequence[str], also: dict[str, Any]) -> None:
    """Drop what is there of a round that a run was cut off in: a round is compared within one run."""
    for round_ in {name.split("/")[1] for name in cells if name.split("/")[0] == load}:
        here = in_round(policies, int(round_), also["policies"], also["rounds"])
        if any(f"{load}/{round_}/{spec}" not in cells for spec in here):
            for name in [name for name in cells if name.startswith(f"{load}/{round_}/")]:
                del cells[name]


def whole_rounds(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A file's cells of the rounds that all of their policies have."""
    done = {name: cell for name, cell in data["cells"].items() if not cell.get("interrupted")}
    policies = sorted({name.split("/")[2] for name in data["cells"]})
    also = data.get("also", {"policies": [], "rounds": 0})
    served = Counter(name.rpartition("/")[0] for name in done)
    wanted = {at: len(in_round(policies, int(at.split("/")[1]), also["policies"], also["rounds"])) for at in served}
    return {name: cell for name, cell in done.items() if served[at := name.rpartition("/")[0]] == wanted[at]}


def summarise(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of one model's file, by its whole rounds."""
    runs: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for name, cell in whole_rounds(data).items():
        load, round_, policy = name.split("/")
        runs.setdefault((load, policy), {})[int(round_)] = cell
    rows = []
    for (load, policy), rounds in runs.items():
        theirs = runs.get((load, "vllm"), {})
        for figure, up in BETTER_UP.items():
            # Older files have no tokens until the last request came.
            if any(figure not in cell for cell in (*rounds.values(), *theirs.values())):
                continue
            value, low, high = interval_of_mean([cell[figure] for cell in rounds.values()])
            ratios = [_ratio(cell[figure], theirs[i][figure], up) for i, cell in rounds.items() if i in theirs]
            ratio, worst, best = interval_of_mean(ratios) if ratios else (math.nan,) * 3
            rows.append({
                "model": data["model"], "date": data.get("date", "unstated"), "trace": load.partition(" ")[0],
                "rate": round(data["rates"][load], 4), "load": load, "figure": figure, "policy": policy,
                "value": round(value, 1), "low": _rounded(low), "high": _rounded(high),
                "ratio_to_vllm_replica": _rounded(ratio, 4), "ratio_low": _rounded(worst, 4),
                "ratio_high": _rounded(best, 4), "repeats": len(rounds),
                "served": min(cell["served"] for cell in rounds.values()),
            })  # fmt: skip
    return rows


def table(files: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All files' rows. Of two runs of a model's load the newer stands alone if it has all that the older one has.

    That is its policies, and as many rounds and requests of each. Of two runs of one day the newer is the one whose
    costs were measured later. A run without a date replaces none, and none replaces it.
    """
    runs = [summarise(data) for data in files]
    when = [_when(data) for data in files]
    loads: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for i, rows in enumerate(runs):
        for row in rows:
            loads.setdefault((row["model"], row["load"], i), []).append(row)

    def replaced(row: dict[str, Any], i: int) -> bool:
        own = loads[row["model"], row["load"], i]
        return row["date"] != "unstated" and any(
            (model, load) == (row["model"], row["load"])
            and when[j][0] != "unstated"
            and when[j] > when[i]
            and all(
                any(
                    newer["policy"] == each["policy"]
                    and all(newer[count] >= each[count] for count in ("repeats", "served"))
                    for newer in other
                )
                for each in own
            )
            for (model, load, j), other in loads.items()
        )

    return [row for i, rows in enumerate(runs) for row in rows if not replaced(row, i)]


def _when(data: dict[str, Any]) -> tuple[str, str]:
    """(a run's date, when its costs were measured): what tells which of two is the newer one."""
    measured = re.findall(r"measured (\d{4}-\d\d-\d\dT[\d:+]+)", " ".join(map(str, data.get("costs", {}).values())))
    return data.get("date", "unstated"), max(measured, default="")


def _ratio(mine: float, other: float, up: bool) -> float:
    over, under = (mine, other) if up else (other, mine)
    return over / under if under else math.nan


def _rounded(value: float, digits: int = 1) -> float | None:
    return None if math.isnan(value) else round(value, digits)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, or make the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    argv = sys.argv[1:] if argv is None else argv
    if "--summary" in argv:
        parser.add_argument("--summary", type=input_file, nargs="+", required=True)
        parser.add_argument("--json", type=output_file, required=True)
        options = parser.parse_args(argv)
        rows = table([json.loads(file.read_text()) for file in options.summary])
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
        return 0
    add_options(parser, seconds=400.0)
    parser.add_argument("--traces", type=input_folder, default="../shared/traces")
    parser.add_argument("--loads", nargs="+", type=load_of, default=["code saturated", "conversation saturated"])
    parser.add_argument("--policies", nargs="+", type=policy_of, default=list(POLICIES))
    parser.add_argument("--also", nargs="+", type=policy_of, default=[], help="policies of the first rounds alone")
    parser.add_argument("--also-rounds", type=positive, default=1)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calibrate", type=float, default=8.0, help="seconds to measure costs")
    parser.add_argument("--profile", type=profile, help="costs that auto decides by, a file or a name; else measured")
    parser.add_argument("--no-correct", action="store_true", help="auto keeps its table whatever steps take")
    return collect(parser.parse_args(argv), argv)


if __name__ == "__main__":
    sys.exit(main())
