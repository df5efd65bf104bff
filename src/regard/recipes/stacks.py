"""Causal stacks by name: what reads a text from left to right, with any attention of the library in its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard import catalog
from regard._errors import refusal
from regard.transformer import (
    LearnedPosition,
    LongShortAttention,
    LSHAttention,
    Reformer,
    SynthesizerAttention,
    TransformerDecoder,
    TransformerXL,
)

CAUSAL = (
    *("transformer-decoder", "transformer-xl", "reformer", "lsh-attention", "lite-transformer", "synthesizer"),
    *("additive", "sparsemax", "positional-encoding", "learned-position", "rotary-position", "alibi-position"),
    *("relative-position", "directional-position"),
)


class Segments(nn.Module):
    """A Transformer-XL that reads a text segment by segment, each with the memory of those before it.

    Args:
        model: with the memory.
        segment: tokens of a segment.
    """

    def __init__(self, model: TransformerXL, segment: int) -> None:
        super().__init__()
        if segment < 1:
            raise ValueError(refusal("segment", segment, "a whole number >= 1"))
        self.model, self.segment = model, segment

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        memory, read = None, []
        parts = tokens.split(self.segment, -2)
        real = [None] * len(parts) if mask is None else mask.split(self.segment, -1)
        for part, known in zip(parts, real, strict=True):
            output, memory = self.model(part, memory, known)
            read.append(output)
        return torch.cat(read, -2)


def causal_stack(
    name: str,
    options: Mapping[str, Any],
    *,
    dim: int,
    heads: int,
    layers: int,
    length: int,
    segment: int,
    dropout: float = 0.0,
) -> nn.Module:
    """A stack of layers in which no token sees a later one.

    Hashed attentions read none either, but sort all of them: later tokens may move the edges of the chunks in which earlier ones look.

    Args:
        name: a member of the Transformer family; or a score, an alignment or a position, for a plain decoder with it.
        options: of the attention, set by the user.
        dim: width.
        heads: of each layer.
        layers: how many.
        length: the most tokens.
        segment: tokens of a Transformer-XL's segment; it remembers as many as there are.
        dropout: while training.

    Example:
        >>> causal_stack("additive", {}, dim=8, heads=2, layers=1, length=9, segment=3)(torch.randn(2, 9, 8)).shape
        torch.Size([2, 9, 8])
    """
    entry = catalog.find(name, argument="attention")
    name = entry.name
    plain: dict[str, Any] = {"norm": "pre", "dropout": dropout, "activation": "gelu"}
    if name == "transformer-xl":
        return Segments(TransformerXL(dim, heads, layers, **{"memory": length, **plain, **options}), segment)
    if name == "reformer":
        made = {"causal": True, "position": "sinusoidal", "dropout": dropout}
        return Reformer(dim, heads, layers, **{**made, **options})
    inner = {
        "lsh-attention": lambda d, h: LSHAttention(d, h, **options),
        "lite-transformer": lambda d, h: LongShortAttention(d, h, **{"causal": True, **options}),
        "synthesizer": lambda d, h: SynthesizerAttention(d, h, **{"length": length, **options}),
    }
    more: dict[str, Any] = {"position": "sinusoidal"}
    if name in inner:
        more["attention"] = inner[name]
    elif name in ("transformer-decoder", "transformer", "multi-head"):
        more |= options
    elif entry.path in ("general/scoring", "general/alignment"):
        more |= {"score" if entry.path == "general/scoring" else "align": name, **options}
    elif entry.path == "query/position":
        # Only learned positions must know how many there are.
        more |= {"position": LearnedPosition(dim, length) if entry.cls is LearnedPosition else name, **options}
    else:
        expected = "a score, an alignment, a position, or one of " + ", ".join(CAUSAL[:6])
        raise ValueError(refusal("attention", repr(name), expected))
    return TransformerDecoder(dim, heads, layers, cross=False, **{**plain, **more})
