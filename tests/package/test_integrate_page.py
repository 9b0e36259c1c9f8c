"""docs/integrate.md: its Python runs as it stands, from the first block to the last, and prints what is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kpolicy import BatchShape, Engine, Reason

if TYPE_CHECKING:
    import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "integrate.md").read_text(encoding="utf-8")


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """On an Engine that only decides, with the sizes, the batches and the records that the page shows."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)  # noqa: S102 - our own page
    (shown,) = re.findall(r"```python\n(?:(?!```).)*?```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert capsys.readouterr().out == shown
    engine: Engine = names["engine"]
    *captured, failed = names["keys"]
    assert list(engine.registry.captured()) == captured
    assert engine.registry.record(failed).reason is Reason.CAPTURE_OUT_OF_MEMORY
    assert engine.registry.record(captured[0]).hits == 1


def test_the_class_that_the_page_shows_is_the_adapters() -> None:
    """Line by line, but for its constructor."""
    adapter = (Path(__file__).parents[2] / "integrations" / "examples" / "mini_sglang.py").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    head, _, methods = shown.partition("\n")
    assert f"\n{head}\n" in adapter
    assert (
        adapter.partition("\n    def can_use")[2].partition("\n\n\n")[0]
        == methods.removeprefix("    def can_use").rstrip()
    )


def test_the_facts_that_the_page_names_are_taken() -> None:
    """As it writes them, by a batch of decodes beside a prompt."""
    named = re.findall(r"`facts=(\{[^`]*\})`", PAGE)
    assert len(named) == 2
    for facts in named:
        assert BatchShape(decodes=[(1, 4)], prefills=[(64, 0)], facts=eval(facts)).facts  # noqa: S307 - our own page
