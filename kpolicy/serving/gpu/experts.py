"""A mixture of experts in Triton, around torch's grouped matrix products: `gated_experts`.

A token's copies are brought into the experts' order by counting, not by a sort, and a copy's result is found by its
place, so nothing is written for the way back. Every program's work depends on shapes alone and every sum has one order.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kpolicy.serving.gpu.launch import launch

__all__ = ["combine", "gate", "gated_experts", "route"]

ROUTE_BLOCK = 4096
"""Copies that a program of an expert looks at together"""
WIDTH = 2048
"""Values of a row that a program has, at most"""


@triton.jit(do_not_specialize=["count"])
def _route_copies(expert_ptr, token_ptr, place_ptr, end_ptr, count, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    before = 0
    own = 0
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        chosen = tl.load(expert_ptr + at, mask=at < count, other=tl.num_programs(0))
        before += tl.sum(((chosen >= 0) & (chosen < expert)).to(tl.int32), 0)
        own += tl.sum((chosen == expert).to(tl.int32), 0)
    tl.store(end_ptr + expert, before + own)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mine = tl.load(expert_ptr + at, mask=at < count, other=tl.num_programs(0)) == expert
        place = before + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(token_ptr + place, at // CHOSEN, mask=mine)
        tl.store(place_ptr + at, place, mask=mine)
        before += tl.sum(mine.to(tl.int32), 0)
    if expert == tl.num_programs(0) - 1:
        # Copies for no expert have no place; what lies behind the others' places is computed and not read.
        for first in range(0, count, BLOCK):
            at = first + tl.arange(0, BLOCK)
            chosen = tl.load(expert_ptr + at, mask=at < count, other=0)
            tl.store(place_ptr + at, -1, mask=(at < count) & ((chosen < 0) | (chosen > expert)))
            tl.store(token_ptr + at, 0, mask=(at >= before) & (at < count))


def route(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The order that brings every expert's tokens together, by expert and then by token.

    Args:
        experts: [num_tokens, chosen] int32 or int64, contiguous; from 0 to num_experts - 1, others are no expert.
        num_experts: of the layer.

    Returns:
        [num_tokens * chosen] int32, the token at each place; [num_tokens * chosen] int32, the place of each of a
        token's copies, -1 for no expert; [num_experts] int32, where each expert's places end.
    """
    count, device = experts.numel(), experts.device
    token, place, end = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (count, count, num_experts)
    )  # fmt: skip
    launch(_route_copies, (num_experts, 1, 1), (experts, token, place, end), (experts.shape[1], ROUTE_BLOCK), (count,),
           num_warps=8)  # fmt: skip
    return token, place, end


@triton.jit
def _silu_times(out_ptr, both_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gates = tl.load(both_ptr + row * 2 * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    ups = tl.load(both_ptr + (row * 2 + 1) * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + at, (gates * tl.sigmoid(gates) * ups).to(out_ptr.dtype.element_ty), mask=at < SIZE)


def gate(both: torch.Tensor) -> torch.Tensor:
    """[rows, size] of silu(gate) * up, of [rows, 2 * size], contiguous: gates, then ups. In float32, rounded once."""
    size = both.shape[1] // 2
    out = both.new_empty(both.shape[0], size)
    block = _block(size)
    launch(_silu_times, (both.shape[0], triton.cdiv(size, block), 1), (out, both), (size, block), num_warps=4)
    return out


@triton.jit
def _weighted_sum(out_ptr, copies_ptr, place_ptr, weight_ptr, CHOSEN: tl.constexpr, SIZE: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for copy in tl.static_range(CHOSEN):
        place = tl.load(place_ptr + token * CHOSEN + copy).to(tl.int64)
        weight = tl.load(weight_ptr + token * CHOSEN + copy).to(tl.float32)
        values = tl.load(copies_ptr + place * SIZE + at, mask=at < tl.where(place < 0, 0, SIZE), other=0.0)
        total += weight * values.to(tl.float32)
    tl.store(out_ptr + token * SIZE + at, total.to(out_ptr.dtype.element_ty), mask=at < SIZE)


def combine(copies: torch.Tensor, place: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[num_tokens, size]: each token's copies times their weights, added up in the order they were chosen in.

    Args:
        copies: [num_tokens * chosen, size], contiguous, in the experts' order.
        place: of `route`; copies for no expert count nothing.
        weights: [num_tokens, chosen] floats, contiguous.
    """
    (num_tokens, chosen), size = weights.shape, copies.shape[1]
    out = copies.new_empty(num_tokens, size)
    block = _block(size)
    launch(
        _weighted_sum, (num_tokens, triton.cdiv(size, block), 1), (out, copies, place, weights), (chosen, size, block),
        num_warps=4,
    )  # fmt: skip
    return out


@functools.lru_cache(maxsize=256)
def _block(size: int) -> int:
    return int(min(WIDTH, triton.next_power_of_2(size)))


def gated_experts(
    hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """[num_tokens, size] of a mixture of experts whose MLPs are down(silu(gate(x)) * up(x)).

    Args:
        hidden: [num_tokens, size], of any floats; the result is of these.
        experts: [num_tokens, chosen] int32 or int64, which experts each token goes through.
        weights: [num_tokens, chosen] floats, what their results count.
        gate_up: [num_experts, 2 * inner, size] bfloat16.
        down: [num_experts, size, inner] bfloat16.
    """
    token, place, end = route(experts.contiguous(), gate_up.shape[0])
    product = torch.nn.functional.grouped_mm
    both = product(hidden.to(gate_up.dtype).index_select(0, token), gate_up.transpose(1, 2), offs=end)
    copies = product(gate(both), down.transpose(1, 2), offs=end)
    return combine(copies, place, weights.contiguous()).to(hidden.dtype)
