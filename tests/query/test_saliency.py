"""Focus and saliency of recorded scores."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from tests.cases import assert_same, scrambled
from tests.feature.common import normal, weights_of


def parts(score: str, mask=None, query=None, **options):
    attend = scrambled(rg.Attention(score, **options))
    trace = weights_of(attend, normal(2, 5, 3) if query is None else query, normal(2, 7, 4), mask=mask)
    recorded = trace[""][0]
    return rg.focus_and_saliency(recorded), recorded.scores


WIDTHS = {"query_dim": 3, "key_dim": 4}


def test_shapes():
    found, _ = parts("general", **WIDTHS)
    assert [tuple(x.shape) for x in found] == [(2, 5), (2, 7), (2, 5, 7), (2,), (2,), (2,)]
    found, _ = parts("additive", hidden_dim=6, features=4, **WIDTHS)
    assert found.focus.shape == (2, 4, 5, 7)


def test_the_parts_add_up_and_are_centred():
    found, e = parts("additive", hidden_dim=6, **WIDTHS)
    assert_same(found.constant[..., None] + found.saliency[:, None] + found.focus, e)
    for b in range(2):
        whole = sum(e[b, i, j] for i in range(5) for j in range(7)) / 35
        for i in range(5):
            row = sum(e[b, i, j] for j in range(7)) / 7
            assert_same(found.constant[b, i], row)
            for j in range(7):
                column = sum(e[b, k, j] for k in range(5)) / 5
                assert_same(found.focus[b, i, j], e[b, i, j] - row - column + whole)
    shares = found.constant_share + found.saliency_share + found.focus_share
    assert_same(shares, torch.ones(2, dtype=torch.float64))
    assert_same(found.focus_share, found.focus.square().mean((-2, -1)) / e.var((-2, -1), unbiased=False))


def test_additive_without_an_activation_has_no_focus():
    found, _ = parts("additive", hidden_dim=6, activation="identity", **WIDTHS)
    assert (found.focus_share < 1e-20).all()
    assert (found.saliency_share > 0.01).all()


def test_a_score_without_a_query_is_saliency_alone():
    found, e = parts("query-free", key_dim=4, hidden_dim=6, query=normal(2, 5, 4))
    assert_same(found.saliency_share, torch.ones(2, dtype=torch.float64))
    assert e.shape[-1] == 7


def test_the_bias_of_biased_general_is_the_saliency_that_general_lacks():
    plain = scrambled(rg.General(3, 4))
    biased = rg.BiasedGeneral(3, 4).double()
    with torch.no_grad():
        biased.W.copy_(plain.W)
        biased.b.copy_(normal(4, seed=3))
    query, key = normal(5, 3), normal(7, 4)
    a, b = (rg.focus_and_saliency(rg.Attention(s).double().call(query, key)) for s in (plain, biased))
    assert_same(b.focus, a.focus)
    extra = key @ biased.b
    assert_same(b.saliency - a.saliency, extra - extra.mean())


@pytest.mark.parametrize("kind", ["keys", "causal", "any"])
def test_masked_pairs_are_left_out(kind):
    """The parts are those of least squares over the allowed pairs; what is masked may hold anything."""
    mask = {
        "keys": torch.tensor([True, True, False, True, True, False, True]).expand(2, 5, 7),
        "causal": torch.ones(5, 7, dtype=torch.bool).tril(2).expand(2, 5, 7),
        "any": torch.rand(2, 5, 7, generator=torch.Generator().manual_seed(1)) < 0.7,
    }[kind]
    found, e = parts("additive", mask=mask, hidden_dim=6, **WIDTHS)
    for b in range(2):
        pairs = [(i, j) for i in range(5) for j in range(7) if mask[b, i, j]]
        design = torch.zeros(len(pairs), 12, dtype=torch.float64)
        for k, (i, j) in enumerate(pairs):
            design[k, i] = design[k, 5 + j] = 1
        y = torch.stack([e[b, i, j] for i, j in pairs])
        solution = torch.linalg.lstsq(design, y[:, None], driver="gelsd").solution
        rest = y - (design @ solution).squeeze(1)
        mine = torch.stack([found.focus[b, i, j] for i, j in pairs])
        assert (mine - rest).abs().max() < 1e-9
        assert not found.focus[b][~mask[b]].any()
        assert abs(float(found.focus_share[b] - rest.square().sum() / (y - y.mean()).square().sum())) < 1e-9
    shares = found.constant_share + found.saliency_share + found.focus_share
    assert (shares - 1).abs().max() < 1e-9


def test_gradients_flow():
    attend, query = scrambled(rg.Attention("general", **WIDTHS)), normal(5, 3).requires_grad_()
    key = normal(7, 4)
    assert torch.autograd.gradcheck(
        lambda q: rg.focus_and_saliency(attend.call(q, key)).focus_share, [query], fast_mode=True
    )


def test_equal_scores_have_no_variance_to_share():
    found = rg.focus_and_saliency(rg.Attention("dot").call(torch.zeros(5, 3), torch.randn(7, 3)))
    assert [float(x) for x in found[3:]] == [0.0, 0.0, 0.0]


def test_refusals():
    with pytest.raises(TypeError, match="recorded: got Tensor, expected one recorded call"):
        rg.focus_and_saliency(torch.ones(2))
