"""What planned sizes are worth beside vLLM's default list, out of sample.

Each trace is planned on the first half of its requests (replayed until the plan settles) and scored on the second half:
mean step time with the planned sizes against mean step time with vLLM's default list, on the same steps. Two questions:

- vLLM's one list for FULL and PIECEWISE graphs, with at most 60% of the default number of graphs, and then with as
  many; scored on all steps and on those of decode rows alone.
- `decode`: a list for decode rows alone, and of the default list only the sizes that they can reach. This is a harder
  rival: no size of it is above the largest batch of either half. Both lists end with the same size.

Run from the repository root, with the traces in ``../shared/traces`` (or ``--traces``)::

    python -m benchmarks.plan_worth --date YYYY-MM-DD

Costs are made up, analytic, of a publisher's kernels, and those of every profile that ships with the package: measured
steps of four models on one H200. The table of measured kernels needs ``kpolicy[aiconfigurator]``, and is left out
without.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import kpolicy
from benchmarks.command import commit_of, input_folder
from kpolicy.attention.support import parse_attention
from kpolicy.budgets import Budget
from kpolicy.costs import AttentionCost, CostTable, Curve, HostCost, analytic_costs, title_of
from kpolicy.errors import ConfigError
from kpolicy.ladders import CaptureSizes
from kpolicy.planning import Histogram, Workload, fixed_point, plan
from kpolicy.planning.plan import SMOOTHING
from kpolicy.planning.workload import DECODE, LIST
from kpolicy.policies import get_policy
from kpolicy.profiles import load_profile, profile_names
from kpolicy.scheduling.traces import Trace, read_trace
from kpolicy.settings import Settings
from kpolicy.simulate import Server
from kpolicy.trace_plan import halves, layout_of, replayed

RESULT = Path(__file__).parent / "results" / "plan_worth.json"
WORKLOADS = (
    ("conversation x1", "azure_llm_2023_conv.csv", 1.0),
    ("conversation x3", "azure_llm_2023_conv.csv", 3.0),
    ("code x1", "azure_llm_2023_code.csv", 1.0),
    ("code x6", "azure_llm_2023_code.csv", 6.0),
    ("Mooncake x0.3", "mooncake_conversation.csv.gz", 0.3),
    ("BurstGPT x600", "burstgpt_1_first400.csv", 600.0),
)
POLICY = "vllm:version=0.33"
SERVER = Server(settings=Settings(max_num_reqs=256, max_num_tokens=2048), warm=True)
CLAIMS = parse_attention("gqa").claims
FEWER = 0.6


def rising_costs() -> CostTable:
    """A step of 5 ms, 0.03 ms a decode token and 0.05 ms a prompt token, in a graph; eager is bound by its launches."""
    dense = Curve((1, 16384), (4730.0, 4700.0 + 30.0 * 16384))
    return CostTable(
        version="5 ms + 0.03 ms a decode token + 0.05 ms a prompt token",
        measured=False,
        full=dense,
        piecewise=dense,
        eager=dense,
        prefill_attention=AttentionCost(0.0, 20.0, 0.0),
        host_full=HostCost(50.0),
        host_piecewise=HostCost(2640.0),
        host_eager=HostCost(12288.0),
        step_us=300.0,
        capture_us=(150_000.0, 400_000.0),
        graph_bytes=(6 << 20, 12 << 20),
    )


def h200_costs() -> CostTable:
    """The analytic table with dense work of the shape that GEMMs were measured to have on an H200: flat, not monotone.

    Source: rows of a published table of 4096 x 4096 bf16 GEMMs (vLLM 0.24, one H200), in microseconds; scaled so that
    size 1 takes what the analytic table says.
    """
    table = analytic_costs()
    sizes = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)
    gemm = (12.6, 12.6, 13.1, 12.0, 14.0, 17.5, 23.4, 44.1, 84.4)
    dense = Curve(sizes, [us * table.full.at(1) / gemm[0] for us in gemm])
    return attrs.evolve(table, version="analytic, GEMM shape of one H200", full=dense, piecewise=dense, eager=dense)


def measured_costs() -> CostTable | None:
    """Kernels of an 8B model as aiconfigurator-core's tables have them for one H200; None where it isn't installed."""
    from kpolicy.simulate.aiconfigurator import aiconfigurator_costs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(LLAMA_3_8B), encoding="utf-8")
        try:
            return aiconfigurator_costs(path, "H200")[0]
        except ConfigError as error:
            print(f"left out: {error}")
            return None


def shipped_costs(name: str) -> CostTable:
    """What was measured, of a profile that ships; its version says which."""
    costs = load_profile(name).costs
    return attrs.evolve(costs, version=f"{name}, {costs.version}")


LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip


def decodes_of(histogram: Histogram) -> Histogram:
    """Only the steps of decode rows alone."""
    found = Histogram(histogram.source)
    found.decodes = histogram.settled().decodes
    return found


def worth(name: str, trace: Trace, costs: CostTable) -> dict[str, Any]:
    """Both questions for one trace."""
    policy, settings = get_policy(POLICY), SERVER.settings
    layout = layout_of(policy, CLAIMS, settings)
    default = policy.sizes(settings)
    first, second = halves(trace)

    def steps_of(requests: Trace, sizes: CaptureSizes) -> Histogram:
        return replayed(requests, POLICY, sizes, server=SERVER, costs=costs, attention=CLAIMS)

    def workload(histogram: Histogram, **changed: Any) -> Workload:
        return Workload(histogram=histogram, costs=costs, settings=settings, layout=attrs.evolve(layout, **changed))

    seen, held = steps_of(first, default), steps_of(second, default)
    later = workload(held)
    num_default = len(default.piecewise)
    keys_default = len(policy.plan(default, CLAIMS, settings))
    found: dict[str, Any] = {
        "trace": name,
        "requests": len(trace),
        "steps": [seen.steps, held.steps],
        "largest_decode_batch": [seen.largest(1), held.largest(1)],
        "default": {"sizes": num_default, "graphs": keys_default, "step_us": later.time_us(default) / later.steps},
    }
    alone = workload(decodes_of(held))
    for label, most in (("fewer", int(FEWER * keys_default)), ("as_many", keys_default)):
        settled = fixed_point(
            lambda sizes: seen if sizes is default else steps_of(first, sizes),
            # Each graph key takes one stream of these tables, so this budget counts keys.
            lambda steps, most=most: (plan(workload(steps), Budget(streams=most)), workload(steps)),
            default,
        )
        sizes = settled.plan.sizes
        again = workload(steps_of(second, sizes))
        graphs = len(policy.plan(sizes, CLAIMS, settings))
        found[label] = {
            "sizes": len(settled.plan.lists[LIST]),
            "graphs": graphs,
            "share_of_graphs": graphs / keys_default,
            "against_default": later.time_us(sizes) / later.time_us(default) - 1,
            "decode_steps_against_default": alone.time_us(sizes) / alone.time_us(default) - 1,
            "replayed_against_default": again.time_us(sizes) / again.steps / (later.time_us(default) / later.steps) - 1,
            "gap": settled.plan.gap,
            "settled": settled.settled,
            "list": ",".join(map(str, settled.plan.lists[LIST])),
        }
    found["decode"] = decode_worth(seen, held, default, workload)
    return found


def decode_worth(seen: Histogram, held: Histogram, default: CaptureSizes, workload: Any) -> dict[str, Any]:
    """The harder question: decode steps alone, against the default sizes that they can reach."""
    apart = {"one_list": False, "others": None}
    before, later = workload(decodes_of(seen), **apart), workload(decodes_of(held), **apart)
    reach = max(seen.largest(1), held.largest(1))
    within = [size for size in default.decode if size < reach]
    rival = CaptureSizes((*within, next(size for size in default.decode if size >= reach)))
    found: dict[str, Any] = {"reach": reach, "default_sizes": len(rival.decode)}
    for label, most in (("fewer", max(1, int(FEWER * len(rival.decode)))), ("as_many", len(rival.decode))):
        for smoothing in (SMOOTHING, 0.0):
            made = plan(before, most_sizes=most, smoothing=smoothing, largest={DECODE: rival.decode[-1]})
            key = label if smoothing else f"{label}_unsmoothed"
            found[key] = {
                "sizes": len(made.lists[DECODE]),
                "against_default": later.time_us(made.sizes) / later.time_us(rival) - 1,
            }
    return found


def table(written: dict[str, Any]) -> str:
    """The result as the tables of docs/benchmarks.md."""
    lines = []
    for each in written["tables"]:
        lines += [
            f"{title_of(each['costs'])}:",
            "",
            "| trace | steps | 60% of graphs | decode steps | as many | decode steps | decode list | 60% | as many |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in each["workloads"]:
            fewer, many, decode = row["fewer"], row["as_many"], row["decode"]
            cells = [
                row["trace"],
                f"{row['steps'][1]:,.0f}",
                f"{fewer['against_default']:+.2%}",
                f"{fewer['decode_steps_against_default']:+.2%}",
                f"{many['against_default']:+.2%}",
                f"{many['decode_steps_against_default']:+.2%}",
                f"{decode['default_sizes']} sizes",
                f"{decode['fewer']['against_default']:+.2%} ({decode['fewer_unsmoothed']['against_default']:+.2%})",
                f"{decode['as_many']['against_default']:+.2%} ({decode['as_many_unsmoothed']['against_default']:+.2%})",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=input_folder, default="../shared/traces", help="the folder with the traces")
    parser.add_argument("--date", default="", help="written into the result; without it nothing is written")
    parser.add_argument("--only", default="", help="a part of a trace's name")
    arguments = parser.parse_args()
    if not any(arguments.only in name for name, _, _ in WORKLOADS):
        parser.error(f"--only {arguments.only} is in no name of {', '.join(name for name, _, _ in WORKLOADS)}")
    tables, commit = [], commit_of()
    measured = measured_costs()
    shipped = map(shipped_costs, profile_names())
    for costs in (rising_costs(), h200_costs(), analytic_costs(), *([measured] if measured else []), *shipped):
        rows = []
        print(f"\n{costs.version}")
        for name, file, rate in WORKLOADS:
            if arguments.only not in name:
                continue
            trace = read_trace(arguments.traces / file).scaled(rate)
            begun = time.perf_counter()
            row = worth(name, trace, costs)
            rows.append(row)
            fewer, many, decode = row["fewer"], row["as_many"], row["decode"]
            print(
                f"{name:16s} {fewer['graphs']} of {row['default']['graphs']} graphs {fewer['against_default']:+.2%} "
                f"(decode {fewer['decode_steps_against_default']:+.2%}) | {many['graphs']} "
                f"{many['against_default']:+.2%} (decode {many['decode_steps_against_default']:+.2%}) | decode list "
                f"{decode['fewer']['sizes']} of {decode['default_sizes']} {decode['fewer']['against_default']:+.2%} "
                f"(unsmoothed {decode['fewer_unsmoothed']['against_default']:+.2%}), {decode['as_many']['sizes']} "
                f"{decode['as_many']['against_default']:+.2%} "
                f"(unsmoothed {decode['as_many_unsmoothed']['against_default']:+.2%}) "
                f"[{time.perf_counter() - begun:.0f} s]",
                flush=True,
            )
        tables.append({"costs": costs.version, "workloads": rows})
    if arguments.date:
        written = {
            "what": "mean step time with sizes planned on the first half of a trace against vLLM's default list, "
            "on the second half's steps",
            "smoothing": SMOOTHING,
            "date": arguments.date,
            "commit": commit,
            "command": f"python -m benchmarks.plan_worth --date {arguments.date}",
            "kpolicy": kpolicy.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "policy": POLICY,
            "settings": attrs.asdict(SERVER.settings),
            "tables": tables,
        }
        RESULT.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
