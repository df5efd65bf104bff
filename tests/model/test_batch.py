"""Examples become batches: padded, masked, nothing lost."""

from __future__ import annotations

import pytest
import torch

from regard.model import Batch, Example, collate


def test_everything_is_padded_and_masked() -> None:
    short = Example({"x": torch.ones(2, 3)}, torch.tensor([1, 2]), gold=torch.ones(2, 2, dtype=torch.int8))
    long = Example({"x": torch.ones(5, 3)}, torch.tensor([1, 2, 3]), gold=torch.ones(3, 5, dtype=torch.int8))
    batch = collate([short, long])
    assert len(batch) == 2
    assert batch.inputs["x"].shape == (2, 5, 3)
    assert batch.masks["x"].sum(-1).tolist() == [2, 5]
    assert batch.target.tolist() == [[1, 2, -1], [1, 2, 3]]
    assert batch.gold.flatten(1).sum(-1).tolist() == [4, 15]


def test_levels_keep_their_masks() -> None:
    ragged = Example({"x": torch.zeros(2, 4).long()}, masks={"x": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()})
    small = Example({"x": torch.zeros(1, 1).long()}, masks={"x": torch.tensor([[True]])})
    mask = collate([ragged, small]).masks["x"]
    assert mask.shape == (2, 2, 4)
    assert mask.sum((1, 2)).tolist() == [6, 1]


def test_bad_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="examples: got none"):
        collate([])
    with pytest.raises(ValueError, match="some with a target"):
        collate([Example({"x": torch.zeros(1)}, torch.tensor(1)), Example({"x": torch.zeros(1)})])
    with pytest.raises(ValueError, match="equally many axes"):
        collate([Example({"x": torch.zeros(1)}), Example({"x": torch.zeros(1, 2)})])


def test_a_batch_moves() -> None:
    batch = Batch({"x": torch.zeros(2, 3)}, {"x": torch.ones(2, 3).bool()}, torch.zeros(2), {"v": torch.zeros(2)})
    moved = batch.to("meta")
    assert {moved.inputs["x"].device.type, moved.masks["x"].device.type, moved.target.device.type} == {"meta"}
    assert moved.variables["v"].device.type == "meta"
    assert moved.gold is None
