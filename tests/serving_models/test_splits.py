"""How decode rows' KV is shared out, in Triton's interpreter: by their lengths, whatever they are padded to.

The interpreter must be chosen before Triton is imported, so these tests run in a process of their own.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from random import Random
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
        shares = splits.Shares()
        outs.append(paged.paged_attention(query, k, v, rows, 0.2, shares, **options))
        assert torch.equal(paged.paged_attention(query, k, v, rows, 0.2, shares, **options), outs[-1]), (
            "a further layer"
        )
        [(shared, _)] = shares._made.values()
        plan, *_ = paged._decode_plan(paged._Heads(
            heads, kv_heads, 32, value_dim, PAGE, window, softcap > 0, query.dtype, query.device
        ), padded, uniform or 1, WIDTH)  # fmt: skip
        assert not shared.arrivals[: plan.places // 2 * kv_heads].any()
    right = attention.paged_attention(query[:real].contiguous(), k, v, _rows(name, padded)[0], 0.2, window, softcap)
    _held(outs, right, real)


@interpreted
@pytest.mark.usefixtures("processors")
def test_one_buffer_and_two_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large heads have one, whose pages are read when they are needed, and others two."""
    from kpolicy.serving.gpu import paged, splits

    outs, stages = [], []
    launch = paged.launch

    def watched(*given: Any, **options: Any) -> None:
        stages.append(options["num_stages"])
        launch(*given, **options)

    monkeypatch.setattr(paged, "launch", watched)
    rows, slots, real, num_tokens = _rows("decodes", 8)
    k, v, query = torch.randn(slots + 1, 2, 32), torch.randn(slots + 1, 2, 32), torch.randn(num_tokens, 4, 32)
    for most_bytes in (0, paged.TWICE_BYTES):
        monkeypatch.setattr(paged, "TWICE_BYTES", most_bytes)
        paged._decode_plan.cache_clear()
        outs.append(paged.paged_attention(query, k, v, rows, 0.2, splits.Shares(), prefills=False))
    paged._decode_plan.cache_clear()
    assert stages == [2, 3]
    _held(outs, attention.paged_attention(query[:real].contiguous(), k, v, rows, 0.2, 0, 0.0), real)


@interpreted
@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("name", ["one", "decodes", "drafts"])
@pytest.mark.parametrize("heads", [2, 8])
def test_latents_likewise(name: str, heads: int) -> None:
    """MLA, in one tile and in several."""
    from kpolicy.serving.gpu import latent, splits

    uniform, outs, rank, rope = BATCHES[name][2] or 1, [], 24, 8
    for padded in (len(BATCHES[name][0]), 8, 30):
        rows, slots, real, num_tokens = _rows(name, padded)
        generator = torch.Generator().manual_seed(0)
        cache = torch.randn(slots + 1, rank + rope, generator=generator)
        cache[-1] = math.nan
        query = torch.full((num_tokens, heads, rank + rope), math.nan)
        query[:real] = torch.randn(real, heads, rank + rope, generator=generator)
        shares = splits.Shares()
        outs.append(latent.latent_attention(query[..., :rank], query[..., rank:], cache, rows, 0.2, uniform, shares))
    keys = cache[:, None]
    right = attention.paged_attention(query[:real].contiguous(), keys, keys[..., :rank].contiguous(), rows, 0.2, 0, 0.0)
    _held(outs, right, real)


@interpreted
@pytest.mark.usefixtures("processors")
def test_a_row_that_is_longer_has_more_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One alone has as many as it may, a long one among short ones more than they, and of many equal ones each one."""
    from kpolicy.serving.gpu import paged, splits

    scratch: list[Any] = []
    launch = paged.launch

    def watched(kernel: Any, grid: Any, args: tuple[Any, ...], *more: Any, **options: int) -> None:
        args[3].fill_(math.nan)
        launch(kernel, grid, args, *more, **options)
        scratch.append(args[3])

    monkeypatch.setattr(paged, "launch", watched)
    cache = torch.randn(PAGE * WIDTH, 1, 16)
    for lens in ([333], [333] * 5, [40] * 23 + [333], [333] * 40):
        rows, *_ = _rows("one", 40)
        rows.kv_lens[: len(lens)] = torch.tensor(lens).int()
        paged.paged_attention(torch.randn(40, 1, 16), cache, cache, rows, 0.2, splits.Shares(), prefills=False)
    # A row may have four programs, and 24 are two on each of 12 processors.
    assert [int((~sums.isnan()).sum()) for sums in scratch] == [4, 20, 4, 0]


def _shared_by_hand(blocks: list[int], programs: int, most: int) -> list[tuple[int, int, int]]:
    """Of each row (how many programs, blocks of each, class): the least share with room for all, tried from 1 up.

    Where more programs than are planned to run at once are needed for a share over three quarters of the longest row,
    that row's.
    """
    room = min(len(blocks) * most, max(programs, len(blocks) + programs // 2))
    share = next(
        each
        for each in itertools.count(1)
        if sum(-(-row // each) for row in blocks) <= room and -(-max(blocks) // each) <= most
    )
    if sum(-(-row // share) for row in blocks) > programs and share > 0.75 * max(blocks):
        share = max(blocks)
    own = [-(-row // -(-row // share)) for row in blocks]
    return [(-(-row // each), each, min(3, 4 * each // (share + 1))) for row, each in zip(blocks, own, strict=True)]


WHOLE_OR_SHARED = {
    "share of three quarters of the longest": ([12] * 6 + [16] * 3, 8, [1] * 6 + [2] * 3),
    "a share beyond that": ([13] * 6 + [16] * 3, 8, [1] * 9),
    "no more programs than at once": ([13] * 6 + [16] * 3, 12, [1] * 6 + [2] * 3),
    "one row far longer": ([13] * 6 + [16] * 3 + [32], 8, [1] * 9 + [2]),
    "alike rows, halved with room for it": ([16] * 4, 8, [2] * 4),
    "alike rows, one longer than the share": ([15] * 6 + [16] * 2, 8, [1] * 8),
}
"""Blocks of rows, programs that are planned to run at once, and programs of each row"""


@pytest.mark.parametrize("name", WHOLE_OR_SHARED)
def test_rows_of_plain_cases_by_hand(name: str) -> None:
    """What random cases are held to says of plain ones what was worked out without it."""
    blocks, programs, expected = WHOLE_OR_SHARED[name]
    assert [parts for parts, *_ in _shared_by_hand(blocks, programs, 32)] == expected


@interpreted
@pytest.mark.parametrize("name", WHOLE_OR_SHARED)
def test_rows_have_a_program_each_or_share_out(name: str) -> None:
    """By whether the longest is less than a third longer than the share, and whether all of them run at once."""
    from kpolicy.serving.gpu import splits

    blocks, programs, expected = WHOLE_OR_SHARED[name]
    count, block_n = len(blocks), 64
    lens, starts = torch.tensor([each * block_n for each in blocks]).int(), torch.arange(count + 1).int()
    splits.plan_splits.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(splits, "processors", lambda _device: programs)
        plan = splits.plan_splits(count, 1, 4096, torch.device("cpu"), 1)
    splits.plan_splits.cache_clear()
    assert (plan.programs, plan.most) == (programs, 32)
    shared = splits.Shares().of(RowTensors(torch.zeros(count, 1).int(), lens, starts, PAGE), plan, 1, block_n, 1)
    fields = splits.FIELDS.value
    found = Counter(shared.plan[: plan.grid * fields].view(-1, fields)[:, 0].tolist())
    assert [found[row] for row in range(count)] == expected


def _lengths(random: Random) -> tuple[list[int], list[int], int]:
    """KV and query tokens of random rows, prompts and rows without KV among them, and the most KV of one."""
    count, most_kv = random.choice([1, 3, 17, 40, 90]), random.choice([100, 4096])
    spread = random.choice([0.05, 1.2])
    lens = [min(most_kv, round(random.lognormvariate(6, spread))) + 1 for _ in range(count)]
    query_lens = [1] * count
    for row in random.sample(range(count), count // 3):
        if random.random() < 0.5:
            query_lens[row] = random.randint(2, 50)
        else:
            lens[row] = 0
    lens[-1], query_lens[-1] = max(lens[-1], 1), 1
    return lens, query_lens, most_kv


@interpreted
@pytest.mark.parametrize("seed", range(24))
def test_programs_have_the_least_share_that_there_is_room_for(seed: int) -> None:
    """By hand, of random rows with prompts among and behind them: each has its blocks once, in their order."""
    from kpolicy.serving.gpu import splits

    random = Random(seed)  # noqa: S311
    lens, query_lens, most_kv = _lengths(random)
    count, padding, block_n = len(lens), random.choice([0, 9]), 64
    window, groups = random.choice([0, 0, 500]), random.choice([1, 2, 8])
    starts = torch.tensor([0, *itertools.accumulate(query_lens), *[sum(query_lens)] * padding]).int()
    kv_lens = torch.tensor([*lens, *[0] * padding]).int()
    rows = RowTensors(torch.zeros(count + padding, 1).int(), kv_lens, starts, PAGE)
    splits.plan_splits.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(splits, "processors", lambda _device: random.choice([2, 12, 40]))
        plan = splits.plan_splits(count + padding, groups, most_kv, torch.device("cpu"), 2)
    splits.plan_splits.cache_clear()
    shared = splits.Shares().of(rows, plan, groups, block_n, 1, window)
    own = [row for row in range(count) if query_lens[row] == 1]
    low = [max(0, lens[row] - window) // block_n * block_n if window else 0 for row in own]
    blocks = [max(1, -(-(lens[row] - begin) // block_n)) for row, begin in zip(own, low, strict=True)]
    by_hand = _shared_by_hand(blocks, plan.programs, plan.most)
    places = list(itertools.accumulate((0, *(parts if parts > 1 else 0 for parts, *_ in by_hand))))
    order = sorted(range(len(own)), key=lambda i: -by_hand[i][2])
    expected = [
        [own[i], by_hand[i][0] * splits.PARTS.value + part, by_hand[i][1], places[i]]
        for i in order
        for part in range(by_hand[i][0])
    ]
    fields = splits.FIELDS.value
    table = shared.plan[: plan.grid * fields].view(-1, fields).tolist()
    assert table[: len(expected)] == expected
    assert {each[0] for each in table[len(expected) :]} <= {-1}
    # No part is empty, and all of a row's together are its blocks.
    assert all((parts - 1) * size < row <= parts * size for row, (parts, size, _) in zip(blocks, by_hand, strict=True))
    first = {row: program for program, (row, *_) in reversed([*enumerate(expected)])}
    heads = [first[row] for row, (parts, *_) in zip(own, by_hand, strict=True) if parts > 1]
    assert shared.heads[: plan.shared].tolist() == heads + [-1] * (plan.shared - len(heads))
    assert int(shared.plan[plan.grid * fields]) == count
    assert places[-1] <= plan.places
    counters = plan.places // 2 * groups
    assert not shared.arrivals[:counters].any()
    assert places[-1] // 2 * groups <= counters <= len(shared.arrivals)


@interpreted
def test_what_a_kernel_is_given_begins_where_pointers_divide_by_16() -> None:
    """Whatever the rows: what is compiled depends on it, and a further form is compiled while a server waits."""
    from kpolicy.serving.gpu import splits

    for count in (1, 2, 3, 4, 7, 30):
        rows, *_ = _rows("one", count)
        plan = splits.plan_splits(count, 2, 384, torch.device("cpu"), 2)
        for counted in (True, False):
            made = splits.Shares().of(rows, plan, 2, 64, 1, counted=counted)
            assert [each.storage_offset() % 4 for each in made] == [0, 0, 0]
            assert bool(len(made.arrivals)) is (counted and plan.places > 1)


@interpreted
@pytest.mark.usefixtures("processors")
def test_a_step_is_shared_out_once_for_each_kind_of_layers() -> None:
    """Layers of other windows, blocks or rows have a plan of their own; further ones of a kind find it."""
    from kpolicy.serving.gpu import splits

    rows, *_ = _rows("decodes", 8)
    front = RowTensors(rows.block_table[:3], rows.kv_lens[:3], rows.query_starts[:4], PAGE)
    plan, few = (splits.plan_splits(count, 2, 384, torch.device("cpu"), 2) for count in (8, 3))
    shares = splits.Shares()
    first = shares.of(rows, plan, 2, 64, 1)
    assert shares.of(rows, plan, 2, 64, 1) is first
    others = [
        shares.of(rows, plan, 2, 64, 1, 100), shares.of(rows, plan, 2, 32, 1), shares.of(front, few, 2, 64, 1),
        shares.of(rows, plan, 4, 64, 1), shares.of(rows, plan, 2, 64, 3),
        shares.of(rows, plan, 2, 64, 1, counted=False),
    ]  # fmt: skip
    assert len({id(each) for each in (first, *others)}) == 7
    assert splits.Shares().of(rows, plan, 2, 64, 1) is not first


@interpreted
@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("name", ["keys and values", "latents"])
def test_a_further_step_shares_out_anew(name: str) -> None:
    """Its rows are in the same tensors, as where a graph's are staged, and have other lengths."""
    from kpolicy.serving.triton_kernels import TritonKernels

    kernels = TritonKernels(torch.device("cpu"))
    rows, slots, real, _ = _rows("decodes", 8)
    latents = name == "latents"
    spec = LayerSpec(4, 4, 32, 16, 0.2) if latents else LayerSpec(4, 2, 32, 32, 0.2)
    caches = [torch.randn(slots + 1, 24 + 8)] if latents else [torch.randn(slots + 1, 2, 32) for _ in "kv"]
    kv_b, query = torch.randn(4 * (24 + 16), 24), torch.randn(8, 4, 32)

    def attend(rows: RowTensors) -> Any:
        none: Any = None
        step = StepContext(StepTensors(none, none, none, *rows[:3]), None, 1)
        if latents:
            return kernels.attend_latents(step, spec, query, rows, *caches, kv_b)[:real]
        return kernels.attend(step, spec, query, rows, *caches)[:real]

    attend(rows)
    rows.kv_lens[:real] = torch.tensor([300, 2, 290, 40, 17]).int()
    rows.block_table.copy_(rows.block_table.flip(0)[[5, 6, 7, 3, 4, 0, 1, 2]])
    afresh = RowTensors(rows.block_table.clone(), rows.kv_lens.clone(), rows.query_starts.clone(), PAGE)
    assert torch.equal(attend(rows), attend(afresh))


@interpreted
@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("lens", [[0] * 5, [0, 300, 0, 5, 0], [7] * 300], ids=["none", "holes", "many"])
@pytest.mark.parametrize("query_len", [1, 3])
def test_rows_without_kv_are_zero_wherever_they_are(lens: list[int], query_len: int) -> None:
    """Alone, between others, and rows beyond those that one warp shares out."""
    from kpolicy.serving.gpu import paged, splits

    count = len(lens)
    needed = [-(-length // PAGE) for length in lens]
    pages = iter(range(sum(needed)))
    table = torch.zeros(2 * count, WIDTH, dtype=torch.int32)
    for row, many in enumerate(needed):
        table[row, :many] = torch.tensor([next(pages) for _ in range(many)])
    starts = torch.arange(0, (2 * count + 1) * query_len, query_len).int()
    rows = RowTensors(table, torch.tensor([*lens, *[0] * count]).int(), starts, PAGE)
    k, v = (torch.randn(max(1, sum(needed)) * PAGE + 1, 2, 16) for _ in "kv")
    query = torch.randn(2 * count * query_len, 4, 16)
    out = paged.paged_attention(query, k, v, rows, 0.2, splits.Shares(), decode_len=query_len, prefills=False)
    right = attention.paged_attention(query, k, v, rows, 0.2, 0, 0.0)
    with_kv = torch.tensor([length >= query_len for length in [*lens, *[0] * count]]).repeat_interleave(query_len)
    torch.testing.assert_close(out[with_kv], right[with_kv], atol=1e-5, rtol=1e-5)
    empty = torch.tensor([not length for length in [*lens, *[0] * count]]).repeat_interleave(query_len)
    assert not out[empty].any()


@pytest.mark.parametrize("count", [1, 20, 132])
@pytest.mark.parametrize("groups", [1, 2, 8, 40])
@pytest.mark.parametrize("most_kv", [64, 700, 1 << 17])
def test_a_launch_has_room_for_any_of_its_rows(
    count: int, groups: int, most_kv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, of random lengths: programs, rows that have several, and their places."""
    from kpolicy.serving.gpu import splits

    monkeypatch.setattr(splits, "processors", lambda _device: count)
    splits.plan_splits.cache_clear()
    random = Random(count * groups + most_kv)  # noqa: S311
    for num_reqs, each in itertools.product((1, 7, 80), (2, 4)):
        plan = splits.plan_splits(num_reqs, groups, most_kv, torch.device("cpu"), each)
        most = [0, 0, 0]
        for _ in range(60):
            rows = random.choice([num_reqs, random.randint(1, num_reqs), min(num_reqs, max(1, plan.programs // 2))])
            longest = max(1, most_kv // 64)
            blocks = [random.randint(1, random.choice([1, longest, longest])) for _ in range(rows)]
            parts = [of for of, *_ in _shared_by_hand(blocks, plan.programs, plan.most)]
            several = [of for of in parts if of > 1]
            assert max(parts) <= plan.most < splits.PARTS.value
            most = [max(pair) for pair in zip(most, (sum(parts), len(several), sum(several)), strict=True)]
        assert most[0] <= plan.grid
        assert most[1] <= plan.shared
        assert most[2] <= plan.places
        if plan.programs <= 1 or plan.most == 1:
            assert plan.shared == plan.places == 0
        # Where rows fill the device twice over and more, half as many programs as fit it are beyond one each.
        assert plan.shared <= plan.programs // 2
        assert plan.places <= plan.programs
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
