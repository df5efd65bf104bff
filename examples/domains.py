"""Sentiment across domains: HATN (Li et al. 2018, https://doi.org/10.1609/aaai.v32i1.12055).

Two hierarchical attentions read a review. The first must hide which domain it comes from (its gradient is reversed), so it reads
words that mean the same everywhere: pivots. The second reads what is left when the pivots are covered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import regard as rg
from regard.recipes.planted import Batch, fit


class Reverse(torch.autograd.Function):
    """The identity, whose gradient has the opposite sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class TransferNetwork(nn.Module):
    def __init__(self, dim: int, covered: float = 0.2) -> None:
        super().__init__()
        self.pivots, self.others = (rg.HierarchicalAttention(dim) for _ in range(2))
        self.domain, self.sentiment = nn.Linear(dim, 2), nn.Linear(2 * dim, 2)
        self.covered = covered

    def forward(self, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of sentiment and of domain."""
        with rg.record(self.pivots) as trace:
            shared = self.pivots(features, mask)
        uncovered = mask & (self.pivots.leaf_weights(trace) < self.covered)
        both = torch.cat([shared, self.others(features, uncovered)], -1)
        return self.sentiment(both), self.domain(Reverse.apply(shared))


@dataclass(frozen=True)
class Reviews:
    """Reviews from two domains, of three sentences of four words, labelled in the source domain alone.

    A word has an opinion of one of three kinds, or none: a pivot, right in both domains; or a word of one of the domains.
    """

    only: int | None = None

    @property
    def classes(self) -> int:
        return 2

    def draw(self, count: int, generator: Generator) -> Batch:
        sentiment, domain = (torch.randint(2, (count,), generator=generator) for _ in range(2))
        domain = domain if self.only is None else torch.full_like(domain, self.only)
        kind = torch.rand(count, 12, generator=generator).argsort(-1)
        features = 0.1 * torch.randn(count, 12, 8, generator=generator)
        pivot, own = kind < 2, (kind >= 2) & (kind < 6)
        sign = (2.0 * sentiment - 1)[:, None]
        features[..., 0] += pivot.float()
        features[..., 1] += pivot * sign
        for d in range(2):
            here = own & (domain == d)[:, None]
            features[..., 2 + 2 * d] += here.float()
            features[..., 3 + 2 * d] += here * sign
        mask = torch.rand(count, 12, generator=generator) < 0.9
        inputs = {"features": features.view(count, 3, 4, 8), "mask": (mask | pivot).view(count, 3, 4)}
        return Batch(inputs, sentiment, {"domain": domain, "pivot": pivot.view(count, 3, 4)})


def adversarial(model: nn.Module, batch: Batch) -> Tensor:
    """Sentiment in the source domain; domain in both."""
    sentiment, domain = model(**batch.inputs)
    source = batch.truth["domain"] == 0
    return F.cross_entropy(sentiment[source], batch.target[source]) + F.cross_entropy(domain, batch.truth["domain"])


def main(steps: int = 200) -> dict[str, float]:
    torch.manual_seed(0)
    model = TransferNetwork(8)
    fit(model, Reviews(), steps=steps, lr=0.02, loss=adversarial)
    batch = Reviews(only=1).draw(1024, Generator().manual_seed(1))
    with torch.no_grad(), rg.record(model) as trace:
        sentiment, _ = model(**batch.inputs)
        weights = model.pivots.leaf_weights(trace, at="pivots")
    found = {
        "accuracy in the other domain": float((sentiment.argmax(-1) == batch.target).float().mean()),
        "weight on pivots": float((weights * batch.truth["pivot"]).sum((1, 2)).mean()),
        "share of pivots": float(batch.truth["pivot"].float().sum() / batch.inputs["mask"].sum()),
    }
    print(", ".join(f"{name} {value:.2f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()
