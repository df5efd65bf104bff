"""The attention inside a Transformer's layers: heads, positions, and a memory of what was projected before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard._errors import refusal
from regard.general.bound import Sizes
from regard.general.masks import Mask
from regard.ops.call import Bias
from regard.ops.fill import kept_rows
from regard.ops.parallel.ranks import first_place, refuse
from regard.query.multi_head import MultiHeadAttention, over_heads, split_heads
from regard.transformer.cache import Slot
from regard.transformer.positions import PositionLike, RelativePosition, StreamedBias, build_position
from regard.transformer.positions.base import rows_of
from regard.transformer.sharing import Shared


class TransformerAttention(MultiHeadAttention):
    r"""Multi-head attention that knows positions and keeps keys and values while decoding (https://arxiv.org/abs/1706.03762).

    $$C_h = \mathrm{align}\big(\mathrm{score}(Q W_Q^{h\top}, K W_K^{h\top}) + b\big)\, V W_V^{h\top}, \qquad
      C = [C_1; \dots; C_H]\, W_O^\top$$

    Queries, keys and values of the same tokens are projected by one product. The weights of all heads are at `attention` under a
    trace.

    Args:
        dim: width of query, key and value, or of each of the three; the result is as wide as the query.
        heads: $H$.
        position: how places enter the scores: `"rotary"`, `"alibi"`, `"relative"`, `"transformer-xl"`, `"directional"`, a
            `RelativePosition`, or a function that makes one. Only for tokens that read themselves.
        bias: add $b_Q$, $b_K$, $b_V$ and $b_O$ to the projections.
        **options: `score`, `align`, `key_heads`, `head_dim`, `dropout` and so on, as in `MultiHeadAttention`.

    Example:
        >>> attend = TransformerAttention(8, 2, position="rotary", score="general")
        >>> attend(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        dim: int | tuple[int, int, int],
        heads: int,
        *,
        position: PositionLike = None,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(dim, heads, bias=bias, **options)
        built = build_position(position, heads=heads, head_dim=self.W_Q.shape[1], dim=self.W_Q.shape[2])
        if built is not None and not isinstance(built, RelativePosition):
            fix = "Fix: add it to the tokens, as TransformerEncoder(position=…) does."
            raise ValueError(refusal("position", type(built).__name__, "a position of scores", fix))
        self.position = built
        if built is not None:
            parts: Any = [self.attention] if self.heads is None else self.heads
            for part in parts:
                part.score = built.score(part.score)

    def forward(
        self,
        query: Float[Tensor, "*q dq"],
        key: Float[Tensor, "*b n dk"] | None = None,
        value: Float[Tensor, "*_ n dv"] | None = None,
        *,
        mask: Tensor | Mask | None = None,
        bias: Tensor | Callable[[Tensor, Tensor], Tensor] | None = None,
        cache: Slot | None = None,
    ) -> Float[Tensor, "*q dq"]:
        """Read the values by every head.

        Args:
            query: (..., Nq, d_q).
            key: (..., N, d_k); the query when not given.
            value: (..., N, d_v); the key when not given.
            mask: True where a query may attend a key, as in `MultiHeadAttention`; over all keys, those in the cache too.
            bias: added to the scores: as the mask, or a function of places i and j.
            cache: keys and values of earlier calls. A self-attention adds its own to them; keys that are given stay as they
                were at the first call.
        """
        own = key is None
        if cache is not None:
            refuse("decoding with a cache", "a cache holds the keys of one rank")
        if self.position is not None and not own:
            what = f"none: {type(self.position).__name__} knows the places of one sequence only"
            raise ValueError(refusal("key", "other tokens", what))
        key = query if key is None else key
        value = key if value is None else value
        if query.dim() < 2 or query.dim() != key.dim():
            got = f"shape {tuple(query.shape)} beside a key of shape {tuple(key.shape)}"
            raise ValueError(refusal("query", got, "as many axes as the key: (..., Nq, d_q)"))
        past = cache.length if own and cache is not None else 0
        if mask is None or isinstance(mask, Shared):
            shared = mask
        else:
            shared, query, key, value = self._filled(mask, query, key, value, past)
        q, k, v = self._heads(query, key, value, own, cache)
        first = k.shape[-2] - q.shape[-2] if own else 0
        if cache is not None and not own:
            first, cache.asked = cache.asked, cache.asked + q.shape[-2]
        bias = over_heads(bias, key.dim(), single=False)
        if self.position is not None:
            bias, q = _sum(bias, self.position.bias(q, k), first), self.position.query(q)
            shared = _also(shared, self.position.pairs, Sizes(tuple(query.shape[:-2]), q.shape[-2], k.shape[-2]), q)
        if shared is None:
            return self.join(self._attend(q, k, v, None, False, bias, first))
        context = self._attend(q, k, v, shared.bound, not shared.heads, bias, first)
        return kept_rows(self.join(context), shared.rows)

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, own: bool, cache: Slot | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all heads, those of earlier calls before these."""
        if cache is None:
            return self.project(query, key, value)
        if own:
            q, k, v = self.project(query, key, value)
            return q, *cache.extend(k, v)
        k, v = cache.once(lambda: (split_heads(key, self.W_K, self.b_K), split_heads(value, self.W_V, self.b_V)))
        return split_heads(query, self.W_Q, self.b_Q), k, v

    def _filled(
        self, mask: Tensor | Mask, query: Tensor, key: Tensor, value: Tensor, past: int
    ) -> tuple[Shared, Tensor, Tensor, Tensor]:
        """A mask that comes from outside, and inputs that hold zeros where it lets nobody look."""
        bound, per_head = self._bind(mask, query, key, value, past=past)
        rows, keys = bound.rows(key.device), bound.keys(key.device)
        if per_head:
            rows, keys = (None if x is None or x.dim() < 2 else x.any(-2) for x in (rows, keys))
        new = None if keys is None else keys[..., past:]
        return (
            Shared(bound, rows, heads=not per_head),
            kept_rows(query, rows),
            kept_rows(key, new),
            kept_rows(value, new),
        )


def _sum(given: Any, own: Bias | None, first: int) -> Any:
    """The bias that was given and that of the position, as one."""
    if given is None or own is None:
        return own if given is None else given
    one, two = _streamed(given, first), _streamed(own, first)
    lead = tuple(torch.broadcast_shapes(one.lead, two.lead))

    def tile(i: Tensor, j: Tensor, *tensors: Tensor) -> Tensor:
        count = len(one.tensors)
        return one.function(i, j, *tensors[:count]) + two.function(i, j, *tensors[count:])

    return StreamedBias(tile, lead, one.requires_grad or two.requires_grad, (*one.tensors, *two.tensors))


def _streamed(bias: Any, first: int) -> StreamedBias:
    if isinstance(bias, StreamedBias):
        return bias
    if not isinstance(bias, Tensor):
        return StreamedBias(bias, requires_grad=True)
    whole = bias if bias.dim() > 1 else bias.reshape(1, -1)
    first = first if whole.shape[-2] == 1 else first + first_place(whole.shape[-2])

    def tile(i: Tensor, j: Tensor, whole: Tensor) -> Tensor:
        rows = whole if whole.shape[-2] == 1 else rows_of(whole, i, first)
        return rows if whole.shape[-1] == 1 else rows.index_select(-1, j.flatten())

    return StreamedBias(tile, tuple(whole.shape[:-2]), whole.requires_grad, (whole,))


def _also(shared: Shared | None, pairs: Mask | None, sizes: Sizes, like: Tensor) -> Shared | None:
    """Allowed by the mask and by the position."""
    if pairs is None:
        return shared
    if shared is not None:
        return shared.also(pairs, like.device)
    bound = pairs.bind(sizes)
    return Shared(bound, bound.rows(like.device))
