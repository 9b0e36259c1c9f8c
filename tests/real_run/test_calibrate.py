"""Costs measured on this machine, and what rests on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.errors import ProfileError  # noqa: E402
from kpolicy.modes import Part  # noqa: E402
from kpolicy.schemas import read_profile  # noqa: E402
from kpolicy.serving.calibrate import calibrate, check_profile, save_profile  # noqa: E402
from kpolicy.serving.real_run import Serving  # noqa: E402
from kpolicy.shapes import BatchShape  # noqa: E402
from tests.real_run.helpers import SETTINGS  # noqa: E402


@pytest.fixture(scope="module")
def measured(model: Any) -> Any:
    """(engine with its graphs, the table measured with them)."""
    from tests.real_run.helpers import LADDER

    serving = Serving(model=model, settings=SETTINGS, ladder=LADDER)
    engine = serving.engine("auto")
    engine.capture()
    costs = calibrate(engine.executor, engine.registry, model, SETTINGS, allowance_s=20.0)
    return serving, engine, costs


def test_every_captured_size_is_a_point(measured: Any) -> None:
    """The curves have a positive time for each captured size, EAGER's up to the token limit."""
    _, engine, costs = measured
    captured = engine.registry.captured()
    assert costs.measured
    assert costs.mixed is not None
    assert {*costs.full.sizes, *costs.mixed.sizes} == {key.num_tokens for key in captured if key.part is Part.FULL}
    assert set(costs.piecewise.sizes) == {key.num_tokens for key in captured if key.part is Part.PIECEWISE}
    assert costs.eager.sizes[-1] == SETTINGS.max_num_tokens
    assert 0 <= costs.overlap_cost <= 2
    assert all(seconds > 0 for seconds in costs.capture_us)
    assert costs.graph_pieces[1] > costs.graph_pieces[0] == 1


def test_the_version_names_device_and_model(measured: Any) -> None:
    """Who reads a decision's cost table sees what it was measured on."""
    _, _, costs = measured
    assert "Qwen3ForCausalLM" in costs.version
    assert "measured " in costs.version
    assert "thread" in costs.version


def test_auto_decides_by_what_was_measured(measured: Any) -> None:
    """With the measured table auto's reasons say so, and nothing is taken for granted."""
    serving, engine, costs = measured
    again = attrs.evolve(serving, costs=costs).engine("auto", like=engine)
    assert again.keys == engine.keys
    decision = again.decide(BatchShape.decode(3))
    assert decision.reason.value in {"cheapest_measured", "eager_is_cheaper"}
    assert not decision.basis
    assert decision.costs_version == costs.version


def test_a_profile_gives_the_table_back(measured: Any, model: Any, tmp_path: Path) -> None:
    """What is saved reads as the same table, with device, model, versions and how the model was split."""
    costs = measured[2]
    save_profile(tmp_path / "p.json", costs, model, "kpolicy run")
    profile = read_profile(tmp_path / "p.json")
    assert profile.costs == costs
    assert profile.versions["torch"] == str(torch.__version__)
    assert "Qwen3" in profile.model
    assert (costs.measured_on, costs.measured_with) == (profile.device, profile.model)
    assert profile.tensor_parallel_size == 1
    assert profile.model_shape == costs.measured_shape == model.model_shape
    caches = model.kv_caches()
    assert profile.kv_bytes_per_token == sum(each[0].numel() * each.element_size() for each in caches) > 0
    check_profile(profile, model, "p.json")


def test_a_profile_of_a_model_with_another_layer_is_refused(measured: Any, tmp_path: Path) -> None:
    """Both are of 0.1 M parameters to a tenth, and so of one name."""
    from kpolicy.serving.load import load
    from tests.real_run.helpers import TINY

    save_profile(tmp_path / "p.json", measured[2], measured[0].model, "kpolicy run")
    profile = read_profile(tmp_path / "p.json")
    layers = profile.model_shape["num_hidden_layers"]
    assert {"hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "attention_kernels"} <= {
        *profile.model_shape
    }
    deeper = {**TINY, "num_hidden_layers": TINY["num_hidden_layers"] + 1}
    other = load(deeper, num_blocks=32, block_size=4, max_num_reqs=4, seed=3)
    old = attrs.evolve(profile, model=other.full_name, model_shape={})
    check_profile(old, other, "an older profile")
    with pytest.raises(
        ProfileError, match=rf"^p\.json was .* of num_hidden_layers {layers}, and this has .* {layers + 1}\."
    ):
        check_profile(attrs.evolve(profile, model=other.full_name), other, "p.json")


def test_without_graphs_every_curve_is_eagers(model: Any) -> None:
    """A policy that captures nothing is measured all the same."""
    engine = Serving(model=model, settings=SETTINGS).engine("eager")
    costs = calibrate(engine.executor, engine.registry, model, SETTINGS, allowance_s=0.2)
    assert costs.full == costs.piecewise == costs.eager


def test_progress_is_told(model: Any) -> None:
    """Shares of the allowance that rise, and the whole of it where all was measured."""
    engine = Serving(model=model, settings=SETTINGS).engine("eager")
    told: list[float] = []
    calibrate(engine.executor, engine.registry, model, SETTINGS, allowance_s=30.0, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    shorter: list[float] = []
    calibrate(engine.executor, engine.registry, model, SETTINGS, allowance_s=0.01, progress=shorter.append)
    assert all(0 < share <= 1 for share in shorter)
    engine.release()


def test_least_rounds_go_beyond_the_allowance(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allowance that ends within the first case leaves nothing out where every case must have samples."""
    from kpolicy.executors.calibrate import Calibration

    rounds: list[int] = []
    ended = Calibration.end

    def noted(self: Calibration) -> None:
        rounds.append(self.rounds)
        ended(self)

    monkeypatch.setattr(Calibration, "end", noted)
    engine = Serving(model=model, settings=SETTINGS).engine("eager")
    told: list[float] = []
    given = (engine.executor, engine.registry, model, SETTINGS)
    short = calibrate(*given, allowance_s=1e-6)
    all_of_it = calibrate(*given, allowance_s=1e-6, least_rounds=2, progress=told.append)
    assert short.eager.sizes[-1] < SETTINGS.max_num_tokens == all_of_it.eager.sizes[-1]
    assert rounds[0] == 0
    assert rounds[1] >= 2
    assert told[-1] == 1.0
    assert max(told[:-1], default=0.0) < 1.0
    engine.release()
