"""What delaying prompts is worth: the page and the setting say what the result does, and that is what runs now."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import attrs
import pytest

from benchmarks import first_token_limit as made
from benchmarks.command import command_line
from kpolicy import settings
from kpolicy.errors import TraceError
from kpolicy.profiles import load_profile

ROOT = Path(__file__).parents[2]
TRACES = ROOT.parent / "shared" / "traces"
PAGE = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")
PART = PAGE.partition("\n## Decode steps beside prompts\n")[2].partition("\n## ")[0]
TEXT = " ".join(PART.split())
FOUND = json.loads(made.RESULT.read_text(encoding="utf-8"))
LLAMA, QWEN, *OTHERS = made.PROFILES
NO, QUARTER = map(str, made.LIMITS)


def rows(profile: str, *, recorded: bool | None = None) -> list[dict[str, Any]]:
    return [
        row for row in FOUND["rows"]
        if row["profile"] == profile and recorded in (None, row["trace"] != made.GENERATED)
    ]  # fmt: skip


def row_of(profile: str, trace: str, load: float) -> dict[str, Any]:
    (found,) = (row for row in rows(profile) if (row["trace"], row["load"]) == (trace, load))
    return found


def ratio(row: dict[str, Any], limit: str, figure: str) -> float:
    return made.ratio(figure, row["auto"][limit], row["vllm"])


def over(row: dict[str, Any], figure: str) -> float:
    """1.25 over 1, above 1 where it is better."""
    return made.ratio(figure, row["auto"][QUARTER], row["auto"][NO])


def test_the_table_is_the_result_s() -> None:
    """Of the first two profiles, every cell; and how many requests each had."""
    assert f"\n\n{made.table(FOUND['rows'], made.PROFILES[:2])}\n\n" in PART
    counts = {row["requests"] for row in FOUND["rows"] if row["trace"] != made.GENERATED}
    assert f"Recorded are {min(counts)} to {max(counts)} requests from the middle of each of the four traces" in TEXT
    assert {row["requests"] for row in FOUND["rows"] if row["trace"] == made.GENERATED} == {made.MANY}
    assert f"generated are {made.MANY:,}" in TEXT


def test_the_result_is_whole_and_says_how_it_was_made() -> None:
    """Every profile, as it ships, trace and load; the day, the commit and versions; ratios are those of its figures."""
    cells = [(row["profile"], row["trace"], row["load"]) for row in FOUND["rows"]]
    traces = (*made.FILES, made.GENERATED)
    assert cells == [(each, trace, load) for each in made.PROFILES for trace in traces for load in made.LOADS]
    assert re.fullmatch(r"[0-9a-f]{7}\+?", FOUND["commit"])
    told = (made.__doc__ or "").partition("python -m benchmarks.first_token_limit ")[2].partition("\n")[0]
    given = told.replace("YYYY-MM-DD", FOUND["date"]).split()
    assert FOUND["command"] == command_line("benchmarks.first_token_limit", given)
    assert {"kpolicy", "python"} <= FOUND.keys()
    assert FOUND["profiles"] == {name: load_profile(name).costs.version for name in made.PROFILES}
    for row in FOUND["rows"]:
        for limit, ours in row["auto"].items():
            assert ours["ratios"] == {name: round(ratio(row, limit, name), 3) for name in made.FIGURES}


def test_what_prompts_lose() -> None:
    """The latest median, and what it is for, as the page and the setting have it."""
    recorded = rows(LLAMA, recorded=True)
    late = 1 / min(ratio(row, QUARTER, "ttft_p50_us") for row in recorded)
    gained = [over(row, "tokens_per_s") - 1 for row in recorded]
    told = f"up to {late:.1f} times as late as by"
    more = f"{-min(gained):.1%} less to {max(gained):.1%} more tokens a second"
    comment = " ".join((ROOT / "kpolicy" / "settings.py").read_text(encoding="utf-8").split())
    for text in (TEXT, comment):
        assert told in text
        assert f"for {more}" in text
    most = over(row_of(LLAMA, made.GENERATED, 1.3), "tokens_per_s") - 1
    assert f"1.25 is better, by {most:.1%} of throughput in one such load" in comment
    assert made.LIMITS[1] == settings.GAP_FIRST_TOKEN_LIMIT == 1.25
    sooner = {(row["trace"], row["load"]) for row in rows(QWEN) if over(row, "ttft_p50_us") > 1}
    assert sooner == {(made.GENERATED, 1.3), ("Mooncake", 1.3), ("BurstGPT", 0.7)}
    assert len(rows(QWEN)) == 10
    assert all(ratio(row, QUARTER, "ttft_p50_us") > 1 for row in rows(QWEN))
    told = "later than with 1 in seven of ten loads, but not of the generated requests and Mooncake at 1.3 and of "
    assert f"{told}BurstGPT at 0.7, and in all sooner than by `vllm`'s rule" in TEXT


def test_what_is_below_with_1() -> None:
    """Two figures of the page's table and two of the other profiles; with 1.25 two of the four."""
    below = {
        (row["profile"], row["trace"], row["load"], figure): round(ratio(row, NO, figure), 3)
        for row in FOUND["rows"] for figure in made.FIGURES if ratio(row, NO, figure) < 0.99
    }  # fmt: skip
    few, many = (LLAMA, "BurstGPT", 1.3, "gap_p99_us"), (LLAMA, made.GENERATED, 1.3, "gap_p99_us")
    late, median = (OTHERS[0], "Mooncake", 1.3, "ttft_p99_us"), (OTHERS[0], "Mooncake", 0.7, "ttft_p50_us")
    assert below.keys() == {few, many, late, median}
    assert f"With 1 four of {len(FOUND['rows']) * len(made.FIGURES)} figures are below 0.99" in TEXT
    assert f"at 1.3, of BurstGPT ({below[few]}) and of the generated requests ({below[many]})" in TEXT
    told = f"Llama-3.2-1B's Mooncake, their p99 at 1.3 ({below[late]}) and their median at 0.7 ({below[median]})"
    assert told in TEXT
    assert {cell for cell in below if ratio(row_of(*cell[:3]), QUARTER, cell[3]) < 0.99} == {many, median}


@pytest.mark.skipif(not TRACES.exists(), reason="the traces lie beside the repository and aren't here")
def test_what_is_below_on_a_host_that_keeps_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the two of the page's table isn't."""
    monkeypatch.setattr(made, "SERVER", attrs.evolve(made.SERVER, steady_host=True))
    steady = made.cell(LLAMA, "BurstGPT", TRACES, 1.3)
    assert f"it is {ratio(steady, NO, 'gap_p99_us'):.2f} on one that keeps its speed" in TEXT


def test_where_more_is_asked_for_long_than_can_be_served() -> None:
    """The loads in which a limit of 1.25 is better in throughput and in first tokens."""
    generated, mooncake = (row_of(LLAMA, trace, 1.3) for trace in (made.GENERATED, "Mooncake"))
    more, sooner = (over(generated, figure) for figure in ("tokens_per_s", "ttft_p50_us"))
    assert f"it has {more - 1:.1%} more tokens a second, and median first tokens {sooner:.1f} times as soon" in TEXT
    more, sooner = (over(mooncake, figure) for figure in ("tokens_per_s", "ttft_p50_us"))
    assert f"of its Mooncake at 1.3, {more - 1:.1%} and {sooner:.1f} times" in TEXT


def test_how_much_shorter_gaps_are() -> None:
    """The most of both profiles."""
    most = max((*rows(LLAMA), *rows(QWEN)), key=lambda row: over(row, "gap_p99_us"))
    assert (most["profile"], most["trace"], most["load"]) == (QWEN, "Mooncake", 0.7)
    assert f"up to {over(most, 'gap_p99_us'):.1f} times as short as with 1 (Qwen2.5-0.5B's Mooncake at 0.7)" in TEXT


def test_generated_requests_are_what_is_simulated_now(tmp_path: Path) -> None:
    """A cell that needs no trace."""
    assert made.cell(LLAMA, made.GENERATED, tmp_path, 1.3) == row_of(LLAMA, made.GENERATED, 1.3)


@pytest.mark.skipif(not TRACES.exists(), reason="the traces lie beside the repository and aren't here")
@pytest.mark.parametrize(("profile", "trace", "load"), [(LLAMA, "conversation", 0.7), (QWEN, "BurstGPT", 1.3)])
def test_the_result_on_record_is_what_is_simulated_now(profile: str, trace: str, load: float) -> None:
    """Two cells again: the same figures and steps."""
    assert made.cell(profile, trace, TRACES, load) == row_of(profile, trace, load)


# The command


class Pool:
    """A pool of processes, all in this one."""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, run: Any, *given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(run(*given))
        except Exception as error:  # noqa: BLE001 - as a pool does
            future.set_exception(error)
        return future


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A folder with all of them."""
    folder = tmp_path / "traces"
    folder.mkdir()
    for name in made.FILES.values():
        (folder / name).write_text(TRACE, encoding="utf-8")
    return folder


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, float]]:
    """Each cell has the row on record, but those listed, which fail."""
    failing: list[tuple[str, str, float]] = []

    def cell(profile: str, trace: str, folder: Path, load: float) -> dict[str, Any]:
        if (profile, trace, load) in failing:
            raise TraceError(folder / made.FILES[trace], 3, "it was cut meanwhile")
        return row_of(profile, trace, load)

    monkeypatch.setattr(made, "cell", cell)
    monkeypatch.setattr(made, "ProcessPoolExecutor", Pool)
    return failing


def test_what_is_written_says_what_was_given(traces: Path, cells: Any, tmp_path: Path) -> None:
    """All rows, in the order of the cells; an option that was left out isn't in the command."""
    out = tmp_path / "out.json"
    assert made.main(["--traces", str(traces), "--json", str(out)]) == 0
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["command"] == "python -m benchmarks.first_token_limit --traces traces --json out.json"
    assert written["rows"] == FOUND["rows"]
    assert written.keys() == FOUND.keys()
    assert cells == []


def test_what_is_done_is_kept_where_a_cell_fails(
    traces: Path, cells: list[tuple[str, str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which one, and why, is said."""
    cells += [(LLAMA, "code", 0.7), (QWEN, "Mooncake", 1.3)]
    out = tmp_path / "out.json"
    assert made.main(["--traces", str(traces), "--json", str(out)]) == 1
    kept = [row for row in FOUND["rows"] if (row["profile"], row["trace"], row["load"]) not in cells]
    assert json.loads(out.read_text(encoding="utf-8"))["rows"] == kept
    told = capsys.readouterr().err
    assert f"{LLAMA} code 0.7 failed: TraceError: {traces / made.FILES['code']}, line 3: it was cut meanwhile" in told
    assert "2 of 40 cells failed" in told


def test_what_is_done_is_kept_where_it_is_interrupted(
    traces: Path, cells: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from the keyboard."""

    def finished(_: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        yield 3, FOUND["rows"][3]
        yield 1, FOUND["rows"][1]
        raise KeyboardInterrupt

    monkeypatch.setattr(made, "finished", finished)
    out = tmp_path / "out.json"
    with pytest.raises(KeyboardInterrupt):
        made.main(["--traces", str(traces), "--json", str(out)])
    assert json.loads(out.read_text(encoding="utf-8"))["rows"] == [FOUND["rows"][1], FOUND["rows"][3]]
    assert cells == []


@pytest.mark.parametrize("case", ["missing", "empty"])
def test_traces_are_looked_at_first(
    case: str, traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that can't be read is one line, before any process is started."""
    monkeypatch.setattr(made, "ProcessPoolExecutor", None)
    bad = traces / made.FILES["code"]
    bad.unlink()
    if case == "empty":
        bad.touch()
    with pytest.raises(SystemExit) as ended:
        made.main(["--traces", str(traces)])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "argument --traces: " in last
    if case == "missing":
        assert f"{traces} has no {bad.name}; give a folder that has {', '.join(made.FILES.values())}" in last
    else:
        assert f"{bad}: the file is empty" in last


@pytest.mark.parametrize(
    ("ratios", "told"),
    [
        ([0.9899, 1.0], "0.99 to 1.00"), ([0.985, 0.9849], "**0.98** to **0.98**"), ([0.5], "**0.50**"),
        ([2.0, 0.9], "**0.90** to 2.00"), ([99.999, 553.2], "100.00 to 553"), ([], "none"),
    ],
)  # fmt: skip
def test_bold_is_what_is_told_to_be_below(ratios: list[float], told: str) -> None:
    """As it reads: 0.99 isn't below 0.99."""
    assert made.told(ratios) == told


def test_a_figure_of_0_has_no_ratio() -> None:
    """Where nobody has two tokens there are no gaps; the other ratios are told, and the table leaves it out."""
    ours, theirs = (dict.fromkeys(made.FIGURES, value) for value in (2.0, 1.0))
    theirs["gap_p50_us"] = ours["gap_p99_us"] = theirs["gap_p99_us"] = 0.0
    assert math.isnan(made.ratio("gap_p50_us", ours, theirs))
    found = made.ratios(ours, theirs)
    assert found == {"tokens_per_s": 2.0, "ttft_p50_us": 0.5, "ttft_p99_us": 0.5}
    rows = [
        {"profile": LLAMA, "trace": trace, "load": load, "auto": {limit: {"ratios": found} for limit in (NO, QUARTER)}}
        for trace in (*made.FILES, made.GENERATED) for load in made.LOADS
    ]  # fmt: skip
    assert made.table(rows, (LLAMA,)).splitlines()[-1].endswith("| 2.00 | **0.50** | **0.50** | none | none |")
