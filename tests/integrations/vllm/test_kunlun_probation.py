"""What a FULL graph on probation has to prove, and what a step's metadata shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")

from kpolicy.keys import GraphKey  # noqa: E402
from kpolicy.modes import Part  # noqa: E402
from kpolicy_vllm.kunlun_attach import rows_to_show  # noqa: E402
from kpolicy_vllm.kunlun_probation import NEEDED, Probation, Seen  # noqa: E402


@attrs.define(slots=False)
class DecodeMetadata:
    """As much of vLLM-Kunlun's as a step shows."""

    context_lens_cpu: Any
    block_tables: Any


SHOWN = {
    "longer rows": Seen((9, 9), 2, (1, 4)), "shorter rows": Seen((2, 8), 2, (1, 4)),
    "other block tables": Seen((2, 9), 2, (7, 8)), "another number of rows": Seen((8,), 1, (1,)),
}  # fmt: skip


@pytest.mark.parametrize("left_out", SHOWN)
def test_each_kind_of_row_is_needed(left_out: str) -> None:
    """Longer and shorter rows, other block tables, another number of rows: without one of them no graph is trusted."""
    trial = Probation(Seen((8, 8), 2, (1, 4)), shortest=False)
    others = [seen for name, seen in SHOWN.items() if name != left_out]
    if left_out in ("longer rows", "shorter rows"):
        others = [Seen(tuple(8 for _ in seen.lengths), seen.rows, seen.tables) if seen is SHOWN["other block tables"]
                  else seen for seen in others]  # fmt: skip
    assert not any(trial.compared(seen) for seen in others * 3)
    assert trial.missing() == {left_out}
    assert trial.compared(SHOWN[left_out])


def test_what_can_not_be_shown_is_not_asked_for() -> None:
    """A graph of one row has no other number of rows, and one of the shortest rows no shorter ones."""
    short = Probation(Seen((1,), 1, (0,)), shortest=True)
    assert [short.compared(Seen((2 + i,), 1, (3,))) for i in range(NEEDED)] == [False, False, True]
    # Lengths on the device alone, of which none can be frozen: other blocks and numbers of rows are to be shown.
    assert Probation(Seen((), 2, (0, 0)), shortest=True).missing() == {"other block tables", "another number of rows"}


def test_what_a_step_shows_is_found_in_nested_metadata() -> None:
    """Lengths on the host, cumulated or not, without padding; query lengths tell rows alone; block tables anywhere."""
    inner = DecodeMetadata(torch.tensor([3, 4, 0]), torch.full((3, 2), 6))
    outer = SimpleNamespace(
        decode_metadata=inner, kv_lod_cpu=[0, 7, 12], slot_mapping=torch.tensor([5]), seq_lens=None,
        query_start_loc_host=torch.tensor([0, 1, 2]),
    )  # fmt: skip
    seen = Seen.of({"a": outer, "b": outer})
    assert seen == Seen((3, 4, 7, 5), 2, (6, 6))
    assert Seen.of({"a": SimpleNamespace(slot_mapping=torch.tensor([5]))}) is None
    assert Seen.of({"a": SimpleNamespace(query_start_loc_host=torch.tensor([0, 1]))}) == Seen((), 1, ())
    assert Seen.of(None) is None


@pytest.mark.parametrize(("reqs", "query_len", "captured"), [(1, 1, 1), (8, 1, 1), (4, 4, 4), (8, 1, 200), (4, 3, 90)])
def test_the_rows_of_warm_up_are_enough(reqs: int, query_len: int, captured: int) -> None:
    """Shown those rows, with eager's bits each time, a graph is trusted; all fit its shape and the model."""
    key = GraphKey(Part.FULL, reqs * query_len, reqs, query_len=query_len)
    lengths = (captured,) * reqs
    trial = Probation(Seen(lengths, reqs, (0,) * reqs), shortest=captured <= query_len)
    trusted = False
    for block, rows in enumerate(rows_to_show(key, lengths, 2048)):
        assert rows.decodes <= reqs
        assert query_len < rows.kv <= 2048
        seen = Seen((rows.kv,) * rows.decodes, rows.decodes, tuple(range(1 + block, 1 + block + rows.decodes)))
        assert not trusted
        assert trial.tells(seen)
        trusted = trial.compared(seen)
    assert trusted
