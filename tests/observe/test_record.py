"""`record` sees every attention of a model and touches none."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import regard as rg
from regard.observe.record import paths_of
from regard.ops import hooks
from tests.cases import assert_same
from tests.observe.models import DIM, PATHS, batch, model


def test_paths_are_those_of_named_modules():
    m = model()
    with rg.record(m) as trace:
        m(batch())
    assert list(trace) == PATHS
    assert set(trace) <= {name for name, _ in m.named_modules()}
    assert len(trace) == 3
    assert "pool" in trace
    assert "pool.score" not in trace
    assert repr(trace) == "Trace('encoder.0.attention': 1, 'encoder.1.attention': 1, 'pool': 2)"


def test_calls_of_one_module_are_a_list_in_order():
    m, x = model(), batch()
    with rg.record(m) as trace:
        m(x)
    first, second = trace["pool"]
    assert_same(second.call.key, 2 * first.call.key)
    with pytest.raises(
        AttributeError, match=r"trace\['pool'\] holds 2 calls: take one, such as trace\['pool'\]\[0\].weights"
    ):
        _ = trace["pool"].weights
    assert trace["encoder.0.attention"].weights.shape == (3, 7, 7)
    assert torch.equal(trace["encoder.0.attention"].weights, trace["encoder.0.attention"][0].weights)


def test_a_trace_of_one_module_is_asked_directly():
    attend, x = rg.Attention("dot"), torch.randn(2, 5, 4)
    with rg.record(attend) as trace:
        attend(x, x)
    assert torch.equal(trace.weights, trace[""][0].weights)
    m = model()
    with rg.record(m) as trace:
        m(batch())
    with pytest.raises(AttributeError, match="holds 3 modules: take one"):
        _ = trace.weights


def test_a_single_query_has_no_query_axis():
    m = model()
    with rg.record(m) as trace:
        m(batch())
    assert trace["pool"][0].weights.shape == (3, 7)
    assert trace["pool"][0].entropy().shape == (3,)
    assert trace["pool"][0].topk(2)[1].shape == (3, 2)


def test_features_come_last():
    attend = rg.Attention(rg.Additive(DIM, DIM, 3, features=DIM))
    x = batch().float()
    with rg.record(attend) as trace:
        attend(x, x)
    assert trace.weights.shape == (3, 7, 7, DIM)
    assert trace.entropy().shape == (3, 7, DIM)
    assert trace.mass_received().shape == (3, 7, DIM)
    assert trace.topk(2)[0].shape == (3, 7, 2, DIM)
    assert torch.allclose(trace.weights.sum(-2), torch.ones(3, 7, DIM))


@pytest.mark.parametrize("depth", [1, 2])
def test_wrappers_leave_no_trace_in_paths(depth):
    m = model()
    wrapped = m
    for _ in range(depth):
        wrapped = AveragedModel(wrapped)
    with rg.record(wrapped) as trace:
        wrapped(batch())
    assert list(trace) == PATHS


def test_wrappers_inside_leave_no_trace_either():
    m = model()
    m.encoder[1] = AveragedModel(m.encoder[1])
    with rg.record(m) as trace:
        m(batch())
    assert list(trace) == PATHS


def test_data_parallelism_leaves_no_trace_in_paths():
    m = model()
    assert list(paths_of(nn.DataParallel(m)).values()) == ["", *paths_of(m).values()]


def test_an_only_child_called_module_keeps_its_name():
    class Block(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args):
            return self.module(*args)

    x = batch().float()
    m = Block(Block(rg.Attention("dot")))
    with rg.intervene(m, "uniform", at="module.module"), rg.record(m) as trace:
        m(x, x)
    assert list(trace) == ["module.module"]


def test_a_child_called_module_keeps_its_name():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.norm = rg.Attention("dot"), nn.LayerNorm(DIM)

        def forward(self, x):
            return self.norm(x + self.module(x, x))

    residual = nn.Sequential(Residual(), Residual())
    with rg.record(residual) as trace:
        residual(batch().float())
    assert list(trace) == ["0.module", "1.module"]


def test_compiled_models_run_eagerly_and_are_recorded():
    torch._dynamo.reset()
    m, x = model(), batch()
    compiled = torch.compile(m, backend="aot_eager")
    expected = compiled(x)
    with rg.record(compiled) as trace:
        found = compiled(x)
    assert list(trace) == PATHS
    assert_same(found, expected)
    with rg.intervene(compiled, "uniform"):
        assert (compiled(x) - expected).abs().max() > 1e-3
    assert_same(compiled(x), expected)


def test_a_compiled_part_is_recorded_too():
    torch._dynamo.reset()
    m, x = model(), batch()
    m.encoder[0].compile(backend="aot_eager")
    m(x)
    with rg.record(m) as trace:
        m(x)
    assert list(trace) == PATHS


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_not_recorded_twice(reentrant):
    m, plain, x = model(checkpointing=reentrant), model(), batch().requires_grad_()
    with rg.record(m) as trace:
        m(x).square().sum().backward()
    assert [len(trace[path]) for path in PATHS] == [1, 1, 2]
    plain(x).square().sum().backward()
    for first, second in zip(m.parameters(), plain.parameters(), strict=True):
        assert_same(first.grad, second.grad)


def test_weights_recorded_under_checkpointing_have_their_gradient():
    grads = []
    for m in (model(checkpointing=False), model()):
        x = batch().requires_grad_()
        with rg.record(m) as trace:
            m(x)
        trace["encoder.1.attention"].entropy().sum().backward()
        grads.append(x.grad)
    assert_same(*grads)


def test_an_intervention_holds_in_the_recomputation_inside_it():
    grads = []
    for m in (model(checkpointing=False), model()):
        x = batch().requires_grad_()
        with rg.intervene(m, "uniform"):
            m(x).square().sum().backward()
        grads.append(x.grad)
    assert_same(*grads)


def test_only_the_model_that_was_asked_for_is_recorded():
    m, other, x = model(), model(), batch()
    with rg.record(m) as trace:
        other(x)
        m.encoder[0](x)
    assert list(trace) == ["encoder.0.attention"]


def test_two_records_at_once():
    m, x = model(), batch()
    with rg.record(m) as outer:
        m(x)
        with rg.record(m.encoder[0], "entropy") as inner:
            m(x)
    assert len(outer["pool"]) == 4
    assert list(inner) == ["attention"]
    assert torch.equal(inner.entropy(), outer["encoder.0.attention"][1].entropy())


def test_who_stops_watching_meanwhile_hides_no_call():
    # As another thread may, between one observer and the next.
    def leaving(module, call):
        hooks.observers.remove(leaving)

    attend, x = rg.Attention("dot"), torch.randn(1, 5, 4)
    hooks.observers.append(leaving)
    with rg.record(attend) as trace:
        attend(x, x)
    assert len(trace[""]) == 1


def test_the_model_is_not_modified():
    m, x = model(), batch()
    before, modules = pickle.dumps(m), [(name, type(part), set(vars(part))) for name, part in m.named_modules()]
    with rg.record(m) as trace, rg.intervene(m, "permuted"):
        m(x)
        assert pickle.dumps(m) == before
        twin = copy.deepcopy(m)
        assert [(name, type(part), set(vars(part))) for name, part in m.named_modules()] == modules
        twin(x)
        pickle.loads(pickle.dumps(m))(x)
    assert len(trace["pool"]) == 2
    assert pickle.dumps(m) == before


def test_a_trace_outlives_the_model():
    m, x = model(), batch()
    with rg.record(m) as trace:
        m(x)
    expected = trace["encoder.0.attention"].weights
    m = pickle.loads(pickle.dumps(m))
    assert torch.equal(trace["encoder.0.attention"].weights, expected)


def test_a_trace_is_copied_and_pickled():
    m = model()
    with rg.record(m) as trace, torch.no_grad():
        m(batch())
    for twin in (copy.deepcopy(trace), pickle.loads(pickle.dumps(trace))):
        assert list(twin) == PATHS
        assert torch.equal(twin["encoder.0.attention"].weights, trace["encoder.0.attention"].weights)


def test_an_error_inside_leaves_nothing_behind():
    m = model()
    with pytest.raises(RuntimeError, match="mine"), rg.record(m), rg.intervene(m, "uniform"):
        raise RuntimeError("mine")
    assert not rg.ops.hooks.observers
    assert not rg.ops.hooks.interventions


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_fields_of_a_forward_without_gradients(guard):
    m, x = model(), batch()
    with rg.record(m) as trace:
        m(x)
    with rg.record(m) as without, guard():
        m(x)
    assert torch.equal(without["encoder.0.attention"].weights, trace["encoder.0.attention"].weights)
    assert torch.equal(without["encoder.1.attention"].entropy(), trace["encoder.1.attention"].entropy())


def test_named_fields_are_all_that_is_kept():
    m = model()
    with rg.record(m, "entropy", topk=2) as trace:
        m(batch())
    kept = trace["encoder.0.attention"]
    assert not kept.entropy().requires_grad
    assert repr(kept[0]) == "Recorded('encoder.0.attention': entropy, topk)"
    with pytest.raises(AttributeError, match="does not hold 'weights': name it when recording or saving"):
        _ = kept.weights
    with pytest.raises(AttributeError, match="has no call: it was recorded with named fields"):
        _ = kept.call


def test_refusals():
    m = model()
    with pytest.raises(ValueError, match=r"fields: got 'entropi', expected some of .*Did you mean 'entropy'"):
        with rg.record(m, "entropi"):
            pass
    with pytest.raises(TypeError, match=r"model: got function, expected a torch.nn.Module"):
        with rg.record(lambda x: x):
            pass
    with rg.record(m) as trace:
        pass
    with pytest.raises(KeyError, match=r"nothing was recorded, so there is no 'pool'; .*regard.adopt"):
        _ = trace["pool"]
    with rg.record(m) as trace:
        m(batch())
    with pytest.raises(KeyError, match=r"path: got 'poool', expected a recorded attention. Did you mean 'pool'"):
        _ = trace["poool"]


def test_a_model_without_attention_is_said_to_have_none():
    x = torch.randn(3, 2, 8)
    for m in (nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2)):
        said = rf"record\({type(m).__name__}\): the model holds no attention, so nothing was recorded.*regard.adopt"
        with pytest.warns(UserWarning, match=said) as found, rg.record(m) as trace:
            m(x)
        assert len(trace) == 0
        assert found[0].filename == __file__


def transformer():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=16))


@pytest.mark.parametrize(
    "make",
    [
        lambda: model(),
        lambda: AveragedModel(model()),
        lambda: nn.DataParallel(model()),
        lambda: torch.compile(model()),
        lambda: rg.adopt(nn.TransformerEncoderLayer(8, 2)),
        lambda: rg.adopt(transformer()),
        lambda: rg.adopt(transformer()).encoder.layer[0],
        lambda: nn.Sequential(rg.adopt(transformer())),
        lambda: rg.GraphAttention(6, heads=2),
        lambda: rg.DynamicRouting((4, 2), capsules=3),
        lambda: rg.PointerNetwork(4, 6),
    ],
)
def test_attention_that_is_not_called_is_no_reason_to_warn(make):
    m = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with rg.record(m) as trace:
            pass
    assert len(trace) == 0


def test_a_module_of_your_own_that_is_seen_is_no_reason_to_warn():
    class Own(nn.Module):
        def forward(self, x):
            hooks.seen(self, rg.Attention("dot").call(x, x))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with rg.record(m := Own()) as trace:
            m(torch.randn(3, 4))
    assert trace.weights.shape == (3, 3)
