"""One query, nothing to be kept out, added or watched: the equation itself, which must be what `execute` would have run."""

from __future__ import annotations

import math
import sys

import pytest
import torch

import regard as rg
from regard.general.attention import Attention

SCORES = {
    "additive": lambda: Attention("additive", query_dim=3, key_dim=5, hidden_dim=7),
    "activated-general": lambda: Attention("activated-general", query_dim=3, key_dim=5),
    "query-free": lambda: Attention("query-free", key_dim=5, hidden_dim=7),
    "tempered": lambda: Attention(rg.Additive(3, 5, 7), rg.Soft(temperature=0.5, learnable=True)),
    "heads": lambda: Attention(rg.Additive(3, 5, 7, heads=2)),
}


def inputs(name: str) -> tuple[torch.Tensor | None, torch.Tensor]:
    torch.manual_seed(0)
    key = torch.randn(2, 11, 5) if name != "heads" else torch.randn(3, 2, 11, 5)
    return None if name == "query-free" else torch.randn(*key.shape[:-2], 3), key


@pytest.mark.parametrize("name", SCORES)
def test_it_is_what_is_executed_otherwise(name: str) -> None:
    attend, (query, key) = SCORES[name](), inputs(name)
    directly = attend._at_once(query, key, None)
    assert directly is not None
    with rg.record(attend) as trace:
        watched = attend(query, key)
    assert torch.equal(attend(query, key), watched)
    assert torch.equal(directly, watched)
    assert trace.weights.shape == key.shape[:-1]
    assert rg.explain_dispatch(attend, query, key).path == "dense"


@pytest.mark.parametrize("name", SCORES)
def test_filled_keys_are_what_is_executed_otherwise(name: str) -> None:
    attend, (query, key) = SCORES[name](), inputs(name)
    real = torch.rand(key.shape[:-1], generator=torch.Generator().manual_seed(1)) > 0.4
    real[0] = False
    key = torch.where(real.unsqueeze(-1), key, 0.0)
    if query is not None:
        query[0] = math.nan  # it has nothing to read
    directly = attend._at_once(query, key, None, real)
    assert directly is not None
    mask = rg.Keys(real, filled=True)
    with rg.record(attend):
        watched = attend(query, key, mask=mask)
    assert torch.equal(directly, watched)
    assert torch.equal(attend(query, key, mask=mask), watched)
    assert not watched[0].any()
    torch.testing.assert_close(attend(query, key, mask=rg.Keys(real)), watched)


@pytest.mark.parametrize("empty", [(0,), (0, 1)])
def test_a_query_that_all_share_is_what_is_executed_otherwise(empty: tuple[int, ...]) -> None:
    attend, (_, key) = SCORES["additive"](), inputs("additive")
    real = torch.arange(11).expand(2, 11) < 7
    real = real.index_fill(0, torch.tensor(empty), False)
    key = torch.where(real.unsqueeze(-1), key, 0.0)
    query = torch.randn(3) if len(empty) == 1 else torch.full((3,), math.nan)
    directly = attend._at_once(query, key, None, real)
    with rg.record(attend):
        watched = attend(query, key, mask=rg.Keys(real, filled=True))
    assert directly is not None
    assert torch.equal(directly, watched)
    assert not watched[list(empty)].any()


def test_a_tensor_of_booleans_says_nothing_of_what_stands_elsewhere() -> None:
    attend, (query, key) = SCORES["additive"](), inputs("additive")
    real = torch.arange(11) < 7
    loud = torch.where(real[:, None], key, math.nan)
    for mask in (real.expand(2, 11), rg.Keys(real.expand(2, 11))):
        torch.testing.assert_close(attend(query, loud, mask=mask), attend(query, key[:, :7]))


@pytest.mark.parametrize("name", SCORES)
def test_gradients_are_those_of_the_execution(name: str) -> None:
    attend, (query, key) = SCORES[name](), inputs(name)
    key.requires_grad_()
    wanted = [key, *attend.parameters()]
    directly = torch.autograd.grad(attend(query, key).square().sum(), wanted)
    with rg.record(attend):
        watched = torch.autograd.grad(attend(query, key).square().sum(), wanted)
    for x, y in zip(directly, watched, strict=True):
        torch.testing.assert_close(x, y)


def test_not_where_there_is_something_to_decide() -> None:
    query, key = inputs("additive")
    assert query is not None
    attend = SCORES["additive"]()
    assert attend._at_once(query[:, None], key, None) is None
    assert attend._at_once(query.half(), key.half(), None) is None
    with rg.execution("blockwise"):
        assert attend._at_once(query, key, None) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert attend._at_once(query, key, None) is None
    others = [
        Attention(rg.Additive(3, 5, 7), "entmax"),
        Attention(rg.Additive(3, 5, 7), impl="dense"),
        Attention(rg.Additive(3, 5, 7), dropout=0.5),
        Attention(rg.Additive(3, 5, 7), key_map=torch.nn.Linear(5, 5)),
        Attention(rg.Additive(3, 5, 7, features=5)),
        Attention(rg.General(3, 5)),
        Attention(rg.ActivatedGeneral(3, 5, "identity")),
    ]
    assert all(other._at_once(query, key, None) is None for other in others)
    assert others[2].eval()._at_once(query, key, None) is not None


def test_interventions_are_seen() -> None:
    attend, (query, key) = SCORES["additive"](), inputs("additive")
    with rg.intervene(attend, "uniform"):
        torch.testing.assert_close(attend(query, key), key.mean(-2))


def test_no_keys_give_zeros() -> None:
    attend, (query, key) = SCORES["additive"](), inputs("additive")
    assert torch.equal(attend(query, key[:, :0]), torch.zeros(2, 5))


@pytest.mark.parametrize(("name", "most"), [("additive", 30), ("activated-general", 30), ("query-free", 30)])
def test_what_surrounds_the_products_stays_small(name: str, most: int) -> None:
    """Counted in Python functions, since times depend on the machine."""
    attend, (query, key) = SCORES[name](), inputs(name)
    attend(query, key)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        attend(query, key)
    finally:
        sys.setprofile(None)
    assert calls <= most
