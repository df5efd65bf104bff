r"""Attention among tokens that hash alike, as a call: which pairs see each other, and how they are computed by chunks.

In every round the tokens are sorted by bucket and cut into chunks of $m$; a token sees those of its bucket in its own chunk and in
the neighbouring ones. A pair counts once, however many rounds see it: the result is a softmax over the union of what the rounds
see. The rounds meet in their log-sum-exps,

$$o_i = \sum_r e^{L_i^r - L_i}\, o_i^r, \qquad L_i = \log \sum_r e^{L_i^r},$$

where a pair is left to the first round that sees it. To give it to all of them, each with $\log N_{ij}$ subtracted, where $N_{ij}$
counts these rounds, is the same sum in another order. A token sees itself only where it sees nothing else.

The backward needs no more than $L$ and $D_i = do_i \cdot o_i$, whatever the number of rounds: $P_{ij} = e^{e_{ij} - L_i}$,
$dv_j = \sum_i P_{ij}\, do_i$, $de_{ij} = P_{ij} (do_i \cdot v_j - D_i)$.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard.ops.call import Call, Mask
from regard.ops.forms import BilinearForm, wide
from regard.ops.random import DROPOUT, philox

# The bucket of a token that takes no part; larger than any other, so that such tokens are sorted to the end.
HOLE = torch.iinfo(torch.int16).max
# Scores of what is not seen and of the token itself. Finite, so that rows without anything stay free of NaN; far enough apart that
# their exponentials vanish beside any other score, and beside each other.
_HIDDEN, _OWN = torch.finfo(torch.float32).min, -1e30


@dataclass(frozen=True, eq=False)
class Buckets:
    """The buckets of some tokens in every round, and where sorting puts the tokens."""

    ids: Tensor  # (..., R, N), from 0; HOLE for a token that takes no part
    order: Tensor  # (..., R, N), which token stands at each place
    rank: Tensor  # (..., R, N), the place of each token
    chunk: int
    across: bool  # whether chunks are all that counts

    @staticmethod
    def of(ids: Tensor, chunk: int, across: bool = False) -> Buckets:
        """Sort tokens by bucket, those of one bucket as they stand."""
        n = ids.shape[-1]
        order = ids.argsort(dim=-1, stable=True)
        rank = torch.empty_like(order).scatter_(-1, order, torch.arange(n, device=ids.device).expand_as(order))
        return Buckets(ids, order, rank, max(1, min(chunk, n)), across)

    def over(self, lead: tuple[int, ...]) -> Buckets:
        """The same for all of these leading axes."""
        ids, order, rank = (x.expand(*lead, *x.shape[-2:]) for x in (self.ids, self.order, self.rank))
        return replace(self, ids=ids, order=order, rank=rank)

    @property
    def rounds(self) -> int:
        return self.ids.shape[-2]

    @property
    def chunks(self) -> int:
        """How many there are in a round."""
        return -(-self.ids.shape[-1] // self.chunk)

    @property
    def spots(self) -> Tensor:
        """Bucket and chunk of each token as one number: those of one bucket in neighbouring chunks differ by one."""
        chunk = self.rank // self.chunk
        return chunk if self.across else self.ids.long() * (2 * self.chunks + 2) + chunk


@dataclass(frozen=True, eq=False)
class HashedMask:
    """Who sees whom in at least one round, (..., N, N), within a band of distances and whatever else is allowed."""

    buckets: Buckets
    low: float = -math.inf
    high: float = math.inf
    others: Mask | None = None

    is_filled = True

    @property
    def ahead(self) -> bool:
        """Whether the next chunk is seen: not where nobody looks ahead."""
        return self.high > 0

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, _, n = self.buckets.ids.shape
        return (*lead, n, n)

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        """Booleans (..., len(i), len(j))."""
        n, rows = self.shape[-1], slice(i.start, i.stop)
        spots, seen = self.buckets.spots, torch.zeros((), dtype=torch.bool, device=device)
        for r in range(self.buckets.rounds):
            apart = spots[..., r, rows, None] - spots[..., r, None, :]
            seen = seen | (apart == 0) | (apart == 1) | ((apart == -1) if self.ahead else False)
        real = self.buckets.ids[..., 0, :] != HOLE
        position = torch.arange(n, device=device)
        distance = position - position[rows, None]
        seen = seen & real[..., rows, None] & real[..., None, :] & (distance >= self.low) & (distance <= self.high)
        if self.others is not None:
            seen = seen & self.others.tile(i, range(n), device)
        own = distance == 0
        alone = ~(seen & ~own).any(-1, keepdim=True)
        return (seen & (~own | alone))[..., j.start : j.stop]

    def keys(self, device: torch.device) -> Tensor | None:
        """Tokens that take part."""
        return self.buckets.ids[..., 0, :] != HOLE

    def rows(self, device: torch.device) -> Tensor | None:
        n = self.shape[-1]
        if self.low <= 0 <= self.high and self.others is None:
            return self.keys(device)
        return torch.cat([self.tile(range(i, i + 1), range(n), device).any(-1) for i in range(n)], -1) if n else None

    def also(self, other: Mask) -> HashedMask:
        """Allowed by both; the chunks stay as they are."""
        return replace(self, others=other if self.others is None else _Both(self.others, other))


@dataclass(frozen=True)
class _Both:
    """Allowed by two masks."""

    left: Mask
    right: Mask

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(torch.broadcast_shapes(self.left.shape, self.right.shape))

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        return self.left.tile(i, j, device) & self.right.tile(i, j, device)

    def keys(self, device: torch.device) -> Tensor | None:
        return None

    def rows(self, device: torch.device) -> Tensor | None:
        return None


@dataclass(frozen=True)
class HashedCall(Call):
    """An attention among tokens that hash alike. Any execution computes it from its mask; `chunked` in time linear in N."""

    buckets: Buckets = field(kw_only=True)

    def why_not_chunked(self) -> str | None:
        """The reason why this call is not computed by chunks, or None."""
        form = self.form
        if not isinstance(form, BilinearForm) or not form.is_plain or form.multi:
            return "the scores are not plain products"
        if self.bias is not None or form.key_bias is not None:
            return "a bias"
        if self.align.temperature_of_softmax is None:
            return f"alignment {type(self.align).__name__} is not a plain softmax"
        if not isinstance(self.mask, HashedMask) or self.mask.others is not None:
            return "a mask of pairs that is no band"
        if 0 in self.value.shape:
            return "an empty axis"
        if self.buckets.chunks == 1:
            return "one chunk holds them all"
        return None

    def chunked(self) -> Tensor:
        """The result (..., N, d_v), by chunks."""
        form, mask, temperature = self.form, self.mask, self.align.temperature_of_softmax
        assert isinstance(form, BilinearForm)
        assert isinstance(mask, HashedMask)
        assert temperature is not None
        mask = replace(mask, buckets=mask.buckets.over(self.lead))
        half = self.device.type == "cuda" and self.value.dtype in (torch.float16, torch.bfloat16)
        # On tensor cores a product of halves is summed in float32; elsewhere only wide operands are.
        dtype = self.value.dtype if half else torch.promote_types(wide(form.query).dtype, wide(self.value).dtype)
        query = form.query if form.scale == 1.0 else form.query * form.scale
        query = query if isinstance(temperature, float) and temperature == 1.0 else query / temperature
        q, k, v = (
            x.to(dtype).expand(*self.lead, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
            for x in (query, form.key, self.value)
        )
        if self.dropout == 0.0 and _why_not_kernels(q, v, mask.buckets.chunk) is None:
            context: Tensor = _Kernels.apply(q.contiguous(), k.contiguous(), v.contiguous(), mask)  # type: ignore[no-untyped-call]
        else:
            plan = _Plan.of(mask, self.dropout, self.seed)
            context = _Chunked.apply(q, k, v, plan)  # type: ignore[no-untyped-call]
        return context.reshape(*self.lead, *context.shape[-2:])


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
        ids, order, spots = (
            x.movedim(-2, 0).reshape(rounds, -1, n) for x in (buckets.ids, buckets.order, buckets.spots)
        )
        rows = ids.shape[1]
        row = torch.arange(rounds * rows, device=ids.device).view(rounds, rows, 1)
        bucket = ids.gather(-1, order)
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
        drawn = ((word.squeeze(-1) >> 9).to(torch.float32) + 0.5) * 2.0**-23
        kept = (drawn >= self.dropout).to(dtype)
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


def _has_triton() -> bool:
    """Whether there are kernels; they are imported here, on first use, also while a graph is being compiled."""
    if importlib.util.find_spec("triton") is None:
        return False
    importlib.import_module("regard.ops.triton.hashed")
    return True


# What torch.compiler.assume_constant_result does, without its import of the whole compiler.
_has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _why_not_kernels(q: Tensor, v: Tensor, chunk: int) -> str | None:
    """The reason why the kernels do not compute this, or None."""
    if q.device.type != "cuda" or not _has_triton():
        return "no CUDA device with Triton"
    from regard.ops.triton import hashed

    return hashed.why_not(q, v, chunk)


class _Kernels(torch.autograd.Function):
    """The same on a GPU, without anything sorted or masked in memory."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: HashedMask) -> Tensor:
        from regard.ops.triton import hashed

        buckets = mask.buckets
        shape = (buckets.rounds, -1, buckets.ids.shape[-1])
        spots = torch.where(buckets.ids == HOLE, -100, buckets.spots)
        order, spots = (x.movedim(-2, 0).reshape(shape).int().contiguous() for x in (buckets.order, spots))
        # Distances are less than 2^30.
        ctx.sizes = buckets.chunk, int(max(mask.low, -(2**30))), int(min(mask.high, 2**30))
        context, total = hashed.forward(q, k, v, order, spots, *ctx.sizes)
        ctx.save_for_backward(q, k, v, context, total, order, spots)
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from regard.ops.triton import hashed

        return *hashed.backward(grad, *ctx.saved_tensors, *ctx.sizes), None


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
        context = torch.where(alive.unsqueeze(-1), context, 0.0)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, context, torch.where(alive, total, 0.0), hidden, own)
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
    return _product(asking, shown.mT).masked_fill_(own, _OWN).masked_fill_(hidden, _HIDDEN)
