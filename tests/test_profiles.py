"""Profiles that ship with kpolicy, and how ``--profile`` finds one."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from benchmarks.command import without_folders
from kpolicy.errors import ConfigError, SchemaError, UnknownNameError
from kpolicy.figures import model_figures
from kpolicy.profiles import find_profile, load_profile, profile_names
from kpolicy.simulate.cost_models import cost_model
from tests.test_figures import DEEPSEEK_V2_LITE, LLAMA_1B, LLAMA_8B_CONFIG, QWEN_05B


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_reads(name: str) -> None:
    """Each was measured, says on what and what its host did while it served, and gives the simulator its costs."""
    profile = load_profile(name)
    assert profile.costs.measured
    assert profile.device
    assert profile.measured_at
    assert profile.command.startswith(("kpolicy calibrate ", "python -m benchmarks.middle_profile "))
    assert profile.command == without_folders(shlex.split(profile.command))
    assert profile.costs.kv_span is not None
    assert profile.costs.served is not None
    assert profile.costs.served.scheduler_us > 0
    assert len(profile.costs.served.host_work_us) > 1
    assert cost_model(profile=Path(name)).costs == profile.costs


CONFIGS = {
    "deepseek-v2-lite-h200": DEEPSEEK_V2_LITE, "llama-3.1-8b-h200": LLAMA_8B_CONFIG, "llama-3.2-1b-h200": LLAMA_1B,
    "qwen2.5-0.5b-h200": QWEN_05B,
}  # fmt: skip


@pytest.mark.parametrize("name", profile_names())
def test_bytes_of_kv_are_the_configs(name: str) -> None:
    """Worked out again from the model's config, in 16 bits; a simulation takes graphs' bytes out of KV by them."""
    profile, wanted = load_profile(name), model_figures(CONFIGS[name]).kv_bytes_per_token
    assert profile.model.endswith(", bfloat16")
    assert profile.kv_bytes_per_token == wanted
    model = cost_model(profile=Path(name))
    assert model.kv_bytes_per_token == wanted
    assert not any("bytes of KV" in note for note in model.notes)


def test_there_are_some() -> None:
    """One of each model that is measured on a GPU."""
    wanted = {"deepseek-v2-lite-h200", "llama-3.1-8b-h200", "llama-3.2-1b-h200", "qwen2.5-0.5b-h200"}
    assert wanted <= set(profile_names())


def test_a_file_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has a file of that name means the file."""
    monkeypatch.chdir(tmp_path)
    name = profile_names()[0]
    Path(name).write_text("{")
    assert find_profile(name) == Path(name)
    with pytest.raises(SchemaError, match="cut short"):
        load_profile(name)


def test_a_wrong_name_is_told() -> None:
    """A near miss gets a suggestion; a path that isn't there is a path."""
    with pytest.raises(UnknownNameError, match=r"did you mean 'qwen2\.5-0\.5b-h200'"):
        find_profile("qwen2.5-0.5b-h20")
    with pytest.raises(ConfigError, match="can't read"):
        load_profile("missing.json")
    with pytest.raises(ConfigError, match="can't read"):
        load_profile("no/such/profile")
