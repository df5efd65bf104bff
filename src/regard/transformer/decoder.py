"""The decoder: layers in which a token reads those before it, and what an encoder made of another input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import masked_input
from regard.general.bound import Sizes
from regard.general.causal import refuse_together
from regard.general.masks import Causal, Mask, as_mask
from regard.general.scores.base import width
from regard.ops.fill import kept_rows
from regard.ops.parallel.ranks import first_place
from regard.transformer.cache import Cache, fitting
from regard.transformer.encoder import copied_norm, stack
from regard.transformer.layers import DecoderLayer
from regard.transformer.positions import PositionLike
from regard.transformer.sharing import Shared, share


@register(
    name="transformer-decoder",
    zh="Transformer 解码器",
    path="query/multiplicity",
    equation="x ← LN(x + MHA(x, x)_{j≤i}),  x ← LN(x + MHA(x, m)),  x ← LN(x + FFN(x)),  L times",
    paper="Vaswani et al., Attention Is All You Need, NeurIPS 2017",
    year=2017,
    time="L (N² d + N M d + N d²); a cached step L (N d + M d + d²)",
    memory="L N d; the cache L (N + M) d",
    choose="a sequence is to be generated, one token after the other, trained on all of them at once",
    avoid="the whole input is known and both directions help (encoder)",
)
class TransformerDecoder(nn.Module):
    r"""Layers of causal self-attention and of attention to an encoder's output $m$ (https://arxiv.org/abs/1706.03762).

    $$x \leftarrow \mathrm{LN}(x + \mathrm{MHA}(x, x)_{j \le i}), \qquad x \leftarrow \mathrm{LN}(x + \mathrm{MHA}(x, m)), \qquad
      x \leftarrow \mathrm{LN}(x + \mathrm{FFN}(x)), \qquad L \text{ times}$$

    No token sees a later one; alignments that are decided by all tokens together, whatever the mask, are refused (`Sinkhorn`,
    `DependencyTree`, `ReinforcedPairs`, and `Reinforced` with its `context`). With a cache, tokens may come in any portions, and give what
    they would have given together. Under a trace the weights of layer $l$ are at `layers.l.attention.attention` and
    `layers.l.cross.attention`.

    Args:
        dim: width of the tokens.
        heads: of each attention.
        layers: how many, or ready-made ones, each called as `layer(tokens, memory, mask, memory_mask)`, and with `cache=` while decoding.
        cross: whether there is an encoder's output to read, or its width; False for a decoder alone.
        position: as in `TransformerEncoder`; of the tokens among themselves.
        final_norm: normalise at the end; so by default with `norm="pre"`.
        **options: of each `DecoderLayer`.

    Example:
        >>> import torch
        >>> decode = TransformerDecoder(8, heads=2, layers=3)
        >>> decode(torch.randn(2, 5, 8), torch.randn(2, 7, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        layers: int | Sequence[nn.Module] = 6,
        *,
        cross: bool | int = True,
        position: PositionLike = None,
        final_norm: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.dim = width("dim", dim)
        # Layers that are ready-made know for themselves how wide a memory they read.
        more = {} if not isinstance(layers, int) else {"cross": cross}
        self.memory_dim = None if not more or cross is False else dim if cross is True else cross
        self.position, self.layers = stack(DecoderLayer, dim, heads, layers, position, options | more)
        for layer in self.layers:
            for name in ("attention", "cross"):
                if isinstance(part := getattr(layer, name, None), nn.Module):
                    refuse_together(part, memory=name == "cross")
        wanted = options.get("norm") == "pre" if final_norm is None else final_norm
        self.final_norm = nn.LayerNorm(dim, bias=options.get("bias", True)) if wanted else None

    def forward(
        self,
        tokens: Float[Tensor, "*b n d"],
        memory: Float[Tensor, "*_ m dm"] | None = None,
        mask: Bool[Tensor, "*_ n"] | None = None,
        memory_mask: Bool[Tensor, "*_ m"] | None = None,
        *,
        pairs: Mask | Tensor | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "*b n d"]:
        """Read the tokens, and the memory.

        Args:
            tokens: (..., N, d): all of them, or with a cache those that follow the ones it has seen.
            memory: what the encoder gave, (..., M, d_m).
            mask: True for real tokens, (..., N).
            memory_mask: True for what is real in the memory, (..., M).
            pairs: which token may look at which, beside causality; over all tokens so far.
            cache: what `cache()` gave; it is changed. It remembers the memory too, as it was at the first call.
        """
        tokens, mask = masked_input(tokens, mask, "tokens", self.dim)
        lead, n = tuple(tokens.shape[:-2]), tokens.shape[-2]
        across = None
        if memory is not None:
            memory, memory_mask = masked_input(memory, memory_mask, "memory", self.memory_dim)
            across = share(memory_mask, None, Sizes(lead, n, memory.shape[-2]), tokens.device, own=False)
        start, real = 0, mask
        if cache is not None:
            fitting(cache, len(self.layers), lead, memory)
            start = cache.length
            cache.seen(n, mask, lead, tokens.device)
            real = cache.real
        own = self._own(real, pairs, Sizes(lead, n, start + n), tokens)
        if self.position is not None:
            tokens = self.position(tokens, start + first_place(n))
        for k, layer in enumerate(self.layers):
            slots = {} if cache is None else {"cache": (cache.own[k], cache.cross[k])}
            tokens = layer(tokens, memory, own, across, **slots)
        if self.final_norm is not None:
            tokens = self.final_norm(tokens)
        return kept_rows(tokens, mask)

    def _own(self, real: Tensor | None, pairs: Mask | Tensor | None, sizes: Sizes, tokens: Tensor) -> Shared | None:
        """Who may look at whom among the tokens."""
        if pairs is not None:
            return share(real, Causal() & as_mask(pairs), sizes, tokens.device)
        # A single token after all others may see every one of them.
        return share(real, None if sizes.nq == 1 else Causal(), sizes, tokens.device)

    def cache(self) -> Cache:
        """An empty memory of keys and values, for decoding in portions."""
        return Cache(len(self.layers))

    @classmethod
    def from_torch(cls, module: nn.TransformerDecoder, **options: Any) -> TransformerDecoder:
        """The same function as a decoder of torch under a causal `tgt_mask`, with copies of its weights.

        Axes are (..., N, d) whatever its `batch_first` says, True in a mask means a real token, and padding comes out as zeros.
        """
        if not isinstance(module, nn.TransformerDecoder):
            raise TypeError(refusal("module", type(module).__name__, "an nn.TransformerDecoder"))
        layers = [DecoderLayer.from_torch(layer, **options) for layer in module.layers]
        attention: Any = module.layers[0].self_attn
        ours = cls(attention.embed_dim, attention.num_heads, layers)
        ours.final_norm = copied_norm(module.norm)
        return ours.train(module.training)
