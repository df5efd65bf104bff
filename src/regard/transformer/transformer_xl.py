"""Transformer-XL: a text in segments, each of which can look back at what the layers saw before."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import masked_input
from regard.general.bound import Sizes
from regard.general.causal import refuse_together
from regard.general.masks import Band, Causal, Mask
from regard.general.scores.base import width
from regard.ops.fill import kept_rows
from regard.query.multi_head import split_heads
from regard.transformer.attention import TransformerAttention
from regard.transformer.cache import Slot
from regard.transformer.layers import EncoderLayer
from regard.transformer.positions import TransformerXLPosition
from regard.transformer.sharing import Shared, share


class Memory(NamedTuple):
    """What the layers were given at the last tokens, without gradients: for each layer (..., M, d).

    `real` (..., M) is False where there was padding; None where there was none.
    """

    states: tuple[Tensor, ...]
    real: Tensor | None = None

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return self.states[0].shape[-2]

    def reorder(self, rows: Tensor) -> Memory:
        """These entries of the batch, in this order."""
        real = None if self.real is None else self.real.index_select(0, rows)
        return Memory(tuple(state.index_select(0, rows) for state in self.states), real)


class Segment(NamedTuple):
    """What a model makes of a segment, and the memory for the next one."""

    output: Tensor
    memory: Memory


class TransformerXLLayer(EncoderLayer):
    r"""A layer whose tokens also read those of earlier segments (Dai et al. 2019, https://arxiv.org/abs/1901.02860).

    $$x \leftarrow \mathrm{LN}\big(x + \mathrm{MHA}(x, [m; x])\big), \qquad x \leftarrow \mathrm{LN}(x + \mathrm{FFN}(x))$$

    Args:
        dim: width of the tokens.
        heads: of the attention.
        feedforward_dim: width inside the feed-forward map; 4 `dim` when not given.
        **options: of `EncoderLayer`, but for `attention`.

    Example:
        >>> layer = TransformerXLLayer(8, 2, position="transformer-xl")
        >>> layer(torch.randn(2, 5, 8), memory=torch.randn(2, 7, 8)).shape
        torch.Size([2, 5, 8])
    """

    attention: TransformerAttention

    def __init__(self, dim: int, heads: int, feedforward_dim: int | None = None, **options: Any) -> None:
        if options.get("attention") is not None:
            raise TypeError(
                refusal("attention", repr(options["attention"]), "none: the memory needs its own projections")
            )
        super().__init__(dim, heads, feedforward_dim, **options)

    def forward(
        self,
        tokens: Float[Tensor, "*b n d"],
        mask: Tensor | Mask | None = None,
        memory: Float[Tensor, "*_ m d"] | None = None,
    ) -> Float[Tensor, "*b n d"]:
        """Update the tokens (..., N, d); the mask is over the memory (..., M, d) and them, (..., N, M + N)."""

        def attend(x: Tensor) -> Tensor:
            if memory is None or memory.shape[-2] == 0:
                alone: Tensor = self.attention(x, mask=mask)
                return alone
            before = self.norm_attention(memory) if self.norm == "pre" else memory
            slot, attention = Slot(), self.attention
            slot.extend(
                split_heads(before, attention.W_K, attention.b_K), split_heads(before, attention.W_V, attention.b_V)
            )
            result: Tensor = attention(x, mask=mask, cache=slot)
            return result

        tokens = self._added(tokens, self.norm_attention, attend)
        return self._added(tokens, self.norm_feedforward, self.feedforward)


@register(
    name="transformer-xl",
    zh="Transformer-XL（循环记忆）",
    path="query/multiplicity",
    equation="x ← LN(x + MHA(x, [SG(m); x])_{j≤i}),  m' = last M of [m; x],  positions i − j",
    paper="Dai et al., Transformer-XL: Attentive Language Models beyond a Fixed-Length Context, ACL 2019",
    year=2019,
    time="L (N (M + N) d + (M + N) d²) a segment of N tokens; linear in the text",
    memory="L (M + N) d",
    choose="long texts, read in order: context beyond a segment, for a cost that does not grow with what was read",
    avoid="the whole input is there at once and both directions help (encoder), or texts fit into one segment",
)
class TransformerXL(nn.Module):
    r"""A causal Transformer with a memory of earlier segments (Dai et al. 2019, https://arxiv.org/abs/1901.02860).

    $$x \leftarrow \mathrm{LN}\big(x + \mathrm{MHA}(x, [\mathrm{SG}(m); x])_{j \le i}\big), \qquad
      x \leftarrow \mathrm{LN}(x + \mathrm{FFN}(x)), \qquad m' = [\mathrm{SG}(m); x]_{-M:}$$

    for each layer, which remembers what it was given. Scores are those of `TransformerXLPosition`: they depend on distances alone,
    so that what was remembered stays valid. No gradient flows into the memory. Under a trace the weights of layer $l$ are at
    `layers.l.attention.attention`, (..., H, N, M + N).

    No token sees a later one: alignments that are decided by all tokens together are refused, as in `TransformerDecoder`.

    While the memory holds everything so far, or with `same_length`, a text gives the same result in whatever segments it comes.

    Args:
        dim: width of the tokens, an even number.
        heads: of each layer.
        layers: how many.
        memory: $M$, the most tokens that are remembered; 0 for none. It may be changed later, at `memory_length`, as where more is
            remembered in evaluation than in training.
        clamp: distances beyond it count as that far; no limit when None.
        same_length: let each token read itself and the $M$ before it, rather than the first of a segment less than the last.
        final_norm: normalise at the end; so by default with `norm="pre"`.
        **options: of each `TransformerXLLayer`: `norm`, `feedforward_dim`, `activation`, `dropout`, `bias`, `score`, `align` and so on.

    Example:
        >>> model = TransformerXL(8, heads=2, layers=3, memory=7)
        >>> first, second = torch.randn(2, 10, 8).split(5, dim=-2)
        >>> output, memory = model(first)
        >>> model(second, memory).output.shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        layers: int = 6,
        *,
        memory: int,
        clamp: int | None = None,
        same_length: bool = False,
        final_norm: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(memory, int) or isinstance(memory, bool) or memory < 0:
            raise ValueError(refusal("memory", repr(memory), "a whole number >= 0"))
        if "position" in options:
            fix = "Fix: TransformerDecoder takes any, without a memory."
            raise TypeError(refusal("position", repr(options["position"]), "none: its own is part of the model", fix))
        self.dim, self.memory_length, self.same_length = width("dim", dim), memory, same_length
        head_dim = options.get("head_dim") or max(1, dim // width("heads", heads))
        head_dim = head_dim if isinstance(head_dim, int) else head_dim[0]

        def position() -> TransformerXLPosition:
            return TransformerXLPosition(heads, head_dim, dim, clamp)

        self.layers = nn.ModuleList(
            TransformerXLLayer(dim, heads, position=position, **options) for _ in range(width("layers", layers))
        )
        refuse_together(self.layers)
        wanted = options.get("norm") == "pre" if final_norm is None else final_norm
        self.final_norm = nn.LayerNorm(dim, bias=options.get("bias", True)) if wanted else None

    def forward(
        self, tokens: Float[Tensor, "*b n d"], memory: Memory | None = None, mask: Bool[Tensor, "*_ n"] | None = None
    ) -> Segment:
        """Read a segment.

        Args:
            tokens: (..., N, d); segments may differ in length.
            memory: what the call on the segment before gave; None at the beginning.
            mask: True for real tokens, (..., N). Padding keeps its place: tokens of a later segment are that much farther away.
        """
        tokens, mask = masked_input(tokens, mask, "tokens", self.dim)
        lead, n = tuple(tokens.shape[:-2]), tokens.shape[-2]
        memory = self._checked(memory, tokens)
        past = memory.length
        real = _joined(memory.real, mask, (*lead, past), (*lead, n), tokens.device)
        shared = self._allowed(real, Sizes(lead, n, past + n), tokens.device)
        inputs: list[Tensor] = []
        for layer, state in zip(self.layers, memory.states, strict=True):
            inputs.append(tokens)
            tokens = layer(tokens, shared, state)
        if self.final_norm is not None:
            tokens = self.final_norm(tokens)
        return Segment(kept_rows(tokens, mask), self._remembered(memory, inputs, real))

    def _allowed(self, real: Tensor | None, sizes: Sizes, device: torch.device) -> Shared | None:
        """Who may look at whom, in the memory and in the segment."""
        # A memory that was filled when more was remembered still holds more.
        if self.same_length and (sizes.nq > 1 or sizes.n > self.memory_length + 1):
            return share(real, Band(-self.memory_length, 0), sizes, device)
        return share(real, None if sizes.nq == 1 else Causal(), sizes, device)

    def _remembered(self, memory: Memory, inputs: list[Tensor], real: Tensor | None) -> Memory:
        """The last rows of the memory and of what the layers were given now."""
        room, n = self.memory_length, inputs[0].shape[-2]
        total = memory.length + n
        begin = max(0, total - room)

        def last(state: Tensor, x: Tensor) -> Tensor:
            x = x.detach()
            if begin >= memory.length:
                return x[..., begin - memory.length :, :]
            return torch.cat([state[..., begin:, :], x], -2)

        states = tuple(last(state, x) for state, x in zip(memory.states, inputs, strict=True))
        return Memory(states, None if real is None else real[..., begin:])

    def _checked(self, memory: Memory | None, tokens: Tensor) -> Memory:
        if memory is None:
            return Memory((tokens[..., :0, :].detach(),) * len(self.layers))
        if not isinstance(memory, Memory):
            raise TypeError(refusal("memory", type(memory).__name__, "the memory that the call before gave"))
        if len(memory.states) != len(self.layers):
            raise ValueError(refusal("memory", f"one of {len(memory.states)} layers", f"one of {len(self.layers)}"))
        shape, expected = memory.states[0].shape, (*tokens.shape[:-2], memory.length, tokens.shape[-1])
        if tuple(shape) != expected:
            fix = "Fix: keep the rows of a batch together from segment to segment, or begin with memory=None."
            raise ValueError(refusal("memory", f"states of shape {tuple(shape)}", f"{expected}", fix))
        return memory

    def extra_repr(self) -> str:
        return f"memory={self.memory_length}, same_length={self.same_length}"


def _joined(
    old: Tensor | None, new: Tensor | None, before: tuple[int, ...], now: tuple[int, ...], device: torch.device
) -> Tensor | None:
    """Which tokens of memory and segment are real; None for all of them."""
    if old is None and new is None:
        return None
    old = torch.ones(before, dtype=torch.bool, device=device) if old is None else old
    new = torch.ones(now, dtype=torch.bool, device=device) if new is None else new
    return torch.cat([old, new], -1)
