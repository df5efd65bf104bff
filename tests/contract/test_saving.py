"""Modules are ordinary modules: what saves, copies and shares those works here."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.utils.prune
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file, save_file

import regard as rg
from tests.contract.cases import CASES, Case

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def assert_same_function(case: Case, module: torch.nn.Module, other: torch.nn.Module) -> None:
    assert torch.equal(case.run(module, case.inputs()), case.run(other, case.inputs()))


def another(case: Case) -> torch.nn.Module:
    """The same mechanism with other parameters."""
    module = case.build()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.neg_().sub_(1)
    return module


@every_case
def test_state_dict(case):
    module, other = case.build(), another(case)
    if list(module.parameters()):
        assert not torch.equal(case.run(module, case.inputs()), case.run(other, case.inputs()))
    other.load_state_dict(module.state_dict())
    assert_same_function(case, module, other)


@every_case
def test_checkpoint_that_runs_no_code(case):
    module, other, buffer = case.build(), another(case), io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert_same_function(case, module, other)


@every_case
def test_safetensors(case, tmp_path):
    module, other = case.build(), another(case)
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_same_function(case, module, other)


@every_case
def test_pickle(case):
    module = case.build()
    assert_same_function(case, module, pickle.loads(pickle.dumps(module)))


@every_case
def test_deepcopy_is_another_module(case):
    module, inputs = case.build(), case.inputs()
    twin, before = copy.deepcopy(module), case.run(module, inputs)
    assert_same_function(case, module, twin)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(torch.nan)
    assert torch.equal(case.run(module, inputs), before)


@every_case
def test_repr_is_short_and_names_the_parts(case):
    text = repr(case.build())
    assert type(case.build()).__name__ in text
    assert len(text) < 2000


class Shared(rg.Attention, PyTorchModelHubMixin):
    """What a user writes to put an attention on the hub."""


@pytest.mark.parametrize(
    "options",
    [
        {"score": "additive", "query_dim": 2, "key_dim": 11, "hidden_dim": 17},
        {"score": "general", "align": "entmax", "query_dim": 2, "key_dim": 11, "alpha": 1.3, "dropout": 0.25},
        {"score": "scaled-dot", "align": "local-monotonic", "window": 2, "impl": "dense"},
    ],
    ids=lambda options: options["score"],
)
def test_hub_mixin(options, tmp_path):
    module = Shared(**options).eval()
    module.save_pretrained(tmp_path)
    back = Shared.from_pretrained(tmp_path).eval()
    assert repr(back) == repr(module)
    width = options.get("query_dim", 11)
    query, key = torch.randn(3, 5, width), torch.randn(3, 7, 11)
    assert torch.equal(back(query, key), module(query, key))


def test_hooks_before_a_score_run():
    """Pruning and weight norms of torch make a parameter there, from what is learned."""
    attend, x = rg.Attention("additive", query_dim=4, key_dim=4, hidden_dim=6), torch.randn(2, 3, 4)
    torch.nn.utils.prune.l1_unstructured(attend.score, "W1", amount=0.3)
    before, state = attend(x, x), attend.state_dict()
    state["score.W1_orig"] = state["score.W1_orig"] * 5
    attend.load_state_dict(state)
    assert not torch.equal(attend(x, x), before)
    assert torch.equal(attend(x, x), attend(x, x))
    optimizer = torch.optim.SGD(attend.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        attend(x, x).sum().backward()
        optimizer.step()
    assert (attend.score.W1 == 0).float().mean() >= 0.25
