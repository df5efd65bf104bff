"""A small Transformer that writes sequences backwards (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

Encoder and decoder of one layer each, rotary positions. It is trained on all tokens at once, and then writes one after the other
with a cache of keys and values: greedily, with a beam, and drawn at random. What it reads of the source is known: the token that
it writes next, from the last to the first.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import regard as rg
from regard.recipes.planted import Reversal, accuracy, fit

CROSS = "transformer.decoder.layers.0.cross.attention"


def whole(
    model: rg.SequenceToSequence, task: Reversal, how: rg.Greedy | rg.Beam | rg.Sample, count: int = 256
) -> float:
    """Share of unseen sequences that are written without a mistake."""
    batch = task.draw(count, Generator().manual_seed(2))
    source, mask = batch.inputs["source"], batch.inputs["mask"]
    written = model.generate(source, mask, begin=task.begin, end=task.end, steps=task.n + 1, how=how).tokens
    written = torch.nn.functional.pad(written, (0, task.n + 1 - written.shape[1]), value=task.end)
    return float((written == batch.target).all(-1).float().mean())


def looks(model: rg.SequenceToSequence, task: Reversal, count: int = 256) -> Tensor:
    """Weight on the token that is written next, the most of any head, of each token that is no padding."""
    batch = task.draw(count, Generator().manual_seed(3))
    with torch.no_grad(), rg.record(model) as trace:
        model(**batch.inputs)
    origin = batch.truth["source"]
    on_it = trace[CROSS].weights.gather(-1, origin[:, None, :, None].expand(-1, 4, -1, 1)).squeeze(-1)
    return on_it.amax(1)[batch.target != task.end]


def main(steps: int = 300) -> dict[str, float]:
    torch.manual_seed(0)
    task = Reversal()
    model = rg.SequenceToSequence(
        task.classes, 32, heads=4, layers=1, position="rotary", norm="pre", feedforward_dim=64
    )
    fit(model, task, steps=steps, lr=1e-2)
    torch.manual_seed(1)
    found = {
        "tokens right": accuracy(model, task, count=512),
        "whole, greedy": whole(model, task, rg.Greedy()),
        "whole, beam of 4": whole(model, task, rg.Beam(4)),
        "whole, drawn": whole(model, task, rg.Sample(0.7, top_p=0.95)),
        "weight on what is written": float(looks(model, task).mean()),
    }
    print(", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()
