"""`benchmarks.middle_profile`: of several calibrations, the one in the middle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest

from benchmarks import middle_profile
from kpolicy.costs import CostTable, HostCost, analytic_costs
from kpolicy.schemas import Profile, read_profile, write_profile

if TYPE_CHECKING:
    from pathlib import Path


def table(eager_us: float, pieces_us: float, work_us: float) -> CostTable:
    """A decode in pieces takes `pieces_us`, an eager prompt `eager_us`; what isn't asked for takes anything."""
    return attrs.evolve(
        analytic_costs(), host_work_us=work_us, host_eager=HostCost(eager_us, 1.0, decode_us=9e4),
        host_piecewise=HostCost(pieces_us / 2, 1.0, decode_us=pieces_us / 2, prefill_us=9e4),
    )  # fmt: skip


def written(path: Path, costs: CostTable, *, device: str = "a device", model: str = "a model") -> Path:
    write_profile(path, Profile(costs=attrs.evolve(costs, measured_on=device), device=device, model=model))
    return path


def test_the_one_in_the_middle_of_what_launches_took_at_one_speed_is_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Where the work takes 20 us: 19,000; of 22,000 beside 24 us a share of 1 - 0.85 * (1 - 20 / 24); 19,100.
    paths = [
        written(tmp_path / "1.json", table(16_000, 3000, 20.0)),
        written(tmp_path / "2.json", table(18_500, 3500, 24.0)),
        written(tmp_path / "3.json", table(15_200, 3900, 20.0)),
    ]
    out = tmp_path / "out.json"
    assert middle_profile.main([*map(str, paths), "--out", str(out)]) == 0
    assert out.read_bytes() == paths[0].read_bytes()
    assert read_profile(out).costs.host_work_us == 20.0
    said = capsys.readouterr().out.splitlines()
    assert [line.removeprefix(str(tmp_path)) for line in said] == [
        "/1.json: 19,000 us, 1.00 of the middle one, taken",
        "/2.json: 18,883 us, 0.99 of the middle one",
        "/3.json: 19,100 us, 1.01 of the middle one",
    ]
    # Of two the quicker.
    assert middle_profile.main([*map(str, paths[:2]), "--out", str(out)]) == 0
    assert out.read_bytes() == paths[1].read_bytes()
    assert read_profile(out).costs.host_work_us == 24.0


def test_profiles_that_do_not_compare_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = written(tmp_path / "1.json", table(16_000, 3000, 20.0))
    others = {
        "profile 2 is of a model on another device": written(
            tmp_path / "2.json", table(1, 1, 20.0), device="another device"
        ),
        "profile 2 is of another model on a device": written(
            tmp_path / "3.json", table(1, 1, 20.0), model="another model"
        ),
        "profile 2 has no host_work_us": written(tmp_path / "4.json", table(1, 1, 0.0)),
    }
    out = tmp_path / "out.json"
    for why, path in others.items():
        assert middle_profile.main([str(first), str(path), "--out", str(out)]) == 2
        assert why in capsys.readouterr().err
    assert middle_profile.main([str(tmp_path / "none.json"), "--out", str(out)]) == 2
    assert "none.json" in capsys.readouterr().err
    assert not out.exists()
    assert middle_profile.main([str(first), "--out", str(tmp_path / "no folder" / "out.json")]) == 2
    assert "no folder" in capsys.readouterr().err
    before = first.read_bytes()
    with pytest.raises(SystemExit) as stopped:
        middle_profile.main([str(others["profile 2 has no host_work_us"]), str(first), "--out", str(first)])
    assert stopped.value.code == 2
    assert "is one of the profiles" in capsys.readouterr().err
    assert first.read_bytes() == before
