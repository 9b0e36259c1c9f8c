"""The plans beside SGLang's results: what they rest on, what they lack, and what the page says of that."""

import copy
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.sglang.lacking import PROFILE, RESULTS, lacking
from benchmarks.sglang.make_profile import profile
from benchmarks.sglang.rows import DRAWS
from kpolicy.schemas import read_plan, read_profile

DOCS = (Path(__file__).parents[2] / "docs" / "measured_sglang.md").read_text(encoding="utf-8")
WORDS = " ".join(DOCS.split())
PUBLISHED = json.loads(RESULTS.read_text(encoding="utf-8"))
MEAN = RESULTS.with_name("profile_sglang_qwen05b_mean.json")
PLANS = [RESULTS.with_name(name) for name in ("plan_sglang_qwen05b.json", "plan_sglang_qwen05b_60.json")]
COSTS = read_profile(PROFILE).costs
STOCK = next(each for each in PUBLISHED["starts"] if (each["part"], each["side"]) == ("qwen-between", "stock"))


def of_draw(draw):
    """The rows of the slice by their load, less the words of the draw."""
    words = f" {DRAWS[draw]}, planned sizes"
    return {row["load"].removesuffix(words): row for row in PUBLISHED["apart"] if row["load"].endswith(words)}


def a_plan(decodes, others, path=PLANS[0]):
    plan = json.loads(path.read_text(encoding="utf-8"))
    plan["planned_from"]["histogram"] = {"decodes": {"1": decodes}, "others": others}
    return plan


def test_the_mean_tells_graphs_apart_that_most_starts_do_not():
    """By the published mean each of SGLang's decode graphs takes longer than the last, by the median not all."""
    by_mean = profile(PUBLISHED, [15, 16, 20, 22], mean=True)
    assert by_mean == read_profile(MEAN)
    by_median = profile(PUBLISHED, [15, 16, 20, 22])
    rises = [
        all(one < more for one, more in pairwise(map(each.costs.full.at, STOCK["decode_sizes"])))
        for each in (by_mean, by_median)
    ]
    assert rises == [True, False]


def test_the_plan_of_60_has_all_decode_sizes():
    """It rests on the mean, its decodes pad no further than SGLang's, and its prompts are SGLang's sizes too."""
    plan = read_plan(PLANS[1])
    assert plan.costs_version == read_profile(MEAN).costs.version
    assert list(plan.sizes.decode) == STOCK["decode_sizes"]
    assert set(plan.sizes.piecewise) < set(STOCK["prefill_sizes"])
    assert (len(plan.sizes.piecewise), max(plan.sizes.piecewise)) == (24, max(STOCK["prefill_sizes"]))


def test_shares_of_steps_by_size():
    """2 and 12 are lacked, 11 is padded further by it, 8 isn't; 300 goes further to 896, and 320 is just a size."""
    found = lacking(a_plan({"2": 1.0, "8": 5.0, "11": 2.0, "12": 2.0}, {"300": 3.0, "320": 1.0}), COSTS, PUBLISHED)
    decode, prefill = found["decode"], found["prefill"]
    assert (decode["lacks"], decode["steps"], decode["sizes"]) == ([2, 12, 16, 40], 10, 32)
    assert (decode["just_such"], decode["padded_further"]) == (0.3, 0.5)
    assert (prefill["just_such"], prefill["padded_further"]) == (0.25, 1.0)
    at = COSTS.full.at
    us = [1 * at(2), 5 * at(8), 2 * at(12), 2 * at(12)]
    assert decode["just_such_of_time"] == pytest.approx((us[0] + us[3]) / sum(us), abs=1e-5)
    rows = of_draw("between")
    lost = [1 / rows[f"decode {size}"]["ratio"] - 1 for size in (2, 12)]
    assert decode["lost_of_time"] == pytest.approx((us[0] * lost[0] + us[3] * lost[1]) / sum(us), abs=1e-5)


def test_what_a_plan_loses_that_was_not_run_is_not_known():
    """Rows are of one plan's graphs; another's loss is null, and a plan without its steps is refused."""
    found = lacking(a_plan({"1": 1.0}, {"300": 1.0}, PLANS[1]), COSTS, PUBLISHED)
    assert found["decode"]["lost_of_time"] is found["prefill"]["lost_of_time"] is None
    with pytest.raises(ValueError, match="kpolicy plan TRACE --out PLAN"):
        lacking(json.loads(PLANS[0].read_text(encoding="utf-8")), COSTS, PUBLISHED)


def test_the_published_shares_are_of_the_published_plans():
    """Each entry has its plan's sizes, and docs/measured_sglang.md quotes its shares."""
    found = json.loads(RESULTS.with_name("sglang_lacking.json").read_text(encoding="utf-8"))["plans"]
    for each, path in zip(found, PLANS, strict=True):
        plan = json.loads(path.read_text(encoding="utf-8"))
        sizes = {"decode": plan["sizes"]["decode"], "prefill": plan["sizes"]["piecewise"]}
        assert each["steps_of"] == plan["planned_from"]["trace"]
        for name, own in sizes.items():
            assert each[name]["lacks"] == sorted(set(STOCK[f"{name}_sizes"]) - set(own))
            assert each[name]["sizes"] == len(own)
    decode, prefill = found[0]["decode"], found[0]["prefill"]
    assert (
        f"{decode['padded_further']:.0%} of the decodes and {prefill['padded_further']:.0%} of the prompts are padded "
        "further" in WORDS
    )
    assert f"{decode['just_such']:.1%} of the decodes and {prefill['just_such']:.1%} of the prompts have" in WORDS
    assert f"{decode['lost_of_time']:.2%} of the time that the plan's decodes take" in WORDS
    planned = found[1]["prefill"]
    assert f"padded further, {planned['padded_further']:.0%} of them, and {planned['just_such']:.1%} have" in WORDS


@pytest.mark.parametrize(
    ("draw", "kind", "begins"),
    [("between", "decode", "2, 12, 16, 40 decodes"), ("between", "extend", "prompts of 12 sizes, 8 to 960 tokens"),
     ("below", "decode", "11, 15, 39 decodes"), ("below", "extend", "prompts of 12 sizes, 7 to 959 tokens")],
)  # fmt: skip
def test_the_page_has_what_sizes_between_take(draw, kind, begins):
    """The table's medians, ratios and intervals are the rows', each size's own with them."""
    rows = of_draw(draw)
    whole = rows[f"{kind} steps"]
    sizes = {int(load.split()[1]): row["ratio"] for load, row in rows.items() if load[len(kind) + 1 :].isdigit()
             and load.startswith(kind)}  # fmt: skip
    (line,) = [line for line in DOCS.splitlines() if line.startswith(f"| {begins} |")]
    words = ", ".join(f"{sizes[size]:.3f}" for size in sorted(sizes))
    own = f": {words}" if kind == "decode" else f", each from {min(sizes.values()):.3f} to {max(sizes.values()):.3f}"
    told = [f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
            for row in (whole, whole["again"], whole["against_again"])]  # fmt: skip
    cells = [f"{whole[side]:.2f}" for side in ("stock", "kpolicy")] + [told[0] + own, ", ".join(told[1:])]
    assert [cell.strip() for cell in line.strip("| ").split(" | ")[1:]] == cells
    count = len(sizes) if kind == "decode" else int(re.findall(r"of (\d+) sizes", begins)[0])
    assert (whole["sizes"], whole["run"]) == (count, 25)


def test_rows_of_one_slice_only_are_taken_for_a_plan_that_was_run():
    """With other results the loss is those results'."""
    other = copy.deepcopy(PUBLISHED)
    for row in other["apart"]:
        if row["load"].startswith("extend steps") and DRAWS["between"] in row["load"]:
            row["ratio"] = 0.8
    found = lacking(a_plan({"1": 1.0}, {"320": 1.0}), COSTS, other)
    assert found["prefill"]["lost_of_time"] == pytest.approx(0.25)
