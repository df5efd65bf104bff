"""Feature models one after the other."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from regard._errors import refusal


class Chain(nn.Module):
    """Feature models one after the other, each with the mask of what it is given.

    Args:
        *parts: modules that take features and a mask; one that changes the length has `mask_after`.

    Example:
        >>> import torch, regard as rg
        >>> from regard.model import Embedding
        >>> chain = Chain(Embedding(20, 8), rg.RecurrentEncoder(8, 5))
        >>> chain(torch.tensor([[3, 5, 0]])).shape
        torch.Size([1, 3, 10])
    """

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        if not parts:
            raise ValueError(refusal("parts", "none", "at least one feature model"))
        self.parts = nn.ModuleList(parts)
        self.out_dim = getattr(parts[-1], "out_dim", None)
        self.fills_padding = getattr(parts[-1], "fills_padding", False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = [*self.parts]
        for part, after in pairwise(parts):
            # Zeros at padding cost as much as the vectors themselves: none are written for a part that skips whatever stands there.
            unread = getattr(part, "only_fills_padding", False) and getattr(after, "skips_padding", False)
            x, mask = part(x, None if unread else mask), mask_after(part, mask)
        found: Tensor = parts[-1](x, mask)
        return found

    def mask_after(self, mask: Tensor | None) -> Tensor | None:
        """What is real after the last part."""
        for part in self.parts:
            mask = mask_after(part, mask)
        return mask


def mask_after(module: nn.Module, mask: Tensor | None) -> Tensor | None:
    """Which of a feature model's results are real, when these of its inputs are: the same, unless it says otherwise."""
    change = getattr(module, "mask_after", None)
    changed: Tensor | None = mask if change is None else change(mask)
    return changed
