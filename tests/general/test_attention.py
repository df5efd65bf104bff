"""What `Attention` itself promises, whatever its parts."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import regard as rg


@pytest.mark.parametrize("how", ["hard", "dropout", "permuted"])
def test_asking_what_would_run_draws_nothing(how: str) -> None:
    attend = rg.Attention("dot", "hard" if how == "hard" else None, dropout=0.5 if how == "dropout" else 0.0)
    x = torch.randn(2, 5, 3)
    before = torch.get_rng_state()
    with rg.intervene(attend, "permuted") if how == "permuted" else nullcontext():
        rg.explain_dispatch(attend, x, x)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_window_beyond_every_index_is_no_window() -> None:
    query, key = torch.randn(2, 5, 3), torch.randn(2, 7, 3)
    local = rg.Attention("dot", rg.Local(10**30, gaussian=False))
    assert torch.allclose(local(query, key), rg.Attention("dot")(query, key), atol=1e-6)


def test_a_table_is_looked_up_by_a_function() -> None:
    table = torch.randn(5, 7)
    attend, query, key = rg.Attention("dot"), torch.randn(2, 5, 3), torch.randn(2, 7, 3)
    with rg.execution("blockwise", panel=2):
        looked_up = attend(query, key, bias=lambda i, j: table[i, j])
    assert torch.allclose(looked_up, attend(query, key, bias=table), atol=1e-6)
