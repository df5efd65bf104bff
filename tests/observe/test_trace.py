"""A trace on disk: whole or not at all, and never mistaken for something else."""

import os

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

import regard as rg
from tests.observe.models import DIM, PATHS, batch, model


@pytest.fixture
def trace():
    m = model()
    with rg.record(m) as trace, torch.no_grad():
        m(batch())
    return trace


def test_weights_are_saved_when_nothing_is_named(trace, tmp_path):
    trace.save(tmp_path / "trace.safetensors")
    back = rg.load_trace(tmp_path / "trace.safetensors")
    assert list(back) == PATHS
    for path in PATHS:
        assert len(back[path]) == len(trace[path])
        for first, second in zip(back[path], trace[path], strict=True):
            assert torch.equal(first.weights, second.weights)
    with pytest.raises(AttributeError, match="does not hold 'entropy'"):
        back["encoder.0.attention"].entropy()


def test_named_fields_are_saved(trace, tmp_path):
    region = torch.arange(7) < 3
    trace.save(tmp_path / "trace.safetensors", "entropy", "scores", topk=3, mass_on=region)
    back = rg.load_trace(str(tmp_path / "trace.safetensors"))["encoder.1.attention"]
    own = trace["encoder.1.attention"]
    assert torch.equal(back.entropy(), own.entropy())
    assert torch.equal(back.scores, own.scores)
    assert torch.equal(back.mass_on(), own.mass_on(region))
    for first, second in zip(back.topk(), own.topk(3), strict=True):
        assert torch.equal(first, second)


def test_a_loaded_trace_is_saved_again(trace, tmp_path):
    trace.save(tmp_path / "one", "weights", "entropy")
    rg.load_trace(tmp_path / "one").save(tmp_path / "two", "entropy")
    again = rg.load_trace(tmp_path / "two")
    assert torch.equal(again["pool"][1].entropy(), trace["pool"][1].entropy())
    with pytest.raises(AttributeError, match="does not hold 'weights'"):
        rg.load_trace(tmp_path / "two").save(tmp_path / "three", "weights")


@pytest.mark.parametrize("features", [None, DIM])
def test_what_was_recorded_by_name_is_saved_when_nothing_is_named(features, tmp_path):
    attend, x = rg.Attention("additive", query_dim=DIM, key_dim=DIM, hidden_dim=3, features=features), batch().float()
    with rg.record(attend, "entropy", topk=2, mass_on=torch.arange(7) < 3) as trace:
        attend(x, x)
        attend(x, x)
    trace.save(tmp_path / "one")
    rg.load_trace(tmp_path / "one").save(tmp_path / "two")
    for name in ("one", "two"):
        for back, own in zip(rg.load_trace(tmp_path / name)[""], trace[""], strict=True):
            assert torch.equal(back.entropy(), own.entropy())
            assert torch.equal(back.mass_on(), own.mass_on())
            assert all(torch.equal(*pair) for pair in zip(back.topk(), own.topk(), strict=True))
            with pytest.raises(AttributeError, match="does not hold 'weights'"):
                _ = back.weights


def test_features_stay_last(tmp_path):
    attend, x = rg.Attention(rg.Additive(DIM, DIM, 3, features=DIM)), batch().float()
    with rg.record(attend) as trace:
        attend(x, x)
    trace.save(tmp_path / "trace", "weights", topk=2)
    back = rg.load_trace(tmp_path / "trace")
    assert torch.equal(back.weights, trace.weights)
    for first, second in zip(back.topk(), trace.topk(2), strict=True):
        assert torch.equal(first, second)


def test_folders_are_made(trace, tmp_path):
    trace.save(tmp_path / "new" / "folder" / "trace")
    assert rg.load_trace(tmp_path / "new" / "folder" / "trace")


def test_nothing_but_the_file_is_left(trace, tmp_path):
    trace.save(tmp_path / "trace")
    assert os.listdir(tmp_path) == ["trace"]


def test_an_interrupted_save_leaves_the_previous_file(trace, tmp_path, monkeypatch):
    trace.save(tmp_path / "trace", "entropy")
    before = (tmp_path / "trace").read_bytes()

    def interrupted(tensors, path, **rest):
        with open(path, "wb") as file:
            file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.torch, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trace.save(tmp_path / "trace")
    assert (tmp_path / "trace").read_bytes() == before
    assert os.listdir(tmp_path) == ["trace"]


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(trace, tmp_path, kept):
    trace.save(tmp_path / "trace")
    whole = (tmp_path / "trace").read_bytes()
    (tmp_path / "trace").write_bytes(whole[:kept])
    with pytest.raises(
        ValueError, match=r"path: got '.*trace' \(.*\), expected a complete safetensors file written by"
    ):
        rg.load_trace(tmp_path / "trace")


def test_a_foreign_file_is_refused(tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "model")
    with pytest.raises(ValueError, match=r"path: got '.*model', expected a file written by Trace.save"):
        rg.load_trace(tmp_path / "model")
    (tmp_path / "text").write_text("{}" * 100)
    with pytest.raises(ValueError, match="expected a complete safetensors file"):
        rg.load_trace(tmp_path / "text")
    with pytest.raises(FileNotFoundError):
        rg.load_trace(tmp_path / "nowhere")


def test_a_folder_is_no_trace(tmp_path):
    with pytest.raises(IsADirectoryError, match="path: got the folder .*, expected a file written by Trace.save"):
        rg.load_trace(tmp_path)


def test_an_empty_trace_says_that_it_is_empty():
    with rg.record(rg.Attention("dot")) as trace:
        pass
    with pytest.raises(
        AttributeError, match=r"nothing was recorded, so there is no 'weights'; did the model run inside"
    ):
        _ = trace.weights


@pytest.mark.parametrize("features", [None, 4])
@pytest.mark.parametrize("impl", ["auto", "dense"])
def test_weights_of_chosen_queries_are_rows_of_all(features, impl):
    attend = rg.Attention("additive", query_dim=3, key_dim=5, hidden_dim=2, features=features).double()
    query, key = torch.randn(2, 11, 3).double(), torch.randn(1, 7, 5).double()
    value = torch.randn(2, 7, 4).double()
    with rg.execution(impl, panel=2), rg.record(attend) as trace:
        attend(query, key, value, mask=rg.Padding(torch.tensor([7, 2])))
        chosen = trace.weights_of([3, 4, 5, 0, -1])
        assert torch.equal(chosen, trace.weights[:, [3, 4, 5, 0, 10]])
        assert torch.equal(trace.weights_of(6), trace.weights[:, 6:7])
    chosen.square().sum().backward()
    assert attend.score.W1.grad.abs().sum() > 0


def test_no_other_queries_are_computed(monkeypatch):
    attend, x = rg.Attention("dot"), torch.randn(1000, 3)
    with rg.record(attend) as trace:
        attend(x, x)
    seen = []
    weights = type(trace.call).weights
    monkeypatch.setattr(
        type(trace.call), "weights", lambda self, i=None, **given: seen.append(i) or weights(self, i, **given)
    )
    trace.weights_of([500, 501, 7])
    assert seen == [range(500, 502), range(7, 8)]


@pytest.mark.parametrize(
    "queries",
    [
        *([], [11], [-12], [1.5], [True], "a", True, 1.5, None, slice(5, 5), slice(1.5)),
        *(torch.tensor([True] * 11), torch.tensor([0.5]), torch.tensor([[1, 2]]), torch.tensor([11]), torch.tensor([])),
        *(np.array([True]), np.array([0.5]), np.array([[1, 2]])),
    ],
    ids=repr,
)
def test_places_that_are_none_are_refused(queries):
    attend, x = rg.Attention("dot"), torch.randn(11, 3)
    with rg.record(attend) as trace:
        attend(x, x)
    with pytest.raises(ValueError, match="queries: got .*whole numbers from -11 to 10"):
        trace.weights_of(queries)


def test_weights_of_a_single_query_or_of_edges_are_refused():
    attend, x = rg.Attention("dot"), torch.randn(11, 3)
    with rg.record(attend) as trace:
        attend(x[0], x)
    with pytest.raises(ValueError, match="weights_of: the call had a single query"):
        trace.weights_of(0)
    layer = rg.GraphAttention(3, 1)
    with rg.record(layer) as trace:
        layer(x, torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(ValueError, match="weights_of: along edges there is a weight for each edge"):
        trace.weights_of(0)


@pytest.mark.parametrize(
    ("queries", "rows"),
    [
        (torch.tensor([3, -1, 0]), [3, 10, 0]),
        (torch.tensor([2, 5], dtype=torch.uint8), [2, 5]),
        (np.array([3, -1, 0]), [3, 10, 0]),
        (np.array([4], dtype=np.uint8), [4]),
        ([np.int64(4), 5], [4, 5]),
        (np.int64(4), [4]),
        (range(2, 5), [2, 3, 4]),
        (slice(2, 5), [2, 3, 4]),
        (slice(None, None, -4), [10, 6, 2]),
        (slice(-2, None), [9, 10]),
    ],
    ids=repr,
)
def test_places_are_said_as_in_python_numpy_and_torch(queries, rows):
    attend, x = rg.Attention("dot"), torch.randn(11, 3)
    with rg.record(attend) as trace:
        attend(x, x)
    assert torch.equal(trace.weights_of(queries), trace.weights[rows])


@pytest.mark.parametrize("mask", [rg.Keys, rg.Padding, lambda m: rg.Causal() & m], ids=["keys", "padding", "pairs"])
def test_a_mask_that_was_changed_since_is_noticed(mask):
    attend, x = rg.Attention("dot"), torch.randn(2, 6, 4)
    given = torch.tensor([6, 3]) if mask is rg.Padding else torch.ones(2, 6, dtype=torch.bool)
    given = given if mask in (rg.Keys, rg.Padding) else given[:, None].expand(2, 6, 6).clone()
    with rg.record(attend) as trace:
        attend(x, x, mask=mask(given))
    before = trace.weights
    given.fill_(0)
    if mask is rg.Padding:
        # What was made of the lengths is still the same.
        assert torch.equal(trace.weights, before)
        return
    with pytest.raises(RuntimeError, match="changed in place since"):
        _ = trace.weights


@pytest.mark.parametrize("name", ["weights_of", "log_prob", "expected_loss"])
def test_what_is_asked_of_the_call_itself_is_no_field(name, tmp_path):
    attend, x = rg.Attention("dot"), torch.randn(11, 3)
    said = rf"fields: got '{name}'.*Fix: {name}\(…\) is a method of a trace without named fields; torch.save keeps"
    with pytest.raises(ValueError, match=said), rg.record(attend, "entropy", **{name: [3, 4]}):
        pass
    with rg.record(attend) as trace:
        attend(x, x)
    with pytest.raises(ValueError, match=said):
        trace.save(tmp_path / "trace.safetensors", name)
    torch.save(trace.weights_of([3, 4]), tmp_path / "weights")
    assert torch.equal(torch.load(tmp_path / "weights"), trace.weights[3:5])


def test_a_flipped_bit_in_a_path_is_noticed(tmp_path):
    attend, x = torch.nn.ModuleDict({"first": rg.Attention("dot")}), torch.randn(5, 3)
    with rg.record(attend) as trace:
        attend["first"](x, x)
    trace.save(tmp_path / "trace.safetensors")
    written = (tmp_path / "trace.safetensors").read_bytes()
    (tmp_path / "trace.safetensors").write_bytes(written.replace(b"first", b"fisst", 1))
    with pytest.raises(ValueError, match="its bytes have changed"):
        rg.load_trace(tmp_path / "trace.safetensors")
