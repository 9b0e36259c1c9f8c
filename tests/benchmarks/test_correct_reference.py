"""benchmarks.gpu.correct's reference: attention that is broken for EAGER and the modes alike is seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.gpu import correct  # noqa: E402
from tests.benchmarks.broken_attention import BREAKS, LATENT, break_after_loading  # noqa: E402
from tests.benchmarks.test_gpu_scripts import QWEN  # noqa: E402


@pytest.mark.parametrize("config", [QWEN, LATENT], ids=["keys and values", "latents"])
@pytest.mark.parametrize("how", BREAKS)
def test_broken_attention_is_seen(
    config: dict[str, Any], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides are off alike, so only transformers' own forward tells; intact, nothing is over a limit."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out.json"
    broken = break_after_loading(monkeypatch, how)
    given = ["--config", str(tmp_path), "--device", "cpu", "--tiny", "--out", str(out), "--part", "reference"]
    given += ["--commit", "now"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        code = correct.main(given)
    finally:
        torch.set_num_threads(threads)
    assert broken == ["plain"]
    found = json.loads(out.read_text())["cells"]["reference"]
    over = correct.over_limits(found)
    assert found["commit"] == "now"
    assert found["ratio"] <= 2, "the modes are as EAGER is"
    if how == "intact":
        assert (code, over, found["beyond_margin"]) == (0, [], 0)
        assert found["theirs_p999"] == 0, "in float32 it is the reference"
    else:
        assert code == 1
        assert over == ["eager_over_theirs", "eager_median_over_theirs", "beyond_margin"]
        assert min(found["beyond_margin_of"].values()) > 0


def errors(l2: list[float], wrong: Sequence[float] = (), largest: float = 0.5) -> correct.Errors:
    """Of rows with those errors."""
    made = correct.Errors()
    made.l2, made.wrong, made.largest = list(l2), list(wrong), [largest]
    return made


def test_eager_is_held_to_transformers_and_the_modes_to_eager() -> None:
    """At p99.9 and in the median, each by its own limit; a floor stands in for a forward without error."""
    found = correct.compared(errors([0.1, 0.1, 0.2]), errors([0.1, 0.1, 0.39]), errors([0.1, 0.1, 0.77]), 10.0)
    assert (found["eager_over_theirs"], found["eager_median_over_theirs"], found["ratio"]) == (1.95, 1.0, 1.9744)
    assert correct.over_limits(found) == []
    found = correct.compared(errors([0.1, 0.1, 1.0]), errors([0.1, 0.3, 1.2]), errors([0.1, 0.3, 2.5]), 10.0)
    assert correct.over_limits(found) == ["ratio", "eager_median_over_theirs"]
    found = correct.compared(errors([0.0], largest=0.0), errors([1e-6]), errors([1e-6]), 10.0)
    assert found["eager_over_theirs"] == round(1e-6 / correct.FLOOR, 4)
    assert found["margin"] == 2 * correct.FLOOR * 10


def test_a_token_counts_beyond_twice_transformers_own_error() -> None:
    """Of EAGER as of the modes, whatever EAGER's own largest error is."""
    ours = errors([0.1], wrong=[0.9, 1.1], largest=50.0)
    found = correct.compared(errors([0.1], wrong=[0.2]), ours, errors([0.1], wrong=[1.2, 1.3, 0.1]), 10.0)
    assert found["tokens_that_differ"] == {"theirs": 1, "eager": 2, "modes": 3}
    assert (found["beyond_margin"], found["beyond_margin_of"]) == (3, {"eager": 1, "modes": 2})
    assert correct.over_limits(found) == ["beyond_margin"]


def test_logits_that_are_not_finite_are_far_off() -> None:
    """A NaN is beyond every limit, and sorts."""
    made, exact = correct.Errors(), torch.tensor([[1.0, 2.0, 3.0]] * 3)
    made.add(exact * torch.tensor([[1.0], [float("nan")], [float("inf")]]), exact)
    assert made.l2[0] == 0
    assert min(made.l2[1:]) > 1e14
    assert made.p999 < float("inf")
    found = correct.compared(errors([0.1] * 3), made, errors([0.1] * 3), 10.0)
    assert "eager_over_theirs" in correct.over_limits(found)


def test_results_of_before_are_read_and_measured_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are judged by what they have when they are merged; a run that goes on takes a new reference."""
    before = {"ratio": 0.98, "beyond_margin": 0}
    assert correct.over_limits(before) == []
    assert correct.over_limits({**before, "ratio": float("nan"), "beyond_margin": 2}) == ["ratio", "beyond_margin"]
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    out = tmp_path / "out.json"
    given = ["--config", str(tmp_path), "--device", "cpu", "--tiny", "--out", str(out), "--part", "reference"]
    assert correct.main(given) == 0
    result = json.loads(out.read_text())
    result["cells"]["reference"] = before
    out.write_text(json.dumps(result))
    assert correct.merge([out], tmp_path / "merged.json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["over_limits"] == []
    assert correct.main(given) == 0
    assert json.loads(out.read_text())["cells"]["reference"]["eager_over_theirs"] <= 2
