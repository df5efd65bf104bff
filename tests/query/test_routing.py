"""Dynamic routing: inputs send more to outputs that agree with them."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.query.routing import lengths
from regard.recipes.planted import CapsuleNetwork, Digits, accuracy, fit
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, holes, normal, weights_of

OPTIONS = {
    "own matrices": {"inputs": 5},
    "shared matrices": {},
    "one iteration": {"iterations": 1},
    "five iterations": {"iterations": 5, "inputs": 5},
    "detached": {"inputs": 5, "detach": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_execution = pytest.mark.parametrize("execution", EXECUTIONS, ids=str)


def length(x: list) -> torch.Tensor:
    return sum(v * v for v in x).sqrt()


def oracle(m: rg.DynamicRouting, inputs: dict[int, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs and the couplings of all iterations of one example; inputs by their index, without padding."""
    J, d = m.W.shape[-3], m.W.shape[-1]
    predicted = {(i, j): u @ (m.W[j] if m.W.dim() == 3 else m.W[i, j]) for i, u in inputs.items() for j in range(J)}
    constant = {pair: x.detach() for pair, x in predicted.items()} if m.detach else predicted
    b = dict.fromkeys(predicted, torch.zeros((), dtype=torch.float64))
    couplings = []
    for r in range(m.iterations):
        last = r == m.iterations - 1
        known = predicted if last else constant
        c = {}
        for i in inputs:
            total = sum(b[i, j].exp() for j in range(J))
            for j in range(J):
                c[i, j] = b[i, j].exp() / total
        couplings.append(torch.stack([torch.stack([c[i, j] for j in range(J)]) for i in inputs]))
        v = []
        for j in range(J):
            s = [sum(c[i, j] * known[i, j][k] for i in inputs) for k in range(d)]
            n = length(s)
            v.append([n * n / (1 + n * n) * x / n for x in s])
        if not last:
            b = {(i, j): b[i, j] + sum(x * y for x, y in zip(known[i, j], v[j], strict=True)) for i, j in b}
    return torch.stack([torch.stack(x) for x in v]), couplings


@every_option
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(options, lead):
    m = rg.DynamicRouting((3, 7), 11, **options)
    assert m(torch.randn(*lead, 5, 3)).shape == (*lead, 11, 7)
    found = m.capsules(torch.randn(*lead, 5, 3), torch.ones(*lead, 5, dtype=torch.bool))
    assert found.probability.shape == (*lead, 11)
    assert found.context.shape == found.reconstruction.shape == (*lead, 11, 7)
    assert found.mean.shape == (*lead, 3)


@every_execution
@every_option
def test_oracle(options, execution):
    m, mask = scrambled(rg.DynamicRouting((3, 2), 4, **options)), holes(2, 5)
    clean = normal(2, 5, 3).requires_grad_()
    dirty = torch.where(mask[..., None], clean.detach(), math.nan).requires_grad_()
    with rg.execution(execution[0], panel=execution[1]), rg.record(m) as trace:
        found = m(dirty, mask)
        mine = torch.autograd.grad(found.square().sum(), [dirty, m.W])
    each = [oracle(m, {i: clean[b, i] for i in range(5) if mask[b, i]}) for b in range(2)]
    expected = torch.stack([v for v, _ in each])
    theirs = torch.autograd.grad(expected.square().sum(), [clean, m.W])
    assert_same(found, expected)
    for a, b in zip(mine, theirs, strict=True):
        assert_same(a + 1, b + 1)
    assert len(trace["routing"]) == m.iterations
    for r, call in enumerate(trace["routing"]):
        for b in range(2):
            assert_same(call.weights[b][mask[b]], each[b][1][r])
        assert not call.weights[~mask].any()


@pytest.mark.parametrize("options", [{"inputs": 4}, {}, {"iterations": 1}], ids=str)
def test_gradients(options):
    m, mask = scrambled(rg.DynamicRouting((3, 2), 3, **options)), holes(2, 4)

    def function(u, W):
        return torch.func.functional_call(m, {"W": W}, (u, mask))

    assert torch.autograd.gradcheck(function, [normal(2, 4, 3).requires_grad_(), m.W])


def test_detached_couplings_are_constants():
    m, u = scrambled(rg.DynamicRouting((3, 2), 4, 5, detach=True)), normal(2, 5, 3).requires_grad_()
    with rg.record(m) as trace:
        mine = torch.autograd.grad(m(u).square().sum(), [u, m.W])
    c = trace["routing"][-1].weights
    assert not c.requires_grad
    s = torch.einsum("bij,bijd->bjd", c, m.predictions(u))
    theirs = torch.autograd.grad(rg.squash(s).square().sum(), [u, m.W])
    for a, b in zip(mine, theirs, strict=True):
        assert_same(a, b)
    whole = scrambled(rg.DynamicRouting((3, 2), 4, 5))
    assert_same(whole(u), m(u))
    assert not torch.allclose(torch.autograd.grad(whole(u).square().sum(), u)[0], mine[0])


def test_squash():
    s = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-9, 0.0], [1e4, 0.0]], dtype=torch.float64, requires_grad=True)
    v = rg.squash(s)
    assert_same(lengths(v), torch.tensor([25 / 26, 0, 1e-18, 1e8 / (1 + 1e8)], dtype=torch.float64))
    assert_same(v[0] / lengths(v)[0], s[0] / 5)
    v.sum().backward()
    assert not s.grad[1].any()
    assert s.grad.isfinite().all()
    assert torch.autograd.gradcheck(rg.squash, [normal(3, 5).requires_grad_()])


def test_capsules_are_lengths_and_directions():
    m, u = scrambled(rg.DynamicRouting((3, 2), 4)), normal(2, 5, 3)
    found = m.capsules(u)
    assert_same(found.reconstruction, m(u))
    assert_same(found.probability, m(u).norm(dim=-1))
    assert_same(found.probability[..., None] * found.context, found.reconstruction)
    empty = m.capsules(u.requires_grad_(), torch.zeros(2, 5, dtype=torch.bool))
    torch.cat([x.flatten() for x in empty]).sum().backward()
    assert not torch.cat([x.flatten() for x in empty]).any()
    assert not u.grad.any()
    assert not m.W.grad.any()


def test_agreement_takes_over():
    """Two inputs agree on the first output and a third is far off: with iterations it is sent elsewhere."""
    m = rg.DynamicRouting((1, 2), 2, 3, iterations=4).double()
    with torch.no_grad():
        m.W.copy_(torch.tensor([[[[4, 0]], [[0, 0]]], [[[4, 0]], [[0, 0]]], [[[-4, 0]], [[0, 1]]]]))
    trace = weights_of(m, torch.ones(1, 3, 1).double())
    to_first = torch.stack([call.weights[0, :, 0] for call in trace["routing"]])
    assert_same(to_first[0], torch.full((3,), 0.5, dtype=torch.float64))
    assert (to_first[1:, :2] > to_first[:-1, :2]).all()
    assert (to_first[1:, 2] < to_first[:-1, 2]).all()


def test_uniform_couplings_are_one_iteration_and_closed_outputs_get_nothing():
    m, u = scrambled(rg.DynamicRouting((3, 2), 4, 5)), normal(2, 5, 3)
    once = scrambled(rg.DynamicRouting((3, 2), 4, 5, iterations=1))
    with rg.intervene(m, "uniform", at="routing"):
        assert_same(m(u), once(u))
    with rg.intervene(m, "erased", keys=[1], at="routing"), rg.record(m) as trace:
        v = m(u)
    assert not v[:, 1].any()
    for call in trace["routing"]:
        assert not call.weights[..., 1].any()
        assert_same(call.weights.sum(-1), torch.ones(2, 5, dtype=torch.float64))


def test_other_alignments_route_too():
    m = scrambled(rg.DynamicRouting((3, 2), 4, 5, align="sparsemax"))
    with torch.no_grad():
        m.W.mul_(10)
    last = weights_of(m, normal(2, 5, 3))["routing"][-1].weights
    assert_same(last.sum(-1), torch.ones(2, 5, dtype=torch.float64))
    assert (last == 0).any()


def test_inputs_may_be_permuted_with_their_matrices():
    m, u, order = scrambled(rg.DynamicRouting((3, 2), 4, 5)), normal(2, 5, 3), [3, 0, 4, 1, 2]
    before = m(u)
    assert not torch.allclose(m(u[:, order]), before)
    with torch.no_grad():
        m.W.copy_(m.W[order].clone())
    assert_same(m(u[:, order]), before)
    shared = scrambled(rg.DynamicRouting((3, 2), 4))
    assert_same(shared(u[:, order]), shared(u))


def test_half_precision_routes_in_float32():
    m, u = scrambled(rg.DynamicRouting((3, 8), 4, 50)), normal(2, 50, 3)
    exact, low = m(u), m.to(torch.bfloat16)(u.to(torch.bfloat16))
    with rg.record(m) as trace:
        m(u.to(torch.bfloat16))
    assert low.dtype == torch.bfloat16
    assert trace["routing"][-1].weights.dtype == torch.float32
    assert (low.double() - exact).abs().max() < 0.02


def test_digits():
    """The paper's network in small, on 1437 images of 8 x 8 pixels, judged on 360 others."""
    torch.manual_seed(0)
    model = CapsuleNetwork()
    fit(model, Digits(), steps=300, lr=3e-3, loss=CapsuleNetwork.loss)
    test = Digits(test=True)
    found = accuracy(model, test, count=len(test))
    batch = test.draw(len(test), torch.Generator().manual_seed(0))
    with torch.no_grad(), rg.intervene(model, "uniform", at="digits.routing"):
        without = float((model(**batch.inputs).argmax(-1) == batch.target).float().mean())
    with torch.no_grad():
        v = model.digits(model.parts(batch.inputs["image"]))
        error = float((model.decode(v, batch.target) - batch.inputs["image"].flatten(1)).square().mean())
        mean = float((batch.inputs["image"].mean(0) - batch.inputs["image"]).square().mean())
        entropy = [float(call.entropy().mean()) for call in weights_of(model, **batch.inputs)["digits.routing"]]
    print(f"\ndigits {found:.4f}, with uniform couplings {without:.4f}")
    print(f"squared error of a pixel {error:.3f}, of the mean image {mean:.3f}")
    print("entropy of the couplings by iteration", *(f"{x:.3f}" for x in entropy))
    assert found >= 0.97
    assert error < 0.75 * mean
    assert entropy[0] > entropy[1] > entropy[2]


def test_refusals():
    with pytest.raises(ValueError, match="capsules: got 0"):
        rg.DynamicRouting(3, 0)
    with pytest.raises(ValueError, match="iterations: got 0"):
        rg.DynamicRouting(3, 4, iterations=0)
    with pytest.raises(ValueError, match=r"dim: got \(3, 4, 5\), expected a whole number >= 1, or 2 of them"):
        rg.DynamicRouting((3, 4, 5), 4)
    with pytest.raises(ValueError, match="u: got 6 capsules, expected at most inputs=5"):
        rg.DynamicRouting(3, 4, 5)(torch.randn(2, 6, 3))
    with pytest.raises(ValueError, match="u: got width 2, expected dim=3"):
        rg.DynamicRouting(3, 4, 5)(torch.randn(2, 5, 2))
    with rg.execution("fused"), pytest.raises(NotImplementedError, match="side that is not normalised"):
        rg.DynamicRouting(3, 4)(torch.randn(2, 5, 3))


@pytest.mark.parametrize("inputs", [None, 7])
def test_inputs_of_another_dtype_are_refused(inputs):
    with pytest.raises(TypeError, match="u: got a tensor of torch.float64, expected the module's dtype"):
        rg.DynamicRouting(3, 2, inputs)(torch.zeros(2, 7, 3).double())


@pytest.mark.parametrize("length", [2.0**-11, 1.0, 1000.0])
def test_lengths_are_not_lost_in_half_precision(length):
    s = torch.tensor([length, 0.0, 0.0])
    torch.testing.assert_close(lengths(s.half()).float(), s[0], rtol=1e-3, atol=0)
    torch.testing.assert_close(rg.squash(s.half()).float(), rg.squash(s), rtol=1e-3, atol=1e-7)
    assert rg.squash(s.half()).dtype == torch.float16
