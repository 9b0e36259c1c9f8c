"""What benchmarks.sglang.host_cost times at a graph's inputs, and what docs/measured_sglang.md says of it."""

import gc
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
from benchmarks.sglang import host_cost, host_trace
from tests.oracle.sglang_real import MARKS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", ["host_cost", "host_trace"])
def test_without_the_plugin_the_error_says_what_to_install(module):
    """And how to go without installing it."""
    code = f"import sys; sys.modules['kpolicy_sglang'] = None; import benchmarks.sglang.{module}"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "pip install ./integrations/kpolicy_sglang" in last
    assert "PYTHONPATH=integrations/kpolicy_sglang" in last


def test_wheels_that_nobody_names_are_told(monkeypatch):
    """By the variable that names their folder."""
    monkeypatch.delenv("KPOLICY_ORACLE", raising=False)
    with pytest.raises(SystemExit, match="KPOLICY_ORACLE isn't set"):
        host_cost.wheels()


class TestTimed:
    pytestmark = MARKS

    @pytest.mark.parametrize(("rows", "taken"), [(12, 7), (16, 0)])
    def test_a_padded_batch_finds_what_its_copy_takes_along(self, rows, taken, monkeypatch):
        """Seven of those buffers have empty rows, multimodal positions left out; none of a batch that fits."""
        found = []

        monkeypatch.setattr(host_cost, "_grouped_foreach_copy_", lambda dsts, _: found.append(len(dsts)))
        stock, hooked = host_cost.inputs(rows)
        assert stock() is hooked() is None
        assert found == [0, taken]


def test_a_case_is_measured_in_a_process_of_its_own():
    """Which leaves nothing behind; one that raises is told."""
    found = []
    assert host_cost.in_a_child(lambda: (found.append(1) or 1.0, float(len(found)))) == (1.0, 1.0)
    assert not found
    with pytest.raises(RuntimeError, match="wasn't measured"):
        host_cost.in_a_child(lambda: (1 / 0, 0.0))


def test_a_replay_goes_through_no_hook():
    """So that it takes as long as SGLang's own; its steps tell the hits."""
    for call in host_cost.replay():
        (backend,) = [each.cell_contents for each in call.__closure__]
        assert "replay" not in vars(backend)
        assert call() is None


def test_cold_calls_alternate_and_python_collects_again(monkeypatch):
    """As often of either after a few that load what they need, with so much written to between any two."""
    for name, value in (("CALLS", 2), ("COLD_CALLS", 5), ("COLD_BYTES", 1 << 10)):
        monkeypatch.setattr(host_cost, name, value)
    called = []
    times = host_cost.cold(lambda: called.append("stock"), lambda: called.append("ours"))
    assert called[4:] == [*["ours", "stock", "stock", "ours"] * 2, "ours", "stock"]
    assert all(us > 0 for us in times)
    assert gc.isenabled()


def test_the_page_has_what_hooks_on_inputs_take():
    """Of a padded batch and of one without padding; 0.5.23 has no such hooks."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "sglang_host_cost.json").read_text(encoding="utf-8"))["rows"]
    added = {row["step"].removeprefix(host_cost.INPUTS): (row["sglang"], f"{row['added_us']:.1f}")
             for row in rows if row["step"].startswith(host_cost.INPUTS)}  # fmt: skip
    text = (ROOT / "docs" / "measured_sglang.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"they take a replay ([\d.]+) µs, and a padded one ([\d.]+) ", text)
    assert added == {"16 decodes": ("0.5.16", told[0]), "12 decodes": ("0.5.16", told[1])}
    assert sum(row["step"].startswith(host_cost.INPUTS) for row in rows) == 2


def test_how_many_kinds_of_steps_are_within_the_aim():
    """By one limit, and with a graph's inputs on 0.5.16, as the page and CHANGELOG tell."""
    found = json.loads((ROOT / "benchmarks" / "results" / "sglang_host_cost.json").read_text(encoding="utf-8"))
    steps = found["steps"]
    (padded,) = [row["added_us"] for row in found["rows"] if row["step"] == f"{host_cost.INPUTS}12 decodes"]

    def within(version, key, more=0.0):
        return sum(each[key] + more <= 4 for each in steps if each["sglang"] == version)

    log, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "docs/measured_sglang.md"))
    (now,) = re.findall(r"Of 35 kinds of steps (\d+) on 0\.5\.23 and (\d+) on 0\.5\.16 take at most 4 µs", log)
    assert tuple(str(within(version, "us")) for version in ("0.5.23", "0.5.16")) == now
    (told,) = re.findall(r"inputs take ([\d.]+) more, in place of launches: with it (\d+) of 35 are at most 4\.", page)
    assert told == (f"{padded:.1f}", str(within("0.5.16", "us", padded)))


def test_what_a_look_once_takes_more_and_less():
    """By one run of the commits before and with it: the page's table, both counts, and what CHANGELOG tells."""
    found = json.loads((ROOT / "benchmarks" / "results" / "sglang_host_cost_looks.json").read_text(encoding="utf-8"))
    log, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "docs/measured_sglang.md"))
    steps = {(each["sglang"], each["step"]): (each["before_us"], each["us"]) for each in found["steps"]}
    section = page.partition(f"({found['before']} and it in turns")[2].partition("What made the difference")[0]
    rows = [
        line.strip("|").split(" | ") for line in section.splitlines() if line.startswith(("| prompts,", "| decode,"))
    ]
    for step, *shown in ([cell.strip() for cell in row] for row in rows):
        before, now = zip(*(steps[version, step] for version in ("0.5.23", "0.5.16")), strict=True)
        slower = now[0] > before[0] + 0.1
        now = [f"**{us:.1f}**" if slower else f"{us:.1f}" for us in now]
        assert shown == [", ".join(f"{us:.1f}" for us in before), ", ".join(now)]
    less = [before - now for before, now in steps.values() if before - now > 0.1]
    more = {(version, step): now - before for (version, step), (before, now) in steps.items() if now - before > 0.1}
    counts = [
        sum(before - now > 0.1 for (of, _), (before, now) in steps.items() if of == version)
        for version in ("0.5.23", "0.5.16")
    ]
    assert {step for _, step in more} == {row[0].strip() for row in rows if "**" in row[2]}
    assert len(more) == 4
    assert f"**Quicker** are {counts[0]} and {counts[1]} of 35 kinds by over 0.1 µs" in page
    told = f"{counts[0]} and {counts[1]} kinds (0.5.23, 0.5.16) take {min(less):.1f} to {max(less):.1f} µs less for it"
    assert told in log
    assert f"{min(more.values()):.1f} to {max(more.values()):.1f} more" in log


KINDS = {
    "decode step, nothing waits": ["decode, nothing waits"],
    "decode step, its turn: 1, 4 wait": ["decode, 1 waits", "decode, 4 wait", "decode, 4 wait, one of 900 ran"],
    "16 wait, or a limit on gaps": [
        "decode, 16 wait", "decode, 16 wait, partly cached", "decode, 8 wait, a limit on gaps",
    ],
    "8 wait, one long; one of more than a chunk": [
        "decode, 8 wait, one long", "decode, 8 wait, one long, a long one ran",
        "decode, 3 wait, one of more than a chunk",
    ],
    "8 wait, one long, one under way": ["decode, 8 wait, one long, one under way"],
    "prompt step: 1, 4, 16 wait, one of 900 among 16 or 128": [
        "prompts, 1 waits", "prompts, 4 wait", "prompts, 16 wait", "prompts, 16 wait, one of 900",
        "prompts, 128 wait, one of 900",
    ],
    "16 others wait than at the decode step": ["prompts, 16 wait, others than before"],
    "weighed: 8 wait, one long in the middle, first, behind one, or partly cached": [
        "prompts, 8 wait, one long in the middle", "prompts, 8 wait, one long first",
        "prompts, 8 wait, one long behind one", "prompts, 8 wait, one long, partly cached",
    ],
    "weighed: all of 1,000 or 1,500, one under way, one of more than a chunk, or more came since": [
        "prompts, 8 wait, all of 1,000", "prompts, 8 wait, all of 1,500", "prompts, 8 wait, one long, one under way",
        "prompts, 3 wait, one of more than a chunk", "prompts, 8 wait, one long, 2 came since",
    ],
    "a second batch before the decode step": [
        "prompts, 4 wait, some ran before", "prompts, 4 wait, some ran before, one of 900",
    ],
    "a burst is looked at, 80 and 300 wait": [
        "prompts, 80 wait, a burst is looked at", "prompts, 300 wait, a burst is looked at",
    ],
    "looked at and weighed: 8 others than before, or a second batch of longer ones": [
        "prompts, 8 wait, one long, others than before", "prompts, 5 wait, one of 1,400, some ran before",
    ],
    "prompt step under a limit on gaps": ["prompts, 8 wait, a limit on gaps"],
    "mixed chunks split, 1 and 16 wait (mean of both steps)": [
        "both, 1 waits, mixed chunks are split", "both, 16 wait, mixed chunks are split",
    ],
}  # fmt: skip
"""Steps by the lines of the page's table."""
CYCLE = host_cost.SCHEDULER + "decode, "
COLD = {
    "the scheduler's cycle, nothing waits, 0.5.16": [("0.5.16", f"{CYCLE}nothing waits")],
    "a decode step's question, 0.5.23": [("0.5.23", host_cost.DECODES)],
    "its graph's inputs, 0.5.16, of a captured size; padded": [
        ("0.5.16", f"{host_cost.INPUTS}16 decodes"), ("0.5.16", f"{host_cost.INPUTS}12 decodes"),
    ],
    "its graph's replay": [("0.5.16", host_cost.REPLAY)],
    "a prompt step's question, 0.5.23; 0.5.16": [("0.5.23", host_cost.PROMPTS), ("0.5.16", host_cost.PROMPTS)],
    "the scheduler's cycle, 4 wait, the decodes' turn, 0.5.23; 0.5.16": [
        ("0.5.23", f"{CYCLE}4 wait"), ("0.5.16", f"{CYCLE}4 wait"),
    ],
}  # fmt: skip
"""Rows with cold caches, likewise."""


def cells(label):
    """What the page's line of that name tells."""
    page = (ROOT / "docs" / "measured_sglang.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


@pytest.mark.parametrize("label", KINDS)
def test_the_page_has_what_whole_steps_take(label):
    """From the least of a line's steps to the most, on either release."""
    result = json.loads((ROOT / "benchmarks" / "results" / "sglang_host_cost.json").read_text(encoding="utf-8"))
    steps = {(each["sglang"], each["step"]): each for each in result["steps"]}
    found = []
    for version in ("0.5.23", "0.5.16"):
        for name in ("us", "of_rule", "before_us"):
            values = sorted(steps[version, step][name] for step in KINDS[label])
            found.append(" to ".join(dict.fromkeys(f"{value:.1f}" for value in (values[0], values[-1]))))
    assert cells(label) == found
    assert {step for listed in KINDS.values() for step in listed} == {step for _, step in steps}


@pytest.mark.parametrize("label", COLD)
def test_the_page_has_what_cold_caches_cost(label):
    """Before and now; what comes out below nothing is none."""
    result = json.loads((ROOT / "benchmarks" / "results" / "sglang_host_cost.json").read_text(encoding="utf-8"))
    rows = {(each["sglang"], each["step"]): each for each in result["cold"]["rows"]}
    assert cells(label) == [
        "; ".join(f"{max(rows[each][name], 0):.1f}" for each in COLD[label]) for name in ("before_us", "added_us")
    ]


@pytest.mark.parametrize(
    ("given", "at"), [([], lambda found: found), (["--cold"], lambda found: found["cold"]),
                      (["--add", "prefill"], lambda found: found["rows"][-1])],
)  # fmt: skip
def test_what_is_written_names_the_commit(given, at, tmp_path, monkeypatch):
    """The whole result, single calls beside it, and rows that are put into it."""
    steps = (host_cost.DECODES, host_cost.PROMPTS)
    rows = [host_cost._row(version, step, 1.0, 2.0) for version in ("0.5.23", "0.5.16") for step in steps]
    monkeypatch.setattr(host_cost, "_of", lambda *_, **__: rows)
    monkeypatch.setattr(host_cost, "RESULT", tmp_path / "result.json")
    (tmp_path / "result.json").write_text('{"rows": []}')
    monkeypatch.setenv("KPOLICY_COMMIT", "abc1234")
    monkeypatch.setattr(sys, "argv", ["host_cost", "--date", "2026-11-28", *given])
    assert host_cost.main() == 0
    written = at(json.loads((tmp_path / "result.json").read_text()))
    assert (written["date"], written["commit"]) == ("2026-11-28", "abc1234")


def test_a_served_trace_names_the_commit(tmp_path, monkeypatch):
    """Beside what is there."""
    monkeypatch.setattr(host_trace, "LOADS", {})
    monkeypatch.setattr(host_trace, "RESULT", tmp_path / "result.json")
    (tmp_path / "result.json").write_text('{"rows": []}')
    monkeypatch.setenv("KPOLICY_COMMIT", "abc1234")
    monkeypatch.setattr(sys, "argv", ["host_trace", "--traces", str(tmp_path), "--date", "2026-11-28"])
    assert host_trace.main() == 0
    assert json.loads((tmp_path / "result.json").read_text())["served"]["commit"] == "abc1234"


def test_what_hooks_take_on_another_machine() -> None:
    """How many kinds are over the aim there, now and before, and what the rule takes."""
    found = json.loads((Path(__file__).parents[2] / "benchmarks/results/sglang_host_cost_second.json").read_text())
    told = []
    for version in ("0.5.23", "0.5.16"):
        steps = [row for row in found["steps"] if row["sglang"] == version]
        (rule,) = [row["rule_us"] for row in found["rows"]
                   if (row["sglang"], row["step"]) == (version, "prefill 300, replays")]  # fmt: skip
        sides = [[row[name] for row in steps] for name in ("us", "before_us")]
        apart = statistics.median(a - b for a, b in zip(*sides, strict=True))
        told.append((rule, *(figure for each in sides for figure in (sum(us > 4 for us in each), max(each))), apart))
    (first, second) = told
    page = " ".join((Path(__file__).parents[2] / "docs/measured_sglang.md").read_text().split())
    assert f"SGLang's rule itself takes {first[0]:.1f} and {second[0]:.1f} µs" in page
    assert f"{first[1]} and {second[1]} of 35 kinds are over 4 µs, up to {first[2]:.1f} and {second[2]:.1f};" in page
    assert f"before {first[3]} and {second[3]}, at most {first[4]:.1f} and {second[4]:.1f}." in page
    assert f"Kinds differ by {first[5]:.2f} and {second[5]:.2f} µs in the median" in page
