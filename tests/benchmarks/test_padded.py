"""What padding costs attention, dry: a toy on the CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.gpu import padded

ARGUMENTS = ["--device", "cpu", "--tiny", "--rounds", "2", "--out"]


def test_it_runs_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same rows in graphs of two sizes, with the ratio of the larger one; what is there isn't measured again."""
    out = tmp_path / "out.json"
    assert padded.main([*ARGUMENTS, str(out)]) == 0
    (found,) = json.loads(out.read_text())["cells"].values()
    assert found["now"].keys() == {"layer_us", "padding", "same_bits"}
    assert list(found["now"]["layer_us"]) == ["2", "4"]
    assert list(found["now"]["padding"]) == ["4"]
    assert found["now"]["same_bits"]
    assert "toy/2 x 40" in capsys.readouterr().out
    before = out.read_text()
    assert padded.main([*ARGUMENTS, str(out)]) == 0
    assert json.loads(out.read_text())["cells"] == json.loads(before)["cells"]


def test_kernels_to_choose_among_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its times, its ratio to today's and its difference; two of one name, and today's name, are refused."""
    out = tmp_path / "out.json"
    beside = ["--beside", "one=here", "two=there"]
    assert padded.main([*ARGUMENTS, str(out), "--before", "old", *beside]) == 0
    (found,) = json.loads(out.read_text())["cells"].values()
    assert list(found) == ["now", "before", "one", "two", "after"]
    assert found["after"].keys() == found["two"]["over_now"].keys() == {"2", "4"}
    assert found["one"]["relative_difference"] == 0.0
    assert capsys.readouterr().out.count("over now") == 2
    for refused in ("one=elsewhere", "now=here", "one", "=here", "one="):
        with pytest.raises(SystemExit):
            padded.main([*ARGUMENTS, str(out), *beside, refused])
        assert "--beside" in capsys.readouterr().err


@pytest.mark.parametrize("difference", [0.5, math.nan])
@pytest.mark.parametrize("name", ["before", "one"])
def test_other_results_are_told(name: str, difference: float) -> None:
    """Of any version; an earlier one alone may give other bits in each graph."""
    now = {"layer_us": {2: 1.0}, "same_bits": True}
    assert not padded.wrong({"now": now, name: {**now, "relative_difference": 0.001}, "after": {2: [1.0]}})
    assert padded.wrong({"now": now, name: {**now, "relative_difference": difference}})
    other = {**now, "same_bits": False, "relative_difference": 0.001}
    assert padded.wrong({"now": now, name: other}) is (name != "before")


def test_other_bits_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A graph that gives other bits than a smaller one is named, and the exit code is 1."""
    made = padded.plain

    def wrong(heads: padded.Heads, rows: object, query: object, caches: object) -> object:
        run = made(heads, rows, query, caches)
        return lambda: run() + len(query)  # type: ignore[arg-type]

    monkeypatch.setattr(padded, "plain", wrong)
    assert padded.main([*ARGUMENTS, str(tmp_path / "out.json")]) == 1
    assert "['toy/2 x 40'] wrong" in capsys.readouterr().out


def test_a_folder_without_kernels_is_refused(tmp_path: Path) -> None:
    """It is named, with what it should have."""
    with pytest.raises(SystemExit, match=r"has no kpolicy/serving/gpu/paged\.py"):
        padded.kernels_of(tmp_path)
