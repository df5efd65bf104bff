"""Score x alignment x dimensionality, enumerated from the catalog: what is registered is covered."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard import catalog
from regard.ops import blockwise
from regard.ops.random import SAMPLE, gumbel
from tests import cases, oracles
from tests.cases import D_K, D_V, LEAD, NQ, Case, N, assert_same, compare, run

SUPPORTED = pytest.mark.parametrize("case", cases.supported(), ids=str)


class Slopes(nn.Module):
    """A bias as a function of indices, with a parameter in it."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(-0.3, dtype=torch.float64))

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        return self.slope * (i - j).abs()


class Panels:
    """Counts the panels that are recomputed in a backward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, original = 0, blockwise.checkpoint

        def counting(*args: object, **kwargs: object) -> object:
            self.count += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(blockwise, "checkpoint", counting)


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> Panels:
    return Panels(monkeypatch)


def a_bias(*lead: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(*lead, NQ, N, generator=generator, dtype=torch.float64).requires_grad_()


def agree(attend: rg.Attention, x: dict[str, Tensor], panels: Panels, **rest: object) -> None:
    """Dense, and blockwise in panels of several sizes: the context and every gradient."""
    with rg.execution("dense"):
        expected = run(attend, x, **rest)
    assert bool(expected[0].isfinite().all())
    for rows in (1, 2, 3):
        panels.count = 0
        with rg.execution("blockwise", panel=rows):
            compare(run(attend, x, **rest), expected)
        assert panels.count == -(-NQ // rows), "the panels were not taken"


@pytest.mark.parametrize("case", [*cases.supported(), *cases.variants()], ids=str)
def test_blockwise_is_dense_with_masks_bias_and_dropout(case: Case, panels: Panels) -> None:
    attend = case.build(dropout=0.3)
    agree(attend, case.inputs(grad=True), panels, mask=cases.a_mask(), bias=a_bias(LEAD))


@SUPPORTED
def test_blockwise_is_dense_in_evaluation_under_a_causal_mask(case: Case, panels: Panels) -> None:
    attend = case.build(dropout=0.3).eval()
    mask = rg.Causal() & rg.Padding(torch.tensor([N, N - 3]))
    agree(attend, case.inputs(grad=True), panels, mask=mask, bias=a_bias())


@SUPPORTED
def test_blockwise_is_dense_with_a_bias_that_is_a_function(case: Case, panels: Panels) -> None:
    attend, slopes = case.build(), Slopes()
    attend.slopes = slopes
    agree(attend, case.inputs(grad=True), panels, bias=slopes)
    _, gradients = run(attend, case.inputs(grad=True), bias=slopes)
    assert "parameter slopes.slope" in gradients


@pytest.mark.parametrize("case", [c for c in cases.supported() if "heads" in catalog.arguments(c.score)], ids=str)
def test_blockwise_is_dense_with_heads(case: Case, panels: Panels) -> None:
    attend = Case(case.score, case.align, case.multi, {"heads": (3,)}).build(dropout=0.3)
    mask = cases.a_mask()[:, None]
    agree(attend, case.inputs(grad=True, lead=(LEAD, 3)), panels, mask=mask)
    agree(attend, case.inputs(grad=True, lead=(LEAD, 1)), panels, mask=mask, bias=a_bias(3))


@SUPPORTED
def test_whatever_auto_chooses_is_dense(case: Case) -> None:
    attend, x = case.build(), case.inputs(grad=True)
    with rg.execution("dense"):
        expected = run(attend, x, mask=cases.a_mask())
    compare(run(attend, x, mask=cases.a_mask()), expected)


@SUPPORTED
def test_a_row_without_keys_reads_nothing_and_teaches_nothing(case: Case) -> None:
    attend, x = case.build(), case.inputs(grad=True)
    mask = cases.a_mask()
    for impl in ("dense", "blockwise"):
        with rg.execution(impl, panel=2):
            context = attend(**x, mask=mask)
            assert bool((context[~mask.any(-1)] == 0).all())
            mask_all = torch.zeros_like(mask)
            context, gradients = run(attend, x, mask=mask_all)
        assert bool((context == 0).all())
        for name, gradient in gradients.items():
            assert bool((gradient == 0).all()), name


@cache
def looped_scores(score: str, multi: bool) -> Tensor:
    case = next(c for c in cases.supported() if c.score.name == score and c.multi == multi)
    x = case.inputs(lead=())
    with torch.no_grad():
        return oracles.scores(score, case.build().score, x["query"], x["key"])


@pytest.mark.parametrize("case", [*cases.supported(), *cases.variants()], ids=str)
def test_dense_is_the_looped_equation(case: Case) -> None:
    """Score, align and sum by loops, from the parameters and what was drawn: nothing else of the library."""
    attend, x = case.build(dropout=0.3), case.inputs(lead=())
    mask, bias = cases.a_mask()[1], a_bias().detach()
    with torch.no_grad(), rg.execution("dense"):
        torch.manual_seed(7)
        context = attend(**x, mask=mask, bias=bias)
        torch.manual_seed(7)
        call = attend.call(**x, mask=mask, bias=bias)
        # What is drawn for a position is not the oracle's to know; everything else is.
        noise = gumbel(call.tile().uniform(SAMPLE)).double()
        kept = call.tile().keep(torch.float64)
        assert set(kept.unique().tolist()) == {0.0, 1 / 0.7}
        scores = looped_scores(case.score.name, case.multi)
        scores = scores.movedim(-1, 0) if case.multi else scores[None]
        noise, kept = (t if case.multi else t[None] for t in (noise, kept))
        weights = []
        for f in range(len(scores)):
            weights.append([])
            for i in range(NQ):
                facts = oracles.Facts(
                    i=i,
                    query=x["query"][i] if mask[i].any() else x["query"][i] * 0,
                    length=max((j + 1 for j in range(len(mask[i])) if mask[i, j]), default=0),
                    noise=list(noise[f, i]),
                    selected=call.prepared.get("selected", torch.ones(0)).tolist(),
                )
                row = oracles.ALIGNMENTS[case.align.name](
                    attend.align, list(scores[f, i] + bias[i]), mask[i].tolist(), facts
                )
                weights[-1].append([a * z for a, z in zip(row, kept[f, i], strict=True)])
        expected = oracles.read_features(weights, x["value"]) if case.multi else oracles.read(weights[0], x["value"])
    assert_same(context, expected)


def refusal(case: Case, query: bool = True) -> str | None:
    """What the library says, or None when it runs."""
    try:
        attend = case.build()
        x = case.inputs()
        if not query:
            x["query"] = None
        attend(**x)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def test_only_parameter_free_scores_made_multi_dimensional_are_refused() -> None:
    asked = list(cases.product())
    refused = {str(case): message for case in asked if (message := refusal(case)) is not None}
    parameter_free = {"dot", "scaled-dot", "cosine", "negative-l2"}
    assert {case.score.name for case in asked if cases.is_parameter_free(case.score)} == parameter_free
    assert refused.keys() == {str(c) for c in asked if c.multi and c.score.name in parameter_free}
    assert len(refused) == len(parameter_free) * len(cases.alignments())
    for message in refused.values():
        assert message.startswith(f"features: got {D_V}, expected nothing, since ")
        assert "has no parameters" in message


def test_only_predictive_positions_are_refused_without_a_query() -> None:
    free = [c for c in cases.supported() if not c.score.cls.needs_query]
    refused = {str(c): message for c in free if (message := refusal(c, query=False)) is not None}
    assert refused.keys() == {
        "query-free-local-predictive-single",
        "query-free-local-predictive-multi",
        "source-to-token-local-predictive-multi",
    }
    for message in refused.values():
        assert message.startswith("query: got None, expected a query, since the position is predicted from it.")


def test_a_score_that_compares_is_refused_without_a_query() -> None:
    for case in cases.supported():
        if case.score.cls.needs_query:
            message = refusal(case, query=False)
            assert message is not None
            assert message.startswith("query: got None, expected a tensor")


def test_the_product_is_as_large_as_the_catalog_says() -> None:
    scores, alignments = cases.scores(), cases.alignments()
    always = {entry.name for entry in scores if cases.is_always_multi(entry)}
    assert always == {"token-to-token", "source-to-token"}
    assert len(list(cases.product())) == (2 * len(scores) - len(always)) * len(alignments)
    assert D_K != D_V
