"""One mask for a whole stack: bound once, of tokens that hold zeros wherever there is only padding."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.general.bound import Bound, Sizes
from regard.general.masks import Causal, Keys, Mask, as_mask
from regard.query.parts import Filled


class Shared(Filled):
    """A mask of inputs that hold zeros wherever nobody looks.

    Args:
        bound: the mask.
        rows: which queries (..., Nq) may attend something; None where that is so of every token that is real.
        heads: whether the call has an axis of heads that the mask does not have.
    """

    def __init__(self, bound: Bound, rows: Tensor | None = None, heads: bool = True) -> None:
        super().__init__(bound, heads)
        self.rows = rows

    def also(self, pairs: Mask, device: torch.device) -> Shared:
        """Allowed by this and by that."""
        bound = self.bound.also(pairs.bind(self.bound.sizes))
        rows = bound.rows(device)
        return Shared(bound, rows if self.heads or rows is None else rows.any(-2), self.heads)


def share(
    mask: Tensor | None, pairs: Mask | Tensor | None, sizes: Sizes, device: torch.device, *, own: bool = True
) -> Shared | None:
    """The mask of real keys (..., N) and of allowed pairs.

    Args:
        mask: True for real keys.
        pairs: which query may look at which key.
        sizes: of the call, without heads.
        device: of the tokens.
        own: whether queries and keys are the same tokens: then only padding sees none of them.
    """
    parts = [*([] if mask is None else [Keys(mask)]), *([] if pairs is None else [as_mask(pairs)])]
    if not parts:
        return None
    joined = parts[0] if len(parts) == 1 else parts[0] & parts[1]
    bound = joined.bind(sizes)
    if own and (pairs is None or isinstance(pairs, Causal)):
        return Shared(bound)
    return Shared(bound, bound.rows(device))
