"""Absorbing the up-projection of latents (MLA) into queries and outputs, so that attention runs over latents."""

from __future__ import annotations

import torch

__all__ = ["absorbed", "unabsorbed"]


def absorbed(query: torch.Tensor, up: torch.Tensor, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts of queries that meet latents and roped keys.

    Args:
        query: [num_tokens, num_heads, nope_dim + rope_dim].
        up: [num_heads, nope_dim + value_dim, rank].
        value_dim: of one head.

    Returns: [num_tokens, num_heads, rank] and [num_tokens, num_heads, rope_dim].
    """
    nope_dim = up.shape[1] - value_dim
    latent = torch.bmm(query[..., :nope_dim].transpose(0, 1), up[:, :nope_dim]).transpose(0, 1)
    return latent, query[..., nope_dim:]


def unabsorbed(mixed: torch.Tensor, up: torch.Tensor, value_dim: int) -> torch.Tensor:
    """[num_tokens, num_heads, value_dim] of what attention made of latents, [num_tokens, num_heads, rank]."""
    return torch.bmm(mixed.transpose(0, 1), up[:, up.shape[1] - value_dim :].transpose(1, 2)).transpose(0, 1)
