"""The equations as loops: one query, one key, one row at a time, without batches, knowing nothing of the library.

Everything is a float64 tensor built from scalars, so that autograd gives the gradients of the equations too. Rows are
lists of scalars, `allowed` is a list of booleans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from itertools import product as selections

import torch
from torch import Tensor, nn

Row = Sequence[Tensor]
Weights = list[Tensor]


def zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def dot(x: Tensor, y: Tensor) -> Tensor:
    assert x.shape == y.shape
    assert x.dim() == 1
    return sum((x[d] * y[d] for d in range(len(x))), zero())


def times(matrix: Tensor, x: Tensor) -> Tensor:
    return torch.stack([dot(row, x) for row in matrix])


def column(matrix: Tensor, f: int) -> Tensor:
    return torch.stack([matrix[d, f] for d in range(len(matrix))])


def norm(x: Tensor) -> Tensor:
    return dot(x, x).sqrt() if bool(dot(x, x) > 0) else zero()


# Activations, of one number

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "tanh": lambda z: (z.exp() - (-z).exp()) / (z.exp() + (-z).exp()),
    "tanh:5.0": lambda z: 5 * ((z / 5).exp() - (-z / 5).exp()) / ((z / 5).exp() + (-z / 5).exp()),
    "tanh:1.7": lambda z: 1.7 * ((z / 1.7).exp() - (-z / 1.7).exp()) / ((z / 1.7).exp() + (-z / 1.7).exp()),
    "sigmoid": lambda z: 1 / (1 + (-z).exp()),
    "relu": lambda z: z if bool(z > 0) else z * 0,
    "leaky_relu": lambda z: z if bool(z > 0) else 0.2 * z,
    "leaky_relu:0.3": lambda z: z if bool(z > 0) else 0.3 * z,
    "elu": lambda z: z if bool(z > 0) else z.exp() - 1,
    "elu:1.3": lambda z: z if bool(z > 0) else 1.3 * (z.exp() - 1),
    "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
    "silu": lambda z: z / (1 + (-z).exp()),
}


def each(act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.stack([act(x[d]) for d in range(len(x))])


# Scores, of one query and one key: a scalar, or one for each feature


def read_out(hidden: Tensor, w: Tensor | None, W_d: Tensor | None) -> Tensor:
    if W_d is None:
        assert w is not None
        return dot(w, hidden)
    return torch.stack([dot(column(W_d, f), hidden) for f in range(W_d.shape[1])])


def _activation(score: nn.Module) -> Callable[[Tensor], Tensor]:
    spec = score.activation.spec
    return ACTIVATIONS[{"leaky_relu:0.2": "leaky_relu", "elu:1.0": "elu"}.get(spec, spec)]


def additive(s: nn.Module, q: Tensor, k: Tensor) -> Tensor:
    hidden = each(_activation(s), times(s.W1, q) + times(s.W2, k) + s.b)
    return read_out(hidden, getattr(s, "w", None), getattr(s, "W_d", None))


def query_free(s: nn.Module, q: Tensor | None, k: Tensor) -> Tensor:
    return read_out(each(_activation(s), times(s.W, k) + s.b), getattr(s, "w", None), getattr(s, "W_d", None))


def source_to_token(s: nn.Module, q: Tensor | None, k: Tensor) -> Tensor:
    return read_out(each(ACTIVATIONS["elu"], times(s.W, k) + s.b), None, s.W_d)


def token_to_token(s: nn.Module, q: Tensor, k: Tensor) -> Tensor:
    z = (times(s.W1, q) + times(s.W2, k) + s.b) / 5
    return 5 * each(ACTIVATIONS["tanh"], z)


def per_feature(one: Callable[..., Tensor]) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """A bilinear score whose parameters have one more leading axis for each feature of the value."""

    def score(s: nn.Module, q: Tensor, k: Tensor) -> Tensor:
        parameters = dict(s.named_parameters())
        if s.features is None:
            return one(s, q, k, **parameters)
        return torch.stack([one(s, q, k, **{n: p[f] for n, p in parameters.items()}) for f in range(s.features)])

    return score


def general(s: nn.Module, q: Tensor, k: Tensor, W: Tensor) -> Tensor:
    return sum((k[a] * W[a, b] * q[b] for a in range(len(k)) for b in range(len(q))), zero())


def low_rank_general(s: nn.Module, q: Tensor, k: Tensor, U: Tensor, V: Tensor) -> Tensor:
    return dot(times(U, k), times(V, q))


def biased_general(s: nn.Module, q: Tensor, k: Tensor, W: Tensor, b: Tensor) -> Tensor:
    return dot(k, times(W, q) + b)


def activated_general(s: nn.Module, q: Tensor, k: Tensor, W: Tensor, b: Tensor) -> Tensor:
    return _activation(s)(dot(k, times(W, q)) + b.squeeze())


def cosine(s: nn.Module, q: Tensor, k: Tensor) -> Tensor:
    beta = s.beta if s.log_beta is None else s.log_beta[0].exp()
    return beta * dot(q, k) / (norm(q).clamp(min=1e-8) * norm(k).clamp(min=1e-8))


def negative_l2(s: nn.Module, q: Tensor, k: Tensor) -> Tensor:
    return -dot(q - k, q - k) / s.tau


SCORES: dict[str, Callable[..., Tensor]] = {
    "additive": additive,
    "query-free": query_free,
    "token-to-token": token_to_token,
    "source-to-token": source_to_token,
    "dot": lambda s, q, k: dot(q, k),
    "scaled-dot": lambda s, q, k: dot(q, k) / math.sqrt(len(k)),
    "general": per_feature(general),
    "low-rank-general": per_feature(low_rank_general),
    "biased-general": per_feature(biased_general),
    "activated-general": per_feature(activated_general),
    "cosine": cosine,
    "negative-l2": negative_l2,
}


def scores(name: str, score: nn.Module, query: Tensor | None, key: Tensor) -> Tensor:
    """All pairs of a (Nq, d_q) query and a (N, d_k) key: (Nq, N), or (Nq, N, F)."""
    queries = [None] if query is None else list(query)
    return torch.stack([torch.stack([SCORES[name](score, q, k) for k in key]) for q in queries])


# Alignments, of one row


def soft(e: Row, allowed: Sequence[bool], temperature: float | Tensor = 1.0) -> Weights:
    total = sum(((x / temperature).exp() for x, ok in zip(e, allowed, strict=True) if ok), zero())
    return [(x / temperature).exp() / total if ok else zero() for x, ok in zip(e, allowed, strict=True)]


def argmax(e: Row, allowed: Sequence[bool]) -> int:
    found = -1
    for j, ok in enumerate(allowed):
        if ok and (found < 0 or bool(e[j] > e[found])):
            found = j
    return found


def hard(e: Row, allowed: Sequence[bool], noise: Row | None = None) -> Weights:
    perturbed = [x + g for x, g in zip(e, noise, strict=True)] if noise is not None else e
    chosen = argmax(perturbed, allowed)
    return [zero() + float(j == chosen) for j in range(len(e))]


def gumbel_softmax(e: Row, allowed: Sequence[bool], noise: Row, temperature: float) -> Weights:
    return soft([x + g for x, g in zip(e, noise, strict=True)], allowed, temperature)


def softmax_pullback(p: Row, g: Row) -> Weights:
    """What a gradient on softmax weights p becomes on their scores: p_j (g_j - sum_l p_l g_l)."""
    mean = sum((a * b for a, b in zip(p, g, strict=True)), zero())
    return [a * (b - mean) for a, b in zip(p, g, strict=True)]


def predicted_position(q: Tensor, W_p: Tensor, w_p: Tensor, length: int) -> Tensor:
    return length / (1 + (-dot(w_p, each(ACTIVATIONS["tanh"], times(W_p, q)))).exp())


def window_set(p: float, D: float, allowed: Sequence[bool]) -> list[int]:
    """The allowed positions from ceil(p - D) to floor(p + D); the nearest allowed one where there are none."""
    inside = [j for j in range(math.ceil(p - D), math.floor(p + D) + 1) if 0 <= j < len(allowed) and allowed[j]]
    if inside:
        return inside
    near = [j for j, ok in enumerate(allowed) if ok]
    return [min(near, key=lambda j: (abs(j - p), j))] if near else []


def local(
    e: Row, allowed: Sequence[bool], p: Tensor | float, D: float, gaussian: bool = True, renormalize: bool = False
) -> Weights:
    p = torch.as_tensor(p, dtype=torch.float64)
    window = window_set(p.item(), D, allowed)

    def bump(j: int) -> Tensor:
        return (-((j - p) ** 2) / (2 * (D / 2) ** 2)).exp() if gaussian and D > 0 else zero() + 1

    total = sum((e[j].exp() * (bump(j) if renormalize else 1) for j in window), zero())
    return [e[j].exp() * bump(j) / total if j in window else zero() for j in range(len(e))]


def log_odds(policy: nn.Module, key: Tensor, j: int, valid: Sequence[bool]) -> Tensor:
    """Of selecting key j."""
    f = key[j]
    if policy.context:
        some = [key[n] for n, ok in enumerate(valid) if ok]
        mean = sum(some[1:], some[0]) / len(some)
        f = torch.cat([key[j], mean, key[j] * mean])
    return dot(policy.w, each(ACTIVATIONS["elu"], times(policy.W, f) + policy.b)) + policy.c[0]


def log_bernoulli(logit: Tensor, z: bool) -> Tensor:
    chance = 1 / (1 + (-logit).exp())
    return chance.log() if z else (1 - chance).log()


def reinforced(e: Row, allowed: Sequence[bool], selected: Sequence[bool]) -> Weights:
    subset = [ok and bool(z) for ok, z in zip(allowed, selected, strict=True)]
    if any(subset):
        return soft(e, subset)
    count = sum(bool(ok) for ok in allowed)
    return [zero() + 1 / count if ok else zero() for ok in allowed]


def sparsemax(e: Row, allowed: Sequence[bool]) -> Weights:
    """The point of the simplex nearest to the scores, found by trying every support."""
    x = [s.item() for s in e]
    members = [j for j, ok in enumerate(allowed) if ok]
    best: tuple[float, tuple[int, ...]] | None = None
    for size in range(1, len(members) + 1):
        for support in combinations(members, size):
            tau = (sum(x[j] for j in support) - 1) / size
            if all(x[j] >= tau for j in support):
                distance = sum(tau**2 if j in support else x[j] ** 2 for j in members)
                best = min(best or (distance, support), (distance, support))
    if best is None:
        return [zero() for _ in e]
    threshold = (sum((e[j] for j in best[1]), zero()) - 1) / len(best[1])
    return [e[j] - threshold if j in best[1] else zero() for j in range(len(e))]


def entmax(e: Row, allowed: Sequence[bool], alpha: float) -> list[float]:
    """The definition: halve the interval that holds tau until nothing changes. Plain numbers."""
    x = [(alpha - 1) * s.item() for s in e]
    members = [j for j, ok in enumerate(allowed) if ok]
    if not members:
        return [0.0] * len(x)
    low, high = max(x[j] for j in members) - 1, max(x[j] for j in members)

    def weights(tau: float) -> list[float]:
        return [max(x[j] - tau, 0.0) ** (1 / (alpha - 1)) if j in members else 0.0 for j in range(len(x))]

    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(weights(middle)) >= 1 else (low, middle)
    return weights(low)


def entmax_pullback(a: Sequence[float], g: Sequence[float], alpha: float) -> list[float]:
    """What a gradient on entmax weights becomes on their scores: s (g - <s, g> / sum s), s = a^(2 - alpha)."""
    s = [x ** (2 - alpha) if x > 0 else 0.0 for x in a]
    mean = sum(x * y for x, y in zip(s, g, strict=True)) / sum(s) if sum(s) else 0.0
    return [x * (y - mean) for x, y in zip(s, g, strict=True)]


def entmax_alpha_pullback(a: Sequence[float], g: Sequence[float], alpha: float) -> float:
    """The same on alpha: (a - t)/(alpha - 1)^2 + (h - t sum h)/(alpha - 1), t = s / sum s, h = -a log a."""
    s = [x ** (2 - alpha) if x > 0 else 0.0 for x in a]
    h = [-x * math.log(x) if x > 0 else 0.0 for x in a]
    if not sum(s):
        return 0.0
    t = [x / sum(s) for x in s]
    slope = [(x - y) / (alpha - 1) ** 2 + (z - y * sum(h)) / (alpha - 1) for x, y, z in zip(a, t, h, strict=True)]
    return sum(x * y for x, y in zip(slope, g, strict=True))


def structured(e: Row, allowed: Sequence[bool], T: Tensor) -> Weights:
    """Marginals of a chain through the allowed keys, by trying every selection."""
    members = [j for j, ok in enumerate(allowed) if ok]

    def energy(z: Sequence[int]) -> Tensor:
        pairs = sum((T[a, b] for a, b in pairwise(z)), zero())
        return sum((e[j] for j, taken in zip(members, z, strict=True) if taken), zero()) + pairs

    return _marginals(len(e), members, list(selections((0, 1), repeat=len(members))), energy)


def budget(e: Row, allowed: Sequence[bool], k: int, exact: bool) -> Weights:
    """Marginals of subsets of at most, or exactly, k of the allowed keys, by trying every one."""
    members = [j for j, ok in enumerate(allowed) if ok]
    size = min(k, len(members))
    sets = [z for z in selections((0, 1), repeat=len(members)) if (sum(z) == size if exact else sum(z) <= k)]
    return _marginals(
        len(e), members, sets, lambda z: sum((e[j] for j, t in zip(members, z, strict=True) if t), zero())
    )


def _marginals(
    n: int, members: list[int], sets: list[tuple[int, ...]], energy: Callable[[Sequence[int]], Tensor]
) -> Weights:
    weights = [energy(z).exp() for z in sets]
    total = sum(weights, zero())
    found = [zero() for _ in range(n)]
    for z, w in zip(sets, weights, strict=True):
        for j, taken in zip(members, z, strict=True):
            found[j] = found[j] + w / total if taken else found[j]
    return found


def normalized(a: Row) -> Weights:
    total = sum(a, zero())
    return [x / total for x in a] if bool(total > 0) else list(a)


@dataclass(frozen=True)
class Facts:
    """What an alignment may look at beside a row of scores and its mask."""

    i: int = 0  # position of the query
    query: Tensor | None = None
    length: int = 0  # of what the query may see
    noise: Row | None = None  # Gumbel noise of the row
    selected: Sequence[bool] | None = None


def _hard(a: nn.Module, e: Row, allowed: Sequence[bool], x: Facts) -> Weights:
    if a.gradient == "gumbel" and a.training:
        assert x.noise is not None
        return gumbel_softmax(e, allowed, x.noise, a.temperature)
    return hard(e, allowed, x.noise if a.training or a.evaluation == "sample" else None)


def _local(a: nn.Module, e: Row, allowed: Sequence[bool], x: Facts) -> Weights:
    p: Tensor | float = x.i
    if a.position == "predictive":
        assert x.query is not None
        p = predicted_position(x.query, a.W_p, a.w_p, x.length)
    return local(e, allowed, p, a.window, a.gaussian, a.renormalize)


def _soft(a: nn.Module, e: Row, allowed: Sequence[bool], x: Facts) -> Weights:
    return soft(e, allowed, a.temperature if a.log_temperature is None else a.log_temperature[0].exp())


def _entmax(a: nn.Module, e: Row, allowed: Sequence[bool], x: Facts) -> Weights:
    alpha = a.alpha.item() if isinstance(a.alpha, Tensor) else a.alpha
    return soft(e, allowed) if alpha == 1 else [zero() + w for w in entmax(e, allowed, alpha)]


def _structured(a: nn.Module, e: Row, allowed: Sequence[bool], x: Facts) -> Weights:
    found = structured(e, allowed, a.T)
    return normalized(found) if a.normalize else found


def _budget(a: nn.Module, e: Row, allowed: Sequence[bool], x: Facts) -> Weights:
    found = budget(e, allowed, a.k, a.exact)
    return normalized(found) if a.normalize else found


ALIGNMENTS: dict[str, Callable[[nn.Module, Row, Sequence[bool], Facts], Weights]] = {
    "soft": _soft,
    "hard": _hard,
    "local-monotonic": _local,
    "local-predictive": _local,
    "reinforced": lambda a, e, allowed, x: reinforced(e, allowed, x.selected or []),
    "entmax": _entmax,
    "sparsemax": lambda a, e, allowed, x: sparsemax(e, allowed),
    "structured": _structured,
    "budget": _budget,
}

# The sum


def read(weights: Sequence[Row], value: Tensor) -> Tensor:
    """c_i = sum_j a_ij v_j."""
    return torch.stack([sum((a * v for a, v in zip(row, value, strict=True)), zero() * value[0]) for row in weights])


def read_features(weights: Sequence[Sequence[Row]], value: Tensor) -> Tensor:
    """c_if = sum_j a_ijf v_jf, weights by feature, query, key."""
    columns = [
        torch.stack([sum((a * v[f] for a, v in zip(row, value, strict=True)), zero()) for row in rows])
        for f, rows in enumerate(weights)
    ]
    return torch.stack(columns, -1)
