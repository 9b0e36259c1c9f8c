"""How many of the steps that a plan was made of have just a size that SGLang captures and the plan lacks.

    python benchmarks/sglang/lacking.py PLAN [PLAN] --out OUT

made h200/sglang_lacking.json of the two plans beside it. PLAN is what `kpolicy plan TRACE --out PLAN` writes, with the
steps that it was made of; the published plans are without. SGLang pads nothing at such a size, and the plan does. Steps
of other sizes are padded further where the plan has no graph of the size that SGLang pads them to. Shares of time are
by the graphs that SGLang has, each of a profile's time; what is lost of it is by the rows of stock_vs_kpolicy.py's
slice ``qwen-between``, of decodes by size and of prompts by the middle of those that were measured: null for a plan
that wasn't run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE.parents[1]) not in sys.path:
    sys.path.append(str(HERE.parents[1]))  # run as a script

from benchmarks.sglang.make_profile import RESULTS  # noqa: E402
from benchmarks.sglang.rows import DRAWS  # noqa: E402
from kpolicy.costs import CostTable, Curve  # noqa: E402
from kpolicy.schemas import read_profile  # noqa: E402

PROFILE = RESULTS.with_name("profile_sglang_qwen05b.json")


def lacking(plan: Mapping[str, Any], costs: CostTable, results: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan's own steps have of sizes that it lacks, decodes and prompts apart.

    Args:
        plan: the plan file, with its steps.
        costs: what graphs take.
        results: the result file: SGLang's sizes, and what steps of just such sizes lose.

    Raises:
        ValueError: the plan is without its steps.
    """
    histogram = plan["planned_from"].get("histogram")
    if histogram is None:
        raise ValueError("the plan has no planned_from.histogram: make it with kpolicy plan TRACE --out PLAN")
    starts = {start["side"]: start for start in results["starts"] if start["part"] == "qwen-between"}
    tables = {"decode": histogram["decodes"]["1"], "prefill": histogram["others"]}
    lists = {name: [starts[side][f"{name}_sizes"] for side in ("stock", "planned")] for name in tables}
    own = {"decode": plan["sizes"]["decode"], "prefill": plan["sizes"]["piecewise"]}
    was_run = all(own[name] == lists[name][1] for name in own)
    lost = {row["load"]: 1 / row["ratio"] - 1 for row in (*results["rows"], *results["apart"])} if was_run else None
    curves = {"decode": costs.full, "prefill": costs.piecewise}
    return {name: _of_kind(name, tables[name], (lists[name][0], own[name]), curves[name], lost) for name in tables}


def _of_kind(
    name: str, table: Mapping[str, float], lists: tuple[Sequence[int], Sequence[int]], curve: Curve,
    lost: Mapping[str, float] | None,
) -> dict[str, Any]:  # fmt: skip
    """The shares of one kind of step.

    Args:
        name: ``decode`` or ``prefill``.
        table: how many steps there were of each size.
        lists: SGLang's sizes, the plan's.
        curve: what a step takes by the size of its graph.
        lost: what steps lose, as a share, by the load of a row; None where the plan wasn't run.
    """
    stock, planned = lists
    lacks = sorted(set(stock) - set(planned))
    steps = further = just = us = just_us = lost_us = 0.0
    for text, count in table.items():
        size = int(text)
        there, here = (min(each for each in sizes if each >= size) for sizes in lists)
        takes_us = count * curve.at(there)
        steps, us, further = steps + count, us + takes_us, further + count * (here > there)
        if size in lacks:
            just, just_us = just + count, just_us + takes_us
            of_row = f"decode {size}" if name == "decode" else "extend steps"
            lost_us += takes_us * lost[f"{of_row} {DRAWS['between']}, planned sizes"] if lost else 0.0
    shares = {"padded_further": further / steps, "just_such": just / steps, "just_such_of_time": just_us / us,
              "lost_of_time": lost_us / us}  # fmt: skip
    rounded = {share: round(value, 5) for share, value in shares.items()} | ({} if lost else {"lost_of_time": None})
    return {"sizes": len(planned), "lacks": lacks, "steps": round(steps), **rounded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path, nargs="+", metavar="PLAN", help="a plan file with the steps it was made of")
    parser.add_argument("--out", type=Path, help="where to write what is printed")
    given = parser.parse_args()
    costs, results = read_profile(PROFILE).costs, json.loads(RESULTS.read_text(encoding="utf-8"))
    found = []
    for path in given.plans:
        plan = json.loads(path.read_text(encoding="utf-8"))
        found.append({"steps_of": plan["planned_from"]["trace"], **lacking(plan, costs, results)})
    text = json.dumps({"command": "python benchmarks/sglang/lacking.py PLAN --out OUT", "plans": found}, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
