"""The study of gradients over hops: it runs, and its finding holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard.bench import hop_gradients
from regard.bench.hop_gradients import norm


@pytest.mark.parametrize(
    ("transform", "low", "high"), [("residual", 0.5, 2.0), ("identity", 0.5, 2.0), ("gru", 0.0, 1e-3)]
)
def test_a_residual_transform_keeps_gradients_and_a_recurrent_one_does_not(
    transform: str, low: float, high: float
) -> None:
    assert low <= norm(transform, 16, 0) / norm(transform, 1, 0) <= high


def test_it_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hop_gradients, "HOPS", (1, 2))
    found = list(hop_gradients.rows(seeds=2))
    assert len(found) == 2 * len(hop_gradients.TRANSFORMS)
    assert hop_gradients.draw(found, tmp_path).stat().st_size > 1000
