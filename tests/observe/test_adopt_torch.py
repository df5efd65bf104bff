"""Adopted `torch.nn` attention is the same function, and can be recorded and changed."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from torch import nn

import regard as rg
from regard.observe.adopt.multihead import AdoptedMultiheadAttention
from tests.cases import assert_same, scrambled

B, L, S, E, H = 3, 5, 7, 8, 2
CONSTRUCTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "other widths": {"kdim": 6, "vdim": 10},
    "learned key": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True},
    "both keys": {"add_bias_kv": True, "add_zero_attn": True},
}
MASKS = ["none", "padding", "padding float", "pairs", "pairs float", "pairs of heads", "padding and pairs", "mixed"]


def masks(kind, batched=True):
    """Arguments of torch's attention; no row is without a key, where torch would give NaN."""
    generator = torch.Generator().manual_seed(3)
    padding = torch.arange(S) >= torch.tensor([S, 4, 6])[:, None]
    pairs = torch.rand(L, S, generator=generator) < 0.4
    pairs[:, 1] = False
    of_heads = torch.rand(B * H if batched else H, L, S, generator=generator) < 0.4
    of_heads[..., 1] = False
    noise = torch.randn(L, S, generator=generator, dtype=torch.float64)

    def additive(x):
        return torch.zeros(x.shape, dtype=torch.float64).masked_fill(x, -math.inf)

    padding = padding if batched else padding[1]
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "padding float": {"key_padding_mask": additive(padding)},
        "pairs": {"attn_mask": pairs},
        "pairs float": {"attn_mask": additive(pairs) + noise},
        "pairs of heads": {"attn_mask": of_heads},
        "padding and pairs": {"key_padding_mask": padding, "attn_mask": pairs},
        "mixed": {"key_padding_mask": additive(padding), "attn_mask": noise},
    }[kind]


def attention(construction="plain", **more):
    module = nn.MultiheadAttention(E, H, **CONSTRUCTIONS[construction], **more)
    return scrambled(module)


def tensors(module, batched=True, self_attention=False):
    generator = torch.Generator().manual_seed(4)

    def normal(length, width):
        x = torch.randn(B, length, width, generator=generator, dtype=torch.float64)
        x = x if module.batch_first else x.transpose(0, 1)
        return x if batched else x.select(0 if module.batch_first else 1, 0)

    if self_attention:
        return (normal(L, E).requires_grad_(),) * 3
    return tuple(normal(n, d).requires_grad_() for n, d in ((L, E), (S, module.kdim), (S, module.vdim)))


def outcome(module, inputs, **options):
    """Output, weights, and every gradient."""
    output, weights = module(*inputs, **options)
    loss = output.square().sum() + (0 if weights is None else weights.square().sum())
    leaves = [*dict.fromkeys(inputs), *module.parameters()]
    return [output, weights, *torch.autograd.grad(loss, leaves, allow_unused=True)]


def assert_same_outcome(found, expected):
    for first, second in zip(found, expected, strict=True):
        assert (first is None) == (second is None)
        if second is not None:
            assert_same(first, second)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_the_same_function(construction, mask):
    for batch_first, need_weights, average in itertools.product((True, False), (True, False), (True, False)):
        module = attention(construction, batch_first=batch_first)
        inputs = tensors(module)
        options = {"need_weights": need_weights, "average_attn_weights": average, **masks(mask)}
        expected = outcome(module, inputs, **options)
        rg.adopt(module)
        assert_same_outcome(outcome(module, inputs, **options), expected)


@pytest.mark.parametrize("mask", MASKS)
def test_without_a_batch(mask):
    for batch_first, need_weights in itertools.product((True, False), repeat=2):
        module = attention(batch_first=batch_first)
        inputs = tensors(module, batched=False)
        options = {"need_weights": need_weights, **masks(mask, batched=False)}
        expected = outcome(module, inputs, **options)
        assert_same_outcome(outcome(rg.adopt(module), inputs, **options), expected)


@pytest.mark.parametrize("construction", ["plain", "learned key"])
@pytest.mark.parametrize("lengths", ["self", "cross"])
def test_the_causal_hint(construction, lengths):
    module = attention(construction, batch_first=True)
    inputs = tensors(module, self_attention=lengths == "self")
    mask = torch.ones(L, inputs[1].shape[1]).triu(1).bool()
    for need_weights, padded in itertools.product((True, False), repeat=2):
        options = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
        if padded:
            options["key_padding_mask"] = torch.arange(inputs[1].shape[1]) >= torch.tensor([[4], [5], [3]])
        rg.unadopt(module)
        expected = outcome(module, inputs, **options)
        assert_same_outcome(outcome(rg.adopt(module), inputs, **options), expected)
    with pytest.raises(RuntimeError, match="attn_mask: got None, expected the causal mask"):
        module(*inputs, is_causal=True)


def test_a_row_with_nothing_to_attend_to_is_zero_where_torch_has_nan():
    module = attention(batch_first=True, bias=False)
    inputs = tensors(module)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[1] = True
    expected, _ = module(*inputs, key_padding_mask=padding)
    assert expected[1].isnan().all()
    output, weights = rg.adopt(module)(*inputs, key_padding_mask=padding)
    assert not output[1].any()
    assert not weights[1].any()
    assert_same(output[[0, 2]], expected[[0, 2]])


def transformer(kind):
    torch.manual_seed(0)
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True, dropout=0.0)
        return nn.TransformerEncoder(layer, 2).double()
    if kind == "encoder, norm first":
        layer = nn.TransformerEncoderLayer(E, H, 16, norm_first=True, dropout=0.0)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    if kind == "decoder":
        return nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 16, batch_first=True, dropout=0.0), 2).double()
    return nn.Transformer(E, H, 2, 2, 16, batch_first=True, dropout=0.0).double()


def run(model, kind, x, y, padding):
    """The tokens that are not padding, batch first."""
    if kind == "encoder, norm first":
        return model(x.transpose(0, 1), src_key_padding_mask=padding).transpose(0, 1)[~padding]
    if kind == "encoder":
        return model(x, src_key_padding_mask=padding)[~padding]
    causal = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=torch.float64)
    if kind == "decoder":
        return model(y, x, tgt_mask=causal, memory_key_padding_mask=padding, tgt_is_causal=True)
    return model(x, y, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding)


TRANSFORMERS = {
    "encoder": ["layers.0.self_attn", "layers.1.self_attn"],
    "encoder, norm first": ["layers.0.self_attn", "layers.1.self_attn"],
    "decoder": ["layers.0.self_attn", "layers.0.multihead_attn", "layers.1.self_attn", "layers.1.multihead_attn"],
    "whole": [
        *("encoder.layers.0.self_attn", "encoder.layers.1.self_attn"),
        *("decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"),
        *("decoder.layers.1.self_attn", "decoder.layers.1.multihead_attn"),
    ],
}


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("kind", TRANSFORMERS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_transformers(kind, training, grad):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, S, E, generator=generator, dtype=torch.float64, requires_grad=grad)
    y = torch.randn(B, L, E, generator=generator, dtype=torch.float64, requires_grad=grad)
    padding = torch.arange(S) >= torch.tensor([S, 4, 6])[:, None]
    model = transformer(kind).train(training).requires_grad_(grad)

    def both():
        output = run(model, kind, x, y, padding)
        if not grad:
            return [output]
        wanted = [x, y, *model.parameters()]
        return [output, *torch.autograd.grad(output.square().sum(), wanted, allow_unused=True)]

    # Without gradients and in evaluation the encoder takes its fast path, on nested tensors.
    with torch.set_grad_enabled(grad):
        expected = both()
        with rg.adopted(model), rg.record(model) as trace:
            found = both()
        assert_same_outcome(found, expected)
        assert_same_outcome(both(), expected)
    assert list(trace) == TRANSFORMERS[kind]
    weights = trace[TRANSFORMERS[kind][0]].weights
    assert weights.shape[:2] == (B, H)
    assert_same(weights.sum(-1), torch.ones_like(weights[..., 0]))
    if "encoder" in TRANSFORMERS[kind][0] or kind.startswith("encoder"):
        assert not weights[1, ..., 4:].any()


def test_recorded_weights_are_those_that_torch_returns():
    module = rg.adopt(attention(batch_first=True))
    inputs = tensors(module)
    with rg.record(module) as trace:
        _, weights = module(*inputs, average_attn_weights=False, **masks("padding and pairs"))
    assert_same(trace.weights, weights)


def test_interventions_reach_it():
    module = rg.adopt(attention(batch_first=True))
    inputs, options = tensors(module), masks("padding float")
    plain, plain_weights = module(*inputs, **options)
    kept = (~masks("padding")["key_padding_mask"]).double()
    with rg.intervene(module, "uniform"):
        output, weights = module(*inputs, **options)
    assert_same(weights, (kept / kept.sum(-1, keepdim=True))[:, None, :].expand(B, L, S))
    assert (output - plain).abs().max() > 1e-3
    # A float mask is a mask too: permuted weights do not fall on padding.
    with rg.intervene(module, "permuted"):
        _, weights = module(*inputs, **options)
    assert not weights[1, :, 4:].any()
    assert_same(weights.sum(-1), plain_weights.sum(-1))


@pytest.mark.parametrize("execution", ["dense", "blockwise", "fused"])
def test_executions_reach_it(execution):
    module = attention(batch_first=True)
    inputs = tensors(module)
    expected = outcome(module, inputs, **masks("padding and pairs"))
    with rg.execution(execution), rg.record(rg.adopt(module)) as trace:
        assert_same_outcome(outcome(module, inputs, **masks("padding and pairs")), expected)
    assert len(trace) == 1


def test_dropout_drops_weights_in_training_alone():
    module = rg.adopt(attention(batch_first=True, dropout=0.5))
    inputs = tensors(module)
    _, weights = module(*inputs, average_attn_weights=False)
    dropped = weights == 0
    assert 0.3 < dropped.double().mean() < 0.7
    with rg.record(module) as trace:
        _, weights = module(*inputs, average_attn_weights=False)
    assert_same(weights[weights != 0], 2 * trace.weights[weights != 0])
    assert (module.eval()(*inputs)[1] > 0).all()


def test_compile_and_autocast():
    module = attention(batch_first=True)
    x = torch.randn(B, L, E, dtype=torch.float64)
    expected, _ = module(x, x, x)
    rg.adopt(module)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_same(compiled(x, x, x)[0], expected)
    module, x = module.float(), x.float()
    with torch.autocast("cpu", torch.bfloat16):
        output, weights = module(x, x, x)
    assert output.dtype == weights.dtype == torch.bfloat16
    assert output.isfinite().all()


def test_the_model_stays_itself():
    model = transformer("encoder")
    keys, hooks = list(model.state_dict()), [len(m._forward_pre_hooks) for m in model.modules()]
    variables = [set(vars(m)) for m in model.modules()]
    assert rg.adopt(model) is model
    assert all(isinstance(layer.self_attn, nn.MultiheadAttention) for layer in model.layers)
    assert isinstance(model, nn.TransformerEncoder)
    assert list(model.state_dict()) == keys
    assert [set(vars(m)) for m in model.modules()] == variables
    rg.adopt(model)
    assert rg.unadopt(model) is model
    assert type(model) is nn.TransformerEncoder
    assert all(type(layer.self_attn) is nn.MultiheadAttention for layer in model.layers)
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert model.use_nested_tensor


def test_copies_of_an_adopted_model_are_adopted():
    model = rg.adopt(transformer("encoder").eval())
    x = torch.randn(B, L, E, dtype=torch.float64)
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with rg.record(twin) as trace, torch.no_grad():
            assert_same(twin(x), expected)
        assert len(trace) == 2
        rg.unadopt(twin)
        assert type(twin.layers[0].self_attn) is nn.MultiheadAttention
        assert not twin.layers[0].self_attn._forward_pre_hooks
    assert isinstance(model.layers[0].self_attn, AdoptedMultiheadAttention)


def test_adopting_for_a_while_leaves_what_was_adopted_before():
    model = nn.ModuleList([rg.adopt(attention()), attention()])
    with rg.adopted(model):
        assert [type(m) for m in model] == [AdoptedMultiheadAttention] * 2
    assert [type(m) for m in model] == [AdoptedMultiheadAttention, nn.MultiheadAttention]
    with pytest.raises(RuntimeError, match="mine"), rg.adopted(model):
        raise RuntimeError("mine")
    assert type(model[1]) is nn.MultiheadAttention


def test_other_models_keep_the_fast_path():
    adopted, other = rg.adopt(transformer("encoder")).eval(), transformer("encoder").eval()
    x = torch.randn(B, L, E, dtype=torch.float64)
    called = []
    other.layers[0].self_attn.forward = lambda *args, **rest: called.append(args)
    with torch.no_grad():
        adopted(x)
        other(x)
    assert not called


def test_refusals():
    with pytest.raises(TypeError, match="model: got function, expected a torch.nn.Module"):
        rg.adopt(lambda x: x)
    with pytest.raises(
        ValueError, match=r"model: got Linear, expected a model that holds torch.nn.MultiheadAttention or"
    ):
        rg.adopt(nn.Linear(2, 2))
    assert isinstance(rg.adopt(rg.Attention("dot")), rg.Attention)
    module = rg.adopt(attention(batch_first=True))
    x = tensors(module)
    with pytest.raises(TypeError, match="attn_mask: got a tensor of torch.int64, expected booleans or floating-point"):
        module(*x, attn_mask=torch.ones(L, S, dtype=torch.long))
    nested = torch.nested.nested_tensor([torch.randn(2, E), torch.randn(3, E)])
    with pytest.raises(NotImplementedError, match="query: got a nested tensor, expected a padded one"):
        module(nested, nested, nested)
