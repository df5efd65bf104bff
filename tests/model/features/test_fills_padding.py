"""A feature model that says it leaves zeros at padding spares attention a look at it: what it says must be true."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regard as rg
from regard.model import Batch, Chain, Classifier, Embedding, TaskModel

SAYING = {
    "embedding": lambda: Embedding(9, 5, dropout=0.3),
    "chain": lambda: Chain(Embedding(9, 5), rg.RecurrentEncoder(5, 3)),
}


def ragged() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    mask = torch.rand(4, 7) > 0.4
    mask[1] = False
    return torch.randint(9, (4, 7)), mask


@pytest.mark.parametrize("name", SAYING)
def test_zero_where_it_says_so(name: str) -> None:
    module, (tokens, mask) = SAYING[name](), ragged()
    assert module.fills_padding
    for real in (mask, mask.sort(-1, descending=True).values):
        found = module(tokens, real)
        assert found[real].any(-1).all()
        assert not found[~real].any()


def test_a_chain_says_what_its_last_part_says() -> None:
    assert not Chain(Embedding(9, 5), rg.model.Convolution1d(5, 6)).fills_padding


@pytest.mark.parametrize("holes", [True, False])
def test_a_recurrent_network_skips_vectors_that_are_not_filled(holes: bool) -> None:
    embedding, encode = Embedding(9, 5), rg.RecurrentEncoder(5, 3)
    tokens, mask = ragged()
    mask = mask if holes else torch.arange(7) < torch.tensor([[3], [7], [1], [5]])
    tokens = torch.where(mask, tokens.clamp(min=1), 0)
    with torch.no_grad():
        embedding.table.weight[0] = torch.nan
    results = [Chain(embedding, encode)(tokens, mask), encode(embedding(tokens, mask), mask)]
    assert torch.equal(*results)
    grads = [torch.autograd.grad(found.square().sum(), embedding.table.weight)[0] for found in results]
    assert torch.equal(*grads)
    assert grads[0].isfinite().all()


@pytest.mark.parametrize("name", SAYING)
def test_the_attention_of_a_task_model_is_told(name: str) -> None:
    features, (tokens, mask) = SAYING[name](), ragged()
    seen: list[object] = []
    width = features(tokens, mask).shape[-1]
    attention = rg.Attention("query-free", key_dim=width, hidden_dim=4)
    attention.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["mask"]), with_kwargs=True)
    for module in (features, Chain(features, Shift())):
        model = TaskModel(module, None, attention, Classifier(width, 2)).eval()
        told = model(Batch({"tokens": tokens}, {"tokens": mask}))
        assert bool(told.isfinite().all())
    assert [mask.real is not None for mask in seen] == [True, False]


class Shift(nn.Module):
    """What it writes at padding is not a number."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask.unsqueeze(-1), x, torch.nan)
