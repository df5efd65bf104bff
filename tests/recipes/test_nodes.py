"""Nodes: the files of Planetoid, communities that are made up, and graph attention on them."""

import os
import pickle

import numpy as np
import pytest
import torch

from regard.model import Batch
from regard.recipes import run
from regard.recipes.engine import evaluated
from regard.recipes.nodes import GraphNetwork, NodeClasses
from regard.recipes.nodes import pickled as safe
from regard.recipes.nodes.planetoid import planetoid
from regard.recipes.nodes.task import LabelledGraph, communities
from regard.recipes.recipe import configured

sparse = pytest.importorskip("scipy.sparse")


def write_planetoid(folder, name="cora", *, gap=(), seed=0):
    """Files in the layout of Planetoid: 4 labelled nodes, 501 without, 5 test nodes, of which some places are in no file."""
    draw = np.random.default_rng(seed)
    places = [k for k in range(505, 510 + len(gap)) if k not in gap]
    features = (draw.random((510, 7)) < 0.4).astype(np.float32)
    labels = np.eye(3, dtype=np.int32)[draw.integers(3, size=510)]
    shuffled = draw.permutation(5)
    graph = {k: [int(j) for j in draw.integers(505, size=2)] for k in range(505)}
    graph |= {k: [k - 505, k, k - 505] for k in places}
    parts = {
        "x": sparse.csr_matrix(features[:4]),
        "y": labels[:4],
        "tx": sparse.csr_matrix(features[505:][shuffled]),
        "ty": labels[505:][shuffled],
        "allx": sparse.csr_matrix(features[:505]),
        "ally": labels[:505],
        "graph": graph,
    }
    for part, x in parts.items():
        (folder / f"ind.{name}.{part}").write_bytes(pickle.dumps(x, protocol=2))
    index = "".join(f"{places[k]}\n" for k in shuffled)
    (folder / f"ind.{name}.test.index").write_text(index)
    return features, labels.argmax(1), places


def test_planetoid_files_give_back_what_was_written(tmp_path):
    features, labels, places = write_planetoid(tmp_path)
    found = planetoid(str(tmp_path), "cora")
    assert torch.equal(found.features, torch.from_numpy(features))
    assert found.labels.tolist() == labels.tolist()
    assert found.split["train"].tolist() == [0, 1, 2, 3]
    assert found.split["validation"].tolist() == list(range(4, 504))
    assert found.split["test"].tolist() == places
    pairs = set(map(tuple, found.edges.T.tolist()))
    assert len(pairs) == found.edges.shape[1], "each edge is there once"
    assert pairs == {(j, i) for i, j in pairs}, "edges go both ways"
    assert all(i != j for i, j in pairs), "there are no loops"
    assert {(505, 0), (0, 505)} <= pairs


def test_a_test_node_that_is_in_no_file_has_no_features_and_no_class(tmp_path):
    features, labels, places = write_planetoid(tmp_path, "citeseer", gap=(507,))
    found = planetoid(str(tmp_path), "citeseer")
    assert found.features.shape == (511, 7)
    assert not found.features[507].any()
    assert found.labels[507] == -1
    assert 507 not in found.split["test"].tolist()
    assert torch.equal(found.features[places], torch.from_numpy(features[505:]))
    assert found.labels[places].tolist() == labels[505:].tolist()


class Hostile:
    def __reduce__(self):
        return os.system, ("echo taken > taken.txt",)


@pytest.mark.parametrize("part", ["x", "ally", "graph"])
def test_a_hostile_pickle_is_refused_and_not_run(tmp_path, monkeypatch, part):
    monkeypatch.chdir(tmp_path)
    write_planetoid(tmp_path)
    (tmp_path / f"ind.cora.{part}").write_bytes(pickle.dumps(Hostile(), protocol=2))
    with pytest.raises(ValueError, match=r"posix\.system, expected a pickle of numbers"):
        planetoid(str(tmp_path), "cora")
    assert not (tmp_path / "taken.txt").exists()


def test_broken_numbers_are_refused():
    whole = sparse.csr_matrix(np.eye(3, dtype=np.float32))
    beyond = sparse.csr_matrix(np.eye(3, dtype=np.float32))
    beyond.indices[0] = 7
    assert safe.read(pickle.dumps(whole), "m").tolist() == np.eye(3).tolist()
    for x, match in (
        (beyond, "a broken sparse matrix"),
        (np.array([object()], dtype=object), "expected a pickle of numbers"),
        (np.array(["a"]), "numbers of type"),
    ):
        with pytest.raises(ValueError, match=match):
            safe.read(pickle.dumps(x), "m")
    with pytest.raises(ValueError, match="expected a pickle of numbers"):
        safe.read(b"no pickle", "m")
    with pytest.raises(ValueError, match="expected a pickle of numbers"):
        safe.read(pickle.dumps(np.eye(3, dtype=np.float32), protocol=2)[:-20], "m")


def test_other_number_formats_are_read():
    for x in (np.arange(6, dtype=">i8").reshape(2, 3), np.asfortranarray(np.eye(2, 3)), np.zeros((0, 4), np.uint8)):
        for protocol in (2, 4):
            assert np.array_equal(safe.read(pickle.dumps(x, protocol=protocol), "m"), x)


def test_what_is_missing_or_wrong_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"also has ind\.cora\.x, ind\.cora\.y"):
        planetoid(str(tmp_path), "cora")
    write_planetoid(tmp_path)
    index = tmp_path / "ind.cora.test.index"
    good = index.read_text()
    index.write_text("1\n2\n")
    with pytest.raises(ValueError, match="2 lines, expected 5 numbers of nodes"):
        planetoid(str(tmp_path), "cora")
    index.write_text("505\n506\n507\n508\n999999999\n")
    with pytest.raises(ValueError, match="different numbers from 505 on"):
        planetoid(str(tmp_path), "cora")
    index.write_text(good)
    (tmp_path / "ind.cora.graph").write_bytes(pickle.dumps({0: [4000]}))
    with pytest.raises(ValueError, match="from 0 to 509"):
        planetoid(str(tmp_path), "cora")
    (tmp_path / "ind.cora.ty").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(ValueError, match=r"ind\.cora\.ty: list, expected a matrix"):
        planetoid(str(tmp_path), "cora")
    with pytest.raises(ValueError, match="one of cora, citeseer"):
        configured("nodes", {"set": "pubmed"})


def test_communities_are_what_they_say():
    graph = communities(400, seed=3)
    again, other = communities(400, seed=3), communities(400, seed=4)
    assert torch.equal(graph.features, again.features)
    assert torch.equal(graph.edges, again.edges)
    assert not torch.equal(graph.edges, other.edges)
    parts = torch.cat(list(graph.split.values()))
    assert sorted(parts.tolist()) == list(range(400)), "each node is in one split"
    assert graph.labels[graph.split["train"]].bincount().tolist() == [10] * 4
    alike = (graph.labels[graph.edges[0]] == graph.labels[graph.edges[1]]).float().mean()
    assert 0.7 < alike < 0.85
    typical = torch.arange(24) % 4 == graph.labels[:, None]
    assert graph.features[typical].mean() > 1.7 * graph.features[~typical].mean()


def test_an_example_is_the_graph_with_the_classes_of_a_split():
    graph = communities(80, seed=0)
    example = graph.example("test")
    known = example.target >= 0
    assert known.nonzero().flatten().tolist() == sorted(graph.split["test"].tolist())
    assert torch.equal(example.target[known], graph.labels[known])


def test_a_batch_of_graphs_is_each_of_them():
    graphs = [communities(40, seed=k) for k in (0, 1)]
    edges = [g.edges[:, :100] for g in graphs]
    task = configured("nodes", {"node_count": 40})
    model = task.build().eval()
    assert isinstance(model.attention, GraphNetwork)
    together = model.attention(torch.stack([g.features for g in graphs]), torch.stack(edges))
    for k, g in enumerate(graphs):
        torch.testing.assert_close(together[k], model.attention(g.features[None], edges[k][None])[0])


def test_nodes_without_a_class_cost_nothing():
    output, logits = NodeClasses(), torch.randn(1, 5, 3)
    target = torch.tensor([[0, -1, 2, -1, -1]])
    found = output.loss(logits, Batch({"nodes": logits}, target=target))
    expected = -(logits[0, 0].log_softmax(-1)[0] + logits[0, 2].log_softmax(-1)[2]) / 2
    torch.testing.assert_close(found, expected)
    assert output.terms(Batch({"nodes": logits}, target=target)) == 2


@pytest.mark.parametrize(
    ("attention", "options"),
    [("gat", {}), ("graph-attention", {}), ("graph-attention", {"score": "scaled-dot", "align": "sparsemax"})],
)
def test_every_attention_along_edges_learns(attention, options):
    task = configured("nodes", {"attention": attention, "options": options, "node_count": 80})
    model = task.build()
    batch = task.batches(task.examples("train"))[0]
    loss = model.loss(model(batch), batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_what_does_not_read_along_edges_is_refused():
    with pytest.raises(ValueError, match=r"'additive', expected one that reads along edges.*attention\.score=additive"):
        configured("nodes", {"attention": "additive"}).build()


def test_the_penalty_is_a_part_of_the_gradient():
    task = configured("nodes", {"weight_decay": 0.5, "lr": 1.0})
    model = task.build()
    optimizer = torch.optim.AdamW(task.groups(model), weight_decay=task.weight_decay)
    assert [group["decoupled_weight_decay"] for group in optimizer.param_groups] == [False]


@pytest.mark.parametrize("attention", ["gat", "graph-attention"])
def test_neighbours_tell_the_class_that_words_do_not(tmp_path, attention):
    found = run("nodes", attention=attention, steps=60, every=20, out=tmp_path, progress=False)
    assert found.metrics()["accuracy"] > 0.85
    assert "</svg>" in (found.folder / "attention.svg").read_text()
    task, model = found.recipe(), found.model()
    graph = task.graph
    alone = LabelledGraph(graph.features, graph.edges[:, :0], graph.labels, graph.split, graph.classes)
    assert evaluated(task, model, [alone.example("test")]).metrics["accuracy"] < 0.7
