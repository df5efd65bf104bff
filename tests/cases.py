"""Attention built from the catalog, inputs for it, and what *equal* means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import regard as rg
from regard import catalog
from regard.catalog import Entry

# Every size a different prime, so that no two axes can be mistaken for each other.
LEAD, NQ, N, D_Q, D_K, D_V = 2, 5, 7, 3, 11, 17
OPTIONS = {
    "query_dim": D_Q,
    "key_dim": D_K,
    "dim": D_K,
    "hidden_dim": 13,
    "rank": 2,
    "window": 1.5,
}


@dataclass(frozen=True)
class Case:
    """One point of score x alignment x dimensionality."""

    score: Entry
    align: Entry
    multi: bool = False
    more: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        more = "".join(f"-{key}={value}" for key, value in self.more.items())
        return f"{self.score.name}-{self.align.name}-{'multi' if self.multi else 'single'}{more}"

    @property
    def query_dim(self) -> int:
        """A score without a width of its own compares queries with keys as they are."""
        return D_Q if "query_dim" in catalog.arguments(self.score) else D_K

    def options(self) -> dict[str, Any]:
        """What the two parts must be told."""
        known = OPTIONS | {"query_dim": self.query_dim} | ({"features": D_V} if self.multi else {}) | self.more
        taken = {**catalog.arguments(self.score), **catalog.arguments(self.align)}
        if self.multi and "features" not in taken:
            return {key: known[key] for key in (*(k for k in known if k in taken), "features")}
        return {key: value for key, value in known.items() if key in taken and key not in self.align.preset}

    def build(self, **attention: Any) -> rg.Attention:
        """The module in float64, every parameter away from its initial value: a zero hides what it multiplies."""
        module = rg.Attention(self.score.name, self.align.name, **attention, **self.options())
        return scrambled(module)

    def inputs(self, *, grad: bool = False, lead: tuple[int, ...] = (LEAD,)) -> dict[str, Tensor]:
        return inputs(lead, NQ, N, self.query_dim, D_K, D_V, grad=grad)


def scrambled(module: nn.Module, seed: int = 1) -> Any:
    """A float64 module with normal parameters."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.5)
    return module


def inputs(
    lead: tuple[int, ...], nq: int, n: int, d_q: int, d_k: int, d_v: int, *, grad: bool = False, seed: int = 2
) -> dict[str, Tensor]:
    """Query, key and value in float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"query": (*lead, nq, d_q), "key": (*lead, n, d_k), "value": (*lead, n, d_v)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)
        for name, shape in shapes.items()
    }


def scores() -> list[Entry]:
    return [e for e in catalog.entries("general/scoring") if issubclass(e.cls, rg.Score)]


def alignments() -> list[Entry]:
    return [e for e in catalog.entries("general/alignment") if issubclass(e.cls, rg.Alignment)]


def is_parameter_free(entry: Entry) -> bool:
    """Whether the score has no width to be given: nothing in it could tell features apart."""
    return not {"query_dim", "key_dim", "dim"} & set(catalog.arguments(entry))


def is_always_multi(entry: Entry) -> bool:
    """Whether the score has one weight for each feature without being asked."""
    taken = catalog.arguments(entry)
    return entry.cls(**{key: OPTIONS[key] for key in taken if key in OPTIONS}).features is not None


def product() -> Iterator[Case]:
    """Every combination that can be asked for, refused or not."""
    for score in scores():
        for align in alignments():
            if not is_always_multi(score):
                yield Case(score, align, multi=False)
            yield Case(score, align, multi=True)


def supported() -> list[Case]:
    return [case for case in product() if not (case.multi and is_parameter_free(case.score))]


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "soft": [{"temperature": 0.7}, {"temperature": 1.0, "learnable": True}],
    "hard": [
        {"gradient": "reinforce"},
        {"gradient": "gumbel", "temperature": 0.7},
        {"gradient": "gumbel-straight-through", "temperature": 0.7},
        {"evaluation": "sample"},
    ],
    "local-monotonic": [{"gaussian": False}, {"renormalize": True}, {"window": 0}, {"window": 0.3}, {"window": 23}],
    "local-predictive": [
        {"gaussian": False},
        {"renormalize": True},
        {"window": 0},
        {"window": 0.3},
        {"window": 23},
        {"position_dim": 19},
    ],
    "reinforced": [{"context": True}, {"evaluation": "sample"}],
    "structured": [{"normalize": True}],
    "budget": [{"k": 2}, {"k": 3, "exact": True}, {"k": 2, "normalize": True}],
    "entmax": [{"alpha": 1.0}, {"alpha": 1.3}, {"alpha": 2.0}, {"alpha": 2.7}, {"alpha": 1.2, "learnable": True}],
}


def variants() -> list[Case]:
    """Every variant of every alignment, on a bilinear and an additive score of either dimensionality."""
    forms = [case for case in supported() if case.score.name in ("general", "additive")]
    return [replace(case, more=more) for case in forms for more in VARIANTS.get(case.align.name, [])]


def a_mask() -> Tensor:
    """Booleans over all pairs: the second batch entry is shorter, and one of its rows may attend nothing."""
    mask = torch.ones(LEAD, NQ, N, dtype=torch.bool)
    mask[1, :, N - 2 :] = False
    mask[0, 3, ::2] = False
    mask[1, 2] = False
    return mask


def assert_same(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal in float64 to 1e-10 of the largest entry; beneath 1e-14 is rounding."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} is not {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype == torch.float64, f"{what}: {actual.dtype}, {expected.dtype}"
    if expected.numel() == 0:
        return
    assert bool(actual.isfinite().all()), f"{what}: not finite"
    actual, expected = actual.detach(), expected.detach()
    error, size = float((actual - expected).abs().max()), float(expected.abs().max())
    assert error <= max(1e-10 * size, 1e-14), f"{what}: {error:.3g} off, of {size:.3g}"


# Alignments whose weights are marginals of selections of keys: a row sums to the expected number of keys, and a key alone may be left.
SELECTIONS = ("structured", "budget")


def assert_within_budget(actual: Tensor, dense: Tensor, exact: Tensor, what: str = "") -> None:
    """In low precision: within 2 x (the error of the dense execution in the same dtype + one rounding) of float64."""
    assert actual.dtype == dense.dtype
    assert actual.shape == dense.shape == exact.shape
    assert exact.dtype == torch.float64
    error, allowed = (float((x.double() - exact).abs().max()) for x in (actual, dense))
    budget = 2 * (allowed + torch.finfo(actual.dtype).eps * float(exact.abs().max()))
    assert error <= budget, f"{what}: {error:.3g} off, the budget is {budget:.3g}"


def run(
    attend: nn.Module, tensors: dict[str, Tensor], *, seed: int = 3, **rest: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The context and the gradient of everything that needs one, under a fixed random cotangent."""
    wanted = {f"input {k}": x for k, x in tensors.items() if x is not None and x.requires_grad}
    wanted |= {f"parameter {k}": p for k, p in attend.named_parameters()}
    wanted |= {k: x for k, x in rest.items() if isinstance(x, Tensor) and x.requires_grad}
    torch.manual_seed(seed)
    context = attend(**tensors, **rest)
    if not context.requires_grad:
        return context, {name: torch.zeros_like(x) for name, x in wanted.items()}
    generator = torch.Generator().manual_seed(seed)
    cotangent = torch.randn(context.shape, generator=generator, dtype=torch.float64).to(context.dtype)
    found = torch.autograd.grad(context, list(wanted.values()), cotangent, allow_unused=True)
    return context.detach(), {
        name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(wanted.items(), found, strict=True)
    }


def compare(
    first: tuple[Tensor, dict[str, Tensor]],
    second: tuple[Tensor, dict[str, Tensor]],
    same: Callable[..., None] = assert_same,
) -> None:
    """Contexts and every gradient."""
    same(first[0], second[0], "context")
    assert first[1].keys() == second[1].keys()
    for name in first[1]:
        same(first[1][name], second[1][name], f"gradient of {name}")
