"""Pictures: the same bytes each time, written whole, and a clear error without matplotlib."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from kpolicy.errors import ConfigError
from kpolicy.observe import ModeStats
from kpolicy.report import gather, plots
from kpolicy.report.curves import ticks
from kpolicy.scheduling.generator import generate_trace
from tests.report.helpers import COSTS, SMALL, small_report

NAMES = ("latency", "modes", "map", "padding", "timeline")


def test_every_picture_is_drawn_twice_the_same() -> None:
    """PNG and SVG, and an SVG has the policies' names as text."""
    pytest.importorskip("matplotlib")
    drawn = plots.draw(small_report())
    assert set(drawn) == {f"{name}.{kind}" for name in NAMES for kind in ("png", "svg")}
    for name, content in drawn.items():
        assert content[:8] == b"\x89PNG\r\n\x1a\n" if name.endswith("png") else b"<svg" in content
    assert b">vllm<" in drawn["latency.svg"]
    assert b">+ takes 5% or more over the cheapest way<" in drawn["map.svg"]
    assert drawn == plots.draw(small_report())


@pytest.mark.parametrize("policies", [("auto",), ("auto", "vllm", "eager")])
def test_no_legend_is_cut_off(policies: tuple[str, ...]) -> None:
    """Of any picture; a report of one policy has one map, which is the narrowest."""
    figure_of = pytest.importorskip("matplotlib.figure").Figure
    for name, figure in plots._figures(small_report(policies).traces[0], figure_of):
        figure.draw_without_rendering()
        for legend in figure.legends:
            drawn = legend.get_window_extent()
            assert figure.bbox.x0 <= drawn.x0 < drawn.x1 <= figure.bbox.x1, name
            assert figure.bbox.y0 <= drawn.y0 < drawn.y1 <= figure.bbox.y1, name


def test_a_modes_bar_has_its_share_where_that_fits() -> None:
    """Beyond a twentieth of the time."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    run = small_report().traces[0].runs[0]
    modes = {mode: ModeStats(1, 1, 0, us) for mode, us in (("full", 90.0), ("piecewise", 6.0), ("eager", 4.0))}
    result = attrs.evolve(run.result, modes=modes)
    plots._modes(figure, [attrs.evolve(run, result=result)])
    assert {text.get_text() for text in figure.axes[0].texts} == {"F 90%", "P 6%"}


def test_an_axis_has_round_values() -> None:
    """Three to five of them within one power of ten and over several, and the ends where there is none between."""
    assert [us / 1e3 for us in ticks(2.7e3, 13.4e3)] == [3, 5, 7, 10]
    assert [us / 1e3 for us in ticks(3e3, 55e3)] == [5, 10, 20, 50]
    assert [us / 1e3 for us in ticks(40e3, 3100e3)] == [100, 300, 1000, 3000]
    assert len(ticks(1.0, 1e9)) <= 5
    assert ticks(5.2, 5.9) == [5.2, 5.9]


def test_names_are_no_formulas_and_traces_have_files_of_their_own(tmp_path: Path) -> None:
    """A $ in a name is a $; the second trace's pictures are numbered; nothing else is left in the folder."""
    pytest.importorskip("matplotlib")
    trace = generate_trace(num_requests=12, seed=1)
    made = gather([trace, trace], ["eager"], server=SMALL, costs=COSTS)
    runs = [attrs.evolve(run, policy="a$x$_b") for run in made.traces[0].runs]
    made = attrs.evolve(made, traces=(attrs.evolve(made.traces[0], runs=tuple(runs)), made.traces[1]))
    written = plots.write(made, tmp_path / "new")
    assert {path.name for path in written} == {path.name for path in (tmp_path / "new").iterdir()}
    assert sorted(written) == sorted(plots.files(tmp_path / "new", 2))
    assert {f"{name}{number}.svg" for name in NAMES for number in ("", "-2")} <= {path.name for path in written}
    assert "a$x$_b" in (tmp_path / "new" / "modes.svg").read_text()


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It isn't needed before it is asked for."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"--plots needs matplotlib.*kpolicy\[plots\]"):
        plots.check()
