"""Cost tables of measured kernels: the fit, and the package itself where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from kpolicy import BatchShape, Engine
from kpolicy.costs import CostTable, Curve
from kpolicy.errors import ConfigError, ProfileError, UnknownNameError
from kpolicy.figures import config_costs
from kpolicy.kv_span import KvSpan
from kpolicy.reasons import Basis, Reason
from kpolicy.schemas import Profile, dumps, loads
from kpolicy.simulate import aiconfigurator
from kpolicy.simulate.aiconfigurator import SYSTEMS, aiconfigurator_costs
from tests.fakes.aiconfigurator import install

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "hidden_act": "silu",
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return tmp_path


def test_a_fit_finds_costs_back() -> None:
    """Times that follow the formula give its coefficients; a negative one is left out and the rest fitted."""
    cost, error = aiconfigurator._fitted(
        [(1, 10), (4, 100), (16, 1000), (64, 50)], lambda rows, length: (rows, rows * length),
        lambda rows, length: 30.0 + 2.0 * rows + 0.01 * rows * length,
    )  # fmt: skip
    assert (cost.base_us, cost.row_us, cost.unit_us) == pytest.approx((30.0, 2.0, 0.01))
    assert error == pytest.approx(0.0, abs=1e-9)
    falling, error = aiconfigurator._fitted(
        [(1, 10), (4, 10), (16, 10)], lambda rows, length: (rows, rows * length),
        lambda rows, _length: 100.0 - rows,
    )  # fmt: skip
    assert (falling.row_us, falling.unit_us) == (0.0, 0.0)
    assert falling.base_us == pytest.approx(93.0, rel=0.05)
    assert error > 0


def test_devices_without_tables_are_refused(config: Path) -> None:
    """The error lists the devices that there are tables of."""
    with pytest.raises(UnknownNameError, match="A100, B200, H100, H200"):
        aiconfigurator_costs(config, "ascend-910b")


def test_decisions_say_that_the_publisher_measured(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their reasons, their basis and `explain`: not that nothing was measured, nor that the device was."""
    install(monkeypatch)
    costs, fit = aiconfigurator_costs(config, "H100")
    assert fit.measured_share == pytest.approx(0.5)
    graph, eager = Reason.CHEAPEST_KERNEL_TABLES, Reason.EAGER_IS_CHEAPER_KERNEL_TABLES
    slow = Curve((1, 512), (1e6, 1e6))
    for table, reason in ((costs, graph), (attrs.evolve(costs, full=slow, piecewise=slow), eager)):
        engine = Engine("auto", ladder=[32, 64], costs=table)
        for shape in (BatchShape.decode(17), BatchShape(prefills=[(60, 0)])):
            told = engine.explain(shape)
            assert told.decision == engine.decide(shape)
            assert told.costs.startswith(f"{costs.version} (kernels measured by their publisher, not on your device")
        decision = engine.decide(BatchShape.decode(17))
        assert decision.reason is reason
        assert decision.basis.names == ("ladder_assumed", "support_assumed", "costs_kernel_tables")
        assert decision.why.endswith("the stated attention support and costs of published kernel tables)")
    for text in (graph.text, eager.text):
        assert text.endswith("by kernel tables that their publisher measured, not on your device")
    assert Engine("full", costs=costs).decide(BatchShape.decode(17)).basis == BY_RULE
    assert read_back(costs) == costs
    with pytest.raises(ProfileError, match="leave measured or kernel_tables out"):
        attrs.evolve(costs, measured=True)


BY_RULE = Basis.LADDER_ASSUMED | Basis.SUPPORT_ASSUMED


def read_back(costs: CostTable) -> CostTable:
    """As a profile's file has it."""
    return loads(dumps(Profile(costs=costs, device="a device", model="a model")), Profile).costs


@pytest.mark.parametrize("device", SYSTEMS)
def test_tables_lie_near_the_roofline(config: Path, device: str) -> None:
    """Measured kernels and published figures agree within a factor at every size, and padding is nearly free to 64."""
    pytest.importorskip("aiconfigurator_core")
    costs, fit = aiconfigurator_costs(config, device)
    assert fit.package.startswith("aiconfigurator-core ")
    assert not costs.measured
    assert costs.kernel_tables
    assert 0.5 < fit.measured_share <= 1
    assert fit.decode_error < 0.25
    roofline = config_costs(config, device)
    for size, us in zip(costs.full.sizes, costs.full.us, strict=True):
        assert 0.4 < us / roofline.full.at(size) < 2.5
    assert costs.full.at(64) < 1.3 * costs.full.at(1)
    assert costs.full.at(2048) > 3 * costs.full.at(256)
    assert costs.decode_attention.unit_us > 0
    assert costs.prefill_attention.unit_us > 0
    assert costs.kv_span == KvSpan(decode_row=8192, decode_step=256 * 8192, prefill=8192 + 8192)


def test_what_has_no_tables_is_one_error(tmp_path: Path) -> None:
    """A backend or a model that the package doesn't know, and a file under another name."""
    pytest.importorskip("aiconfigurator_core")
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    with pytest.raises(ConfigError, match="no tables for"):
        aiconfigurator_costs(tmp_path, "H200", backend="llamacpp")
    less = {name: value for name, value in QWEN3_8B.items() if name != "max_position_embeddings"}
    (tmp_path / "less").mkdir()
    (tmp_path / "less" / "config.json").write_text(json.dumps(less))
    with pytest.raises(ConfigError, match=r"it reads 'max_position_embeddings', which isn't there\."):
        aiconfigurator_costs(tmp_path / "less", "H200")
    (tmp_path / "other.json").write_text(json.dumps(QWEN3_8B))
    with pytest.raises(ConfigError, match="Rename the file"):
        aiconfigurator_costs(tmp_path / "other.json", "H200")
