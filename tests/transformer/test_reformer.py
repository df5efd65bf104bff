"""Reformer: reversible layers, chunked feed-forward maps, and the stack made of them."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard.bench.duplication import Setting, Writer
from regard.recipes.planted import Duplicate, accuracy, fit
from regard.transformer import Hashes
from regard.transformer.reversible import reversible
from tests.cases import assert_same, scrambled
from tests.transformer.common import tokens

REAL = torch.arange(11) < torch.tensor([[11], [7]])


def made(layers: int = 3, seed: int = 3, **options) -> rg.Reformer:
    torch.manual_seed(seed)
    options = {"chunk": 3, "feedforward_dim": 7, "feedforward_chunk": 4, "activation": "gelu"} | options
    return scrambled(rg.Reformer(6, 2, layers, **options)).train()


def outcome(model: nn.Module, x: Tensor, mask: Tensor | None = REAL) -> list[Tensor]:
    """The result and all gradients, with the same draws each time."""
    torch.manual_seed(5)
    x = x.detach().requires_grad_()
    result = model(x, mask)
    cotangent = tokens(*result.shape, seed=8).to(result.dtype)
    return [result.detach(), *torch.autograd.grad((result * cotangent).sum(), [x, *model.parameters()])]


def ordinary(layers, x1, x2, mask):
    for layer in layers:
        x1, x2 = layer(x1, x2, mask)
    return x1, x2


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_ordinary_differentiation(dropout, causal, monkeypatch):
    model, x = made(dropout=dropout, attention_dropout=dropout, causal=causal), tokens(2, 11, 6)
    found = outcome(model, x)
    monkeypatch.setattr("regard.transformer.reformer.reversible", ordinary)
    for one, other in zip(found, outcome(model, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_recomputed_layers_draw_what_they_drew():
    """Otherwise the test above would pass without any dropout."""
    model, x = made(dropout=0.5), tokens(2, 11, 6)
    assert not torch.equal(model(x), model(x))


def test_an_inverse_gives_the_inputs_back():
    layer = made(1).layers[0].eval()
    x1, x2 = tokens(2, 11, 6), tokens(2, 11, 6, seed=1)
    for one, other in zip(layer.inverse(*layer(x1, x2)), (x1, x2), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_layer_is_its_equations():
    layer, x1, x2 = made(1).layers[0].eval(), tokens(2, 11, 6), tokens(2, 11, 6, seed=1)
    y1 = x1 + layer.attention(layer.norm_attention(x2), mask=rg.Causal())
    y2 = x2 + layer.feedforward(layer.norm_feedforward(y1))
    for one, other in zip(layer(x1, x2, rg.Causal()), (y1, y2), strict=True):
        assert_same(one, other)


def test_the_mean_of_both_streams_comes_out():
    model, x = made(2, causal=True).eval(), tokens(2, 11, 6)
    y = x, x
    for layer in model.layers:
        y = layer(*y, rg.Causal())
    assert_same(model(x), model.final_norm((y[0] + y[1]) / 2))


def test_nothing_is_kept_of_a_layer_but_its_hashes():
    """What autograd holds on to does not grow with the number of layers."""

    def kept(layers: int) -> int:
        model, held = made(layers), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x.numel()) or x, lambda x: x):
            model(tokens(2, 11, 6).requires_grad_(), REAL)
        return sum(held)

    assert kept(5) == kept(2)


def test_hashes_are_kept_for_the_backward(monkeypatch):
    model, calls = made(2), []
    hash_of = rg.LSHAttention.hash
    monkeypatch.setattr(rg.LSHAttention, "hash", lambda *args: calls.append(1) or hash_of(*args))
    outcome(model, tokens(2, 11, 6))
    assert len(calls) == 2


def test_reversible_layers_take_any_attention():
    model = scrambled(rg.Reformer(6, 2, 2, feedforward_dim=7, attention=rg.TransformerAttention))
    x = tokens(2, 11, 6)
    with rg.execution("dense"):
        expected = outcome(model, x)
    for one, other in zip(outcome(model, x), expected, strict=True):
        assert_same(one, other)


def test_frozen_parameters_and_inputs_without_gradients():
    model, x = made(2), tokens(2, 11, 6)
    for p in model.layers[0].parameters():
        p.requires_grad_(False)
    model(x, REAL).sum().backward()
    assert all(p.grad is None for p in model.layers[0].parameters())
    assert all(p.grad is not None for p in model.layers[1].parameters())
    for p in model.parameters():
        p.requires_grad_(False)
    assert not model(x, REAL).requires_grad


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_chunked_map_is_the_map(dropout):
    torch.manual_seed(0)
    whole = scrambled(rg.FeedForward(5, 7, "gelu", dropout))
    parts = rg.ChunkedFeedForward(5, 7, "gelu", dropout, chunk=3).double()
    parts.load_state_dict(whole.state_dict())
    if dropout:
        # Masks are drawn chunk by chunk: replayed, they give the gradient of what was computed.
        x = tokens(2, 7, 5).requires_grad_()

        def run(x: Tensor) -> Tensor:
            torch.manual_seed(1)
            return parts(x)

        assert torch.autograd.gradcheck(run, (x,), fast_mode=True)
        return
    x = tokens(2, 7, 5)
    found, expected = (outcome(lambda_module(module), x, None) for module in (parts, whole))
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    with torch.no_grad():
        assert_same(parts(x), whole(x))


def lambda_module(module: nn.Module) -> nn.Module:
    """A module that takes a mask and leaves it alone."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.module(x)

    return Plain()


def test_a_chunked_map_keeps_no_hidden_units():
    feed, held = rg.ChunkedFeedForward(5, 700, chunk=3).double(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x.shape) or x, lambda x: x):
        feed(tokens(2, 7, 5).requires_grad_())
    assert not any(700 in shape and 7 in shape for shape in held)


def test_no_token_sees_a_later_one():
    model, x = made(2, causal=True).eval(), tokens(1, 11, 6)
    changed = x.clone()
    changed[:, 7:] = tokens(1, 4, 6, seed=4)
    kept = [Hashes() for _ in model.layers]
    for layer, hashes in zip(model.layers, kept, strict=True):
        attend = layer.attend
        # The same buckets: a later token may move the edge of a chunk, and with it what an earlier one sees.
        layer.attend = lambda x, mask, _=None, attend=attend, hashes=hashes: attend(x, mask, hashes)
    with torch.no_grad():
        found, other = model(x), model(changed)
    assert_same(found[:, :7], other[:, :7])
    assert not torch.allclose(found[:, 7:], other[:, 7:])


def test_padding_and_batches_change_nothing():
    model, x = made(2, causal=True, position="sinusoidal").eval(), tokens(2, 11, 6)
    found = model(x, REAL)
    assert_same(found[0], model(x[:1])[0])
    assert_same(found[1, :7], model(x[1:, :7])[0])
    assert not found[1, 7:].any()
    x[1, 7:] = math.nan
    assert_same(model(x, REAL), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_entered_again_in_the_backward(dtype):
    model, x = made(2).float().eval(), tokens(2, 11, 6).float()
    seen = []
    model.layers[0].feedforward.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        result = model(x.requires_grad_(), REAL)
    result.sum().backward()
    assert seen == [dtype == torch.bfloat16] * 2
    assert x.grad.isfinite().all()


def test_weights_of_every_layer_are_recorded_once():
    model, x = made(2), tokens(2, 11, 6).requires_grad_()
    with rg.record(model) as trace:
        model(x, REAL).sum().backward()
    assert [path for path, _ in trace.items()] == ["layers.0.attention.attention", "layers.1.attention.attention"]
    assert trace["layers.1.attention.attention"].weights.shape == (2, 2, 11, 11)


@pytest.mark.slow
def test_it_compiles():
    model, x = made(1).float().eval(), tokens(2, 11, 6).float()
    compiled = torch.compile(model, backend="eager")
    assert torch.allclose(compiled(x, REAL), model(x, REAL), atol=1e-5)


def test_duplicates_are_where_they_are_said_to_be():
    task = Duplicate(n=5, symbols=7)
    batch = task.draw(11, torch.Generator().manual_seed(0))
    sequence = batch.inputs["tokens"]
    assert sequence.shape == (11, task.length)
    assert (sequence[:, [0, 6]] == 0).all()
    assert torch.equal(sequence[:, 1:6], sequence[:, 7:])
    assert torch.equal(sequence.gather(1, batch.truth["tokens"]), batch.target)
    assert sequence.max() < task.classes


def test_it_learns_where_the_duplicate_stands():
    """The paper's task, small: more hashes find more of it, and some head looks at the answer."""
    task = Duplicate(n=15, symbols=7)
    setting = Setting(task=task, dim=32, heads=2, chunk=8, device="cpu")
    torch.manual_seed(0)
    model = Writer(setting, 2)
    fit(model, task, steps=300, lr=1e-2, batch=32)
    found = {}
    for hashes in (1, 2, 4, "full"):
        model.see(hashes)
        found[hashes] = accuracy(model, task, count=256)
    print(f"duplicate: accuracy by hashes {found}")
    assert found[1] < found[2] < found[4]
    assert found[4] > 0.95
    batch = task.draw(16, torch.Generator().manual_seed(3))
    with rg.record(model) as trace:
        model(**batch.inputs)
    weights = trace["decoder.layers.0.attention.attention"].weights[:, :, 16:31]
    place = batch.truth["tokens"][:, None, :, None].expand(16, 2, 15, 1)
    on_it = float(weights.gather(-1, place).amax(1).mean().detach())
    print(f"duplicate: weight on the place of the answer {on_it:.2f}, that of a mean {1 / 24:.2f}")
    assert on_it > 0.25


def test_a_language_model():
    model = rg.ReformerLanguageModel(11, 8, 2, 2, chunk=4)
    logits = model(torch.randint(11, (2, 9)), torch.arange(9) < torch.tensor([[9], [4]]))
    assert logits.shape == (2, 9, 11)
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_refusals():
    with pytest.raises(ValueError, match="position: got RotaryPosition, expected one of tokens"):
        rg.Reformer(8, 2, 1, position="rotary")
    with pytest.raises(TypeError, match="rounds: got 3, expected nothing beside an attention of its own"):
        rg.Reformer(8, 2, 1, attention=rg.LSHAttention, rounds=3)
    with pytest.raises(ValueError, match="layers: got 0"):
        rg.Reformer(8, 2, 0)
    with pytest.raises(ValueError, match="chunk: got 0"):
        rg.ChunkedFeedForward(8, 2, chunk=0)
    assert reversible([], torch.ones(1), torch.ones(1)) == (torch.ones(1), torch.ones(1))


def test_one_bucket_draws_no_rotations_in_the_backward_either(monkeypatch):
    """Drawn in vain they would shift whatever is drawn after them: the weights and units that are dropped."""
    model, x = made(dropout=0.3, attention_dropout=0.3, buckets=1), tokens(2, 11, 6)
    found = outcome(model, x)
    monkeypatch.setattr("regard.transformer.reformer.reversible", ordinary)
    for one, other in zip(found, outcome(model, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_widths_are_refused_by_their_names():
    with pytest.raises(ValueError, match="feedforward_dim: got 0, expected a whole number >= 1"):
        rg.Reformer(6, 2, 1, feedforward_dim=0)
    with pytest.raises(ValueError, match="feedforward_chunk: got 0, expected a whole number >= 1"):
        rg.Reformer(6, 2, 1, feedforward_chunk=0)
    with pytest.raises(ValueError, match="tokens: got width 5, expected 6"):
        made(1)(tokens(2, 11, 5))


def test_layers_that_share_an_attention_share_its_gradient():
    one = rg.LSHAttention(6, 2, chunk=3)
    model, x = (
        scrambled(rg.Reformer(6, 2, 3, feedforward_dim=7, attention=lambda dim, heads: one)).train(),
        tokens(2, 11, 6),
    )
    with rg.execution("dense"):
        expected = outcome(model, x)
    for found, other in zip(outcome(model, x), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", ["uniform", "permuted", "random"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.filterwarnings("ignore:intervene")
def test_an_intervention_is_of_the_forward_alone(how, inside):
    """The gradient is that of the call that was made, wherever the backward takes place."""
    model, x = made(2).eval(), tokens(2, 11, 6).requires_grad_()
    result = {}
    for execution in ("auto", "dense"):
        torch.manual_seed(7)
        with rg.intervene(model, how) if inside else contextlib.nullcontext(), rg.execution(execution):
            loss = model(x, REAL).pow(3).sum()
        with contextlib.nullcontext() if inside else rg.intervene(model, how):
            (result[execution],) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(result["auto"], result["dense"], rtol=1e-9, atol=1e-9)


def test_a_mode_that_changes_before_the_backward_changes_no_gradient():
    model, x = made(2, dropout=0.3), tokens(2, 11, 6).requires_grad_()
    grads = []
    for training in (True, False):
        torch.manual_seed(7)
        loss = model.train()(x, REAL).pow(3).sum()
        model.train(training)
        grads.append(torch.autograd.grad(loss, x)[0])
        assert all(module.training is training for module in model.modules())
    assert grads[0].equal(grads[1])


def test_parameters_that_changed_before_the_backward_are_refused():
    model = made(2)
    loss = model(tokens(2, 11, 6), REAL).sum()
    with torch.no_grad():
        model.layers[0].feedforward.W1.mul_(2)
    with pytest.raises(
        RuntimeError, match="parameters: got some that were changed in place, expected those of the forward"
    ):
        loss.backward()
