"""How decode rows' KV is shared out, in Triton's interpreter: by the rows there are, whatever they are padded to.

The interpreter must be chosen before Triton is imported, so these tests run in a process of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving_models.interpreter import interpreted, needs_triton, pass_there

torch = pytest.importorskip("torch")
needs_triton()

from kpolicy.executors.step_model import RowLayout, StepContext, StepTensors  # noqa: E402
from kpolicy.serving import attention  # noqa: E402
from kpolicy.serving.kv_cache import LayerSpec  # noqa: E402
from kpolicy.serving.rows import RowTensors  # noqa: E402

# Triton 3.6 converts arrays of one element, which numpy will refuse.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")
PAGE, WIDTH, PROCESSORS = 16, 24, 12
BATCHES: dict[str, tuple[list[int], list[int], int | None]] = {
    # KV tokens and query tokens of each row, and the query length of all rows, padding included.
    "one": ([333], [1], 1),
    "decodes": ([5, 64, 300, 1, 350], [1] * 5, 1),
    "drafts": ([5, 64, 300], [3] * 3, 3),
    "mixed": ([5, 64, 300, 90, 40, 20], [1, 1, 1, 60, 40, 1], None),
    "prompts": ([90, 40], [60, 40], None),
}


def test_in_the_interpreter() -> None:
    """The tests below pass there."""
    pass_there(__file__)


def _rows(name: str, padded: int) -> tuple[RowTensors, int, int, int]:
    """(rows, KV slots, tokens of theirs, tokens with padding's)."""
    kv_lens, query_lens, uniform = BATCHES[name]
    needed = [-(-length // PAGE) for length in kv_lens]
    pages = iter(torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).tolist())
    table = torch.zeros(padded, WIDTH, dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([next(pages) for _ in range(count)])
    padding = padded - len(kv_lens)
    starts = torch.tensor([0, *query_lens, *[uniform or 0] * padding]).cumsum(0).int()
    rows = RowTensors(table, torch.tensor([*kv_lens, *[0] * padding]).int(), starts, PAGE)
    return rows, sum(needed) * PAGE, sum(query_lens), int(starts[-1]) + 2


def _held(outs: list[Any], right: Any, num_tokens: int) -> None:
    """All outputs are bitwise the first one's for the rows' tokens, near the reference, and 0 behind them."""
    for out in outs:
        torch.testing.assert_close(out[:num_tokens], right, atol=1e-5, rtol=1e-5)
        assert torch.equal(out[:num_tokens], outs[0][:num_tokens])
        assert not out[num_tokens:].any()


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device with so many that few rows are shared out."""
    from kpolicy.serving.gpu import splits

    splits.plan_splits.cache_clear()
    monkeypatch.setattr(splits, "processors", lambda _device: PROCESSORS)
    yield
    splits.plan_splits.cache_clear()


@interpreted
@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "value_dim", "window", "softcap"),
    [(4, 2, 32, 0, 0.0), (2, 2, 20, 0, 0.0), (4, 1, 32, 100, 3.0), (4, 4, 32, 0, 0.0)],
)
def test_a_row_is_computed_alike_whatever_it_is_padded_to(
    name: str, heads: int, kv_heads: int, value_dim: int, window: int, softcap: float
) -> None:
    """Keys and values: decodes, drafts, prompts among them, bit for bit in every padded size, and padding is 0."""
    from kpolicy.serving.gpu import paged, splits

    uniform, outs = BATCHES[name][2], []
    arrivals = splits.new_arrivals(torch.device("cpu"))
    for padded in (len(BATCHES[name][0]), 8, 30):
        rows, slots, real, num_tokens = _rows(name, padded)
        generator = torch.Generator().manual_seed(0)
        k, v = (torch.randn(slots + 1, kv_heads, dim, generator=generator) for dim in (32, value_dim))
        k[-1] = v[-1] = math.nan
        query = torch.full((num_tokens, heads, 32), math.nan)
        query[:real] = torch.randn(real, heads, 32, generator=generator)
        options: dict[str, Any] = {"window": window, "softcap": softcap}
        if uniform:
            options |= {"decode_len": uniform, "prefills": False}
        outs.append(paged.paged_attention(query, k, v, rows, 0.2, arrivals, **options))
        assert not arrivals.any()
    right = attention.paged_attention(query[:real].contiguous(), k, v, _rows(name, padded)[0], 0.2, window, softcap)
    _held(outs, right, real)


@interpreted
@pytest.mark.usefixtures("processors")
def test_one_buffer_and_two_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large heads have one, whose pages are read when they are needed, and others two."""
    from kpolicy.serving.gpu import paged, splits

    outs, stages = [], []
    launch, arrivals = paged.launch, splits.new_arrivals(torch.device("cpu"))

    def watched(*given: Any, **options: Any) -> None:
        stages.append(options["num_stages"])
        launch(*given, **options)

    monkeypatch.setattr(paged, "launch", watched)
    rows, slots, real, num_tokens = _rows("decodes", 8)
    k, v, query = torch.randn(slots + 1, 2, 32), torch.randn(slots + 1, 2, 32), torch.randn(num_tokens, 4, 32)
    for most_bytes in (0, paged.TWICE_BYTES):
        monkeypatch.setattr(paged, "TWICE_BYTES", most_bytes)
        paged._decode_plan.cache_clear()
        outs.append(paged.paged_attention(query, k, v, rows, 0.2, arrivals, prefills=False))
    paged._decode_plan.cache_clear()
    assert stages == [2, 3]
    _held(outs, attention.paged_attention(query[:real].contiguous(), k, v, rows, 0.2, 0, 0.0), real)


@interpreted
@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("name", ["one", "decodes", "drafts"])
@pytest.mark.parametrize("heads", [2, 8])
def test_latents_likewise(name: str, heads: int) -> None:
    """MLA, in one tile and in several."""
    from kpolicy.serving.gpu import latent

    uniform, outs, rank, rope = BATCHES[name][2] or 1, [], 24, 8
    for padded in (len(BATCHES[name][0]), 8, 30):
        rows, slots, real, num_tokens = _rows(name, padded)
        generator = torch.Generator().manual_seed(0)
        cache = torch.randn(slots + 1, rank + rope, generator=generator)
        cache[-1] = math.nan
        query = torch.full((num_tokens, heads, rank + rope), math.nan)
        query[:real] = torch.randn(real, heads, rank + rope, generator=generator)
        outs.append(latent.latent_attention(query[..., :rank], query[..., rank:], cache, rows, 0.2, uniform))
    keys = cache[:, None]
    right = attention.paged_attention(query[:real].contiguous(), keys, keys[..., :rank].contiguous(), rows, 0.2, 0, 0.0)
    _held(outs, right, real)


@interpreted
@pytest.mark.usefixtures("processors")
def test_rows_are_shared_out_by_how_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows leave more partial results a row, in the same padded size; as many as fill the device leave none."""
    from kpolicy.serving.gpu import paged, splits

    scratch: list[Any] = []
    launch, empty = paged.launch, torch.empty

    def watched(kernel: Any, grid: Any, args: tuple[Any, ...], *more: Any, **options: int) -> None:
        launch(kernel, grid, args, *more, **options)
        scratch.append(args[3])

    monkeypatch.setattr(paged, "launch", watched)
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: empty(*size, **kind).fill_(math.nan))
    arrivals, cache = splits.new_arrivals(torch.device("cpu")), torch.randn(PAGE * WIDTH, 1, 16)
    for count in (1, 5, 40):
        rows, *_ = _rows("one", 40)
        rows.kv_lens[:count] = 333
        paged.paged_attention(torch.randn(40, 1, 16), cache, cache, rows, 0.2, arrivals, prefills=False)
    # A row may have four programs, and 24 are two on each of 12 processors.
    assert [int((~sums.isnan()).sum()) for sums in scratch] == [4, 20, 0]


@pytest.mark.parametrize("count", [1, 20, 132])
@pytest.mark.parametrize("groups", [1, 2, 8, 40])
@pytest.mark.parametrize("most_kv", [64, 700, 1 << 17])
def test_a_launch_has_room_for_any_number_of_its_rows(
    count: int, groups: int, most_kv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs, partial results and counters are enough for each number of rows, and no more than for the most."""
    from kpolicy.serving.gpu import splits

    monkeypatch.setattr(splits, "processors", lambda _device: count)
    splits.plan_splits.cache_clear()
    device = torch.device("cpu")
    counters = len(splits.new_arrivals(device))
    for num_reqs, each in itertools.product((1, 7, 80, 512), (2, splits.MOST_EACH)):
        plan = splits.plan_splits(num_reqs, groups, most_kv, device, each)
        needed = []
        for rows in range(1, num_reqs + 1):
            shared = splits.split_count.fn(rows, groups, plan.programs, plan.most)
            needed.append(rows * shared)
            assert shared == 1 or rows * shared * groups <= plan.programs == count * each
            assert shared == 1 or (rows <= plan.shared and rows * shared <= plan.partial and rows * groups <= counters)
        assert plan.grid == max(needed)
        assert plan.shared == sum(count > rows for rows, count in enumerate(needed, 1))
    splits.plan_splits.cache_clear()


@interpreted
@pytest.mark.usefixtures("processors")
def test_a_decode_row_is_computed_alike_beside_other_prompts() -> None:
    """By itself, as SPLIT's half, beside prompts that the host knows of, and where it doesn't, as in a FULL graph."""
    from kpolicy.serving.triton_kernels import TritonKernels

    kernels, spec = TritonKernels(torch.device("cpu")), LayerSpec(4, 2, 32, 32, 0.2)
    kv_lens, query_lens, _ = BATCHES["mixed"]
    rows, slots, real, num_tokens = _rows("mixed", 9)
    # Without the prompt row of one token, which counts as a decode.
    rows.kv_lens[5], rows.query_starts[6:] = 0, real - 1
    caches = [torch.randn(slots + 1, 2, 32) for _ in "kv"]
    query = torch.randn(num_tokens, 4, 32)
    alone = RowTensors(rows.block_table[:3], rows.kv_lens[:3], rows.query_starts[:4], PAGE)
    layout = RowLayout(real - 1, 3, query_lens[:5], kv_lens[:5])

    def attend(at: RowTensors, layout: RowLayout | None, uniform: int | None, num_tokens: int) -> Any:
        none: Any = None
        step = StepContext(StepTensors(none, none, none, *at[:3]), layout, uniform)
        for _layer in range(2):
            out = kernels.attend(step, spec, query[:num_tokens], at, *caches)
        return out[:3]

    first = attend(alone, None, 1, 3)
    for each in (
        attend(alone, RowLayout(3, 3, [1] * 3, kv_lens[:3]), None, 3), attend(rows, None, None, num_tokens),
        attend(rows, layout, None, num_tokens),
    ):  # fmt: skip
        assert torch.equal(each, first)
