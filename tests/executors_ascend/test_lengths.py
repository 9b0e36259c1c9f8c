"""What operators are told of lengths, padded to a graph's shape; and what errors of the device mean."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from kpolicy.errors import (  # noqa: E402
    CaptureError,
    ConfigError,
    GraphReplayError,
    RegistryError,
    StickyDeviceError,
    UnknownNameError,
)
from kpolicy.executors.ascend import AscendAdapter  # noqa: E402
from kpolicy.executors.ascend.failures import advice, classify, error_codes  # noqa: E402
from kpolicy.executors.ascend.lengths import NO_ROWS, ContextLengths, HostRows, TokenLengths  # noqa: E402
from kpolicy.executors.ascend.tasks import GraphTasks, HostTask, UpdateWay  # noqa: E402
from kpolicy.executors.buffers import PaddedShape  # noqa: E402
from kpolicy.keys import GraphKey  # noqa: E402
from kpolicy.modes import Part  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from tests.fakes.torch_npu import NO_STREAMS, OLD_DRIVER, fake_torch_npu  # noqa: E402

TOKENS = TokenLengths("q", "kv", 64)


def test_uniform_padding_rows_are_like_the_others() -> None:
    """Padding rows of a uniform launch have its query length, and as much KV."""
    rows = HostRows([3, 3], [10, 7])
    assert TOKENS.values(rows, PaddedShape(12, 4, 3)) == {"q": [3, 6, 9, 12], "kv": [10, 7, 3, 3]}
    assert TOKENS.values(NO_ROWS, PaddedShape(2, 2, 1)) == {"q": [1, 2], "kv": [1, 1]}


def test_other_padding_goes_to_rows_behind() -> None:
    """Padded tokens of a mixed launch are some row's, and the last sum is all tokens, also with every row taken."""
    assert TOKENS.values(HostRows([1, 5], [9, 5]), PaddedShape(16, 2, None)) == {"q": [1, 6, 16], "kv": [9, 5, 10]}
    assert TOKENS.values(HostRows([4], [4]), PaddedShape(4, 1, None)) == {"q": [4, 4], "kv": [4, 0]}
    wide = TOKENS.values(NO_ROWS, PaddedShape(100, 3, None))
    assert wide == {"q": [64, 100, 100, 100], "kv": [64, 36, 0, 0]}


def test_padding_that_no_row_can_take_fails_before_launch() -> None:
    """More padding than tables have room for is said, and the step runs another way."""
    with pytest.raises(GraphReplayError, match="36 of the 100 padded tokens"):
        TOKENS.values(NO_ROWS, PaddedShape(100, 0, None))


def test_any_rows_give_lengths_that_the_operator_takes() -> None:
    """Sums never fall, end with all tokens, and no row has fewer KV tokens than query tokens."""
    rng = random.Random(2)  # noqa: S311
    for _ in range(300):
        queries = [rng.randint(1, 9) for _ in range(rng.randint(0, 6))]
        kv_lens = [query + rng.randint(0, 40) for query in queries]
        shape = PaddedShape(sum(queries) + rng.randint(0, 50), len(queries) + rng.randint(0, 3), None)
        found = TOKENS.values(HostRows(queries, kv_lens), shape)
        ends, lens = found["q"], found["kv"]
        assert len(ends) == len(lens) == shape.num_reqs + 1
        assert ends == sorted(ends)
        assert ends[-1] == shape.num_tokens
        starts = [0, *ends[:-1]]
        assert all(end - start <= kv for start, end, kv in zip(starts, ends, lens, strict=True))
        assert lens[: len(queries)] == kv_lens


def test_single_tokens_see_what_is_before_them() -> None:
    """Paged attention takes each token as a row; padding has nothing to see."""
    rule = ContextLengths("context_lens")
    found = rule.values(HostRows([3, 1], [10, 4]), PaddedShape(6, 4, None))
    assert found == {"context_lens": [8, 9, 10, 4, 0, 0]}


def test_rows_go_on_decode_step_by_decode_step() -> None:
    """Repeated decode steps have one KV token more each."""
    rows = HostRows([1, 1], [5, 9])
    assert rows.ahead(0) is rows
    assert rows.ahead(2).kv_lens == [7, 11]


def test_a_field_that_is_left_out_is_an_error() -> None:
    """A rule that forgets one of its fields would leave a stale one in the graph."""

    class Forgets:
        fields = ("q", "kv")

        def values(self, rows: HostRows, shape: PaddedShape) -> dict[str, list[int]]:
            del rows, shape
            return {"kv": [1]}

    tasks = GraphTasks(GraphKey(Part.FULL, 1, 1, query_len=1), UpdateWay.TASK_GROUPS)
    tasks.tasks.append(HostTask(Forgets(), PaddedShape(1, 1, 1), lambda _: None, None, None))
    with pytest.raises(RegistryError, match=r"gave \['kv'\] for \['kv', 'q'\]"):
        tasks.values(NO_ROWS)


@pytest.mark.parametrize(
    ("text", "reason", "sticky"),
    [
        (NO_STREAMS, Reason.CAPTURE_OUT_OF_STREAMS, False),
        (OLD_DRIVER, Reason.CAPTURE_OUT_OF_STREAMS, False),
        ("EL0009: [PID: 1] capture failed", Reason.CAPTURE_OUT_OF_STREAMS, False),
        ("New capture stream failed", Reason.CAPTURE_OUT_OF_STREAMS, False),
        ("ACL_ERROR_INSUFFICIENT_STREAM_RESOURCES", Reason.CAPTURE_OUT_OF_STREAMS, False),
        ("wait event failed, error code is 207005, resource alloc fail", Reason.CAPTURE_OUT_OF_STREAMS, False),
        ("aclrtMalloc, error code is 207001", Reason.CAPTURE_OUT_OF_MEMORY, False),
        ("NPU out of memory. Tried to allocate 2.00 GiB", Reason.CAPTURE_OUT_OF_MEMORY, False),
        ("aclrtMemcpy, error code is 107030", Reason.CAPTURE_ILLEGAL, False),
        ("ACL stream synchronize failed, error code:507035", Reason.DEVICE_LOST, True),
        ("ACL stream synchronize failed, error code:507015", Reason.DEVICE_LOST, True),
        ("at address 0x5070151", Reason.CAPTURE_FAILED, False),
        ("something else", Reason.CAPTURE_FAILED, False),
    ],
)
def test_errors_are_told_apart(text: str, reason: Reason, sticky: bool) -> None:
    """Codes and texts of the device say whether fewer graphs help, and whether the device is lost."""
    assert classify(RuntimeError(text)) == (reason, sticky)


def test_errors_of_ours_and_of_torch_are_known() -> None:
    """What is already named stays what it is."""
    assert classify(StickyDeviceError("gone")).sticky
    assert classify(CaptureError(Reason.HOST_LENGTHS_FROZEN, "x")) == (Reason.HOST_LENGTHS_FROZEN, False)
    assert classify(GraphReplayError(None, "x")) == (Reason.REPLAY_FAILED, False)
    assert classify(torch.OutOfMemoryError("x")).reason is Reason.CAPTURE_OUT_OF_MEMORY
    assert error_codes(RuntimeError("a 107030, then 207008 and 5070151")) == {107030, 207008}


def test_advice_names_the_driver_where_it_is_the_cause() -> None:
    """The misleading text about memory is put right."""
    assert "25.5.1" in advice(RuntimeError(OLD_DRIVER))
    assert "fewer sizes" in advice(RuntimeError(NO_STREAMS))
    assert advice(RuntimeError("something else")) == ""


def test_what_cannot_be_used_is_said() -> None:
    """No NPU, an unknown order or way, and a torch_npu that isn't there."""
    library = fake_torch_npu()
    with pytest.raises(ConfigError, match="update_order is 'first'; known: replay_fenced"):
        AscendAdapter("cpu", library=library, update_order="first")
    with pytest.raises(UnknownNameError, match="did you mean 'task_groups'"):
        AscendAdapter("cpu", library=library, update_way="task_group")
    library.npu.is_available = lambda: False
    with pytest.raises(ConfigError, match="finds no NPU"):
        AscendAdapter("cpu", library=library)
    del library.npu.NPUGraph.update
    library.npu.is_available = lambda: True
    with pytest.raises(ConfigError, match="this torch_npu has task_groups"):
        AscendAdapter("cpu", library=library, update_way="whole_graph")
    with pytest.raises(ConfigError, match="torch_npu"):
        AscendAdapter("npu")
