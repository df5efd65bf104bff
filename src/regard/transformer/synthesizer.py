"""Synthesizer: weights that no pair of tokens was compared for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard._errors import nearest, refusal
from regard.catalog import register
from regard.general.attention import Attention
from regard.general.masks import Mask
from regard.general.scores import Dot
from regard.general.scores.base import matrix, width, zeros
from regard.ops.fill import kept_rows
from regard.query.multi_head import split_heads
from regard.query.parts import Filled
from regard.transformer.inputs import masked
from regard.transformer.positions import StreamedBias
from regard.transformer.syntheses import (
    DenseSynthesis,
    DotSynthesis,
    FactorizedDenseSynthesis,
    FactorizedRandomSynthesis,
    RandomSynthesis,
    Synthesis,
    Synthesizing,
)

_NAMED: dict[str, Callable[[int, int, int], Synthesizing]] = {
    "dense": DenseSynthesis,
    "factorized-dense": FactorizedDenseSynthesis,
    "random": lambda dim, heads, length: RandomSynthesis(heads, length),
    "fixed-random": lambda dim, heads, length: RandomSynthesis(heads, length, trained=False),
    "factorized-random": lambda dim, heads, length: FactorizedRandomSynthesis(heads, length),
    "dot": lambda dim, heads, length: DotSynthesis(dim, heads),
}
# A name, or a function of width, heads and length that makes one.
SynthesisLike: TypeAlias = str | Synthesizing | Callable[[int, int, int], Synthesizing]


@register(
    name="synthesizer",
    zh="Synthesizer（非成对注意力）",
    path="query/multiplicity",
    equation="C = softmax(S) X W_V,  S_i = W_2 relu(W_1 x_i)  or  S = R  or  Σ_m α_m S_m",
    paper="Tay et al., Synthesizer: Rethinking Self-Attention for Transformer Models, ICML 2021",
    year=2021,
    time="N² d (dense), N² k (factorised random), N² (random), each + N² d_v",
    memory="linear (fused, blockwise) but for R itself, L²",
    choose="what matters is where a token stands: copying, shifting, fixed patterns; and as a measure of what comparing pairs adds",
    avoid="something is to be found by its content, or lengths have no bound",
)
class SynthesizerAttention(nn.Module):
    r"""Weights made up by each token alone, or by none (Tay et al. 2021, https://arxiv.org/abs/2005.00743).

    $$C_h = \mathrm{softmax}\Big(\sum_m \alpha_m S_m^h\Big)\, X W_V^{h\top}, \qquad C = [C_1; \dots; C_H]\, W_O^\top, \qquad
      \alpha = \mathrm{softmax}(a)$$

    A part for the layers of a Transformer; padding and masks of any kind apply as always. With one $S$ there is no $\alpha$. The weights
    of all heads are at `attention` under a trace.

    Args:
        dim: width of the tokens.
        heads: $H$.
        length: $L$, the most tokens there are; longer inputs are refused.
        synthesis: `"dense"`, `"random"`, `"fixed-random"`, `"factorized-dense"`, `"factorized-random"`, or, for mixtures, `"dot"`; a
            ready-made one, such as `FactorizedRandomSynthesis(heads, length, rank=4)`, or a function of width, heads and length
            that makes one. A list of them is a mixture.
        align: softmax when not given.
        bias: add $b_V$ and $b_O$.
        **options: of `Attention`: `dropout` and `impl`.

    Example:
        >>> attend = SynthesizerAttention(8, 2, length=11, synthesis=["random", "dot"])
        >>> attend(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        length: int,
        synthesis: SynthesisLike | Sequence[SynthesisLike] = "dense",
        *,
        align: Any = None,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        dim, self.n_heads, self.length = width("dim", dim), width("heads", heads), width("length", length)
        if dim % heads:
            raise ValueError(refusal("heads", heads, f"a divisor of the width {dim}"))
        given: list[Any] = list(synthesis) if isinstance(synthesis, list | tuple) else [synthesis]
        if not given:
            raise ValueError(refusal("synthesis", "an empty list", "at least one"))
        self.syntheses = nn.ModuleList(_made(each, dim, heads, length) for each in given)
        self.a = zeros(len(given)) if len(given) > 1 else None
        self.W_V, self.W_O = matrix(heads, dim // heads, dim), matrix(dim, dim)
        self.b_V = zeros(heads, dim // heads) if bias else None
        self.b_O = zeros(dim) if bias else None
        self.attention = Attention(Dot(), align, **options)

    @property
    def shares(self) -> Float[Tensor, " m"] | None:
        r"""The shares $\alpha$ of a mixture, which sum to one."""
        return None if self.a is None else self.a.softmax(0)

    def forward(self, tokens: Float[Tensor, "*b n d"], *, mask: Tensor | Mask | None = None) -> Float[Tensor, "*b n d"]:
        """Update the tokens (..., N, d).

        Args:
            tokens: at most `length` of them.
            mask: which token may look at which place, as in `MultiHeadAttention`.
        """
        n = tokens.shape[-2]
        if n > self.length:
            fix = "Fix: make it with a greater length; there are no scores for later places."
            raise ValueError(refusal("tokens", f"{n} of them", f"at most length={self.length}", fix))
        shared, asking, read = masked(tokens, mask, self.n_heads)
        left, right, bias = self._scores([each(asking, read) for each in self.syntheses], tokens)
        value = split_heads(read, self.W_V, self.b_V)
        bound = None if shared is None else Filled(shared.bound, shared.heads)
        context = self.attention(left, right, value, mask=bound, bias=bias)
        joined = F.linear(context.transpose(-3, -2).flatten(-2), self.W_O, self.b_O)
        return kept_rows(joined, None if shared is None else shared.rows)

    def _scores(self, parts: list[Synthesis], tokens: Tensor) -> tuple[Tensor, Tensor, StreamedBias | None]:
        """The mixture as one product of rows, side by side, and one bias."""
        shares = self.shares
        lead = (*tokens.shape[:-2], self.n_heads, tokens.shape[-2])
        lefts, rights, biases = [], [], []
        for k, (left, right, bias) in enumerate(parts):
            share = None if shares is None else shares[k]
            if left is not None and right is not None:
                lefts.append(left if share is None else left * share)
                rights.append(right)
            if bias is not None:
                biases.append((share, bias))
        if not lefts:
            nothing = tokens.new_zeros(1).expand(*lead, 1)
            return nothing, nothing, _summed(biases)
        # Kernels of half precision want widths that eight divides.
        missing = -sum(x.shape[-1] for x in lefts) % 8
        lefts, rights = ([*side, side[0].new_zeros(1, missing)] for side in (lefts, rights))
        left, right = (torch.cat([x.expand(*lead, -1) for x in side], -1) for side in (lefts, rights))
        return left, right, _summed(biases)

    def extra_repr(self) -> str:
        return f"heads={self.n_heads}, length={self.length}"


def _made(given: SynthesisLike, dim: int, heads: int, length: int) -> Synthesizing:
    if isinstance(given, str):
        if given not in _NAMED:
            names = ", ".join(_NAMED)
            raise ValueError(refusal("synthesis", repr(given), f"one of {names}", nearest(given, _NAMED, listed=True)))
        given = _NAMED[given]
    made = given if isinstance(given, nn.Module) or not callable(given) else given(dim, heads, length)
    if not isinstance(made, Synthesizing):
        raise TypeError(
            refusal("synthesis", type(made).__name__, "a synthesis, its name, or a function that makes one")
        )
    if made.length is not None and made.length < length:
        raise ValueError(refusal("synthesis", f"one of length {made.length}", f"length={length} or more"))
    return made


def _summed(biases: list[tuple[Tensor | None, StreamedBias]]) -> StreamedBias | None:
    if not biases:
        return None
    if len(biases) == 1 and biases[0][0] is None:
        return biases[0][1]
    lead = tuple(torch.broadcast_shapes(*(bias.lead for _, bias in biases)))

    def tile(i: Tensor, j: Tensor) -> Tensor:
        parts = [bias(i, j) if share is None else bias(i, j) * share for share, bias in biases]
        return sum(parts[1:], parts[0])

    return StreamedBias(tile, lead, any(bias.requires_grad or share is not None for share, bias in biases))
