"""What benchmarks.sglang.host_cost times at a graph's inputs, and what docs/sglang.md says of it."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
from benchmarks.sglang import host_cost
from kpolicy_sglang import padding
from kpolicy_sglang.versions import KNOWN
from tests.oracle.sglang_real import MARKS

ROOT = Path(__file__).parents[2]


class TestTimed:
    pytestmark = MARKS

    @pytest.mark.parametrize(("rows", "taken"), [(12, [10]), (16, [])])
    @pytest.mark.parametrize("version", KNOWN)
    def test_a_padded_batch_finds_what_its_copy_takes_along(self, version, rows, taken, monkeypatch):
        """Ten rows of those buffers are empty, positions of three kinds among them; none of a batch that fits."""
        found = []

        def copy(original, dsts, srcs):
            found.append([len(each[0]) for each in padding._beside])
            padding._beside.clear()
            original(dsts, srcs)

        monkeypatch.setattr(padding, "grouped_copy", copy)
        stock, hooked = host_cost.inputs(version, rows)
        found.clear()
        assert stock() is hooked() is None
        assert found == [taken]


def test_the_page_has_what_hooks_on_inputs_take():
    """Least and most of the padded rows, and what one without padding takes, on both versions."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "sglang_host_cost.json").read_text(encoding="utf-8"))["rows"]
    added = {padded: sorted(row["added_us"] for row in rows if row["step"] == f"{host_cost.INPUTS}{name}")
             for padded, name in ((True, "12 decodes"), (False, "16 decodes"))}  # fmt: skip
    assert [len(each) for each in added.values()] == [2, 2]
    text = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"they take a replay ([\d.]+) µs, and a padded one ([\d.]+) to ([\d.]+) ", text)
    assert {f"{each:.1f}" for each in added[False]} == {told[0]}
    assert tuple(f"{each:.1f}" for each in added[True]) == told[1:]
