"""Stock vLLM, the shim, and the shim with bounded steps on the comparison's loads, in simulated time.

    python -m benchmarks.vllm.simulated --traces FOLDER --date YYYY-MM-DD

Costs are what the shim measured in vLLM 0.23.0 on an H200 (benchmarks/results/h200/vllm_costs_qwen05b.json). That start
timed no whole graphs of mixed batches, which are taken to run the kernels of their pieces, and no attention of prompts
by itself, which is once left in the curves, as timed with one prompt a step, and once taken out of them at 500 TFLOPS.
A virtual machine's host runs at many speeds: `HOSTS` are shares of the host's times as measured, the second so that a
step of 2,048 tokens takes what it took in the run, 10.3 ms for stock and 5.0 for the shim. Ratios above 1 are better.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import attrs

import kpolicy
from benchmarks.command import traces_and_date
from benchmarks.vllm.loads import make_load
from kpolicy.costs import AttentionCost, CostTable, Curve, HostCost
from kpolicy.ladders import CaptureSizes
from kpolicy.policies import get_policy
from kpolicy.scheduling.traces import Trace, TraceRequest
from kpolicy.schemas import read_profile
from kpolicy.settings import Settings
from kpolicy.simulate import Server, simulate
from kpolicy_vllm.ladder import default_sizes

RESULTS = Path(__file__).parents[1] / "results"
STOCK = "vllm:version=0.23"
LIMITS = Settings(max_num_reqs=1024, max_num_tokens=8192)
LOADS = ("code-2048", "code-8192", "chat", "decode-768-64", "decode-1000-64", "burst-768")
KV_TOKENS = 1_400_000
HOSTS = {"as measured": (1.0, 1.0), "as in the run": (0.6, 0.89), "half": (0.5, 0.5), "a third": (0.35, 0.35)}
"""By name, the shares for graphs and for eager steps"""
PAIR_US = 4 * 14 * 64 * 24 / 500e6
"""A query-key pair over 14 heads of 64 and 24 layers, at 500 TFLOPS"""


class Side(NamedTuple):
    """How a server runs."""

    policy: str
    sizes: CaptureSizes
    objective: str = "throughput"
    pace: str | None = None


def sides(settings: Settings) -> dict[str, Side]:
    """Those that are compared, stock first."""
    paced = fitted(default_sizes(LIMITS, paced=True), settings)
    return {
        "stock": Side(STOCK, fitted(get_policy(STOCK).sizes(LIMITS), settings)),
        "kpolicy": Side("auto", fitted(default_sizes(LIMITS), settings)),
        "paced 1:1": Side("auto", paced, "1:1", STOCK),
        "paced latency": Side("auto", paced, "latency", STOCK),
    }


def fitted(sizes: CaptureSizes, settings: Settings) -> CaptureSizes:
    """The sizes that a step may have."""
    most = settings.max_num_tokens
    return CaptureSizes(*([n for n in each if n <= most] for each in (sizes.decode, sizes.mixed, sizes.piecewise)))


def tables(measured: CostTable) -> Iterator[tuple[str, str, CostTable]]:
    """(attention, host, costs)."""

    def without(curve: Curve) -> Curve:
        dense = [us - PAIR_US * n * n / 2 for n, us in zip(curve.sizes, curve.us, strict=True)]
        return Curve(curve.sizes, dense)

    apart = attrs.evolve(
        measured, piecewise=without(measured.piecewise), eager=without(measured.eager),
        prefill_attention=AttentionCost(unit_us=PAIR_US),
    )  # fmt: skip
    for name, table in (("in the curves", measured), ("apart", apart)):
        for host, (graphs, eager) in HOSTS.items():
            yield name, host, attrs.evolve(
                table, mixed=table.piecewise, host_full=scaled(table.host_full, graphs),
                host_piecewise=scaled(table.host_piecewise, graphs), host_eager=scaled(table.host_eager, eager),
            )  # fmt: skip


def scaled(cost: HostCost, share: float) -> HostCost:
    """A launch's time on another host."""
    return attrs.evolve(cost, base_us=cost.base_us * share)


def figures(trace: Trace, side: Side, settings: Settings, costs: CostTable) -> dict[str, float]:
    """Requests a second, and times in milliseconds."""
    server = Server(settings=settings, kv_tokens=KV_TOKENS, warm=True, steps_ahead=1, pace=side.pace)
    found = simulate(
        trace, side.policy, server=server, costs=costs, ladder=side.sizes, objective=side.objective
    ).as_dict()
    times = {f"{name} {at} ms": found[name][at] / 1e3 for name in ("ttft", "gap", "e2e") for at in ("p50", "p99")}
    return {"requests/s": len(trace) / found["span_s"], **times}


def compare(load_name: str, traces: Path, measured: CostTable) -> list[dict[str, Any]]:
    """One load on all sides and tables."""
    load = make_load(load_name, "qwen05b", traces)
    requests = [TraceRequest(i, at, prompt, output, ()) for i, (at, prompt, output) in enumerate(load.requests)]
    trace = Trace(load_name, load_name, requests)
    settings = attrs.evolve(LIMITS, max_num_tokens=load.step_tokens or LIMITS.max_num_tokens)
    rows = []
    for attention, host, costs in tables(measured):
        stock: dict[str, float] = {}
        for name, side in sides(settings).items():
            found = figures(trace, side, settings, costs)
            stock = stock or found
            for figure, value in found.items():
                better = value / stock[figure] if figure == "requests/s" else stock[figure] / value
                if name != "stock":
                    rows.append(
                        {
                            "load": load_name, "attention": attention, "host": host, "side": name, "figure": figure,
                            "stock": round(stock[figure], 3), "value": round(value, 3), "ratio": round(better, 3),
                        }
                    )  # fmt: skip
    return rows


def main() -> int:
    """Simulate all, write, and print the least and the most of each ratio over the tables."""
    given = traces_and_date(__doc__)
    measured = read_profile(RESULTS / "h200" / "vllm_costs_qwen05b.json").costs
    rows = [row for load in LOADS for row in compare(load, given.traces, measured)]
    written = {
        "what": "vLLM 0.23's rule, the shim, and the shim with bounded steps, in simulated time; Qwen2.5-0.5B, H200",
        "date": given.date, "command": f"python -m benchmarks.vllm.simulated --traces FOLDER --date {given.date}",
        "versions": {"kpolicy": kpolicy.__version__, "python": platform.python_version()}, "rows": rows,
    }  # fmt: skip
    target = RESULTS / "vllm_simulated.json"
    target.with_suffix(".tmp").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    target.with_suffix(".tmp").replace(target)
    names = dict.fromkeys((row["load"], row["side"]) for row in rows)
    for load, side in names:
        for host in HOSTS:
            cells = [row for row in rows if (row["load"], row["side"], row["host"]) == (load, side, host)]
            shown = {
                figure: "{:.2f} {:.2f}".format(*sorted(row["ratio"] for row in cells if row["figure"] == figure))
                for figure in dict.fromkeys(row["figure"] for row in cells)
            }
            print(f"{load:15} {side:14} {host:14} {shown}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
