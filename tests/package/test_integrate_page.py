"""docs/integrate.md: its Python runs as it stands, from the first block to the last."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kpolicy import Engine, Reason

PAGE = Path(__file__).parents[2] / "docs" / "integrate.md"


def test_the_page_runs() -> None:
    """On an Engine that only decides, with the sizes, the batches and the records that the page shows."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)  # noqa: S102 - our own page
    engine: Engine = names["engine"]
    assert names["decision"].reason is not Reason.GRAPH_WITHDRAWN
    shapes = re.findall(r"decodes=\[\(1, (\d+)\)\]", PAGE.read_text(encoding="utf-8"))
    assert max(map(int, shapes)) <= engine.settings.max_num_reqs
    *captured, failed = names["keys"]
    assert list(engine.registry.captured()) == captured
    assert engine.registry.record(failed).reason is Reason.CAPTURE_OUT_OF_MEMORY
    assert engine.registry.record(captured[0]).hits == 1
