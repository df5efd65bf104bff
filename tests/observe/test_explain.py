"""What each attention of a model takes: told by running it once, which leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import regard as rg


class TwoReaders(nn.Module):
    """A model of somebody's: one attention is called twice, another once, a third never."""

    def __init__(self) -> None:
        super().__init__()
        self.first = rg.Attention("additive", query_dim=4, key_dim=4, hidden_dim=3, dropout=0.5)
        self.second = rg.Attention("dot", "sparsemax", impl="blockwise")
        self.spare = rg.Attention("dot")
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.mT).mT
        y = self.first(x, x, mask=rg.Window(4))
        return self.second(self.first(y[:, :2], y), y)


def test_a_model_with_two_attentions() -> None:
    model, x = TwoReaders(), torch.randn(1, 2048, 4)
    found = rg.explain_dispatch(model, x)
    assert list(found) == ["first", "second"]
    assert len(found) == 2
    assert [each.path for each in found.calls["first"]] == ["blockwise", "dense"]
    first, second = str(found).splitlines()
    assert first.startswith("first: dense: ")
    assert first.endswith("(call 2 of 2)")
    assert second == "second: blockwise: asked for"
    assert repr(found) == str(found)
    assert "not banded: dropout is drawn by position" in str(found.calls["first"][0])
    with rg.execution("dense"):
        assert set(map(str, rg.explain_dispatch(model, x).values())) == {"dense: asked for"}


def test_encoders_decoders_and_mechanisms() -> None:
    x = torch.randn(2, 600, 8)
    encoder = rg.TransformerEncoder(8, 2, 2)
    found = rg.explain_dispatch(encoder, x)
    with rg.record(encoder) as trace:
        encoder(x)
    assert list(found) == list(trace)
    assert all(each.path == "fused" for each in found.values())
    model = rg.Transformer(8, 2, 1)
    assert len(rg.explain_dispatch(model, x, x[:, :5])) == 3
    hashed = rg.explain_dispatch(rg.LSHAttention(8, 2), x)
    assert [each.path for each in hashed.values()] == ["chunked"]
    pointer = rg.explain_dispatch(rg.AttentionOverAttention(8), x[:, :5], x[:, :7])
    assert "reads scores or weights itself" in str(pointer)


def test_graphs() -> None:
    layer, nodes = rg.GraphAttention(16, heads=4), torch.randn(5, 16)
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 1]])
    found = rg.explain_dispatch(layer, nodes, edges)
    assert str(found) == "attention: dense: small enough for the equation itself"
    many = torch.randint(5, (2, 40_000))
    assert "along edges: one operator" in str(rg.explain_dispatch(layer, nodes, many))


def test_adopted_attention() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    rg.adopt(model)
    x = torch.randn(2, 5, 8)
    assert "library" in str(rg.explain_dispatch(model, x, x, x))


def test_a_model_that_is_attention_itself_has_no_path() -> None:
    assert str(rg.explain_dispatch(rg.adopt(nn.MultiheadAttention(8, 2)), *[torch.randn(3, 2, 8)] * 3)).startswith(
        "fused"
    )


@pytest.mark.parametrize("train", [True, False])
def test_nothing_is_left_behind(train: bool) -> None:
    model, x = TwoReaders().train(train), torch.randn(1, 64, 4)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    with rg.record(model) as trace:
        rg.explain_dispatch(model, x)
        assert len(trace) == 0
        model.eval()(x)
    assert list(trace) == ["first", "second"]
    assert model.train(train).training == train
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_interventions_are_those_of_the_call() -> None:
    model, x = TwoReaders().eval(), torch.randn(1, 2048, 4)
    assert rg.explain_dispatch(model, x).calls["first"][0].path == "banded"
    with rg.intervene(model, "uniform"):
        assert rg.explain_dispatch(model, x).calls["first"][0].path == "blockwise"


def test_whether_gradients_are_wanted_counts() -> None:
    model, x = rg.MultiHeadAttention(16, 2), torch.randn(1, 900, 16)
    learned = nn.Parameter(torch.randn(900, 900))
    training = rg.explain_dispatch(model, x, bias=learned)
    with torch.no_grad():
        reading = rg.explain_dispatch(model, x, bias=learned)
    assert "needs a gradient" in str(training)
    assert [each.path for each in reading.values()] == ["fused"]


def test_a_model_that_calls_none_is_refused() -> None:
    class Silent(TwoReaders):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(ValueError, match="module: got Silent, which called none of its attentions"):
        rg.explain_dispatch(Silent(), torch.randn(1, 3, 4))
    with pytest.raises(TypeError, match="got Sequential, expected an Attention, or a module that holds some"):
        rg.explain_dispatch(nn.Sequential(nn.Linear(4, 4)), torch.randn(1, 3, 4))


def test_reasons_tell_how_many_keys_a_panel_reads() -> None:
    attend = rg.Attention("additive", query_dim=4, key_dim=4, hidden_dim=4, dropout=0.1)
    x = torch.randn(1, 2048, 4)

    def told(**given: object) -> str:
        return str(rg.explain_dispatch(attend, x, x, **given))

    plain, causal, window = told(), told(mask=rg.Causal()), told(mask=rg.Window(4))
    assert plain.endswith("4 panel(s) of 512 rows")
    assert causal.endswith("4 panel(s) of 512 rows beside 1280 keys on average")
    assert window.endswith("4 panel(s) of 512 rows beside at most 520 keys; not banded: dropout is drawn by position")
