"""Any number of leading axes as the one or two that library calls and kernels have."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# What our kernels read; they add up in float32.
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Entries of the second and third axis of a launch.
MOST_LEADS = (1 << 16) - 1


def why_too_many(leads: int) -> str | None:
    """The reason why no kernel is launched for so many leading entries, or None."""
    return f"more than {MOST_LEADS} leading entries" if leads > MOST_LEADS else None


def four_axes(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(..., N, d) -> (batch, heads, N, d); more leading axes are folded into the heads."""
    if len(lead) == 2 and x.shape[:-2] == lead:
        return x
    batch = lead[0] if lead else 1
    return x.expand(*lead, *x.shape[-2:]).reshape(batch, -1, *x.shape[-2:])


def mask_axes(mask: Tensor, lead: tuple[int, ...]) -> Tensor:
    """A mask (..., Nq, N) with the same four axes, of size 1 where it does not differ."""
    mask = mask.reshape((1,) * (len(lead) + 2 - mask.dim()) + tuple(mask.shape))
    if len(lead) > 2 and any(size > 1 for size in mask.shape[1:-2]):
        mask = mask.expand(mask.shape[0], *lead[1:], *mask.shape[-2:])
    return mask.reshape(mask.shape[0] if lead else 1, -1, *mask.shape[-2:])


def flat(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(..., N, d) -> (L, N, d), written out where it only broadcasts."""
    if x.shape[:-2] != lead:
        x = x.expand(*lead, *x.shape[-2:])
    # What has the axes already is not looked at again by autograd.
    return x if len(lead) == 1 else x.reshape(math.prod(lead), *x.shape[-2:])


def spread(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(L or 1, Nq or 1, N or 1): written out over the leading axes only where it differs along them."""
    x = x.reshape((1,) * (len(lead) + 2 - x.dim()) + tuple(x.shape))
    if any(size > 1 for size in x.shape[:-2]):
        x = x.expand(*lead, *x.shape[-2:])
    return x.reshape(-1, *x.shape[-2:])


def mask_bytes(allowed: Tensor, lead: tuple[int, ...]) -> Tensor:
    """A mask as kernels read it, (L or 1, Nq or 1, N or 1)."""
    return spread(allowed, lead).to(torch.uint8)
