"""What padding costs attention, dry: a toy on the CPU."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks.gpu import padded

ARGUMENTS = ["--device", "cpu", "--tiny", "--rounds", "2", "--out"]


def test_it_runs_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same rows in graphs of two sizes, with the ratio of the larger one; what is there isn't measured again."""
    out = tmp_path / "out.json"
    assert padded.main([*ARGUMENTS, str(out)]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert list(cells) == ["toy/2 x 40", "toy/3 x 40 uneven"]
    for found, sizes in zip(cells.values(), (["2", "4"], ["3", "4"]), strict=True):
        assert found["now"].keys() == {"layer_us", "padding", "same_bits"}
        assert list(found["now"]["layer_us"]) == sizes
        assert list(found["now"]["padding"]) == sizes[1:]
        assert found["now"]["same_bits"]
    told = capsys.readouterr().out
    assert all(cell in told for cell in cells)
    before = out.read_text()
    assert padded.main([*ARGUMENTS, str(out)]) == 0
    assert json.loads(out.read_text())["cells"] == json.loads(before)["cells"]


@pytest.mark.parametrize("rows", ["even", "uneven"])
def test_cells_of_some_rows_alone(tmp_path: Path, rows: str) -> None:
    """Even ones or uneven ones, to which a later run adds the others."""
    out = tmp_path / "out.json"
    assert padded.main([*ARGUMENTS, str(out), "--rows", rows]) == 0
    (cell,) = json.loads(out.read_text())["cells"]
    assert ("uneven" in cell) is (rows == "uneven")
    assert padded.main([*ARGUMENTS, str(out)]) == 0
    assert len(json.loads(out.read_text())["cells"]) == 2


def test_uneven_rows_are_those_of_a_trace() -> None:
    """The same in every run, of the mean that the cell names, the longest two to four times as long."""
    cells = padded.lengths_of(padded.CELLS, padded.UNEVEN, padded.GRAPHS)
    assert len(cells) == len(padded.CELLS) + len(padded.UNEVEN)
    assert cells["84 x 1300 uneven"][1] == [84, 160]
    assert cells["16 x 1000"][1] == [16, 32, 80, 160]
    for name, (lengths, sizes) in cells.items():
        count, _, kv, *uneven = name.split()
        mean = sum(lengths) / len(lengths)
        assert len(lengths) == int(count) <= min(sizes)
        assert mean == pytest.approx(int(kv), rel=0.001 if uneven else 0.06)
        assert (2 < max(lengths) / mean < 4) if uneven else max(lengths) == int(kv)
    assert padded.uneven_lengths(8, 4000) == cells["8 x 4000 uneven"][0]


def test_kernels_to_choose_among_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its times, its ratio to today's and its difference; two of one name, and today's name, are refused."""
    out = tmp_path / "out.json"
    beside = ["--beside", "one=here", "two=there"]
    assert padded.main([*ARGUMENTS, str(out), "--before", str(tmp_path), *beside]) == 0
    for found, sizes in zip(json.loads(out.read_text())["cells"].values(), ({"2", "4"}, {"3", "4"}), strict=True):
        assert list(found) == ["now", "before", "one", "two", "after"]
        assert found["after"].keys() == found["two"]["over_now"].keys() == sizes
        assert found["one"]["relative_difference"] == 0.0
    assert capsys.readouterr().out.count("over now") == 4
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
    assert "['toy/2 x 40', 'toy/3 x 40 uneven'] wrong" in capsys.readouterr().out


PACKAGE = "kpolicy.serving.gpu"
KERNELS = """
from kpolicy.serving import attention
from kpolicy.serving.gpu.launch import NAME
from kpolicy.serving.gpu.splits import FACTOR

def paged_attention(query, key, value, rows, scale, {step}prefills):
    assert {own}
    return attention.paged_attention(query, key, value, rows, scale, 0, 0.0) * FACTOR
"""


STEPS = {"": "FACTOR", "arrivals, ": "arrivals == [FACTOR]", "shares, ": "shares.factor == FACTOR"}
"""What a step has once for all layers, in versions older and newer, and that it is the version's own"""


def kernels_in(folder: Path, factor: float, step: str = "shares, ") -> Path:
    """A version's modules, which import each other and give so many times the result."""
    inside = folder / "kpolicy" / "serving" / "gpu"
    inside.mkdir(parents=True)
    (inside / "launch.py").write_text(f"NAME = {folder.name!r}\n")
    has = "def new_arrivals(device):\n    return [FACTOR]\nclass Shares:\n    factor = FACTOR\n"
    (inside / "splits.py").write_text(f"FACTOR = {factor}\n{has}")
    (inside / "paged.py").write_text(KERNELS.format(step=step, own=STEPS[step]))
    (inside / "latent.py").write_text("from kpolicy.serving.gpu.paged import FACTOR, NAME\n")
    return folder


@pytest.fixture
def today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Today's modules, none of which needs a GPU here."""
    inside = kernels_in(tmp_path / "today", 1.0) / "kpolicy" / "serving" / "gpu"
    made = {}
    for name in ("launch", "splits", "paged", "latent"):
        spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", inside / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        made[name] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", made[name])
        spec.loader.exec_module(made[name])
    return made


def test_an_earlier_version_s_kernels_are_its_own(tmp_path: Path, today: dict[str, ModuleType]) -> None:
    """With the modules that they import, each folder's; today's stay what they were."""
    folders = [kernels_in(tmp_path / name, factor, "") for name, factor in (("old", 2.0), ("older", 3.0))]
    found = [padded.kernels_of(each) for each in (None, *folders)]
    told = [[(each[name].NAME, each[name].FACTOR) for name in ("paged", "latent")] for each in found]
    assert told == [[("today", 1.0)] * 2, [("old", 2.0)] * 2, [("older", 3.0)] * 2]
    for name, module in today.items():
        assert sys.modules[f"{PACKAGE}.{name}"] is module
    assert found[0] == {name: today[name] for name in ("paged", "latent")}


def test_an_earlier_version_is_timed_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, today: dict[str, ModuleType]
) -> None:
    """`after` is today's time over its; results that are not today's are told."""
    del today
    monkeypatch.setattr(padded, "MODELS", {"toy": padded.Heads(2, 4, 2, 16)})
    monkeypatch.setattr(padded, "CELLS", ((2, 40),))
    monkeypatch.setattr(padded, "UNEVEN", ((3, 40),))
    monkeypatch.setattr(padded, "GRAPHS", (2, 4))
    made = padded.calls_of

    class Timed(padded.Graph):
        """The earlier version takes four times as long."""

        def us(self) -> float:
            return 2.0 if self._read[0].old else 0.5  # type: ignore[attr-defined]

    def calls_of(kernels: dict[str, ModuleType], *more: Any) -> Any:
        run = made(kernels, *more)
        run.old = kernels["paged"].NAME != "today"  # type: ignore[attr-defined]
        return run

    monkeypatch.setattr(padded, "calls_of", calls_of)
    monkeypatch.setattr(padded, "Graph", Timed)
    for name, factor, step, status in (("old", 1.01, "", 0), ("bad", 1.5, "arrivals, ", 1)):
        folder, out = kernels_in(tmp_path / name, factor, step), tmp_path / f"{name}.json"
        given = ["--device", "cpu", "--models", "toy", "--rounds", "2", "--before", str(folder), "--out", str(out)]
        assert padded.main(given) == status
        for found, sizes in zip(json.loads(out.read_text())["cells"].values(), ("24", "34"), strict=True):
            assert {size: ratio[0] for size, ratio in found["after"].items()} == dict.fromkeys(sizes, 0.25)
            assert found["before"]["relative_difference"] == pytest.approx(factor - 1, rel=0.3)


def test_a_folder_without_kernels_is_refused(tmp_path: Path) -> None:
    """It is named, with what it should have."""
    with pytest.raises(SystemExit, match=r"has no kpolicy/serving/gpu/paged\.py"):
        padded.kernels_of(tmp_path)
