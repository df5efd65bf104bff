"""Attention-over-attention."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from tests import oracles
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, NAMES, check, holes, normal, weights_of

OPTIONS = {"dot": (4, {}), "general": ((4, 3), {"score": "general"}), "additive": ((4, 3), {"score": "additive"})}
every_option = pytest.mark.parametrize(("dim", "options"), OPTIONS.values(), ids=OPTIONS)
every_execution = pytest.mark.parametrize("execution", EXECUTIONS, ids=str)


def oracle(m: rg.AttentionOverAttention, inputs) -> torch.Tensor:
    """Word by word, of the real words of one example."""
    document, question = inputs
    score = oracles.SCORES[NAMES[type(m.attention.score)]]
    M = [[score(m.attention.score, d, q) for q in question] for d in document]
    alpha = [oracles.soft([row[j] for row in M], [True] * len(document)) for j in range(len(question))]
    beta = [oracles.soft(row, [True] * len(question)) for row in M]
    mean = [sum(row[j] for row in beta) / len(document) for j in range(len(question))]
    return torch.stack([sum(alpha[j][i] * mean[j] for j in range(len(question))) for i in range(len(document))])


class Packed(torch.nn.Module):
    """The weights of the real words first, so that examples of one length can be stacked."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner
        self.attention = inner.attention

    def forward(self, document, question, masks):
        found = self.inner(document, question, masks)
        assert not found[~masks[0]].any()
        return torch.stack([row[real] for row, real in zip(found, masks[0], strict=True)])


@every_option
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(dim, options, lead):
    d, q = (dim, dim) if isinstance(dim, int) else dim
    assert rg.AttentionOverAttention(dim, **options)(torch.randn(*lead, 11, d), torch.randn(*lead, 7, q)).shape == (
        *lead,
        11,
    )


@every_execution
@every_option
def test_oracle(dim, options, execution):
    d, q = (dim, dim) if isinstance(dim, int) else dim
    real = torch.tensor([[True, False, True, True, True, False], [False, True, True, False, True, True]])
    m = Packed(rg.AttentionOverAttention(dim, **options))
    check(
        m, lambda m, x: oracle(m, x), [normal(2, 6, d), normal(2, 4, q, seed=1)], [real, holes(2, 4, seed=1)], execution
    )


@every_execution
@every_option
def test_gradients(dim, options, execution):
    d, q = (dim, dim) if isinstance(dim, int) else dim
    m, masks = scrambled(rg.AttentionOverAttention(dim, **options)), (holes(2, 5), holes(2, 3, seed=1))
    leaves = [normal(2, 5, d).requires_grad_(), normal(2, 3, q).requires_grad_()]
    with rg.execution(execution[0], panel=execution[1]):
        assert torch.autograd.gradcheck(lambda *x: m(*x, masks), leaves, fast_mode=True)


@every_execution
def test_constant_scores_are_uniform_and_a_constant_changes_nothing(execution):
    m = rg.AttentionOverAttention(4, score="general").double()
    document, question = normal(2, 7, 4), normal(2, 3, 4)
    real = holes(2, 7, seed=2)
    with rg.execution(execution[0], panel=execution[1]):
        with torch.no_grad():
            m.attention.score.W.zero_()
        assert_same(m(document, question, (real, None)), real / real.sum(-1, keepdim=True).double())
        plain = m = scrambled(m)
        before = plain(document, question)
        with rg.intervene(m, lambda call: call.with_(bias=torch.full((1, 1), 3.7, dtype=torch.float64))):
            assert_same(m(document, question), before)


@every_execution
def test_large_scores_are_finite(execution):
    document = (200 * normal(2, 7, 4)).requires_grad_()
    with rg.execution(execution[0], panel=execution[1]):
        s = rg.AttentionOverAttention(4)(document, 100 * normal(2, 3, 4), (holes(2, 7), None))
        assert_same(s.sum(-1), torch.ones(2, dtype=torch.float64))
        s[:, 0].sum().backward()
    assert document.grad.isfinite().all()


def test_a_question_without_words_and_an_empty_document_give_zero():
    m, document, question = rg.AttentionOverAttention(4), normal(2, 7, 4), normal(2, 3, 4)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for panel in (None, 2):
        with rg.execution("blockwise", panel=panel):
            assert not m(document, question, (None, nothing)).any()
            assert not m(document, question, (torch.zeros(2, 7, dtype=torch.bool), None)).any()


def test_it_is_not_a_query_of_several_layers():
    """Feeding what the first attention read to a second one gives something else."""
    m, document, question = rg.AttentionOverAttention(4), normal(7, 4), normal(3, 4)
    attend = rg.Attention("dot")
    trace = weights_of(attend, attend(question, document).mean(0), document)
    assert not torch.allclose(trace.weights, m(document, question))


def test_the_two_softmaxes_are_along_different_axes():
    document, question = normal(7, 4), normal(3, 4)
    M = document @ question.mT
    s = rg.AttentionOverAttention(4)(document, question)
    assert_same(s, M.softmax(0) @ M.softmax(1).mean(0))
    assert not torch.allclose(s, M.softmax(1) @ M.softmax(0).mean(0))
    trace = weights_of(rg.AttentionOverAttention(4), document, question)
    assert_same(trace["attention"].scores, M)
    assert_same(trace["attention"].weights, M.softmax(1))


def test_sum_attention_adds_up_by_token():
    m, document, question = rg.AttentionOverAttention(4), normal(2, 7, 4), normal(2, 3, 4)
    tokens = torch.tensor([[3, 0, 3, 5, 5, 3, 1], [2, 2, 2, 2, 2, 2, 2]])
    real = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])
    s, p = m(document, question, (real, None)), m.probabilities(document, question, tokens, 6, (real, None))
    expected = torch.zeros(2, 6, dtype=torch.float64)
    for b in range(2):
        for i in range(7):
            expected[b, tokens[b, i]] += s[b, i]
    assert_same(p, expected)
    assert_same(p.sum(-1), torch.ones(2, dtype=torch.float64))
    assert not p[0, [1, 2, 4]].any()


def test_every_panel_is_computed_twice_and_again_in_the_backward(monkeypatch):
    seen = []
    scores = rg.ops.call.Call.scores
    monkeypatch.setattr(
        rg.ops.call.Call, "scores", lambda self, i=None, **more: (seen.append(i), scores(self, i, **more))[1]
    )
    document = normal(5, 4).requires_grad_()
    with rg.execution("blockwise", panel=2):
        s = rg.AttentionOverAttention(4)(document, normal(3, 4))
        assert seen == 2 * [range(0, 2), range(2, 4), range(4, 5)]
        s.square().sum().backward()
    assert len(seen) == 4 * 3


@pytest.mark.parametrize("score", ["dot", "additive"])
def test_nothing_as_large_as_the_matrix_is_made(score):
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.untyped_storage().nbytes() // x.element_size())
            return out

    m = rg.AttentionOverAttention(3, score=score)
    document, question = torch.randn(101, 3, requires_grad=True), torch.randn(97, 3)
    with rg.execution("blockwise", panel=7), Watch():
        m(document, question, (torch.rand(101) < 0.8, None)).square().sum().backward()
    assert 7 * 97 <= largest <= 3 * 7 * 97


class Reader(torch.nn.Module):
    """Embeds a document and a question, and says which token answers."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.embed = vocabulary, torch.nn.Embedding(vocabulary, 16)
        self.before = torch.nn.Linear(16, 16)
        self.attention = rg.AttentionOverAttention(16, score="general")

    def forward(self, document, question):
        words = self.embed(document)
        states = words + torch.nn.functional.pad(self.before(words), (0, 0, 1, 0))[:, :-1]
        return (
            self.attention.probabilities(states, self.embed(question), document, self.vocabulary).clamp(min=1e-9).log()
        )


def test_it_answers_cloze_questions():
    """The answer follows the word that the question asks about; the question's other words are everywhere."""
    from regard.recipes.planted import Cloze, accuracy, fit

    task = Cloze()
    torch.manual_seed(0)
    model = Reader(task.classes)
    fit(model, task, lr=0.03)
    found = accuracy(model, task)
    print(f"cloze {found:.3f}")
    assert found >= 0.95


def test_refusals():
    with pytest.raises(TypeError, match=r"dropout: got 0\.1, expected nothing"):
        rg.AttentionOverAttention(4, dropout=0.1)
    with pytest.raises(ValueError, match="score: got a multi-dimensional score"):
        rg.AttentionOverAttention(4, score="additive", features=3)
    with rg.execution("fused"), pytest.raises(NotImplementedError, match="normalised along both sides"):
        rg.AttentionOverAttention(4)(torch.randn(2, 3, 4), torch.randn(2, 3, 4))
    with pytest.raises(ValueError, match=r"tokens: got a tensor of torch\.float32"):
        rg.sum_attention(torch.ones(3), torch.ones(3), 4)
    assert math.isclose(float(rg.sum_attention(torch.ones(1), torch.zeros(1, dtype=torch.long), 1)), 1.0)


def test_a_token_outside_the_vocabulary_is_refused():
    with pytest.raises(IndexError, match="tokens: got indices from 0 to 4, expected tokens of a vocabulary of 4"):
        rg.sum_attention(torch.ones(2), torch.tensor([0, 4]), 4)
