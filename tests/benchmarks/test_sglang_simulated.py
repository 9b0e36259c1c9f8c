"""The comparison in simulated time: docs/measured_sglang.md says what its result does, and that is what runs now."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.sglang import simulated
from kpolicy.schemas import read_profile
from kpolicy.settings import Settings
from kpolicy.simulate import Server

ROOT = Path(__file__).parents[2]
TRACES = ROOT.parent / "shared" / "traces"
PAGE = (ROOT / "docs" / "measured_sglang.md").read_text(encoding="utf-8")
TEXT = PAGE.partition("\n## In simulation\n")[2].partition("\n## ")[0]
FOUND = json.loads((simulated.RESULTS / "sglang_simulated.json").read_text(encoding="utf-8"))
SPEED, GAP, FIRST = "tokens/s", "gap p99 ms", "first token p50 ms"
IN_TURN = "auto:forms=in_turn"
FILES = {
    "conversation": "azure_llm_2023_conv.csv", "code": "azure_llm_2023_code.csv",
    "Mooncake": "mooncake_conversation.csv.gz",
}  # fmt: skip


def ratios(figure, policy="auto", **of):
    """Ratios of one figure, rising."""
    return sorted(
        row["ratio"] for row in FOUND["rows"]
        if (row["figure"], row["policy"]) == (figure, policy) and all(row[name] == each for name, each in of.items())
    )  # fmt: skip


def loads(at_once):
    return {row["load"] for row in FOUND["rows"] if (row["load"] != "as recorded") == at_once}


def told(line):
    """The cells of a table's line."""
    return [cell.strip().strip("*") for cell in line.strip().strip("|").split("|")]


def table(head):
    """The lines below a table's head, by their first cell."""
    lines = TEXT.partition(f"{head}\n")[2].partition("\n\n")[0].splitlines()[1:]
    return {cells[0]: cells[1:] for cells in map(told, lines)}


def digits_of(text):
    return len(text.partition(".")[2])


def of_trace(label):
    """The trace and the load of a line, on 0.5B; one that doesn't say is as recorded."""
    name, _, how = label.partition(" ")
    there = {row["load"] for row in FOUND["rows"] if row["trace"] == FILES[name]} & loads(how == "at once")
    (load,) = there
    return {"trace": FILES[name], "load": load, "costs": "0.5B measured"}


def same_to_its_digits(text, value):
    assert float(text) == pytest.approx(value, abs=0.5001 * 10 ** -digits_of(text)), text


def test_the_result_says_how_it_was_made():
    """The day, the commit, the command and the versions."""
    assert re.fullmatch(r"[0-9a-f]{7}\+?", FOUND["commit"])
    assert FOUND["date"] in FOUND["command"]
    assert set(FOUND["versions"]) == {"kpolicy", "python"}


def test_least_and_most():
    """Throughput and gaps from the least ratio to the largest; as recorded and at once, over the three ladders."""
    rows = table("| | as recorded | at once |")
    for label, figure in (("throughput", SPEED), ("p99 gaps", GAP)):
        for at_once, text in enumerate(rows[label]):
            found = sorted(ratio for load in loads(bool(at_once)) for ratio in ratios(figure, load=load))
            least, most = re.findall(r"\d\.\d+", text)
            same_to_its_digits(least, found[0])
            same_to_its_digits(most, found[-1])


def test_which_are_below_one():
    """By four digits, of the policy by itself; and those that only rounding hides."""
    found = [*ratios(SPEED), *ratios(GAP)]
    rows = [row for row in FOUND["rows"] if row["policy"] == "auto" and row["figure"] in (SPEED, GAP)]
    below = [row for row in rows if row["ratio"] < 1]
    numbers = ["No", "One", "Two", "Three", "Four", "Five", "Six", "Seven"]
    assert f"{numbers[len(below)]} of the {len(found)} ratios are below 1 by four digits, all p99 gaps at once" in TEXT
    assert all(row["figure"] == GAP and row["load"] != "as recorded" for row in below)
    told_of = {}
    for trace, size, least, most in re.findall(r"    - (\w+), ([\d.]+B): (\d\.\d+) to (\d\.\d+)\.", TEXT):
        told_of[trace, size] = float(least), float(most)
    names, groups = {FILES["conversation"]: "Conversation", "burstgpt_1_first400.csv": "BurstGPT"}, {}
    for row in below:
        groups.setdefault((names[row["trace"]], row["costs"].split()[0]), []).append(row["ratio"])
    assert told_of == {group: (min(ratios_), max(ratios_)) for group, ratios_ in groups.items()}
    longer = re.search(r"up to (\d\.\d) of (\d+) ms and (\d\.\d) of (\d+):", TEXT).groups()
    for more, of, costs in ((*longer[:2], "0.5B measured"), (*longer[2:], "8B analytic")):
        most = max((row for row in below if row["costs"] == costs), key=lambda row: row["auto"] - row["sglang"])
        same_to_its_digits(more, most["auto"] - most["sglang"])
        assert round(most["sglang"]) == int(of)
    exact = [row["auto"] / row["sglang"] if row["figure"] == SPEED else row["sglang"] / row["auto"] for row in rows]
    hidden = [row for row, ratio in zip(rows, exact, strict=True) if ratio < 1 and row not in below]
    assert f"{['No', 'One', 'Two', 'Three'][len(hidden)]} more are 0.99998, 0.1 us of 5 ms" in TEXT
    assert all(row["figure"] == GAP and row["auto"] - row["sglang"] < 0.00011 for row in hidden)
    assert {round(row["auto"]) for row in hidden} == {5}


def test_first_tokens():
    """The two cases in which the median is longer, with every ladder."""
    slower = [row for row in FOUND["rows"] if (row["figure"], row["policy"]) == (FIRST, "auto") and row["ratio"] < 0.99]
    least, most = re.search(r"first tokens are (\d\.\d+) to (\d\.\d+) of the replica's in two cases", TEXT).groups()
    same_to_its_digits(least, min(row["ratio"] for row in slower))
    same_to_its_digits(most, max(row["ratio"] for row in slower))
    assert {(row["trace"], row["load"], row["costs"]) for row in slower} == {
        (FILES[name], "as recorded", "0.5B measured") for name in ("code", "Mooncake")
    }


def test_the_code_trace_with_larger_sizes():
    """Whose throughput at once is above the replica's now."""
    of = of_trace("code at once")
    least, *_, most = ratios(SPEED, **of)
    assert f"larger sizes, not the rule below, make it {least:.4f} to {most:.4f} here" in TEXT


def test_several_decode_steps_beside_a_prompt():
    """Gaps on 0.5B with the rule, over the three ladders."""
    rows = table("| trace | decode steps at once | spread |")
    assert rows.keys() == {f"{trace} {how}" for trace in FILES for how in ("as recorded", "at once")}
    for label, (_, text) in rows.items():
        of = of_trace(label)
        found, numbers = ratios(GAP, **of), text.split(" to ")
        same_to_its_digits(numbers[0], found[0])
        same_to_its_digits(numbers[-1], found[-1])


def test_without_decodes_beside_prompts():
    """Throughput and gaps as they are in turn, and with decodes beside; each that is below 1 is in the table."""
    rows = table("| trace | throughput | with decodes beside | p99 gaps | with decodes beside |")
    below = {}
    for label, cells in rows.items():
        of = of_trace(label)
        for at, figure in ((0, SPEED), (2, GAP)):
            ((turn,), (beside,)) = (ratios(figure, policy, sizes="SGLang's", **of) for policy in (IN_TURN, "auto"))
            same_to_its_digits(cells[at], turn)
            same_to_its_digits(cells[at + 1], beside)
            if turn < 1:
                below[of["trace"], of["load"], figure] = turn
    every = [row for row in FOUND["rows"] if row["policy"] == IN_TURN and row["figure"] in (SPEED, GAP)]
    assert below == {(row["trace"], row["load"], row["figure"]): row["ratio"] for row in every if row["ratio"] < 1}
    assert f"{['no', 'one', 'two', 'three'][len(below)]} of {len(every)} ratios are below 1, all on 0.5B" in TEXT


@pytest.mark.skipif(not TRACES.exists(), reason="the traces lie beside the repository and aren't here")
def test_the_result_on_record_is_what_is_simulated_now():
    """The shortest trace again, on one table: the same ratios."""
    name, file = "0.5B measured", "burstgpt_1_first400.csv"
    costs = read_profile(simulated.RESULTS / "h200" / "profile_qwen05b.json").costs
    settings = Settings(max_num_reqs=simulated.MOST_REQS, max_num_tokens=simulated.MOST_TOKENS)
    assert simulated.compare(TRACES / file, name, costs, Server(settings=settings, warm=True)) == [
        row for row in FOUND["rows"] if (row["trace"], row["costs"]) == (file, name)
    ]
