"""The shape of TensorRT-LLM's published study of capture sizes, out of the simulator.

Run from the repository root::

    python -m benchmarks.trtllm_ladders --date YYYY-MM-DD

What was published (TensorRT-LLM's tech post 20 and its pull requests 12895 and 13393): on 4 GB200 with inputs of 500
tokens and outputs of 2,000, sizes 64 apart beat powers of two by up to 1.3x, most at 500 to 600 clients of
DeepSeek-R1 and not at all up to 128; sizes 8 apart beat those by up to 1.15x, and lost 5% on DeepSeek-V3.2, where 210
more graphs took 17.2% of the KV tokens, against 8.6% on R1.

Dense work and attention are those of aiconfigurator-core 0.12.0 (Apache 2.0) for DeepSeek-V3.1-NVFP4 with
TensorRT-LLM's kernels on GB200, four ranks of data-parallel attention: kernel by kernel, measured by its publisher.
Memory a graph and KV room are set to the published shares. Everything else is the analytic table's. The digits aren't
those of the study; where gains begin, peak and turn is what is compared.

Where the most is hangs on which lengths the requests happen to have: numbers of clients around it are simulated with
requests of other seeds too.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

import kpolicy
from benchmarks.command import commit_of
from kpolicy.costs import AttentionCost, CostTable, Curve, analytic_costs
from kpolicy.ladders import CaptureSizes
from kpolicy.scheduling.traces import TraceRequest
from kpolicy.settings import Settings
from kpolicy.simulate import Server, simulate

RESULT = Path(__file__).parent / "results" / "trtllm_ladders.json"
RANKS = 4
MOST = 2048
CLIENTS = (16, 64, 128, 256, 500, 520, 544, 576, 608, 640, 704, 768, 896, 1024, 1536, 2048)
SEEDS = (1, 2, 3, 4, 5, 6)
"""Of other requests than those of seed 0, which all numbers of clients are simulated with"""
AROUND = (128, 500, 520, 544, 576, 608, 640, 704, 768, 896)
"""Clients that are simulated with those"""
BELOW = (1, 2, 4, *range(8, 129, 8))
LADDERS = {
    "x2": (*BELOW, *(1 << i for i in range(8, 12))),
    "+64": (*BELOW, *range(192, MOST + 1, 64)),
    "+8": (1, 2, 4, *range(8, MOST + 1, 8)),
}
"""23, 49 and 259 graphs, as in the study."""
KV_TOKENS = 330_000
KV_BYTES = 70_272  # 61 layers of 576 numbers in bf16
GRAPHS = {"R1": 0.086, "V3.2": 0.172}
"""Share of the KV tokens that 210 more graphs take, as published for each model."""

# Microseconds of everything but attention by tokens of one rank.
SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 640, 768, 1024, 1536, 2048)
DENSE_US = (
    10365, 12376, 14254, 15858, 18500, 20482, 23130, 23144, 25246, 26869, 28691, 29597, 30548, 31494, 34378, 36787,
    41705, 47159, 51945, 61142, 81008, 97315,
)  # fmt: skip


def costs(model: str) -> CostTable:
    """The step of one rank, with the memory that the model's graphs take."""
    dense = Curve(SIZES, DENSE_US)
    graph_bytes = int(GRAPHS[model] * KV_TOKENS * KV_BYTES / 210)
    return attrs.evolve(
        analytic_costs(), version=f"aiconfigurator-core 0.12.0:DeepSeek-V3.1-NVFP4:gb200:dp4, graphs of {model}",
        full=dense, piecewise=dense, eager=dense, decode_attention=AttentionCost(820.0, 5.21, 0.00655),
        prefill_attention=AttentionCost(820.0, 5.21, 0.003), graph_bytes=(graph_bytes, graph_bytes),
        capture_us=(500_000.0, 500_000.0),
    )  # fmt: skip


def requests(clients: int, laps: int, seed: int = 0) -> Iterator[TraceRequest]:
    """Inputs of 500 tokens and outputs around 2,000, all there from the start.

    The first of each client is cut to any length, so that clients don't move in step.
    """
    source = random.Random(clients + 10_000 * seed)
    for i in range(clients * laps):
        output = source.randint(1, 2000) if i < clients else source.randint(1800, 2200)
        yield TraceRequest(i, 0.0, 500, output)


def tokens_per_s(
    model: str, ladder: Sequence[int], clients: int, *, ranks: int = RANKS, laps: int = 4, seed: int = 0
) -> float:
    """Tokens a second of all ranks."""
    server = Server(
        settings=Settings(max_num_reqs=MOST, max_num_tokens=8192), kv_tokens=KV_TOKENS, kv_bytes_per_token=KV_BYTES,
        ranks=ranks, warm=True, concurrency=clients * ranks // RANKS,
    )  # fmt: skip
    result = simulate(
        requests(clients * ranks // RANKS, laps, seed), f"tensorrt_llm:enable_padding=true,max_reqs={MOST}",
        server=server, costs=costs(model), attention="mla", ladder=CaptureSizes(tuple(ladder)),
    )  # fmt: skip
    return result.tokens / result.span_s * RANKS / ranks


def study(clients: Sequence[int], *, ranks: int = RANKS, laps: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    """A row for each number of clients: the gain of each ladder over the one with fewer graphs."""
    rows = []
    for each in clients:
        start = time.perf_counter()
        row: dict[str, Any] = {"clients": each}
        for model in GRAPHS:
            rates = {
                name: tokens_per_s(model, ladder, each, ranks=ranks, laps=laps, seed=seed)
                for name, ladder in LADDERS.items()
            }
            row[model] = {
                "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
                "+64 over x2": round(rates["+64"] / rates["x2"], 4),
                "+8 over +64": round(rates["+8"] / rates["+64"], 4),
            }
        row["seconds"] = round(time.perf_counter() - start, 1)
        rows.append(row)
        print(row, flush=True)
    return rows


def most_at(rows: Sequence[dict[str, Any]]) -> int:
    """The number of clients at which sizes 64 apart gain most over powers of two."""
    best = max(rows, key=lambda row: float(row["R1"]["+64 over x2"]))
    return int(best["clients"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", default="", help="written into the result; without it nothing is written")
    parser.add_argument("--ranks", type=int, default=RANKS, help="ranks simulated; 1 stands for all by symmetry")
    arguments = parser.parse_args()
    commit = commit_of()
    rows = study(CLIENTS, ranks=arguments.ranks)
    others = {seed: study(AROUND, ranks=arguments.ranks, seed=seed) for seed in SEEDS}
    if arguments.date:
        drawn = {0: [row for row in rows if row["clients"] in AROUND], **others}
        gains = {
            each: [row["R1"]["+64 over x2"] for rows in drawn.values() for row in rows if row["clients"] == each]
            for each in AROUND
        }
        written = {
            "what": "tokens a second by capture ladder, 500 in and 2,000 out, closed loop, simulated",
            "date": arguments.date,
            "commit": commit,
            "command": f"python -m benchmarks.trtllm_ladders --date {arguments.date}",
            "kpolicy": kpolicy.__version__,
            "python": platform.python_version(),
            "costs": costs("R1").version,
            "graphs": {name: len(ladder) for name, ladder in LADDERS.items()},
            "largest_gain_of_+64_at": {str(seed): most_at(rows) for seed, rows in drawn.items()},
            "least_and_most_gain_of_+64": {str(each): [min(found), max(found)] for each, found in gains.items()},
            "published": "no gain up to 128 clients, most at 500 to 600, +8 loses where graphs take more memory",
            "rows": rows,
            "rows_of_other_seeds": {str(seed): rows for seed, rows in others.items()},
        }
        RESULT.write_text(json.dumps(written, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
