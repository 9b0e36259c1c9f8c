"""Triton kernels of experts and of MLA's prompts, in Triton's interpreter, which cuts bf16 off where a GPU rounds.

The interpreter must be chosen before Triton is imported, so these tests run in a process of their own.
"""

from __future__ import annotations

import itertools

import pytest

from tests.serving_models.interpreter import interpreted, needs_triton, pass_there

torch = pytest.importorskip("torch")
needs_triton()

from tests.serving_models.test_experts import plain_experts  # noqa: E402

# Triton 3.6 converts arrays of one element, which numpy will refuse.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")
SHAPES = [(1, 6, 64), (37, 6, 64), (300, 2, 4), (5, 8, 128), (900, 6, 20)]


def test_in_the_interpreter() -> None:
    """The tests below pass there."""
    pass_there(__file__)


@interpreted
@pytest.mark.parametrize(("num_tokens", "chosen", "num_experts"), SHAPES)
def test_copies_are_ordered_as_by_a_stable_sort(num_tokens: int, chosen: int, num_experts: int) -> None:
    from kpolicy.serving.gpu.experts import route

    ids = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(1)).topk(chosen).indices
    token, place, end = route(ids, num_experts)
    order = ids.flatten().sort(stable=True).indices
    assert torch.equal(token.long(), order // chosen)
    assert torch.equal(order[place.long()], torch.arange(num_tokens * chosen))
    assert torch.equal(end.long(), torch.bincount(ids.flatten(), minlength=num_experts).cumsum(0))


@interpreted
@pytest.mark.parametrize(("num_tokens", "chosen", "num_experts"), SHAPES)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_experts_are_near_plain_ones(num_tokens: int, chosen: int, num_experts: int, integers: torch.dtype) -> None:
    from kpolicy.serving.gpu.experts import gated_experts

    made = torch.Generator().manual_seed(2)
    ids = torch.rand(num_tokens, num_experts, generator=made).topk(chosen).indices.to(integers)
    hidden = torch.randn(num_tokens, 64, generator=made).bfloat16()
    weights = torch.rand(num_tokens, chosen, generator=made)
    gate_up = torch.randn(num_experts, 2 * 40, 64, generator=made).bfloat16() / 8
    down = torch.randn(num_experts, 64, 40, generator=made).bfloat16() / 6
    found = gated_experts(hidden, ids, weights, gate_up, down).float()
    wanted = plain_experts(hidden, ids, weights, gate_up, down).float()
    assert float((found - wanted).norm() / wanted.norm()) < 0.01


@interpreted
# What lies behind the experts' places is whatever memory held.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_copies_for_no_expert_count_nothing_and_results_are_of_the_tokens_type() -> None:
    from kpolicy.serving.gpu.experts import gated_experts, route

    made = torch.Generator().manual_seed(4)
    ids = torch.tensor([[0, 7], [8, 3], [-1, 9], [5, 8]])
    token, place, end = route(ids, 8)
    assert place.tolist() == [0, 3, -1, 1, -1, -1, 2, -1]
    assert (token[:4].tolist(), token[4:].tolist(), end[-1].item()) == ([0, 1, 3, 0], [0] * 4, 4)
    hidden, weights = torch.randn(4, 64, generator=made), torch.rand(4, 2, generator=made)
    gate_up, down = (torch.randn(8, *size, generator=made).bfloat16() / 8 for size in ((80, 64), (64, 40)))
    found = gated_experts(hidden, ids, weights, gate_up, down)
    kept = ids.clamp(0, 7), weights.masked_fill((ids < 0) | (ids > 7), 0.0)
    wanted = plain_experts(hidden.bfloat16(), *kept, gate_up, down).float()
    assert found.dtype == torch.float32
    assert not found[2].any()
    assert float((found - wanted).norm() / wanted.norm()) < 0.02


@interpreted
@pytest.mark.parametrize(("heads", "nope", "rope", "value"), [(2, 32, 16, 32), (3, 16, 8, 12), (2, 128, 64, 128)])
@pytest.mark.parametrize("lengths", [[(5, 5)], [(130, 130), (3, 70), (64, 200)], [(1, 300), (77, 77)]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_expanded_prompts_are_as_over_whole_keys(
    heads: int, nope: int, rope: int, value: int, lengths: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """Causal from the end, each row over its own keys alone: others' are something else each time."""
    from kpolicy.serving.gpu.expanded import expanded_attention

    made = torch.Generator().manual_seed(3)
    queries, kvs = zip(*lengths, strict=True)
    q_starts, kv_starts = ([0, *itertools.accumulate(each)] for each in (queries, kvs))
    query = torch.randn(q_starts[-1], heads, nope + rope, generator=made).to(dtype)
    expanded = torch.randn(kv_starts[-1], heads, nope + value, generator=made).to(dtype)
    roped = torch.randn(kv_starts[-1], 24 + rope, generator=made).to(dtype)[:, 24:]
    starts = [torch.tensor(each, dtype=torch.int32) for each in (q_starts, kv_starts)]
    for row, (query_len, kv_len) in enumerate(lengths):
        mine, keys = (slice(each[row], each[row + 1]) for each in (q_starts, kv_starts))
        only_keys, only_roped = (torch.full_like(each, 50.0) for each in (expanded, roped))
        only_keys[keys], only_roped[keys] = expanded[keys], roped[keys]
        found = expanded_attention(query, only_keys, only_roped, *starts, value, 0.1)[mine].float()
        key = torch.cat((expanded[keys][..., :nope], roped[keys][:, None].expand(-1, heads, -1)), dim=-1).float()
        scores = torch.einsum("qhd,khd->hqk", query[mine].float(), key) * 0.1
        seen = torch.ones(query_len, kv_len, dtype=torch.bool).tril(kv_len - query_len)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        wanted = torch.einsum("hqk,khd->qhd", weights, expanded[keys][..., nope:].float())
        assert float((found - wanted).norm() / wanted.norm()) < (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize(
    ("shared", "dtype", "dims", "tile"),
    [
        (227, torch.bfloat16, (128, 64, 128), (128, 64, 2)),
        (163, torch.bfloat16, (128, 64, 128), (128, 64, 2)),
        (99, torch.bfloat16, (128, 64, 128), (64, 32, 2)),
        (227, torch.bfloat16, (192, 64, 256), (64, 64, 2)),
        (99, torch.float32, (128, 64, 128), (32, 32, 1)),
        (227, torch.float32, (128, 64, 128), (32, 32, 2)),
    ],
)
def test_tiles_fit_a_processors_shared_memory(
    shared: int, dtype: torch.dtype, dims: tuple[int, int, int], tile: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """KiB a program may have: an H200's, an A100's, an RTX 4090's."""
    from kpolicy.serving.gpu import expanded

    monkeypatch.setattr(expanded, "_shared_bytes", lambda _: shared << 10)
    block_m, _, num_stages, constants = expanded._plan.__wrapped__(16, *dims, dtype, torch.device("cpu"))
    assert (block_m, constants[8], num_stages) == tile


def test_heads_that_fit_in_no_tile_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kpolicy.errors import SupportError
    from kpolicy.serving.gpu import expanded

    monkeypatch.setattr(expanded, "_shared_bytes", lambda _: 16 << 10)
    with pytest.raises(SupportError, match=r"heads of MLA of 128 and 64 in keys and 128 in values are too large"):
        expanded._plan.__wrapped__(16, 128, 64, 128, torch.float32, torch.device("cpu"))
