"""What benchmarks.gpu.correct and overlap find out about steps that the host doesn't wait for."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.gpu import common, correct, overlap  # noqa: E402
from kpolicy.executors import parts  # noqa: E402
from kpolicy.serving.rows import RowGroup  # noqa: E402
from tests.benchmarks.test_gpu_scripts import QWEN  # noqa: E402
from tests.executors_launcher import checker  # noqa: E402


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A dry run's options; the result goes to out.json."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return ["--config", str(tmp_path), "--device", "cpu", "--tiny", "--out", str(tmp_path / "out.json")]


def differences(arguments: list[str]) -> list[str]:
    found: list[str] = json.loads(Path(arguments[-1]).read_text())["total"]["differences"]
    return found


def changing(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let `change(call, executor, logits)` spoil what a step did, before anything is compared; calls count from 1."""
    run, calls = common.launched, 0

    def spoiled(executor: Any, decision: Any, inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        ran = run(executor, decision, inputs)
        change(calls, executor, ran[0])
        return ran

    for module in (correct, overlap):
        monkeypatch.setattr(module, "launched", spoiled)


def test_stray_kv_is_said_of_one_step_and_other_faults_of_each(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps launched before a stray write is read meet the same KV and aren't blamed; their wrong logits are told."""

    def change(call: int, executor: Any, logits: list[Any]) -> None:
        if call == 2:
            model = executor.launcher.model
            model.kv_caches()[0][model.num_slots - 1] += 1
        if call == 3:
            logits[0].add_(2)

    changing(monkeypatch, change)
    assert correct.main([*arguments, "--part", "bits", "--count", "12"]) == 1
    stray, wrong = differences(arguments)
    assert stray.startswith("block 0, step 1,")
    assert "which no row has" in stray
    assert wrong.startswith("block 0, step 2,")
    assert wrong.endswith("logits by 2")


@pytest.mark.parametrize("benchmark", [correct, overlap])
def test_the_last_step_is_read(benchmark: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A block ends with no step unread: what its last one computed wrongly is told."""
    last = 6 if benchmark is correct else 11

    def change(call: int, executor: Any, logits: list[Any]) -> None:
        del executor
        if call == last:
            logits[-1].add_(1)

    changing(monkeypatch, change)
    part = ["--part", "bits"] if benchmark is correct else []
    assert benchmark.main([*arguments, *part, "--count", "6"]) == 1
    (difference,) = differences(arguments)
    assert "step 5," in difference
    assert difference.endswith("logits by 1")


@pytest.mark.parametrize("benchmark", [correct, overlap])
@pytest.mark.parametrize(("what", "named"), [("tokens", "sampled tokens"), ("kv", "written KV")])
def test_other_tokens_and_other_kv_show(
    benchmark: Any, what: str, named: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that sampled other tokens than eagerly or in turn, or wrote other KV to slots of its own, is told."""
    run, calls = common.launched, 0

    def other(executor: Any, decision: Any, inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        ran = run(executor, decision, inputs)
        if calls == 1:
            if what == "tokens":
                with torch.inference_mode():
                    ran[1][0].add_(1)
            else:
                executor.launcher.model.kv_caches()[0][inputs.slot_mapping[0]] += 1
        return ran

    monkeypatch.setattr(benchmark, "launched", other)
    part = ["--part", "bits"] if benchmark is correct else []
    assert benchmark.main([*arguments, *part, "--count", "3"]) == 1
    (difference,) = differences(arguments)
    assert "step 0," in difference
    assert difference.endswith(named)


@pytest.mark.parametrize("benchmark", [correct, overlap])
def test_a_second_run_that_writes_no_kv_shows(
    benchmark: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds KV as it was before the first one, so that what that one wrote isn't taken for its own."""
    where, name = (checker, "eager_part") if benchmark is correct else (overlap, "launched")
    run, calls = getattr(where, name), 0

    def writes_nothing(executor: Any, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        caches = executor.launcher.model.kv_caches()
        before = [cache.clone() for cache in caches]
        ran = run(executor, *given)
        if calls % 2 == 0 or benchmark is correct:
            for cache, kept in zip(caches, before, strict=True):
                cache.copy_(kept)
        return ran

    monkeypatch.setattr(where, name, writes_nothing)
    part = ["--part", "bits"] if benchmark is correct else []
    assert benchmark.main([*arguments, *part, "--count", "3"]) == 1
    found = differences(arguments)
    assert len(found) == 3
    assert all(each.endswith("written KV") for each in found)


def test_the_sign_of_a_zero_is_a_bit(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """KV is compared to the bit: a zero that turned negative shows."""
    slot = -2

    def change(call: int, executor: Any, logits: list[Any]) -> None:
        del logits
        if call == 2:
            executor.launcher.model.kv_caches()[0][slot] = -0.0

    made = correct.Bench.note_kv

    def zero(bench: Any) -> None:
        bench.model.kv_caches()[0][slot] = 0.0
        made(bench)

    monkeypatch.setattr(correct.Bench, "note_kv", zero)
    changing(monkeypatch, change)
    assert correct.main([*arguments, "--part", "bits", "--count", "3"]) == 1
    assert "step 1," in differences(arguments)[0]


@pytest.mark.parametrize("benchmark", [correct, overlap])
def test_a_step_that_fails_ends_the_run(benchmark: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step's event raises is raised where the step is read."""

    class Failed:
        def done(self) -> bool:
            return True

        def wait(self) -> None:
            raise RuntimeError("the half beside failed")

    run = common.launched

    def failing(*given: Any) -> Any:
        logits, sampled, outputs = run(*given)
        return logits, sampled, outputs._replace(ready=(Failed(),))

    monkeypatch.setattr(benchmark, "launched", failing)
    with pytest.raises(RuntimeError, match="the half beside failed"):
        benchmark.main([*arguments, *(["--part", "bits"] if benchmark is correct else []), "--count", "2"])


@pytest.mark.parametrize("benchmark", [correct, overlap])
def test_each_block_notes_its_commit(benchmark: Any, arguments: list[str], tmp_path: Path) -> None:
    """A run that goes on at another commit says how many steps each has; so do slices that are added up."""
    part, block = (["--part", "bits"], 100) if benchmark is correct else ([], 250)
    assert benchmark.main([*arguments, *part, "--count", "3", "--commit", "before"]) == 0
    assert benchmark.main([*arguments, *part, "--count", str(block + 2), "--commit", "now"]) == 0
    first = Path(arguments[-1])
    assert json.loads(first.read_text())["total"]["steps_by_commit"] == {"before": 3, "now": 2}
    old = json.loads(first.read_text())
    for cell in old["cells"].values():
        del cell["commit"]
    (tmp_path / "old.json").write_text(json.dumps({**old, "cells": {"7000": old["cells"]["0"]}}))
    out = tmp_path / "merged.json"
    assert benchmark.main(["--merge", str(first), str(tmp_path / "old.json"), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["total"]["steps_by_commit"] == {"before": 3, "now": 2, "unstated": 3}


@pytest.mark.parametrize("benchmark", [correct, overlap])
def test_slices_that_are_added_up_keep_every_command(benchmark: Any, tmp_path: Path) -> None:
    """Those of a slice that went on too, each once; one command alone stays by itself."""
    head = {"model": "a", "device": "d", "cells": {}}
    slices: list[dict[str, Any]] = [
        {"command": "two", "commands": ["one", "two"]},
        {"command": "three"},
        {"command": "two"},
    ]
    files = [tmp_path / f"{i}.json" for i in range(len(slices))]
    for file, commands in zip(files, slices, strict=True):
        file.write_text(json.dumps({**head, **commands}))
    out = tmp_path / "out.json"
    assert benchmark.merge(files, out) == 0
    merged = json.loads(out.read_text())
    assert (merged["command"], merged["commands"], merged["slices"]) == ("two", ["one", "two", "three"], 3)
    assert benchmark.merge([files[1], files[1]], out) == 0
    merged = json.loads(out.read_text())
    assert merged["command"] == "three"
    assert "commands" not in merged


def test_one_kv() -> None:
    """Layers' caches become parts of one tensor a shape, with what was in them."""

    class Layer:
        def __init__(self, fill: float) -> None:
            self.caches = torch.full((3, 2), fill), torch.full((3, 4), fill + 1)

    class Model:
        layers = (Layer(1), Layer(5))

        def kv_caches(self) -> list[Any]:
            return [cache for layer in self.layers for cache in layer.caches]

    model = Model()
    narrow, wide = common.one_kv(model)
    assert (narrow[:, 0, 0].tolist(), wide[:, 0, 0].tolist()) == ([1, 5], [2, 6])
    wide[1, 2] = 9
    assert model.layers[1].caches[1][2].tolist() == [9] * 4


@pytest.mark.parametrize(("width", "words"), [(8, 2), (6, 3), (3, 3)])
def test_bits_of(width: int, words: int) -> None:
    """Rows are read as numbers that are as wide as they allow, and NaN equals itself."""
    values = torch.full((2, width), float("nan"), dtype=torch.bfloat16)
    bits = common.bits_of(values)
    assert bits.shape == (2, words)
    assert torch.equal(bits, common.bits_of(values.clone()))


@pytest.mark.parametrize("benchmark", [correct, overlap])
def test_steps_are_launched_before_one_is_read(
    benchmark: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for no step before two further ones are launched, until a block ends."""
    run, first, launches, read = common.launched, common.Checks.first, 0, []
    a_step = 1 if benchmark is correct else 2

    def counted(*given: Any) -> Any:
        nonlocal launches
        launches += 1
        return run(*given)

    def noted(checks: Any, but: Any = ()) -> Any:
        read.append(launches // a_step)
        return first(checks, but)

    def unasked(part: Any) -> Any:
        raise AssertionError(f"{part} was waited for")

    monkeypatch.setattr(benchmark, "launched", counted)
    monkeypatch.setattr(common.Checks, "first", noted)
    monkeypatch.setattr(parts.OutputRows, "tensor", property(unasked))
    assert benchmark.main([*arguments, *(["--part", "bits"] if benchmark is correct else []), "--count", "7"]) == 0
    assert read == [3, 4, 5, 6, 7, 7, 7]


def test_attention_that_reads_the_reserved_slot_shows(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are NaN, in both runs of a step alike, and that is told."""
    opened = common.opened

    def leaky(model: Any, **given: Any) -> Any:
        # Not before: a model isn't loaded with such attention.
        monkeypatch.setattr(RowGroup, "slots", checker.leaking(RowGroup.slots, model.pad_slot))
        return opened(model, **given)

    monkeypatch.setattr(correct, "opened", leaky)
    assert correct.main([*arguments, "--part", "bits", "--count", "2"]) == 1
    found = differences(arguments)
    assert len(found) == 2
    assert all(each.endswith("an output isn't finite") for each in found)


def test_poison(tmp_path: Path) -> None:
    """The reserved slot, and no other, holds NaN in every layer before a step."""
    options = Namespace(
        config=tmp_path / "config.json", model=None, device="cpu", kernels="auto", tiny=True, layers=0
    )  # fmt: skip
    options.config.write_text(json.dumps(QWEN))
    model = common.load_model(
        common.config_of(options), options, kv_tokens=128, block_size=16, max_model_len=96, max_num_reqs=6
    )  # fmt: skip
    bench = correct.Bench(model, correct.TOY)
    for cache in bench.kv:
        cache.zero_()
    bench.poison()
    for cache in model.kv_caches():
        assert bool(cache[model.pad_slot].isnan().all())
        assert not bool(cache[: model.num_slots].isnan().any())
    bench.executor.release()
