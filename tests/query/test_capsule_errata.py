"""Wrong readings of capsules that are in circulation, each told apart from the right one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import regard as rg
from regard import catalog
from regard.query.capsule_losses import RECONSTRUCTION
from tests.cases import assert_same, scrambled
from tests.feature.common import normal, weights_of


def test_queries_belong_to_classes_not_to_positions():
    """A query q_l for each position would fix the length, and give every class the same weights."""
    m = scrambled(rg.CapsuleAttention(5, 3))
    assert m.q.shape == (3, 5)
    for n in (2, 7):
        weights = weights_of(m, normal(2, n, 5))["attention"].weights
        assert weights.shape == (2, 3, n)
        assert n == 1 or (weights[:, 0] - weights[:, 1]).abs().max() > 1e-3


def test_keys_and_values_are_the_features_unless_maps_are_asked_for():
    """Matrices of each class are in no source."""
    assert dict(rg.CapsuleAttention(5, 3).named_parameters()).keys() == {"q", "w", "b"}
    own = rg.CapsuleAttention(5, 3, maps="class")
    assert own.W_K.shape == own.W_V.shape == (3, 5, 5)


def test_all_ones_minimise_cross_entropy_over_sigmoids():
    """Every class certain is as good as it gets; of the losses of record none takes it."""
    p = torch.ones(2, 3, dtype=torch.float64)
    empty = torch.zeros(2, 3, 1, dtype=torch.float64)
    sure, target = rg.Capsules(empty, p, empty, empty[:, 0]), torch.tensor([0, 2])
    right = sure._replace(probability=F.one_hot(target, 3).double())
    for name in ("cross-entropy", "bce", "multi-margin", "hinge", "margin"):
        loss = rg.CapsuleLoss(name, weight=0.0)
        if name == "cross-entropy":
            assert loss(sure, target) == loss(right, target) == 0
        else:
            assert loss(sure, target) > loss(right, target) + 0.3


def test_the_squared_reconstruction_pulls_every_capsule_to_the_mean():
    """Whichever class is true: its gradient does not know the target. The paper attracts one and repels the others."""
    found = scrambled(rg.CapsuleAttention(4, 3))(normal(2, 7, 4))
    one, other = torch.tensor([0, 0]), torch.tensor([1, 2])
    assert torch.equal(RECONSTRUCTION["squared"](found, one), RECONSTRUCTION["squared"](found, other))
    same = found._replace(reconstruction=found.mean[:, None].expand(2, 3, 4))
    assert not RECONSTRUCTION["squared"](same, one).any()
    for name in ("multi-margin", "hinge"):
        assert not torch.equal(RECONSTRUCTION[name](found, one), RECONSTRUCTION[name](found, other))
        assert (RECONSTRUCTION[name](same, one) > 0).all()


def test_agreement_is_with_predictions_not_with_inputs():
    """Without the hats the update would be u_i · v_j, which is defined only for equal widths, and another number."""
    m, u = scrambled(rg.DynamicRouting((3, 3), 4, 5, iterations=2)), normal(2, 5, 3)
    first, second = weights_of(m, u)["routing"]
    predicted = m.predictions(u)
    v = rg.squash(predicted.mean(1) * 5 / 4)
    assert not first.scores.any()
    assert_same(second.scores, torch.einsum("bijd,bjd->bij", predicted, v))
    assert (second.scores - torch.einsum("bid,bjd->bij", u, v)).abs().max() > 1e-2


def test_couplings_are_normalised_over_outputs():
    """Over inputs, one input and several outputs would all get everything."""
    m = scrambled(rg.DynamicRouting((3, 2), 4))
    (c,) = (call.weights for call in weights_of(m, normal(2, 1, 3))["routing"][-1:])
    assert c.shape == (2, 1, 4)
    assert_same(c.sum(-1), torch.ones(2, 1, dtype=torch.float64))
    assert (c < 0.99).all()


def test_updating_logits_first_is_the_same_from_zero_outputs():
    """Summaries update b before there is a v; with v = 0 at the start that is the paper's order, one iteration late."""
    m, u = scrambled(rg.DynamicRouting((3, 2), 4, 5, iterations=3)), normal(2, 5, 3)
    predicted = m.predictions(u)
    b, v = torch.zeros(2, 5, 4).double(), torch.zeros(2, 4, 2).double()
    for _ in range(3):
        b = b + torch.einsum("bijd,bjd->bij", predicted, v)
        v = rg.squash(torch.einsum("bij,bijd->bjd", b.softmax(-1), predicted))
    assert_same(m(u), v)


def test_heads_do_not_share_parameters():
    m = rg.MultiHeadCapsules((5, 3, 2), 4, 2, maps="head", score="additive", hidden_dim=7)
    x = normal(2, 6, 5).float()
    for name, p in m.named_parameters():
        if name in ("w", "b"):
            continue
        assert p.shape[0] == 2, name
        assert not torch.equal(p[0], p[1]) or not p.any(), name
    weights = weights_of(m, x)["attention"].weights
    assert (weights[:, 0] - weights[:, 1]).abs().max() > 1e-4


def test_capsules_are_siblings_of_hops():
    """They are sometimes filed under multi-hop attention."""
    names = {entry.name for entry in catalog.entries("query/multiplicity")}
    ours = {
        "capsule-based-attention",
        "dynamic-routing-capsules",
        "multi-head-capsules",
        "hierarchical-capsules",
    }
    assert ours | {"multi-hop"} <= names
    for name in ours:
        assert not issubclass(catalog.find(name).cls, rg.MultiHopAttention)


def test_dynamic_routing_is_of_2017_and_capsules_have_no_single_year():
    """The idea is of 2011; what came in 2017 is the routing."""
    assert catalog.find("dynamic-routing-capsules").year == 2017
    assert catalog.find("胶囊注意力").year == 2018
