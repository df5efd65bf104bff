r"""Softmax attention by chunks of sorted tokens: what every round sees, put together.

The result is a softmax over the union of what the rounds see. The rounds meet in their log-sum-exps,

$$o_i = \sum_r e^{L_i^r - L_i}\, o_i^r, \qquad L_i = \log \sum_r e^{L_i^r},$$

where a pair is left to the first round that sees it. To give it to all of them, each with $\log N_{ij}$ subtracted, where $N_{ij}$
counts these rounds, is the same sum in another order.

The backward needs no more than $L$ and $D_i = do_i \cdot o_i$, whatever the number of rounds: $P_{ij} = e^{e_{ij} - L_i}$,
$dv_j = \sum_i P_{ij}\, do_i$, $de_{ij} = P_{ij} (do_i \cdot v_j - D_i)$.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.ops.buckets import HOLE, HashedMask
from regard.ops.fill import where
from regard.ops.random import DROPOUT, least_word, philox
from regard.ops.ready import loaded

if TYPE_CHECKING:
    from regard.ops.triton import hashed

# Scores of what is not seen and of the token itself. Finite, so that rows without anything stay free of NaN; far enough apart that
# their exponentials vanish beside any other score, and beside each other.
_HIDDEN, _OWN = torch.finfo(torch.float32).min, -1e30


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: HashedMask, dropout: float = 0.0, seed: Tensor | None = None
) -> Tensor:
    """Contexts (B, N, d_v) of queries and keys (B, N, d) and values (B, N, d_v): by kernels where there are some, or by products."""
    if dropout == 0.0 and _why_not_kernels(q, v, mask.buckets.chunk) is None:
        context: Tensor = _Kernels.apply(q.contiguous(), k.contiguous(), v.contiguous(), mask)  # type: ignore[no-untyped-call]
    else:
        context = _Chunked.apply(q, k, v, _Plan.of(mask, dropout, seed))  # type: ignore[no-untyped-call]
    return context


@dataclass(frozen=True, eq=False)
class _Plan:
    """Where everything is. Chunks of all rounds and rows stand one after the other, C chunks of m tokens.

    A window is a chunk with those before and after it. Since neighbours in memory are neighbours in order, windows are overlapping
    views, and nothing is copied for them. Each row ends in a chunk of zeros, so that no window reaches into another row: what is not
    finite there would come through a weight of zero.
    """

    mask: HashedMask
    token: Tensor  # (C m,), which row of (B N, d) stands at each place; B N for none
    place: Tensor  # (R B N,), where in (C m) each token stands in each round
    size: int  # m
    dropout: float
    seed: Tensor | None

    @staticmethod
    def of(mask: HashedMask, dropout: float = 0.0, seed: Tensor | None = None) -> _Plan:
        buckets = mask.buckets
        m, rounds, n = buckets.chunk, buckets.rounds, buckets.ids.shape[-1]
        rank = buckets.rank.movedim(-2, 0).reshape(rounds, -1, n)
        row = torch.arange(rank.shape[1], device=rank.device)[:, None]
        order = buckets.order.movedim(-2, 0).reshape(rounds, -1, n) + n * row
        token = _filled_up(order, m, n * rank.shape[1])
        first = torch.arange(rounds * rank.shape[1], device=rank.device).reshape(rounds, -1, 1) * token.shape[-1]
        return _Plan(mask, token.flatten(), (rank + first).flatten(), m, dropout, seed)

    @property
    def before_and_after(self) -> tuple[int, int]:
        return 1, int(self.mask.ahead)

    def chunks(self, x: Tensor) -> Tensor:
        """Rows of x (B N, d) as chunks (C, m, d)."""
        return _and_none(x).index_select(0, self.token).view(-1, self.size, x.shape[-1])

    def windows(self, x: Tensor) -> Tensor:
        """Rows of x (B N, d) as windows (C, w, d)."""
        before, after = self.before_and_after
        token = torch.nn.functional.pad(self.token, (before * self.size, after * self.size), value=len(x))
        return self._overlapping(_and_none(x).index_select(0, token))

    def _overlapping(self, x: Tensor) -> Tensor:
        """Places, those before and after the chunks among them, (C m + …, ...) as windows (C, w, ...)."""
        around = sum(self.before_and_after)
        chunks, width = len(x) // self.size - around, (1 + around) * self.size
        return x.as_strided((chunks, width, *x.shape[1:]), (self.size * x.stride(0), *x.stride()))

    def windows_of(self, x: Tensor, fill: int) -> Tensor:
        """What is said of each place, (C m,), as windows (C, w)."""
        before, after = self.before_and_after
        return self._overlapping(torch.nn.functional.pad(x, (before * self.size, after * self.size), value=fill))

    def gathered(self, x: Tensor) -> Tensor:
        """Undo windows: gradients (C, w, d) of windows, summed where these overlap, (C, m, d)."""
        before, after = self.before_and_after
        parts = x.unflatten(1, (-1, self.size))
        total: Tensor = parts[:, before].clone()
        total[:-1] += parts[1:, 0]
        if after:
            total[1:] += parts[:-1, 2]
        return total

    def tokens(self, x: Tensor, shape: torch.Size) -> Tensor:
        """Chunks (C, m, ...) as (R, *shape), tokens in their own order."""
        return x.reshape(-1, *x.shape[2:]).index_select(0, self.place).view(-1, *shape)

    def hidden(self) -> tuple[Tensor, Tensor]:
        """What is not seen, and what is the token itself, (C, m, w)."""
        mask, buckets, m = self.mask, self.mask.buckets, self.size
        rounds, n = buckets.rounds, buckets.ids.shape[-1]
        bucket, order = (x.movedim(-2, 0).reshape(rounds, -1, n) for x in (buckets.in_order, buckets.order))
        rows = bucket.shape[1]
        row = torch.arange(rounds * rows, device=bucket.device).view(rounds, rows, 1)
        hole = bucket == HOLE
        code = row * (HOLE + 1) + (torch.zeros_like(bucket) if buckets.across else bucket)
        # Holes of queries and of keys have codes of their own: they see nothing, and nobody sees them.
        asks, shows = (_filled_up(torch.where(hole, nobody, code), m, nobody).flatten() for nobody in (-1, -2))
        position = _filled_up(order, m, n).flatten().int()
        at, of = position.view(-1, m, 1), self.windows_of(position, n).unsqueeze(1)
        hidden = asks.view(-1, m, 1) != self.windows_of(shows, -2).unsqueeze(1)
        if mask.high != math.inf:
            hidden |= of > at + int(mask.high)
        if mask.low != -math.inf:
            hidden |= of < at + int(mask.low)
        if rounds == 1:
            return hidden, at == of
        spots = buckets.spots.movedim(-2, 0).reshape(rounds, -1, n)
        per_round, token = hidden.view(rounds, -1, *hidden.shape[1:]), self.token.view(rounds, -1)
        for r in range(1, rounds):
            for s in range(r):
                # Where the tokens of this round stand in an earlier one: a pair that it sees is its own.
                spot = _and_none(spots[s].flatten())[token[r]]
                at_s, of_s = spot.view(-1, m, 1), self.windows_of(spot, 0).unsqueeze(1)
                per_round[r] |= (at_s == of_s) | (at_s - 1 == of_s)
                if mask.ahead:
                    per_round[r] |= at_s + 1 == of_s
        return hidden, at == of

    def keep(self, dtype: torch.dtype) -> Tensor | None:
        """Dropout factors of the pairs (C, m, w), those that every other execution draws; None without dropout."""
        if self.dropout == 0.0 or self.seed is None:
            return None
        n = self.mask.buckets.ids.shape[-1]
        of = self.windows_of(self.token, 0).unsqueeze(1)
        at = self.token.view(-1, self.size, 1)
        i, j, row = at % n, of % n, at // n
        words = philox(self.seed, (j // 4, i, row, torch.full_like(i, DROPOUT)))
        word = torch.stack(torch.broadcast_tensors(*words), -1).gather(-1, (j % 4).expand(*words[0].shape)[..., None])
        kept = (word.squeeze(-1) >= least_word(self.dropout)).to(dtype)
        return kept / (1.0 - self.dropout) if self.dropout < 1.0 else kept


def _filled_up(x: Tensor, m: int, value: int) -> Tensor:
    """The last axis, filled up to whole chunks and one more."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % m + m), value=value)


def _and_none(x: Tensor) -> Tensor:
    """Rows, and one of zeros for places without a token."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def _product(x: Tensor, y: Tensor) -> Tensor:
    """A product that is summed, and kept, in float32 or wider."""
    return torch.bmm(x, y, out_dtype=torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else torch.bmm(x, y)


def _why_not_kernels(q: Tensor, v: Tensor, chunk: int) -> str | None:
    """The reason why the kernels do not compute this, or None."""
    if q.device.type != "cuda" or not loaded("hashed"):
        return "no CUDA device with Triton"
    from regard.ops.triton import hashed

    return hashed.why_not(q, v, chunk)


class _Kernels(torch.autograd.Function):
    """The same on a GPU, without anything sorted or masked in memory."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: HashedMask) -> Tensor:
        from regard.ops.triton import hashed

        places = _places(mask)
        context, total = hashed.forward(q, k, v, places)
        ctx.save_for_backward(q, k, v, context, total, *places[:3])
        ctx.sizes = places[3:]
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from regard.ops.triton import hashed

        q, k, v, context, total, *sorted_tokens = ctx.saved_tensors
        places = hashed.Places(*sorted_tokens, *ctx.sizes)
        return *hashed.backward(grad, q, k, v, context, total, places), None


def _places(mask: HashedMask) -> hashed.Places:
    """What the kernels are told: nothing but what sorting gave, where there is one round."""
    from regard.ops.triton import hashed

    buckets = mask.buckets
    rows = (-1, buckets.rounds, buckets.ids.shape[-1])
    order, in_order = (x.reshape(rows).contiguous() for x in (buckets.order, buckets.in_order))
    spots = None if buckets.rounds == 1 else buckets.spots.reshape(rows).int().contiguous()
    # Distances are less than 2^30.
    low, high = int(max(mask.low, -(2**30))), int(min(mask.high, 2**30))
    return hashed.Places(order, in_order, spots, buckets.chunk, buckets.across, low, high)


class _Chunked(torch.autograd.Function):
    """Softmax attention over what the rounds see; the backward computes the scores again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
        flat = [x.reshape(-1, x.shape[-1]) for x in (q, k, v)]
        hidden, own = plan.hidden()
        scores = _scores(plan.chunks(flat[0]), plan.windows(flat[1]), hidden, own)
        weights = scores.softmax(-1)
        # The log-sum-exp of a row by way of its largest weight, which the softmax has already normalised.
        lse = scores.amax(-1) - weights.amax(-1).log()
        keep = plan.keep(weights.dtype)
        weights = weights if keep is None else weights.mul_(keep)
        partial = _product(weights.to(v.dtype), plan.windows(flat[2]))
        lse, partial = plan.tokens(lse, q.shape[:-1]), plan.tokens(partial, torch.Size((*q.shape[:-1], v.shape[-1])))
        total = lse.logsumexp(0)
        context = ((lse - total).exp().unsqueeze(-1) * partial).sum(0)
        # What is not a number stays so, as in every other execution.
        alive = ~(total <= _HIDDEN / 2)
        context = where(alive.unsqueeze(-1), context, 0.0)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, context, where(alive, total, 0.0), hidden, own)
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        # A backward may run inside autocast, which would round what is wide here.
        with torch.autocast(grad.device.type, enabled=False):
            return *_gradients(ctx.plan, grad, *ctx.saved_tensors), None


def _gradients(
    plan: _Plan,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Tensor,
    total: Tensor,
    hidden: Tensor,
    own: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    flat = [x.reshape(-1, x.shape[-1]) for x in (q, k, v)]
    asking, shown, read = plan.chunks(flat[0]), plan.windows(flat[1]), plan.windows(flat[2])
    of_row = torch.stack([total, (grad * context).sum(-1)], -1)
    of_place = plan.chunks(of_row.view(-1, 2))
    weights = _scores(asking, shown, hidden, own).sub_(of_place[..., :1]).exp_()
    given = plan.chunks(grad.to(v.dtype).reshape(-1, grad.shape[-1]))
    inner = _product(given, read.mT)
    keep = plan.keep(weights.dtype)
    dropped = weights if keep is None else weights * keep
    inner = inner if keep is None else inner.mul_(keep)
    d_value = _product(dropped.to(v.dtype).mT, given)
    d_scores = inner.sub_(of_place[..., 1:]).mul_(weights).to(q.dtype)
    d_query, d_key = _product(d_scores, shown), _product(d_scores.mT, asking)
    gradients = (d_query, plan.gathered(d_key), plan.gathered(d_value))
    dq, dk, dv = (plan.tokens(g, x.shape).sum(0).to(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True))
    return dq, dk, dv


def _scores(asking: Tensor, shown: Tensor, hidden: Tensor, own: Tensor) -> Tensor:
    # Added to the token's own score, so that what is not a number is not hidden by it.
    return _product(asking, shown.mT).add_(own, alpha=_OWN).masked_fill_(hidden, _HIDDEN)
