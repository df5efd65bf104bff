"""Multi-head capsules: several questions a class, one judgement."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.recipes.planted import CapsuleClassifier, Evidence, accuracy, fit
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, attend, holes, mean, normal, weights_of

OPTIONS = {
    "identity": {},
    "shared": {"maps": "shared"},
    "head": {"maps": "head"},
    "judged by head": {"judge": "head"},
    "mapped": {"maps": "head", "compare": "map", "judge": "head"},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_execution = pytest.mark.parametrize("execution", EXECUTIONS, ids=str)


def make(options, classes=3, heads=2):
    return rg.MultiHeadCapsules((4, 5, 2) if "maps" in options else 4, classes, heads, **options)


def sigmoid(x):
    return 1 / (1 + (-x).exp())


def oracle(m: rg.MultiHeadCapsules, tokens):
    """Probabilities and reconstructions of one example, class by class and head by head."""
    H, C, _ = m.q.shape
    p, r = [], []
    for c in range(C):
        contexts = []
        for h in range(H):
            keys = values = tokens
            if m.maps != "identity":
                W_K, W_V = (m.W_K[h], m.W_V[h]) if m.maps == "head" else (m.W_K, m.W_V)
                keys, values = [W_K @ f for f in tokens], [W_V @ f for f in tokens]
            contexts.append(attend(m.attention, m.q[h, c], keys, values))
        if m.judge == "head":
            each = [sigmoid(m.w[c, h] @ contexts[h] + m.b[c, h]) for h in range(H)]
            p.append(sum(each[1:], each[0]) / H)
            one = torch.cat([q * x for q, x in zip(each, contexts, strict=True)])
        else:
            p.append(sigmoid(m.w[c] @ torch.cat(contexts) + m.b[c]))
            one = torch.cat([p[-1] * x for x in contexts])
        r.append(one if m.M is None else m.M @ one)
    return torch.stack(p), torch.stack(r)


@every_option
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(options, lead):
    found = make(options, 7, 5)(torch.randn(*lead, 11, 4), torch.ones(*lead, 11, dtype=torch.bool))
    d = 2 if "maps" in options else 4
    assert found.context.shape == (*lead, 7, 5 * d)
    assert found.probability.shape == (*lead, 7)
    mapped = options.get("compare") == "map"
    assert found.reconstruction.shape == (*lead, 7, 4 if mapped else 5 * d)
    assert found.mean.shape == (*lead, 4 if mapped else 20)


@every_execution
@every_option
def test_oracle(options, execution):
    m, mask = scrambled(make(options)), holes(2, 5)
    clean = normal(2, 5, 4).requires_grad_()
    dirty = torch.where(mask[..., None], clean.detach(), math.nan).requires_grad_()
    with rg.execution(execution[0], panel=execution[1]):
        found = m(dirty, mask)
        loss = found.reconstruction.square().sum() + found.probability.square().sum()
        mine = torch.autograd.grad(loss, [dirty, *m.parameters()])
    each = [oracle(m, list(clean[b][mask[b]])) for b in range(2)]
    p, r = (torch.stack([one[k] for one in each]) for k in range(2))
    assert_same(found.probability, p)
    assert_same(found.reconstruction, r)
    fbar = torch.stack([mean(list(clean[b][mask[b]])) for b in range(2)])
    assert_same(found.mean, fbar if m.M is not None else torch.cat([fbar, fbar], -1))
    theirs = torch.autograd.grad(r.square().sum() + p.square().sum(), [clean, *m.parameters()])
    for a, b in zip(mine, theirs, strict=True):
        assert_same(a + 1, b + 1)


@every_option
def test_gradients(options):
    m, mask = scrambled(make(options)), holes(2, 4)
    assert torch.autograd.gradcheck(lambda x: tuple(m(x, mask)), [normal(2, 4, 4).requires_grad_()], fast_mode=True)


def test_heads_may_be_permuted_with_their_blocks():
    m, x, order = scrambled(make({"maps": "head"}, heads=3)), normal(2, 7, 4), [2, 0, 1]
    before = m(x)
    with torch.no_grad():
        for p in (m.q, m.W_K, m.W_V):
            p.copy_(p[order].clone())
        m.w.copy_(m.w.unflatten(-1, (3, 2))[:, order].flatten(-2).clone())
    assert_same(m(x).probability, before.probability)
    assert_same(m(x).context, before.context.unflatten(-1, (3, 2))[:, :, order].flatten(-2))


def test_paths():
    weights = weights_of(scrambled(make({})), normal(2, 7, 4), holes(2, 7))["attention"].weights
    assert weights.shape == (2, 2, 3, 7)
    assert_same(weights.sum(-1), torch.ones(2, 2, 3, dtype=torch.float64))


def test_they_learn():
    task = Evidence(several=False)
    torch.manual_seed(0)
    model = CapsuleClassifier(rg.MultiHeadCapsules(task.dim, task.classes, 2))
    fit(model, task, lr=0.05, loss=CapsuleClassifier.loss(rg.CapsuleLoss()))
    found = accuracy(model, task)
    print(f"\nevidence for one of five, two heads: {found:.3f}")
    assert found >= 0.97


def test_refusals():
    with pytest.raises(ValueError, match="heads: got 0"):
        rg.MultiHeadCapsules(4, 3, 0)
    with pytest.raises(ValueError, match="maps: got 'class', expected one of identity, shared, head"):
        rg.MultiHeadCapsules(4, 3, 2, maps="class")
    with pytest.raises(ValueError, match="judge: got 'shared', expected one of together, head"):
        rg.MultiHeadCapsules(4, 3, 2, judge="shared")
    with pytest.raises(ValueError, match="compare: got 'sum', expected one of repeat, map"):
        rg.MultiHeadCapsules(4, 3, 2, compare="sum")
    with pytest.raises(ValueError, match="features: got width 5, expected dim=4"):
        rg.MultiHeadCapsules(4, 3, 2)(torch.randn(2, 7, 5))


def test_features_of_another_dtype_are_refused():
    with pytest.raises(TypeError, match="features: got a tensor of torch.float64, expected the module's dtype"):
        rg.MultiHeadCapsules(4, classes=3, heads=2, maps="head")(torch.zeros(2, 5, 4).double())
