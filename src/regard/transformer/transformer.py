"""The Transformer: an encoder that reads one sequence, and a decoder that writes another."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.query.parts import widths
from regard.transformer.decoder import TransformerDecoder
from regard.transformer.encoder import TransformerEncoder
from regard.transformer.positions import PositionLike


@register(
    name="transformer",
    zh="Transformer（多头与多跳）",
    path="query/multiplicity",
    equation="m = encoder(x),  y = decoder(y_{<t}, m)",
    paper="Vaswani et al., Attention Is All You Need, NeurIPS 2017",
    year=2017,
    time="L (N² d + M² d + N M d + (N + M) d²)",
    memory="L (N + M) d (for the backward); weights linear (fused, blockwise)",
    choose="one sequence is to be turned into another: translation, summaries, rewriting",
    avoid="there is little data and its order says much (recurrence), or N² counts (Linformer, Reformer)",
)
class Transformer(nn.Module):
    r"""Encoder and decoder (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

    $$m = \mathrm{encoder}(x), \qquad h = \mathrm{decoder}(y, m)$$

    Many queries at once (heads) and many in a row (layers): multi-head and multi-hop in one. Vectors come in and go out;
    `SequenceToSequence` adds the embeddings and generates. Its parts are `encoder` and `decoder`.

    Args:
        dim: width of the tokens of both.
        heads: of each attention.
        layers: of each, or of encoder and decoder.
        position: as in `TransformerEncoder`, for both.
        **options: of both, such as `norm`, `feedforward_dim`, `dropout`, `score`, `align`.

    Example:
        >>> import torch
        >>> model = Transformer(8, heads=2, layers=2, position="sinusoidal")
        >>> model(torch.randn(2, 7, 8), torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        layers: int | tuple[int, int] = 6,
        *,
        position: PositionLike = None,
        **options: Any,
    ) -> None:
        super().__init__()
        reading, writing = widths("layers", layers, 2)
        self.encoder = TransformerEncoder(dim, heads, reading, position=position, **options)
        self.decoder = TransformerDecoder(dim, heads, writing, position=position, **options)

    def forward(
        self,
        source: Float[Tensor, "*b n d"],
        target: Float[Tensor, "*b m d"],
        mask: Bool[Tensor, "*_ n"] | None = None,
        target_mask: Bool[Tensor, "*_ m"] | None = None,
    ) -> Float[Tensor, "*b m d"]:
        """What the decoder makes of the target so far, at each of its places.

        Args:
            source: (..., N, d).
            target: (..., M, d).
            mask: True for real tokens of the source, (..., N).
            target_mask: True for real tokens of the target, (..., M).
        """
        result: Tensor = self.decoder(target, self.encoder(source, mask), target_mask, mask)
        return result

    @classmethod
    def from_torch(cls, module: nn.Transformer, **options: Any) -> Transformer:
        """The same function as torch's under a causal `tgt_mask`, with copies of its weights; see `TransformerEncoder.from_torch`."""
        if not isinstance(module, nn.Transformer):
            raise TypeError(refusal("module", type(module).__name__, "an nn.Transformer"))
        ours = cls(module.d_model, module.nhead, 1)
        ours.encoder = TransformerEncoder.from_torch(module.encoder, **options)
        ours.decoder = TransformerDecoder.from_torch(module.decoder, **options)
        return ours.train(module.training)
