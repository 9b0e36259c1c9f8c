"""docs/models.md: its Python serves requests as it stands, with a small model in place of the reader's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def test_the_page_serves_requests(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both, eight tokens each; the last line says how their eight steps ran."""
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert example.count('"path/to/checkpoint"') == 1
    exec(example.replace('"path/to/checkpoint"', repr(str(checkpoint))), {})  # noqa: S102 - our own page
    *served, how = capsys.readouterr().out.splitlines()
    assert [(int(line.split()[0]), line.count(",") + 1) for line in served] == [(0, 8), (1, 8)]
    assert sum(map(int, re.findall(r"steps=(\d+)", how))) == 8
