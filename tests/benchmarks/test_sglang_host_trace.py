"""What benchmarks.sglang.host_trace serves and sums, and what the page says of it."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
from benchmarks.sglang import host_trace
from kpolicy.scheduling.traces import TraceRequest
from tests.oracle.sglang_real import MARKS

ROOT = Path(__file__).parents[2]
TURN = "decode, its turn"
LOAD = "conversation, 600 at a time"


class TestServed:
    pytestmark = MARKS

    @pytest.mark.parametrize("version", ["0.5.23", "0.5.16"])
    @pytest.mark.parametrize("at_once", [True, False])
    def test_every_token_of_a_trace_is_served_alike_each_time(self, version, at_once):
        """Prompts run whole, each request gets its tokens, and a second pass has the same steps."""
        requests = [TraceRequest(i, i * 0.01, 50 + 700 * (i % 7), 1 + i % 5) for i in range(40)]
        passes = [host_trace.served(requests, at_once=at_once, version=version, turn=turn) for turn in range(2)]
        first, again = ([each[:3] for each in one] for one in passes)
        assert first == again
        prompts, decodes = (
            sum(size for kind, size, *_ in passes[0] if kind.startswith(begins)) for begins in ("prompts", "decode")
        )
        assert prompts == sum(each.prompt_tokens for each in requests)
        assert decodes == sum(each.output_tokens - 1 for each in requests)
        kinds = {"prompts", "decode, nothing waits"} if at_once else {"prompts", "decode, nothing waits", TURN}
        assert {kind for kind, *_ in passes[0]} == kinds
        waits = host_trace.waited(requests, at_once=at_once, version=version)
        assert [not each for each in waits] == [kind == "decode, nothing waits" for kind, *_ in first]
        assert host_trace.figures(passes, waits, 0)["steps"] == len(passes[0])

    def test_a_server_has_served_its_own_request_before_a_trace_comes(self):
        """What the first step of all sets up is none of the trace's: the scheduler has its own attribute by then."""
        request = TraceRequest(0, 3.0, 50, 2)
        server = host_trace.Served([request], at_once=False, version="0.5.23")
        assert "get_new_batch_prefill" in vars(server.scheduler)
        assert not server.running.reqs
        next(server.cycles())
        assert [len(each.origin_input_ids) for each in server.scheduler.waiting_queue] == [50]


def test_of_a_steps_times_the_least_counts():
    """In microseconds, less what the clock takes; a cycle that asked SGLang less an empty one that did."""
    first = [("prompts", 5, True, 2400, 400, 2100, 2600), (TURN, 9, False, 1100, 300, 600, 700)]
    second = [("prompts", 5, True, 2500, 300, 2200, 2500), (TURN, 9, False, 1000, 500, 700, 800)]
    found = host_trace.figures([first, second], ["several", "one"], 100)
    assert (found["rule_us"], found["added_us"]) == (1.25, 1.75)
    assert (found["of_rule"], found["most_us"], found["above_4_us"]) == (1.4, 2.5, 0)
    assert found["kinds"]["prompts"] == {"steps": 1, "rule_us": 2.0, "added_us": 2.5}
    assert found["kinds"][TURN] == {"steps": 1, "rule_us": 0.5, "added_us": 1.0}
    assert found["ways"] == [
        {"kind": TURN, "waits": "one", "steps": 1, "cycle_us": 0.9, "question_us": 0.1},
        {"kind": "prompts", "waits": "several", "steps": 1, "cycle_us": 2.1, "question_us": 0.4},
    ]
    with pytest.raises(RuntimeError, match="other steps"):
        host_trace.figures([first, first[:1]], ["several", "one"], 100)


def page():
    """Its lines by load."""
    text = (ROOT / "docs" / "measured_sglang.md").read_text(encoding="utf-8")
    return re.findall(r"^\| ((?:conversation|code), [^|]+), (0\.5\.\d\d) \|(.*)\|$", text, flags=re.MULTILINE)


def test_the_page_has_what_served_traces_take():
    """Of each load on either release: steps, means, ratio, percentile, and each kind's share and mean."""
    found = json.loads((ROOT / "benchmarks" / "results" / "sglang_host_cost.json").read_text(encoding="utf-8"))
    rows = {(row["load"], row["sglang"]): row for row in found["served"]["rows"]}
    told = {(load, version): [cell.strip() for cell in cells.split("|")] for load, version, cells in page()}
    assert told.keys() == rows.keys()
    for key, row in rows.items():
        kinds = [row["kinds"][kind] for kind in ("decode, nothing waits", TURN, "prompts")]
        assert told[key] == [
            f"{row['steps']:,}", f"{row['rule_us']:.2f}", f"{row['added_us']:.2f}", f"{row['of_rule']:.2f}",
            f"{row['p50_us']:.2f}; {row['p99_us']:.1f}", f"{row['above_4_us'] / row['steps']:.1%}",
            *(f"{kind['steps'] / row['steps']:.1%}: {kind['added_us']:.2f}" for kind in kinds),
        ]  # fmt: skip


def test_the_page_has_where_a_served_traces_time_goes():
    """By what waits, on 0.5.23 with 600 requests at a time: the share, both parts, and what they make of the mean."""
    result = json.loads((ROOT / "benchmarks" / "results" / "sglang_host_cost.json").read_text(encoding="utf-8"))
    (row,) = [each for each in result["served"]["rows"] if (each["sglang"], each["load"]) == ("0.5.23", LOAD)]
    text = (ROOT / "docs" / "measured_sglang.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| ((?:decode|prompts)[^:|]*): ([^|]+) \| ([\d.]+%) \| (.*) \|$", text, flags=re.MULTILINE)
    steps, ways = row["steps"], row["ways"]
    assert sorted(told) == sorted(
        (way["kind"].removesuffix(", nothing waits"), way["waits"] or "nothing", f"{way['steps'] / steps:.1%}",
         f"{way['cycle_us']:.2f} | {way['question_us']:.2f} | "
         f"{way['steps'] * (way['cycle_us'] + way['question_us']) / steps:.2f}")
        for way in ways
    )  # fmt: skip
    undecided = [
        way for way in ways if way["waits"].startswith("several") or (way["kind"], way["waits"]) == (TURN, "one")
    ]
    share = sum(way["steps"] for way in undecided) / steps
    us = sum(way["steps"] * (way["cycle_us"] + way["question_us"]) for way in undecided) / steps
    added_us, rule_us = row["added_us"], row["rule_us"]
    assert f"prompts of several, are {share:.0%} of all.\n- They take {us:.3f} µs of the mean step" in text
    assert f"all else {added_us - us:.3f}: together {added_us:.3f}, which is the {added_us:.2f} above." in text
    assert f"own rule takes {rule_us:.2f} µs in the mean. For kpolicy" in text
    assert f"have to take {(rule_us - added_us + us) / us:.2f} times what they do." in text


def test_the_page_has_what_a_step_takes_in_the_mean():
    """From the least of the loads to the most, as a time and of SGLang's rule; and of each kind in a row."""
    result = json.loads((ROOT / "benchmarks" / "results" / "sglang_host_cost.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "measured_sglang.md").read_text(encoding="utf-8")
    times, parts = (sorted(row[name] for row in result["served"]["rows"]) for name in ("added_us", "of_rule"))
    mean = f"{times[0]:.2f} to {times[-1]:.2f} µs of kpolicy, {parts[0]:.2f} to {parts[-1]:.2f} times SGLang's own rule"
    assert f"In the mean a step of a served trace takes {mean}" in text
    mean = f"{times[0]:.1f} to {times[-1]:.1f} µs in the mean, {parts[0]:.1f} to {parts[-1]:.1f} of what"
    assert f"Over a served trace a step takes {mean} SGLang's rule takes over the same steps" in text
    guide = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
    assert f"{times[0]:.1f} to {times[-1]:.1f} µs a step in the mean over served traces." in guide
    taken = [sorted(each["us"] for each in result["steps"] if each["sglang"] == of) for of in ("0.5.23", "0.5.16")]
    assert all(us <= 4 for of in taken for us in of)
    (newest, older) = ((of[0], of[-1]) for of in taken)
    told = f"take {newest[0]:.1f} to {newest[1]:.1f} µs on 0.5.23 and {older[0]:.1f} to {older[1]:.1f} on 0.5.16"
    assert f"All {len(taken[0])} kinds of steps {told}" in text
    assert f"{newest[1]:.2f} on 0.5.23 and {older[1]:.2f} on 0.5.16, where an earlier run" in text
