"""The map of buckets: what each round of hashed attention sees."""

from __future__ import annotations

import pytest
import torch

import regard as rg

pytest.importorskip("matplotlib")

from regard.report.figures import bucket_map, save


def recorded(n: int = 24, rounds: int = 2):
    torch.manual_seed(0)
    attend = rg.LSHAttention(8, 2, rounds=rounds, chunk=4).eval()
    with rg.record(attend) as trace:
        attend(torch.randn(1, n, 8), mask=rg.Causal())
    return trace["attention"]


def test_each_round_is_drawn_in_its_own_order(tmp_path):
    found = recorded()
    buckets, weights = found.call.buckets, found.weights[0, 1].detach()
    figure = bucket_map(weights, buckets.ids[0, 1], buckets.chunk, title="one head")
    assert [axes.get_title() for axes in figure.axes[:3]] == ["as they stand", "round 0", "round 1"]
    for r in range(2):
        order = buckets.order[0, 1, r]
        image = torch.tensor(figure.axes[1 + r].images[0].get_array())
        assert torch.allclose(image.double(), weights[order][:, order].double())
        ends = int((buckets.ids[0, 1, r][order].diff() != 0).sum()) + 1
        assert len(figure.axes[1 + r].patches) == 2 * ends
        assert len(figure.axes[1 + r].lines) == 2 * (buckets.chunks - 1)
    assert save(figure, tmp_path / "buckets.svg").stat().st_size > 1000


def test_with_one_round_everything_seen_lies_by_the_diagonal_of_chunks():
    found = recorded(rounds=1)
    buckets, weights = found.call.buckets, found.weights[0, 0].detach()
    image = bucket_map(weights, buckets.ids[0, 0], buckets.chunk).axes[1].images[0].get_array()
    i, j = image.nonzero()
    assert ((i // 4 - j // 4) * (i // 4 - j // 4 - 1) == 0).all()


def test_refusals():
    with pytest.raises(ValueError, match=r"weights: got \(2, 3\)"):
        bucket_map(torch.zeros(2, 3), torch.zeros(1, 2), 1)
    with pytest.raises(ValueError, match=r"buckets: got \(1, 3\)"):
        bucket_map(torch.zeros(2, 2), torch.zeros(1, 3), 1)
    with pytest.raises(ValueError, match="chunk: got 0"):
        bucket_map(torch.zeros(2, 2), torch.zeros(1, 2), 0)
