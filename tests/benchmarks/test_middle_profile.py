"""`benchmarks.middle_profile`: of several calibrations, the middle of each figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest

import kpolicy.middle_profile
from benchmarks import middle_profile
from kpolicy.costs import AttentionCost, CostTable, Curve, HostCost, Ties, analytic_costs
from kpolicy.errors import ProfileError
from kpolicy.host_speed import INSIDE
from kpolicy.kv_span import KvSpan
from kpolicy.schemas import Profile, read_profile, write_profile
from kpolicy.step_effects import StepEffects

if TYPE_CHECKING:
    from pathlib import Path


def table(work_us: float = 20.0, **figures: Any) -> CostTable:
    return attrs.evolve(analytic_costs(), measured=True, host_work_us=work_us, **figures)


def written(path: Path, costs: CostTable, **fields: Any) -> Path:
    write_profile(path, Profile(**{"costs": costs, "device": "a device", "model": "a model", **fields}))
    return path


def middle(tmp_path: Path, *tables: CostTable) -> CostTable:
    paths = [str(written(tmp_path / f"{i}.json", each)) for i, each in enumerate(tables)]
    assert middle_profile.main([*paths, "--out", str(tmp_path / "out.json")]) == 0
    return read_profile(tmp_path / "out.json").costs


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        # Two see the decode steps over first: the third's cost is another figure.
        ([(0.55, None), (0.40, 2.6), (0.44, 2.2)], (0.42, 2.4)),
        ([(0.55, None), (0.57, None), (0.40, 2.6)], (0.56, None)),
        ([(0.55, None), (0.40, 2.6)], (0.40, 2.6)),
        ([(0.5, None), (0.6, None), (0.7, None)], (0.6, None)),
    ],
)
def test_what_halves_beside_each_other_take_is_told_by_pairs(
    told: list[tuple[float, float | None]], expected: tuple[float, float | None], tmp_path: Path
) -> None:
    tables = [
        table(
            overlap_cost=cost, decode_slowdown=slowdown,
            effects=StepEffects(many_rows_overlap=cost, many_rows_slowdown=slowdown),
        )
        for cost, slowdown in told
    ]  # fmt: skip
    found = middle(tmp_path, *tables)
    assert (found.overlap_cost, found.decode_slowdown) == pytest.approx(expected)
    assert (found.effects.many_rows_overlap, found.effects.many_rows_slowdown) == pytest.approx(expected)
    assert (found.effects.one_row_overlap, found.effects.one_row_slowdown) == (None, None)


def test_each_figure_is_the_middle_ones(tmp_path: Path) -> None:
    """Not one table's: whichever is odd by one figure counts by its others."""
    effects = [
        StepEffects(warm_host_share=(share, 0.9), eager_new_us=us, one_row_overlap=one)
        for share, us, one in ((0.86, 0.0, 0.2), (0.92, 700.0, None), (0.94, 2000.0, 0.3))
    ]
    steps, bytes_ = (40.0, 60.0, 50.0), (100, 103, 120)
    attention = [AttentionCost(*each) for each in ((200.0, 0.1, 0.003), (220.0, 0.3, 0.002), (180.0, 0.2, 0.004))]
    spans = [KvSpan(1024, 4096, 6144), KvSpan(1024, 2048, 8192), KvSpan(1024, 4096, 8192)]
    found = middle(
        tmp_path,
        *(
            table(
                effects=effects[i], step_us=steps[i], graph_bytes=(bytes_[i], 7), decode_attention=attention[i],
                kv_span=spans[i],
            )
            for i in range(3)
        ),
    )  # fmt: skip
    assert found.effects.warm_host_share == (0.92, 0.9)
    assert found.effects.eager_new_us == 700.0
    assert found.effects.one_row_overlap == 0.25, "of those that have it"
    assert (found.step_us, found.graph_bytes) == (50.0, (103, 7))
    assert found.decode_attention == AttentionCost(200.0, 0.2, 0.003)
    assert found.kv_span == KvSpan(1024, 2048, 6144), "what one wasn't timed at is outside"
    assert found.mixed is None


def test_attention_is_never_outside_the_tables(tmp_path: Path) -> None:
    """Medians of parts that stand for one another would say 40 us of 8 rows, of which the tables say 80, 80 and 120."""
    costs = [AttentionCost(0.0, 10.0, 0.0), AttentionCost(80.0, 0.0, 0.0), AttentionCost(40.0, 0.0, 0.1)]
    found = middle(tmp_path, *(table(decode_attention=each) for each in costs)).decode_attention
    assert found in costs
    prefill = [
        AttentionCost(*each) for each in ((100.0, 0.0, 0.001, 1.5), (110.0, 0.0, 0.002, 1.4), (90.0, 0, 0.003, 1.6))
    ]
    found = middle(tmp_path, *(table(prefill_attention=each) for each in prefill)).prefill_attention
    assert found == AttentionCost(100.0, 0.0, 0.002, 1.5), "within them each part has its own middle"


def test_measured_times_and_those_to_decide_by_have_a_middle_each(tmp_path: Path) -> None:
    """A size that one table alone has tied is the middle of what each decides by there."""
    full = table().full
    first, *rest = full.us
    tied = [Curve(full.sizes, (us, *rest)) for us in (first * 0.97, first * 0.99, first)]
    found = middle(tmp_path, *(table().decided_by({"full": each}) for each in tied))
    assert found.full == full
    assert found.ties == Ties(full=Curve(full.sizes[:1], (first * 0.99,)))


def test_no_profile_has_no_middle() -> None:
    with pytest.raises(ProfileError, match="no profile"):
        kpolicy.middle_profile.middle([])


def test_curves_are_taken_where_all_of_them_are(tmp_path: Path) -> None:
    """At sizes of any, between those of the others; beyond where one ends they go on as they rose."""
    curves = [Curve([1, 4, 16], [100.0, 130.0, 250.0]), Curve([1, 16], [90.0, 240.0]), Curve([2, 8], [120.0, 150.0])]
    found = middle(tmp_path, *(table(eager=curve) for curve in curves))
    assert found.eager == Curve([2, 4, 8], [110.0, 130.0, 160.0])
    assert found.full == table().full


def test_launching_is_the_middle_of_what_was_measured(tmp_path: Path) -> None:
    """Steps of decodes take 1,300, 1,400 and 1,500 us, though the middle of their parts is 1,100."""
    costs = [HostCost(1000.0, 1.0, 300.0, 100.0), HostCost(300.0, 3.0, 1100.0, 700.0), HostCost(1400.0, 2.0, 100.0)]
    found = middle(tmp_path, *(table(host_eager=each) for each in costs)).host_eager
    ways = ((True, False), (False, True), (True, True))
    times = [found.base_for(decodes=decodes, prefills=prefills) for decodes, prefills in ways]
    assert times == pytest.approx([1400.0, 1100.0, 1500.0])
    assert found.req_us == 2.0


def test_what_was_noted_inside_steps_goes_before_what_was_noted_beside_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside them the host was always as quick; inside, for the last, the work took a fifth longer."""
    hosts = [(10.0, 1000.0), (10.0, 1010.0), (12.0, 1171.0)]
    tables = [
        table(host_work_inside_us=inside, host_eager=HostCost(us), host_piecewise=HostCost(us)) for inside, us in hosts
    ]
    found = middle(tmp_path, *tables)
    assert found.host_work_inside_us == 10.0
    assert found.host_work_us == 20.0
    assert found.host_eager.base_us == pytest.approx(1171 * (1 - 0.85 / 6))
    assert capsys.readouterr().out.splitlines()[-1].endswith("/2.json: 2,010 us, 1.00 of the middle")


def test_tables_are_brought_to_one_host_speed_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table of a slow host launches no slower than the others, once it is brought to their speed."""
    hosts = [(20.0, 1000.0), (20.0, 1010.0), (24.0, 1171.0)]
    tables = [table(work, host_eager=HostCost(us), host_piecewise=HostCost(us), step_us=0.1 * us) for work, us in hosts]
    found = middle(tmp_path, *tables)
    assert found.host_work_us == 20.0
    assert found.host_eager.base_us == pytest.approx(1171 * (1 - 0.85 / 6))
    assert found.step_us == pytest.approx(117.1 * (1 - 0.85 / 6))
    said = capsys.readouterr().out.splitlines()
    assert [line.removeprefix(str(tmp_path)) for line in said] == [
        "/0.json: 2,000 us, 0.99 of the middle", "/1.json: 2,020 us, 1.00 of the middle",
        "/2.json: 2,010 us, 1.00 of the middle",
    ]  # fmt: skip


def test_a_host_that_takes_nothing_to_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a CPU, which runs what it launches: there is no middle to divide by."""
    nothing = {"host_eager": HostCost(0.0), "host_piecewise": HostCost(0.0)}
    middle(tmp_path, *(table(**nothing) for _ in range(3)))
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path / f'{i}.json'}: 0 us" for i in range(3)]


def test_the_profile_says_what_it_was_made_of(tmp_path: Path) -> None:
    paths = [
        written(
            tmp_path / f"{i}.json", table(version=f"table {i}", step_us=1.0 + i), measured_at=f"2026-11-23T03:0{9 - i}",
            versions={"kpolicy": "0.1.0"}, tensor_parallel_size=1,
        )
        for i in (1, 2)
    ]  # fmt: skip
    out = tmp_path / "out.json"
    assert middle_profile.main([*map(str, paths), "--out", str(out)]) == 0
    found = read_profile(out)
    assert found.costs.version == "the middle of each figure of 2: table 1; table 2"
    assert found.costs.step_us == 2.5
    assert (found.device, found.model, found.tensor_parallel_size) == ("a device", "a model", 1)
    assert (found.measured_at, dict(found.versions)) == ("2026-11-23T03:08", {"kpolicy": "0.1.0"})
    assert found.command == f"python -m benchmarks.middle_profile {paths[0]} {paths[1]} --out {out}"


def test_bytes_of_kv_are_those_that_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By any of the profiles, as older ones say nothing; two that differ are refused."""
    old, new, other = (
        written(tmp_path / f"{i}.json", table(), kv_bytes_per_token=said) for i, said in enumerate((None, 512, 1024))
    )
    out = tmp_path / "out.json"
    assert middle_profile.main([*map(str, (old, new, new)), "--out", str(out)]) == 0
    assert read_profile(out).kv_bytes_per_token == 512
    assert middle_profile.main([str(old), "--out", str(out)]) == 0
    assert read_profile(out).kv_bytes_per_token is None
    assert middle_profile.main([*map(str, (old, new, other)), "--out", str(out)]) == 2
    assert "kv_bytes_per_token is 512, 1024; give profiles" in capsys.readouterr().err


def test_profiles_that_do_not_compare_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = written(tmp_path / "1.json", table())
    others = {
        "profile 2 has device another device": written(tmp_path / "2.json", table(), device="another device"),
        "profile 2 has model another model": written(tmp_path / "3.json", table(), model="another model"),
        "profile 2 has model_shape {'experts': 8}": written(tmp_path / "10.json", table(), model_shape={"experts": 8}),
        "profile 2 has versions": written(tmp_path / "4.json", table(), versions={"torch": "2"}),
        "profile 2 has tensor_parallel_size 2": written(tmp_path / "5.json", table(), tensor_parallel_size=2),
        "profile 2 has host_work_us 0, the first 20": written(tmp_path / "6.json", table(0.0)),
        "profile 2 has host_work_inside_us 9, the first 0": written(
            tmp_path / "9.json", table(host_work_inside_us=9.0)
        ),
        "host_probe is 'interpreter', 'copies'": written(tmp_path / "7.json", table(host_probe="copies")),
        "inside_probe is 'interpreter, once', 'interpreter, least of three'": written(
            tmp_path / "11.json", table(inside_probe=INSIDE)
        ),
        "curves of eager have no size in common: 1 to 16384; 20000 to 20000": written(
            tmp_path / "8.json", table(eager=Curve([20_000], [1e4]))
        ),
    }
    out = tmp_path / "out.json"
    for why, path in others.items():
        assert middle_profile.main([str(first), str(path), "--out", str(out)]) == 2
        assert why in capsys.readouterr().err
    assert middle_profile.main([str(tmp_path / "none.json"), "--out", str(out)]) == 2
    assert "none.json" in capsys.readouterr().err
    assert not out.exists()
    with pytest.raises(SystemExit) as stopped:
        middle_profile.main([str(first), "--out", str(tmp_path / "no folder" / "out.json")])
    assert stopped.value.code == 2
    assert "no folder" in capsys.readouterr().err
    before = first.read_bytes()
    with pytest.raises(SystemExit) as stopped:
        middle_profile.main([str(tmp_path / "6.json"), str(first), "--out", str(first)])
    assert stopped.value.code == 2
    assert "is one of the profiles" in capsys.readouterr().err
    assert first.read_bytes() == before
