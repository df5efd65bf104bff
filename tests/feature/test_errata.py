"""Wrong readings that are in circulation, each told apart from the right one."""

from __future__ import annotations

import torch

import regard as rg
from regard import catalog
from tests.cases import assert_same, scrambled
from tests.feature.common import normal, weights_of

INPUTS = normal(2, 3, 5), normal(2, 7, 5, seed=1), normal(2, 11, 5, seed=2)  # target, left, right


def test_steps_of_alternating_co_attention_are_separate_unless_tied():
    """The survey ties first and last step; the authors' implementation has three sets of parameters."""
    separate, tied = rg.AlternatingCoAttention(5), rg.AlternatingCoAttention(5, tie_first_last=True)
    assert {name.split(".")[0] for name, _ in separate.named_parameters()} == {"summary", "second", "first"}
    assert {name.split(".")[0] for name, _ in tied.named_parameters()} == {"second", "first"}


def test_the_first_step_reads_the_first_input():
    """The superscript 0 of its scores counts steps: the keys are those of input 1."""
    trace = weights_of(rg.AlternatingCoAttention(5), normal(2, 4, 5).float(), normal(2, 7, 5).float())
    assert trace["summary"].weights.shape == trace["first"].weights.shape == (2, 4)
    assert trace["second"].weights.shape == (2, 7)


def test_the_first_step_has_no_query():
    """Scores "with and without sequence input" are scores with and without a query."""
    m = scrambled(rg.AlternatingCoAttention(5))
    first = normal(2, 4, 5)
    one, other = (weights_of(m, first, normal(2, 7, 5, seed=k)) for k in (1, 2))
    assert torch.equal(one["summary"].weights, other["summary"].weights)
    assert not torch.equal(one["first"].weights, other["first"].weights)


def test_means_are_over_true_lengths():
    """Dividing by the padded length makes a result depend on the rest of the batch."""
    m = scrambled(rg.InteractiveCoAttention(5))
    first, second = normal(1, 4, 5), normal(1, 7, 5)
    alone = m(first[:, :2], second)
    padded = m(first, second, (torch.tensor([[True, True, False, False]]), None))
    assert_same(padded, alone)
    wrong = m.second(torch.cat([first[:, :2], torch.zeros(1, 2, 5).double()], 1).mean(1), second)
    assert (padded[:, 5:] - wrong).abs().max() > 1e-4
    rotate = scrambled(rg.RotatoryAttention(5))
    target, left, right = INPUTS
    longer = torch.cat([target, normal(2, 6, 5, seed=9)], 1)
    mask = torch.arange(9).expand(2, 9) < 3
    assert_same(rotate(longer, left, right, (mask, None, None)), rotate(target, left, right))


def test_the_interactive_score_is_activated_general():
    """The survey calls it additive in one place."""
    assert isinstance(rg.InteractiveCoAttention(5).first.score, rg.ActivatedGeneral)
    assert rg.InteractiveCoAttention(5).first.score.activation.spec == "tanh"


def test_the_maximum_may_be_taken_on_one_side_alone():
    """Both sides is the survey's generalisation; BiDAF takes it over the question, for the context."""
    both, first, none = (
        rg.ParallelCoAttention(5, scoring=scoring)
        for scoring in ("max", ("max", "aggregated"), ("aggregated", "aggregated"))
    )
    context, question = normal(2, 4, 5), normal(2, 7, 5)
    one = scrambled(first)
    a = one.affinity.score(context, question)
    expected = (a.amax(-1).softmax(-1)[:, None] @ context)[:, 0]
    assert_same(one(context, question)[:, :5], expected)
    assert (one(context, question)[:, 5:] - scrambled(both)(context, question)[:, 5:]).abs().max() > 1e-3
    assert both.W1 is None
    assert none.scoring == ("aggregated", "aggregated")


def test_both_lines_of_parallel_co_attention_share_their_matrices():
    m = rg.ParallelCoAttention((5, 3), hidden_dim=7)
    shapes = {name: tuple(p.shape) for name, p in m.named_parameters() if "affinity" not in name}
    assert shapes == {"W1": (7, 5), "W2": (7, 3), "first.score.w": (7,), "second.score.w": (7,)}


def test_rotatory_attention_asks_with_the_target_first():
    """The implementation that was released runs the other way round."""
    m = scrambled(rg.RotatoryAttention(5))
    inverse = scrambled(rg.RotatoryAttention(5, order="context-first"))
    inverse.load_state_dict(m.state_dict())
    target, left, _ = INPUTS
    forwards, backwards = weights_of(m, *INPUTS), weights_of(inverse, *INPUTS)
    assert list(forwards) == ["left", "right", "target_left", "target_right"]
    assert list(backwards) == ["target_left", "target_right", "left", "right"]
    assert_same(forwards["left"].scores, m.left.score(target.mean(1)[:, None], left)[:, 0])
    assert_same(backwards["target_left"].scores, m.target_left.score(left.mean(1)[:, None], target)[:, 0])
    assert (m(*INPUTS) - inverse(*INPUTS)).abs().max() > 1e-3


def test_rotatory_attention_concatenates_left_right_and_their_targets():
    m = scrambled(rg.RotatoryAttention((3, 5)))
    target, left, right = normal(2, 4, 3), normal(2, 7, 5), normal(2, 11, 5)
    out, trace = m(target, left, right), weights_of(m, target, left, right)
    read = {"left": left, "right": right, "target_left": target, "target_right": target}
    parts = [(trace[path].weights[:, None] @ x)[:, 0] for path, x in read.items()]
    assert_same(out, torch.cat(parts, -1))


def test_rotatory_attention_is_no_co_attention():
    """It is sometimes filed under fine-grained co-attention; the survey has it apart."""
    names = {entry.name for entry in catalog.entries("feature/multiplicity")}
    assert {name for name in names if "co-attention" in name} == {
        "alternating-co-attention",
        "interactive-co-attention",
        "parallel-co-attention",
        "multi-grained-co-attention",
    }
    assert "rotatory" in names
    assert not issubclass(catalog.find("rotatory").cls, rg.ParallelCoAttention)


def test_attention_via_attention_is_not_attention_over_attention():
    """Their Chinese names collide: the library's is unambiguous, and the English one leads."""
    entry = catalog.find("经由注意力的注意力（注意力叠加）")
    assert entry.name == "attention-via-attention"
    assert len({e.zh for e in catalog.entries()}) == len(list(catalog.entries()))


def test_hierarchical_is_not_structured():
    entry = catalog.find("层级注意力")
    assert entry.cls is rg.HierarchicalAttention
    assert "structured" not in entry.name


def test_single_ends_of_the_axes_are_plain_attention():
    for name in ("singular-feature", "single-level", "single-representational"):
        entry = catalog.find(name)
        assert entry.cls is rg.Attention
        assert "Attention" in entry.choose
