"""What benchmarks.sglang.host_cost times at a graph's inputs, and what docs/sglang.md says of it."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
from benchmarks.sglang import host_cost
from tests.oracle.sglang_real import MARKS

ROOT = Path(__file__).parents[2]


class TestTimed:
    pytestmark = MARKS

    @pytest.mark.parametrize(("rows", "taken"), [(12, 7), (16, 0)])
    def test_a_padded_batch_finds_what_its_copy_takes_along(self, rows, taken, monkeypatch):
        """Seven of those buffers have empty rows, multimodal positions left out; none of a batch that fits."""
        found = []

        monkeypatch.setattr(host_cost, "_grouped_foreach_copy_", lambda dsts, _: found.append(len(dsts)))
        stock, hooked = host_cost.inputs(rows)
        assert stock() is hooked() is None
        assert found == [0, taken]


def test_the_page_has_what_hooks_on_inputs_take():
    """Of a padded batch and of one without padding; 0.5.23 has no such hooks."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "sglang_host_cost.json").read_text(encoding="utf-8"))["rows"]
    added = {row["step"].removeprefix(host_cost.INPUTS): (row["sglang"], f"{row['added_us']:.1f}")
             for row in rows if row["step"].startswith(host_cost.INPUTS)}  # fmt: skip
    text = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"they take a replay ([\d.]+) µs, and a padded one ([\d.]+) ", text)
    assert added == {"16 decodes": ("0.5.16", told[0]), "12 decodes": ("0.5.16", told[1])}
    assert sum(row["step"].startswith(host_cost.INPUTS) for row in rows) == 2
