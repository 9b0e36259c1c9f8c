"""Sampling on the device: greedy, or by temperature with noise that is a function of the request, not of a generator.

Gumbel-max: the argmax of logits / temperature + Gumbel noise is a sample of the softmax. The noise of a token is a hash
of (seed, position, token id), so a request gets the same tokens in any batch, a replay gets fresh noise from its
inputs, and no random operator, which a graph couldn't hold, is used.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["gumbel_noise", "sample"]

_GOLDEN = 0x9E3779B9 - 2**32
"""2**32 over the golden ratio, as int32: spreads neighbouring token ids."""
_COLDEST = 1e-30
"""Colder rows are scaled as if by this: they take the likeliest token all the same, and logits stay finite"""


def sample(logits: torch.Tensor, step: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The next token of each row, [rows] int64.

    Args:
        logits: [rows, vocab].
        step: ``temperature`` [rows] float32 (0 is greedy), ``seed`` [rows] int64, ``position`` [rows] int64. Without
            ``temperature`` all rows are greedy and no noise is computed.
    """
    temperature = step.get("temperature")
    if temperature is None:
        return logits.argmax(-1)
    logits = logits.float()
    warm = (temperature > 0)[:, None]
    noise = gumbel_noise(step["seed"], step["position"], logits.shape[1])
    scaled = logits / temperature.clamp(min=_COLDEST)[:, None]
    return torch.where(warm, scaled + noise, logits).argmax(-1)


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, vocab: int) -> torch.Tensor:
    """[rows, vocab] float32 of the standard Gumbel distribution, a function of seed, position and token id alone.

    Args:
        seed: [rows] int64.
        position: [rows] int64.
        vocab: token ids.
    """
    # int32 wraps, and converting to it keeps the low half.
    row = _mix(_mix(_mix(seed.to(torch.int32)) ^ (seed >> 32).to(torch.int32)) ^ position.to(torch.int32))
    token = torch.arange(vocab, device=seed.device, dtype=torch.int32) * _GOLDEN
    bits = _mix(row[:, None] + token).bitwise_and_(0x7FFFFFFF)
    # Noise is large where the uniform number is small, and float32 is finest there. Near 1 it may round to 1, whose
    # noise is minus infinity: a token with next to no chance gets none.
    uniform = bits.float().add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit mix of int32: lowbias32 of Chris Wellons' hash-prospector. Shifts are made logical by a mask."""
    x = x ^ ((x >> 16).bitwise_and_(0xFFFF))
    x.mul_(0x7FEB352D).bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    x.mul_(0x846CA68B - 2**32)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
