"""Attention capsules: a query for every class, which judges what it reads."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.recipes.planted import CapsuleClassifier, Evidence, fit
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, attend, holes, mean, normal, weights_of

OPTIONS = {
    "identity": {},
    "shared": {"maps": "shared"},
    "class": {"maps": "class"},
    "additive": {"score": "additive", "maps": "shared"},
    "class, additive, multi-dimensional": {"score": "additive", "maps": "class", "features": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_execution = pytest.mark.parametrize("execution", EXECUTIONS, ids=str)


def make(options, classes=3):
    return rg.CapsuleAttention((4, 5, 2) if "maps" in options else 4, classes, **options)


def oracle(m: rg.CapsuleAttention, tokens) -> tuple[list, list, list]:
    """Contexts, probabilities and reconstructions of one example, class by class."""
    contexts, probabilities, reconstructions = [], [], []
    for c in range(len(m.q)):
        keys = values = tokens
        if m.maps != "identity":
            W_K, W_V = (m.W_K[c], m.W_V[c]) if m.maps == "class" else (m.W_K, m.W_V)
            keys, values = [W_K @ f for f in tokens], [W_V @ f for f in tokens]
        context = attend(m.attention, m.q[c], keys, values)
        logit = sum(w * x for w, x in zip(m.w[c], context, strict=True)) + m.b[c]
        p = 1 / (1 + (-logit).exp())
        contexts.append(context)
        probabilities.append(p)
        reconstructions.append(p * context)
    return contexts, probabilities, reconstructions


@every_option
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(options, lead):
    found = make(options, 7)(torch.randn(*lead, 11, 4), torch.ones(*lead, 11, dtype=torch.bool))
    d = 2 if "maps" in options else 4
    assert found.context.shape == found.reconstruction.shape == (*lead, 7, d)
    assert found.probability.shape == (*lead, 7)
    assert found.mean.shape == (*lead, 4)
    assert found.prediction.shape == lead
    assert torch.equal(found.prediction, found.probability.argmax(-1))


@every_execution
@every_option
def test_oracle(options, execution):
    m, mask = scrambled(make(options)), holes(2, 5)
    clean = normal(2, 5, 4).requires_grad_()
    dirty = torch.where(mask[..., None], clean.detach(), math.nan).requires_grad_()
    with rg.execution(execution[0], panel=execution[1]):
        found = m(dirty, mask)
        mine = torch.autograd.grad(
            found.reconstruction.square().sum() + found.probability.square().sum(), [dirty, *m.parameters()]
        )
    each = [oracle(m, list(clean[b][mask[b]])) for b in range(2)]
    contexts, p, r = (torch.stack([torch.stack(one[k]) for one in each]) for k in range(3))
    assert_same(found.context, contexts)
    assert_same(found.probability, p)
    assert_same(found.reconstruction, r)
    assert_same(found.mean, torch.stack([mean(list(clean[b][mask[b]])) for b in range(2)]))
    theirs = torch.autograd.grad(r.square().sum() + p.square().sum(), [clean, *m.parameters()])
    for a, b in zip(mine, theirs, strict=True):
        assert_same(a + 1, b + 1)


@every_option
def test_gradients(options):
    m, mask = scrambled(make(options)), holes(2, 4)
    assert torch.autograd.gradcheck(lambda x: tuple(m(x, mask)), [normal(2, 4, 4).requires_grad_()], fast_mode=True)
    names = [name for name, _ in m.named_parameters()]
    x = normal(2, 4, 4)

    def of_parameters(*values):
        found = torch.func.functional_call(m, dict(zip(names, values, strict=True)), (x, mask))
        return found.reconstruction, found.probability

    assert torch.autograd.gradcheck(of_parameters, list(m.parameters()), fast_mode=True)


@every_option
def test_probabilities_are_probabilities_and_shorten(options):
    found = scrambled(make(options))(3 * normal(2, 7, 4))
    assert ((found.probability > 0) & (found.probability < 1)).all()
    assert (found.reconstruction.norm(dim=-1) <= found.context.norm(dim=-1)).all()


@every_option
def test_tokens_may_be_permuted_and_classes_with_their_parameters(options):
    m, x, order = scrambled(make(options)), normal(2, 7, 4), [2, 0, 1]
    before = m(x)
    for a, b in zip(m(x[:, torch.randperm(7)]), before, strict=True):
        assert_same(a, b)
    with torch.no_grad():
        for p in (m.q, m.w, m.b, *((m.W_K, m.W_V) if m.maps == "class" else ())):
            p.copy_(p[order].clone())
    assert_same(m(x).probability, before.probability[:, order])
    assert_same(m(x).context, before.context[:, order])


def test_identical_queries_read_the_same():
    m = scrambled(rg.CapsuleAttention(4, 3))
    with torch.no_grad():
        m.q.copy_(m.q[:1].clone().expand_as(m.q))
    found = m(normal(2, 7, 4))
    assert_same(found.context, found.context[:, :1].expand_as(found.context))
    assert (found.probability[:, 0] - found.probability[:, 1]).abs().max() > 1e-3


def test_nothing_real_reads_nothing():
    m = scrambled(rg.CapsuleAttention(4, 3))
    found = m(torch.full((2, 5, 4), math.nan, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.bool))
    assert not found.context.any()
    assert not found.reconstruction.any()
    assert_same(found.probability, m.b.sigmoid().expand(2, 3))


def test_dropped_contexts_change_what_is_judged_but_not_what_was_read():
    m, x = scrambled(rg.CapsuleAttention(4, 3, drop_context=0.5)), normal(2, 7, 4)
    quiet = m.eval()(x)
    loud = m.train()(x)
    assert torch.equal(loud.context, quiet.context)
    assert not torch.equal(loud.probability, quiet.probability)


def test_paths_and_interventions():
    m, x, mask = scrambled(rg.CapsuleAttention(4, 3)), normal(2, 7, 4), holes(2, 7)
    trace = weights_of(m, x, mask)
    assert list(trace) == ["attention"]
    assert trace["attention"].weights.shape == (2, 3, 7)
    assert not trace["attention"].weights[~mask[:, None].expand(2, 3, 7)].any()
    assert weights_of(scrambled(make({"maps": "class"})), x, mask)["attention"].weights.shape == (2, 3, 7)
    with rg.intervene(m, "uniform", at="attention"):
        assert_same(m(x, mask).context, m(x, mask).mean[:, None].expand(2, 3, 4))


def test_every_class_finds_its_evidence():
    """Every class reads its own token; one query, or a mean, cannot ask each class's token for something else."""
    task = Evidence()
    torch.manual_seed(0)
    model = CapsuleClassifier(rg.CapsuleAttention(task.dim, task.classes))
    fit(model, task, steps=400, lr=0.05, loss=CapsuleClassifier.loss(rg.CapsuleLoss("bce", weight=0.0)))
    batch = task.draw(2048, torch.Generator().manual_seed(1))

    def right(p: torch.Tensor) -> float:
        return float(((p > 0.5) == batch.target).float().mean())

    trace = weights_of(model, **batch.inputs)
    looked = (trace["capsules.attention"].weights.argmax(-1) == batch.truth["token"]).float().mean()
    found = right(model(**batch.inputs))
    with rg.intervene(model, "uniform"):
        without = right(model(**batch.inputs))
    print(f"\nclasses judged right {found:.3f}, at their own token {looked:.3f}; without attention {without:.3f}")
    assert found >= 0.97
    assert looked >= 0.95
    assert without <= 0.7


def test_refusals():
    with pytest.raises(ValueError, match="classes: got 0"):
        rg.CapsuleAttention(4, 0)
    with pytest.raises(ValueError, match="maps: got 'own', expected one of identity, shared, class"):
        rg.CapsuleAttention(4, 3, maps="own")
    with pytest.raises(ValueError, match="maps: got 'identity', expected equal widths, not 4 and 5"):
        rg.CapsuleAttention((4, 5, 4), 3)
    with pytest.raises(ValueError, match=r"drop_context: got 1\.5, expected a probability"):
        rg.CapsuleAttention(4, 3, drop_context=1.5)
    with pytest.raises(ValueError, match="features: got width 5, expected dim=4"):
        rg.CapsuleAttention(4, 3)(torch.randn(2, 7, 5))
    with pytest.raises(TypeError, match="hidden_dims: got 3"):
        rg.CapsuleAttention(4, 3, score="additive", hidden_dims=3)


@pytest.mark.parametrize("maps", ["identity", "shared", "class"])
def test_features_of_another_dtype_are_refused(maps):
    with pytest.raises(TypeError, match="features: got a tensor of torch.float64, expected the module's dtype"):
        rg.CapsuleAttention(4, classes=3, maps=maps)(torch.zeros(2, 5, 4).double())
    with pytest.raises(TypeError, match="features: got list, expected a floating-point tensor"):
        rg.CapsuleAttention(4, classes=3, maps=maps)([[0.0] * 4])
