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


def test_how_many_kinds_of_steps_are_within_the_aim():
    """By one limit, now and before, and with a graph's inputs on 0.5.16, as the page and CHANGELOG tell."""
    steps = json.loads((ROOT / "benchmarks" / "results" / "sglang_host_cost.json").read_text(encoding="utf-8"))["steps"]

    def within(version, key, more=0.0):
        return sum(each[key] + more <= 4 for each in steps if each["sglang"] == version)

    log, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "docs/sglang.md"))
    (told,) = re.findall(r"(\d+) of 35 kinds of steps take at most 4, where (\d+) did on 0.5.23 and (\d+) on", log)
    now, *before = told
    assert [within(version, "us") for version in ("0.5.23", "0.5.16")] == [int(now)] * 2
    assert [within(version, "before_us") for version in ("0.5.23", "0.5.16")] == [int(each) for each in before]
    (told,) = re.findall(r"with 0.5 (\d+) of 35 are at most 4, with 1.3 (\d+);", page)
    assert [within("0.5.16", "us", more) for more in (0.5, 1.3)] == [int(each) for each in told]
