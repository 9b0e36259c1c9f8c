"""The benchmark of random steps: shards share out slices, and merge into one result that counts everything once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks import random_steps  # noqa: E402
from kpolicy.policies import OWN  # noqa: E402
from tests.serving_models.families import FAMILIES  # noqa: E402


def test_shards_share_out_all_slices() -> None:
    """Each slice is one shard's, and every family has steps of both kinds."""
    parts = [list(random_steps.slices_of(10_000, 250, shard, 7)) for shard in range(1, 8)]
    assert sorted(number for part in parts for number in part) == list(range(40))
    places = {random_steps.place_of(number, sorted(FAMILIES)) for number in range(40)}
    assert len(places) == 40
    assert {family for family, place in places if place % 2} == set(FAMILIES)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two shards of one small run."""
    folder = tmp_path_factory.mktemp("shards")
    files = [folder / f"{shard}.json" for shard in (1, 2)]
    for shard, file in enumerate(files, 1):
        asked = ["--steps", "84", "--slice-steps", "42", "--shard", f"{shard}/2", "--result", str(file)]
        assert random_steps.main(asked) == 0
    return files


def test_shards_merge_into_one_result(shards: list[Path], tmp_path: Path) -> None:
    """The merged result has all steps, by policy too, and says what is missing."""
    whole = tmp_path / "whole.json"
    assert random_steps.main(["--merge", *map(str, shards), "--result", str(whole)]) == 0
    result = json.loads(whole.read_text())
    assert (result["total_steps"], result["missing_slices"], result["differences"]) == (84, 0, [])
    assert result["policy_steps"].keys() >= OWN.keys()
    assert sum(result["policy_steps"].values()) == 42
    assert sum(result["ways"].values()) == 84
    assert random_steps.main(["--merge", str(shards[0]), "--result", str(whole)]) == 0
    assert json.loads(whole.read_text())["missing_slices"] == 1


def test_what_is_done_is_not_done_again(shards: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A shard that is whole runs nothing more; another run's file is left alone, with an error."""
    before = shards[0].read_text()
    asked = ["--slice-steps", "42", "--shard", "1/2", "--result", str(shards[0])]
    assert random_steps.main(["--steps", "84", *asked]) == 0
    assert shards[0].read_text() == before
    assert random_steps.main(["--steps", "168", *asked]) == 2
    assert "another run's" in capsys.readouterr().err
    assert shards[0].read_text() == before


@pytest.mark.parametrize(
    ("asked", "said"), [(["--shard", "3/2"], "takes I/N"), (["--shard", "one"], "takes I/N")]
)  # fmt: skip
def test_a_shard_must_be_one_of_its_number(asked: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A shard that isn't there is an error."""
    assert random_steps.main(asked) == 2
    assert said in capsys.readouterr().err


def test_a_shard_counts_once(shards: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shard given twice, or of another run, is an error and writes nothing."""
    whole = tmp_path / "whole.json"
    other = {**json.loads(shards[1].read_text()), "slice_steps": 9}
    (tmp_path / "other.json").write_text(json.dumps(other))
    for files, said in (((shards[0], shards[0]), "twice"), ((shards[0], tmp_path / "other.json"), "slice_steps")):
        assert random_steps.main(["--merge", *map(str, files), "--result", str(whole)]) == 2
        assert said in capsys.readouterr().err
    assert not whole.exists()


def test_a_difference_is_in_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that isn't eager's to the bit ends its slice, stands in the result and in the exit code."""
    from tests.executors_launcher.checker import Checker

    step = Checker.step

    def fails(self: Any, decision: Any, inputs: Any) -> Any:
        assert sum(self.steps.values()) < 3, "off by one bit"
        return step(self, decision, inputs)

    monkeypatch.setattr(Checker, "step", fails)
    file = tmp_path / "one.json"
    assert random_steps.main(["--steps", "5", "--slice-steps", "5", "--result", str(file)]) == 1
    result = json.loads(file.read_text())
    assert "off by one bit" in result["differences"][0]["what"]
    assert sum(result["steps"].values()) == 3
