"""A position that is no number, and a nearest key whose score is none, are seen in what reads them, in every kernel."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.ops.blockwise import blockwise
from regard.ops.call import Call, assuming
from regard.ops.dense import dense
from regard.ops.dispatch import choose, execute

D = 4
SCORES: dict[str, Callable[[], rg.Score]] = {
    "bilinear": lambda: rg.ActivatedGeneral(D, D),
    "additive": lambda: rg.Additive(D, D, 3),
    "multi-dimensional": lambda: rg.Additive(D, D, 3, features=D),
    "units": lambda: rg.TokenToToken(D),
}
WINDOWS: dict[str, Callable[[], rg.Local]] = {
    "scaled": lambda: rg.Local(1.0, "predictive", query_dim=D),
    "added": lambda: rg.Local(1.0, "predictive", renormalize=True, query_dim=D),
    "flat": lambda: rg.Local(1.0, "predictive", gaussian=False, query_dim=D),
}


def fused(call: Call) -> Tensor:
    with assuming("cuda"):
        assert choose(call, "fused").path == "fused"
        return execute(call, "fused")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_a_position_that_is_no_number(
    score: Callable[[], rg.Score], window: Callable[[], rg.Local], masked: bool
) -> None:
    query, key, value = (torch.randn(1, n, D) for n in (20, 7, 7))
    query[0, 1] = query[0, 18] = math.nan
    readable = torch.ones(20, 7, dtype=torch.bool)
    if masked:
        # Who may read nothing reads zeros.
        readable[:, :3] = readable[18] = False
    call = rg.Attention(score(), window()).call(query, key, value, mask=readable if masked else None)
    expected = dense(call)
    assert expected[0, 1].isnan().all()
    torch.testing.assert_close(fused(call), expected, equal_nan=True)
    torch.testing.assert_close(blockwise(call, 3), expected, equal_nan=True)


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_a_nearest_key_whose_score_is_no_number(score: Callable[[], rg.Score]) -> None:
    query, key, value = (torch.randn(1, n, D) for n in (3, 7, 7))
    key[0, 5, 2] = math.nan
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[0, 5] = mask[1, 6] = True
    call = rg.Attention(score(), rg.Local(0.3, gaussian=False)).call(query, key, value, mask=mask)
    expected = dense(call)
    assert expected[0, 0].isnan().any()
    assert expected[0, 1:].isfinite().all()
    torch.testing.assert_close(fused(call), expected, equal_nan=True)
