"""Recommendation by a cloze: BERT4Rec (Sun et al. 2019, https://arxiv.org/abs/1904.06690), plain and with Lite Transformer layers.

Users go round a circle of items in steps of their own. The model is trained to fill in items that were masked, seen from both
sides, and then asked for the one that comes next.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

import regard as rg
from regard.recipes.planted import Batch, Strides, fit


def cloze(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of masked items; the next one is not shown."""
    return model.loss(batch.inputs["items"], batch.inputs["mask"])


@torch.no_grad()
def hit_rate(model: rg.BERT4Rec, task: Strides, count: int = 512) -> float:
    batch = task.draw(count, Generator().manual_seed(1))
    found = model.recommend(batch.inputs["items"], batch.inputs["mask"]).argmax(-1)
    return float((found == batch.target).float().mean())


def main(steps: int = 300) -> dict[str, float]:
    task, found = Strides(), {}
    for name, options in (("bert4rec", {}), ("lite", {"attention": rg.LongShortAttention})):
        torch.manual_seed(0)
        model = rg.BERT4Rec(
            task.items, 32, heads=4, layers=2, length=task.n + 1, masked=0.3, last=0.3, norm="pre", **options
        )
        fit(model, task, steps=steps, lr=5e-3, loss=cloze)
        found[name] = hit_rate(model, task)
    found["chance"] = 1 / task.items
    print(", ".join(f"hit rate, {name} {value:.3f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()
