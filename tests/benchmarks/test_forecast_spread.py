"""What forecasts are worth is worked out again from the published profiles, and not from what knew the run's end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import forecast_spread
from benchmarks.forecast_spread import RESULTS, main

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "azure_llm_2023_code.csv"
NAME = "h200-dsv2lite-nineteenth"
SERVED = ("--trace", str(TRACE), "--start", "600", "--window", "20")


@pytest.mark.skipif(not TRACE.exists(), reason="the traces lie beside the repository and aren't here")
def test_the_published_figures_come_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each error by part, calibration and start, and the pairs that rank wrongly; the commit is named.

    Without a date nothing is written.
    """
    monkeypatch.setattr(forecast_spread, "RESULTS", tmp_path)
    monkeypatch.setenv("KPOLICY_COMMIT", "abc1234")
    given = ("--result", str(RESULTS / f"fidelity-{NAME}-before.json"), *SERVED)
    assert main((*given, "--date", "2026-11-29")) == 0
    [made] = tmp_path.iterdir()
    published = RESULTS / made.name
    assert made.name == f"forecast_spread-{NAME}.json"
    found, said = (json.loads(path.read_text(encoding="utf-8")) for path in (made, published))
    for name in ("policies", "ranked_wrong_from_starts", "starts", "run"):
        assert found[name] == said[name]
    assert found["commit"] == "abc1234"
    made.unlink()
    monkeypatch.setattr(forecast_spread, "STARTS", 1)
    assert main(given) == 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(not TRACE.exists(), reason="the traces lie beside the repository and aren't here")
def test_calibrations_behind_the_run_forecast_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(("--result", str(RESULTS / f"fidelity-{NAME}.json"), *SERVED))
    assert "calibrations made after the run too" in capsys.readouterr().err


@pytest.mark.skipif(not TRACE.exists(), reason="the traces lie beside the repository and aren't here")
def test_a_profile_that_did_not_serve_forecasts_no_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How slow the host was in the run is told by what it noted."""
    stem = f"fidelity-{NAME}-before"
    result = tmp_path / f"{stem}.json"
    result.write_bytes((RESULTS / result.name).read_bytes())
    profile = json.loads((RESULTS / f"{stem}-profile.json").read_text(encoding="utf-8"))
    del profile["costs"]["served"]
    (tmp_path / f"{stem}-profile.json").write_text(json.dumps(profile))
    for number in range(1, 4):
        name = f"fidelity-{NAME}-profile-{number}.json"
        (tmp_path / name).write_bytes((RESULTS / name).read_bytes())
    with pytest.raises(SystemExit, match="2"):
        main(("--result", str(result), *SERVED))
    assert "its profile doesn't say how fast the host was while its calibration served" in capsys.readouterr().err
