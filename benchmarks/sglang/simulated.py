"""`auto` against the replica of SGLang's rule on every trace, in simulated time: throughput and gaps between tokens.

    PYTHONPATH=integrations/kpolicy_sglang python -m benchmarks.sglang.simulated --traces FOLDER --date YYYY-MM-DD

Each trace as it was recorded, where requests arrive slower than they are served, and its first requests at once, where
they can't be, after all captures. Costs: measured on an H200 for Qwen2.5-0.5B shapes
(benchmarks/results/h200/profile_qwen05b.json), and analytic for an 8B model. The replica has SGLang's own sizes for an
H200. `auto` has its own default sizes, spaced on to SGLang's largest, a step that is full; those that kpolicy-sglang
captures there; and the very sizes of the replica, so that only the rules differ. With each it may also delay prompts
for several decode steps beside them, as it doesn't by default, and with the replica's it is told to run no decodes
beside prompts, which SGLang can't. Ratios are above 1 where `auto` is better.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import attrs

import kpolicy
from benchmarks.command import commit_of, traces_and_date
from kpolicy.costs import CostTable, analytic_costs
from kpolicy.ladders import CaptureSizes, default_sizes
from kpolicy.policies import get_policy
from kpolicy.scheduling.traces import Trace, read_trace
from kpolicy.schemas import read_profile
from kpolicy.settings import GAP_FIRST_TOKEN_LIMIT, Objective, Settings
from kpolicy.simulate import Server, SimResult, simulate
from kpolicy_sglang.ladder import default_decode_sizes

RESULTS = Path(__file__).parents[1] / "results"
FILES = (
    "azure_llm_2023_conv.csv", "azure_llm_2023_code.csv", "burstgpt_1_first400.csv", "mooncake_conversation.csv.gz",
)  # fmt: skip
REPLICA = "sglang:gpu_memory_gib=139"
AT_ONCE, SPEED = 1_500, 1e6
MOST_REQS, MOST_TOKENS = 600, 8192
LATER = Objective(first_token_limit=GAP_FIRST_TOKEN_LIMIT)
AHEAD = f"auto, first_token_limit={GAP_FIRST_TOKEN_LIMIT}"
"""How rows call `auto` where it may delay prompts"""


def loads(path: Path) -> list[tuple[str, Trace]]:
    """The trace as recorded, and its first requests at once."""
    trace = read_trace(path)
    first = attrs.evolve(trace, requests=trace.requests[:AT_ONCE])
    return [("as recorded", trace), (f"first {len(first):,} at once", first.scaled(SPEED))]


def figures(result: SimResult) -> dict[str, float]:
    """Output tokens a second from the first arrival to the last token, and gaps in milliseconds."""
    found = result.as_dict()
    busy_s = found["span_s"]
    gap = found["gap"]
    return {
        "tokens/s": found["tokens"] / busy_s,
        "gap p99 ms": gap["p99"] / 1e3,
        "gap mean ms": gap["mean"] / 1e3,
        "first token p50 ms": found["ttft"]["p50"] / 1e3,
    }


def sides(settings: Settings) -> list[tuple[str, str, CaptureSizes]]:
    """What is compared, what it captures by name, and as sizes."""
    own, stock = CaptureSizes.default(settings), get_policy(REPLICA).sizes(settings)
    decodes = default_decode_sizes(stock.decode, settings.max_num_reqs)
    ladders = (
        ("its own, to a full step", attrs.evolve(own, piecewise=default_sizes(stock.piecewise[-1]))),
        ("kpolicy-sglang's", attrs.evolve(stock, decode=decodes)),
        ("SGLang's", stock),
    )
    return [*((side, *each) for side in ("auto", AHEAD) for each in ladders), ("auto:forms=in_turn", "SGLang's", stock)]


def compare(path: Path, name: str, costs: CostTable, server: Server) -> list[dict[str, Any]]:
    """One trace under one cost table."""
    rows = []
    for load, trace in loads(path):
        replica = figures(simulate(trace, REPLICA, server=server, costs=costs))
        for policy, captured, ladder in sides(server.settings):
            rule, objective = ("auto", LATER) if policy == AHEAD else (policy, Objective())
            auto = figures(simulate(trace, rule, server=server, costs=costs, ladder=ladder, objective=objective))
            for figure, ours in auto.items():
                stock = replica[figure]
                ratio = ours / stock if figure == "tokens/s" else stock / ours
                rows.append(
                    {
                        "trace": path.name, "load": load, "costs": name, "policy": policy, "sizes": captured,
                        "figure": figure, "sglang": round(stock, 4), "auto": round(ours, 4), "ratio": round(ratio, 4),
                    }
                )  # fmt: skip
                print(*rows[-1].values(), sep="\t", flush=True)
    return rows


def main() -> int:
    given, commit = traces_and_date(__doc__), commit_of()
    measured = read_profile(RESULTS / "h200" / "profile_qwen05b.json").costs
    server = Server(settings=Settings(max_num_reqs=MOST_REQS, max_num_tokens=MOST_TOKENS), warm=True)
    rows = []
    for path in (given.traces / name for name in FILES):
        for name, costs in (("0.5B measured", measured), ("8B analytic", analytic_costs())):
            rows += compare(path, name, costs, server)
    written = {
        "what": "auto against the replica of SGLang 0.5.23 in simulated time; ratios above 1 favour auto",
        "date": given.date, "commit": commit,
        "command": "PYTHONPATH=integrations/kpolicy_sglang python -m benchmarks.sglang.simulated "
        f"--traces FOLDER --date {given.date}",
        "versions": {"kpolicy": kpolicy.__version__, "python": platform.python_version()}, "rows": rows,
    }  # fmt: skip
    (RESULTS / "sglang_simulated.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    for policy, captured, _ in sides(server.settings):
        mine = [row for row in rows if (row["policy"], row["sizes"]) == (policy, captured)]
        worst = {
            name: min(row["ratio"] for row in mine if row["figure"] == name) for name in ("tokens/s", "gap p99 ms")
        }
        print(f"least ratios of {policy} with {captured}: {worst}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
