"""What no mask hides: alignments by which a token would see later ones."""

from __future__ import annotations

from torch import nn

from regard._errors import refusal
from regard.general.attention import Attention


def refuse_together(part: nn.Module, memory: bool = False) -> None:
    """Refuse attentions inside a part whose weights all tokens decide together, for classes that promise that no token sees later ones.

    Args:
        part: an attention, or what holds some.
        memory: whether keys are of a memory: what is prepared of all of it is of no later token, unless other queries are looked at.
    """
    for module in part.modules():
        align = module.align if isinstance(module, Attention) else None
        if not (getattr(align, "splits", True) or (memory and getattr(align, "is_rowwise", True))):
            expected = "one that decides each row by itself: all tokens together decide these weights, later ones too"
            raise ValueError(refusal("align", type(align).__name__, expected))
