"""Tasks whose answer is a sequence, or comes after one: their truth, example by example."""

from __future__ import annotations

from itertools import pairwise

import torch

from regard.recipes.planted import Reversal, Strides


def test_reversal_one_by_one():
    task = Reversal(n=5)
    batch = task.draw(50, torch.Generator().manual_seed(0))
    for source, before, mask, written, origin in zip(
        *batch.inputs.values(), batch.target, batch.truth["source"], strict=True
    ):
        n = int(mask.sum()) - 1
        assert source[n] == task.end
        assert written[:n].tolist() == source[:n].flip(0).tolist()
        assert (written[n:] == task.end).all()
        assert before.tolist() == [task.begin, *written[:-1].tolist()]
        assert source[origin].tolist() == written.tolist()


def test_strides_one_by_one():
    task = Strides()
    batch = task.draw(50, torch.Generator().manual_seed(0))
    for items, mask, target in zip(*batch.inputs.values(), batch.target, strict=True):
        seen = [*items[mask].tolist(), int(target)]
        assert len(seen) >= 4
        assert len({(b - a) % task.items for a, b in pairwise(seen)}) == 1
