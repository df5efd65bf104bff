"""Hashed attention: tokens read those that point the same way, found by sorting and not by comparing all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.general.attention import Attention
from regard.general.bound import Bound, BoundBand, BoundBoth, BoundKeys, Sizes
from regard.general.masks import Mask, as_mask
from regard.general.scores.base import matrix, width, zeros
from regard.ops import hooks
from regard.ops.buckets import HOLE, Buckets, HashedMask
from regard.ops.dispatch import autocasting, execute
from regard.ops.fill import kept_rows
from regard.ops.hashed import HashedCall
from regard.ops.random import SAMPLE, SELECT, draw_seed, uniform
from regard.query.multi_head import split_heads
from regard.transformer.hashing import BucketsLike, bucket_ids, check_buckets, directions, own_directions
from regard.transformer.sharing import Shared


class Hashes:
    """The buckets of one call, kept for the call that recomputes it: tokens that differ in the last bit may hash otherwise."""

    def __init__(self) -> None:
        self.ids: Tensor | None = None


@register(
    name="lsh-attention",
    zh="局部敏感哈希注意力",
    path="query/multiplicity",
    equation="q_i = k_i |q_i| = W x_i,  a_i = softmax_{j: h_r(q_j) = h_r(q_i) in some round r, j ≠ i}(q_i · k_j),  h(x) = argmax [xR; -xR]",
    paper="Kitaev, Kaiser and Levskaya, Reformer: The Efficient Transformer, ICLR 2020",
    year=2020,
    time="R N (3 m d + d √b) + R N log N,  b = 2 N / m buckets",
    memory="R N (3 m + d)",
    choose="long sequences in which each token needs the few others that resemble it",
    avoid="short ones (full attention is quicker), or what matters resembles nothing: another bucket is never seen",
)
class LSHAttention(nn.Module):
    r"""Attention within buckets of a locality-sensitive hash (Kitaev et al. 2020, https://arxiv.org/abs/2001.04451).

    Queries and keys are one projection, $q_i = W_{QK} x_i$ and $k_i = q_i / \lVert q_i \rVert$, so that those that point the same way
    attend each other. In each of $R$ rounds a random $R_r$ gives every token a bucket,

    $$h_r(q) = \mathrm{argmax}\, [q R_r;\, -q R_r],$$

    or, for more than 128 buckets, a pair of such hashes, $h_r = h_{r1} + b_1 h_{r2}$, so that $b = b_1 b_2$ buckets cost $b_1 + b_2$;
    the tokens are sorted by bucket and place and cut into chunks of $m$; a token sees those of its bucket in its own chunk and in
    the neighbouring ones (the one before is enough where nobody looks ahead). It reads what it sees in any round:

    $$c_i = \sum_{j \in P_i} \mathrm{softmax}_j(q_i \cdot k_j)\, v_j, \qquad
      P_i = \bigcup_r \{ j \ne i : h_r(q_j) = h_r(q_i),\ j \text{ in a chunk near that of } i \text{ in round } r \}$$

    A pair that several rounds see counts once, as in the paper. A token reads itself only where it sees nobody else. With one
    bucket and a chunk as long as the sequence this is full attention.

    Later tokens are never read under a causal mask, but they are sorted too: they may move the edge of a chunk, and so what an
    earlier token sees.

    While training every call draws new rotations; in evaluation they are always the same ones, and neither padding nor the rest of a
    batch changes a result. Weights and everything else of a trace are at `attention`, (..., H, N, N), with zeros where nothing is seen.

    Args:
        dim: width of the tokens.
        heads: $H$, each with rotations of its own.
        rounds: $R$; more of them miss less.
        chunk: $m$.
        buckets: how many, an even number or 1, by one hash; or $(b_1, b_2, \dots)$, even numbers, by several hashes together.
            When not given, two for every $m$ real tokens of a sequence: by one hash up to 128, by two of about $\sqrt b$ each above.
        across_buckets: let a token see all of its chunk and the neighbouring ones, whatever their buckets.
        head_dim: width of a head; the width of the tokens over $H$ when not given.
        bias: add $b_{QK}$, $b_V$ and $b_O$ to the projections.
        dropout: probability of dropping a weight while training.
        impl: as in `Attention`; `auto` goes by chunks.

    Example:
        >>> attend = LSHAttention(8, heads=2, rounds=3, chunk=4)
        >>> attend(torch.randn(2, 11, 8)).shape
        torch.Size([2, 11, 8])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        rounds: int = 2,
        chunk: int = 64,
        buckets: BucketsLike = None,
        across_buckets: bool = False,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        dim, self.heads = width("dim", dim), width("heads", heads)
        self.rounds, self.chunk, self.across_buckets = width("rounds", rounds), width("chunk", chunk), across_buckets
        self.buckets = check_buckets(buckets)
        if head_dim is None and dim % self.heads:
            fix = "Fix: pass head_dim=…, the width of a head."
            raise ValueError(refusal("heads", heads, f"a divisor of the width {dim}", fix))
        d = width("head_dim", dim // self.heads if head_dim is None else head_dim)
        self.W_QK, self.W_V, self.W_O = (
            matrix(self.heads, d, dim),
            matrix(self.heads, d, dim),
            matrix(dim, self.heads * d),
        )
        self.b_QK = zeros(self.heads, d) if bias else None
        self.b_V = zeros(self.heads, d) if bias else None
        self.b_O = zeros(dim) if bias else None
        self.attention = Attention("dot", dropout=dropout, impl=impl)
        self.seed: Tensor
        self.register_buffer("seed", draw_seed(torch.device("cpu")))

    def forward(
        self,
        tokens: Float[Tensor, "*b n d"],
        *,
        mask: Tensor | Mask | None = None,
        hashes: Hashes | None = None,
    ) -> Float[Tensor, "*b n d"]:
        """Update the tokens.

        Args:
            tokens: (..., N, d).
            mask: True where a token may look at another: booleans that broadcast to (..., N, N), or a mask object. A token that nobody
                may look at takes no part: it is not hashed, and reads nothing. Bands such as `Causal()` and `Keys(real)` are computed by
                chunks; other masks take memory linear and time quadratic in N. `Packed` is refused: all its sequences would be sorted
                together.
            hashes: keeps the buckets of the first call, and gives them to the next.
        """
        if tokens.dim() < 2 or tokens.shape[-1] != self.W_O.shape[0]:
            raise ValueError(refusal("tokens", f"shape {tuple(tokens.shape)}", f"(..., N, {self.W_O.shape[0]})"))
        view = _view(mask, Sizes(tuple(tokens.shape[:-2]), tokens.shape[-2], tokens.shape[-2]), tokens.device)
        if not isinstance(mask, Shared):
            tokens = kept_rows(tokens, view.real)
        query, value = self._heads(tokens)
        ids = self._hashed(query, view.real, Hashes() if hashes is None else hashes)
        call = hooks.changed(self.attention, self._call(query, value, ids, view))
        context = execute(call, self.attention.impl)
        hooks.seen(self.attention, call)
        joined = F.linear(context.transpose(-3, -2).flatten(-2), self.W_O, self.b_O)
        return kept_rows(kept_rows(joined, view.real), view.rows)

    def _heads(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and values of all heads by one product, (..., H, N, d_h)."""
        b = None if self.b_QK is None or self.b_V is None else torch.cat([self.b_QK, self.b_V])
        query, value = split_heads(tokens, torch.cat([self.W_QK, self.W_V]), b).chunk(2, -3)
        # Copied once for all who would: hashing, normalising and sorting go head by head.
        return query.contiguous(), value

    def _hashed(self, query: Tensor, real: Tensor | None, hashes: Hashes) -> Tensor:
        if hashes.ids is None:
            hashes.ids = self.hash(query, real)
        elif self.training and self.buckets != 1:
            # Drawn in vain: whatever is drawn after the rotations must be what it was in the first call.
            self._rotations(query, self._directions(query, real))
        return hashes.ids

    @torch.no_grad()
    def hash(self, query: Float[Tensor, "*b h n d"], real: Tensor | None = None) -> Int[Tensor, "..."]:
        """The bucket of each query (..., H, N, d_h) in every round, (..., H, R, N); tokens that are not real, (..., N), have none."""
        if self.buckets == 1:
            # The same for all heads and sequences: so is what they see, unless some of it is padding.
            shape = (*(1 for _ in query.shape[:-2]), self.rounds, query.shape[-2])
            ids = torch.zeros(shape, dtype=torch.int16, device=query.device)
        else:
            counts = self._directions(query, real)
            # As many buckets as the sequence would have without its padding.
            own = None if real is None or self.buckets is not None else own_directions(real, self.chunk)
            ids = bucket_ids(query, self._rotations(query, counts), counts, own)
        return ids if real is None else torch.where(real[..., None, None, :], ids, HOLE)

    def _directions(self, query: Tensor, real: Tensor | None) -> tuple[int, ...]:
        return directions(self.buckets, query.shape[-2], self.chunk, padded=real is not None)

    def _rotations(self, query: Tensor, counts: Sequence[int]) -> Tensor:
        """Random directions (H, d_h, R, columns), those of one hash after those of another."""
        d = query.shape[-1]
        if self.training:
            return torch.randn(self.heads, d, self.rounds, sum(counts), dtype=query.dtype, device=query.device)
        # Drawn by position, so that those of a longer sequence begin with those of a shorter one.
        drawn = []
        for k, columns in enumerate(counts):
            rows, lead = range(k * d, (k + 1) * d), (self.heads, self.rounds)
            radius, angle = (uniform(self.seed, lead, None, rows, range(columns), of) for of in (SAMPLE, SELECT))
            drawn.append((-2.0 * radius.log()).sqrt() * (2.0 * math.pi * angle).cos())
        return torch.cat(drawn, -1).transpose(1, 2)

    def _call(self, query: Tensor, value: Tensor, ids: Tensor, view: _View) -> HashedCall:
        """Everything that decides the result."""
        key = _unit(query)
        if autocasting(value.device) and value.dtype == torch.float32:
            value = value.to(torch.get_autocast_dtype(value.device.type))
        dropout = self.attention.dropout if self.training else 0.0
        buckets = Buckets.of(ids, self.chunk, self.across_buckets)
        return HashedCall(
            form=self.attention.score.reduce(query, key),
            value=value,
            align=self.attention.align,
            query=query,
            key=key,
            mask=HashedMask(buckets, view.low, view.high, view.others),
            dropout=dropout,
            training=self.training,
            seed=draw_seed(value.device) if dropout > 0.0 else None,
            buckets=buckets,
        )

    def extra_repr(self) -> str:
        count = "" if self.buckets is None else f", buckets={self.buckets}"
        across = ", across_buckets=True" if self.across_buckets else ""
        return f"dim={self.W_O.shape[0]}, heads={self.heads}, rounds={self.rounds}, chunk={self.chunk}{count}{across}"


def _unit(x: Tensor) -> Tensor:
    """Vectors of length one; of zeros, zeros. A root mean square is a length over √d, and one kernel, wide inside."""
    d = x.shape[-1]
    unit: Tensor = F.rms_norm(x, (d,), eps=1e-24 / d).to(x.dtype) * d**-0.5
    return unit


@dataclass(frozen=True)
class _View:
    """What a mask says: distances, tokens that take part (..., N), tokens that may look at something, and whatever else."""

    low: float = -math.inf
    high: float = math.inf
    real: Tensor | None = None
    rows: Tensor | None = None
    others: _OfHeads | None = None


def _view(mask: Tensor | Mask | None, sizes: Sizes, device: torch.device) -> _View:
    """Take a mask apart."""
    if mask is None:
        return _View()
    bound = mask.bound if isinstance(mask, Shared) else as_mask(mask).bind(sizes)
    if bound.origins(device) is not None:
        fix = "Fix: put them side by side, with a mask of the real tokens."
        expected = "one sequence, since buckets and chunks are of all its tokens"
        raise ValueError(refusal("mask", "Packed, several sequences", expected, fix))
    band, keys = bound._band_and_keys() if isinstance(bound, BoundBoth) else (bound, bound)
    if isinstance(keys, BoundKeys) and bound is keys:
        return _View(real=keys.keys(device))
    if isinstance(band, BoundBand) and (bound is band or isinstance(keys, BoundKeys)):
        # Where the band holds the token itself, whoever takes part sees something.
        rows = None if band.low <= 0 <= band.high else bound.rows(device)
        return _View(band.low, band.high, keys.allowed if isinstance(keys, BoundKeys) else None, rows)
    return _View(real=bound.keys(device), rows=bound.rows(device), others=_OfHeads(bound))


@dataclass(frozen=True)
class _OfHeads:
    """A mask without heads, for a call that has them."""

    bound: Bound

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.bound.shape
        return (*shape[:-2], 1, *shape[-2:]) if len(shape) > 2 else shape

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        tile = self.bound.tile(i, j, device)
        return tile.unsqueeze(-3) if tile.dim() > 2 else tile

    def keys(self, device: torch.device) -> Tensor | None:
        return None

    def rows(self, device: torch.device) -> Tensor | None:
        return None
