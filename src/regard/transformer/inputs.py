"""What an attention inside a layer makes of its tokens under a mask: who asks, and what is read."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from regard._errors import refusal
from regard.general.bound import Sizes
from regard.general.masks import Mask, Pairs, as_mask
from regard.ops.fill import kept_rows
from regard.transformer.sharing import Shared


class Masked(NamedTuple):
    """The mask of a call, and its tokens with zeros where they neither ask nor are read."""

    shared: Shared | None
    asking: Tensor
    read: Tensor


def masked(tokens: Tensor, mask: Tensor | Mask | None, heads: int) -> Masked:
    """Bind a mask to tokens (..., N, d) that read themselves; one that a stack has made is bound already."""
    if mask is None or isinstance(mask, Shared):
        return Masked(mask, tokens, tokens)
    mask, lead, n = as_mask(mask), tuple(tokens.shape[:-2]), tokens.shape[-2]
    per_head = isinstance(mask, Pairs) and mask.allowed.dim() == len(lead) + 3
    bound = mask.bind(Sizes((*lead, heads) if per_head else lead, n, n))
    rows, keys = bound.rows(tokens.device), bound.keys(tokens.device)
    if per_head:
        rows, keys = (None if x is None or x.dim() < 2 else x.any(-2) for x in (rows, keys))
    return Masked(Shared(bound, rows, heads=not per_head), kept_rows(tokens, rows), kept_rows(tokens, keys))


def real_keys(shared: Shared | None, tokens: Tensor, who: str) -> Tensor | None:
    """The keys that may be read (..., N), where they must be the same for every query; None for all of them."""
    if shared is None:
        return None
    shape = shared.bound.shape
    if shape[-2] != 1 or not shared.heads:
        got = f"one of shape {tuple(shape)}, which tells queries apart"
        fix = f"{who} mixes all places before any query looks: it has no causal form. Fix: pass masks of keys, such as Keys(real)."
        raise ValueError(refusal("mask", got, "the same keys for every query", fix))
    return shared.bound.keys(tokens.device)
