"""benchmarks.gpu.correct: a stray write of the eager part is seen, and isn't said to be the next step's alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.gpu import correct
from kpolicy.errors import KPolicyError
from tests.benchmarks.test_gpu_scripts import QWEN
from tests.executors_launcher import checker


@pytest.mark.parametrize("last", [False, True])
def test_a_stray_write_of_the_eager_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool) -> None:
    """It shows in the step behind it, whose message leaves open whose it is, or at the block's end."""
    part, run, steps = checker.eager_part, correct.Bench.compare, 0

    def compare(self: Any, decision: Any, inputs: Any) -> Any:
        nonlocal steps
        steps += 1
        return run(self, decision, inputs)

    def stray(executor: Any, launch: Any, inputs: Any) -> Any:
        made = part(executor, launch, inputs)
        if steps == (3 if last else 2):
            model = executor.model
            slot = next(each for each in reversed(range(model.num_slots)) if each not in inputs.slot_mapping)
            model.kv_caches()[0][slot] += 1
        return made

    monkeypatch.setattr(correct.Bench, "compare", compare)
    monkeypatch.setattr(checker, "eager_part", stray)
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    out = tmp_path / "c.json"
    given = ["--device", "cpu", "--tiny", "--config", str(tmp_path), "--out", str(out)]
    assert correct.main([*given, "--count", "3", "--part", "bits"]) == 1
    (difference,) = json.loads(out.read_text())["total"]["differences"]
    assert difference.startswith("block 0, last step run eagerly" if last else "block 0, step 2")
    assert "which no row has" in difference
    assert last or difference.endswith("by this step, or by the one before run eagerly")


def test_a_launch_of_the_eager_part_that_failed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no logits, and its own error is what ends the steps."""
    part = checker.eager_part

    def failed(executor: Any, launch: Any, inputs: Any) -> Any:
        outputs = part(executor, launch, inputs).outputs

        class Failed:
            logits, tokens = None, outputs.tokens

            def __len__(self) -> int:
                return len(outputs)

            @property
            def tensor(self) -> Any:
                raise KPolicyError("the launch failed")

        return SimpleNamespace(outputs=Failed())

    monkeypatch.setattr(checker, "eager_part", failed)
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    given = ["--device", "cpu", "--tiny", "--config", str(tmp_path), "--out", str(tmp_path / "c.json")]
    with pytest.raises(KPolicyError, match="the launch failed"):
        correct.main([*given, "--count", "1", "--part", "bits"])
