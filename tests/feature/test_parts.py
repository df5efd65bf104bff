"""How scores and alignments are given to a mechanism: by name, class, function or object, for all steps or for each."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import regard as rg
from regard.feature.parts import attentions, masked_inputs, masked_mean, pair_of_widths
from tests.feature.common import normal

STEPS = {"one": (2, 3), "two": (5, 7)}
WAYS = {
    "name": ("additive", {"hidden_dim": 11}),
    "class": (rg.Additive, {"hidden_dim": 11}),
    "function": (lambda q, k: rg.Additive(q, k, 11), {}),
    "partial": (partial(rg.Additive, hidden_dim=11), {}),
    "objects": ([rg.Additive(2, 3, 11), rg.Additive(5, 7, 11)], {}),
    "attentions": ([rg.Attention(rg.Additive(2, 3, 11)), rg.Attention(rg.Additive(5, 7, 11))], {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_step_has_the_score_and_parameters_of_its_own(way):
    score, options = WAYS[way]
    built = attentions(STEPS, score, None, options)
    for name, (query_dim, key_dim) in STEPS.items():
        s = built[name].score
        assert isinstance(s, rg.Additive)
        assert (s.query_dim, s.key_dim, s.hidden_dim) == (query_dim, key_dim, 11)
    assert built["one"].score.b is not built["two"].score.b


@pytest.mark.parametrize(
    "align",
    ["reinforced", rg.Reinforced, lambda: rg.Reinforced(3), [rg.Reinforced(3), rg.Reinforced(3)]],
    ids=["name", "class", "function", "objects"],
)
def test_every_step_has_the_alignment_of_its_own(align):
    built = attentions({"one": (2, 3), "two": (5, 3)}, "additive", align, {})
    aligns = [a.align for a in built.values()]
    assert all(isinstance(a, rg.Reinforced) and a.policy.dim == 3 for a in aligns)
    assert aligns[0] is not aligns[1]


def test_the_hidden_width_is_that_of_the_key_when_not_given():
    built = attentions(STEPS, "additive", None, {})
    assert [a.score.hidden_dim for a in built.values()] == [3, 7]


def test_features_make_it_multi_dimensional():
    built = attentions(STEPS, "additive", None, {"features": True})
    assert [a.score.features for a in built.values()] == [3, 7]


def test_what_has_no_parameters_may_be_shared():
    built = attentions({"one": (3, 3), "two": (7, 7)}, rg.ScaledDot(), rg.Sparsemax(), {})
    assert built["one"].score is built["two"].score
    assert built["one"].align is built["two"].align


def test_options_reach_scores_alignments_and_the_attention():
    built = attentions(
        STEPS, "low-rank-general", "hard", {"rank": 2, "gradient": "gumbel", "dropout": 0.25, "impl": "dense"}
    )
    for attend in built.values():
        assert attend.score.rank == 2
        assert attend.align.gradient == "gumbel"
        assert (attend.dropout, attend.impl) == (0.25, "dense")


def test_refusals():
    with pytest.raises(
        ValueError, match=r"score: got one Additive, expected parameters for 2 steps\. Fix: pass its name"
    ):
        attentions(STEPS, rg.Additive(2, 3, 5), None, {})
    with pytest.raises(ValueError, match="align: got one Reinforced"):
        attentions(STEPS, "additive", rg.Reinforced(3), {})
    with pytest.raises(ValueError, match="score: got 3 of them, expected one for each step: one, two"):
        attentions(STEPS, ["dot"] * 3, None, {})
    with pytest.raises(ValueError, match=r"score: got 'aditive', expected .* Did you mean 'additive'"):
        attentions(STEPS, "aditive", None, {})
    with pytest.raises(TypeError, match="score: got 'low-rank-general', expected also rank="):
        attentions(STEPS, "low-rank-general", None, {})
    with pytest.raises(TypeError, match="score: got LowRankGeneral, expected also rank="):
        attentions(STEPS, rg.LowRankGeneral, None, {})
    with pytest.raises(TypeError, match=r"hiden_dim: got 4, expected .* Did you mean 'hidden_dim'"):
        attentions(STEPS, "additive", None, {"hiden_dim": 4})
    with pytest.raises(TypeError, match="score: got a function that gives int"):
        attentions(STEPS, lambda q, k: 3, None, {})
    with pytest.raises(TypeError, match="align: got a function that gives int"):
        attentions(STEPS, "additive", lambda: 3, {})
    with pytest.raises(TypeError, match="score: got Linear"):
        attentions(STEPS, torch.nn.Linear, None, {})
    with pytest.raises(TypeError, match="align: got int"):
        attentions(STEPS, "additive", 3, {})
    with pytest.raises(
        ValueError, match="score: got Additive, expected a score that needs no query for the step 'one'"
    ):
        attentions({"one": (None, 3)}, lambda q, k: rg.Additive(2, k, 5), None, {})


@pytest.mark.parametrize(
    "score", ["dot", "scaled-dot", "cosine", "negative-l2", rg.Dot, rg.ScaledDot(), lambda q, k: rg.Dot()]
)
@pytest.mark.parametrize("make", [rg.RotatoryAttention, rg.InteractiveCoAttention, rg.AlternatingCoAttention])
def test_a_score_of_like_widths_is_refused_for_unlike_ones(make, score):
    expected = r"score: got \w+ for the step '\w+', of queries of width \d and keys of width \d, .*Fix: use General"
    with pytest.raises(ValueError, match=expected):
        make((6, 4), score=score)
    make(6, score=score)


def test_a_score_that_takes_any_widths_is_taken_at_its_word():
    class Anything(rg.Dot):
        def check_widths(self, query, key):
            """Any two widths."""

    assert isinstance(attentions({"one": (6, 4)}, Anything(), None, {})["one"].score, Anything)


def test_a_map_of_the_keys_may_make_widths_alike():
    attend = rg.Attention("dot", key_map=torch.nn.Linear(4, 6))
    assert attentions({"one": (6, 4)}, [attend], None, {})["one"] is attend


@pytest.mark.parametrize("dim", [0, True, (3,), (3, 0), (1, 2, 3), "ab"])
def test_widths_are_checked(dim):
    with pytest.raises(ValueError, match="dim: got"):
        pair_of_widths(dim)


def test_masks_are_checked():
    x = torch.randn(2, 3, 5)
    with pytest.raises(ValueError, match="masks: got Tensor, expected one mask, or None, for each of first, second"):
        masked_inputs({"first": x, "second": x}, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="masks: got 1 masks"):
        masked_inputs({"first": x, "second": x}, (None,))
    with pytest.raises(TypeError, match=r"mask of second: got a tensor of torch\.int64, expected booleans"):
        masked_inputs({"first": x, "second": x}, (None, torch.ones(2, 3, dtype=torch.long)))
    with pytest.raises(ValueError, match=r"mask of first: got shape \(2, 4\), expected .* \(2, 3\)"):
        masked_inputs({"first": x, "second": x}, (torch.ones(2, 4, dtype=torch.bool), None))
    with pytest.raises(ValueError, match="first: got shape \\(5,\\)"):
        masked_inputs({"first": x[0, 0]}, None)


def test_a_mask_may_be_shared_by_leading_axes():
    x, mask = normal(4, 2, 3, 5), torch.tensor([True, False, True])
    (filled,), (found,) = masked_inputs({"first": x}, (mask,))
    assert found.shape == (4, 2, 3)
    assert torch.equal(filled[..., 1, :], torch.zeros(4, 2, 5, dtype=torch.float64))


def test_the_mean_is_over_what_is_real():
    x = torch.tensor([[[2.0], [4.0], [0.0]], [[0.0], [0.0], [0.0]]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert masked_mean(x, mask).tolist() == [[3.0], [0.0]]
    assert masked_mean(x, None).tolist() == [[2.0], [0.0]]
    assert masked_mean(x[:, :0], None).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_of_many_tokens_is_that_of_few_in_half_precision(dtype):
    x = torch.full((1, 1009, 2), 100.0, dtype=dtype)
    mean = masked_mean(x, torch.ones(1, 1009, dtype=torch.bool))
    assert mean.dtype == dtype
    assert mean.tolist() == [[100.0, 100.0]]


def test_inputs_are_checked_by_their_own_names():
    x = torch.randn(2, 3, 5)
    with pytest.raises(TypeError, match=r"second: got list, expected a floating-point tensor"):
        masked_inputs({"first": x, "second": [1.0]}, None)
    with pytest.raises(TypeError, match=r"first: got a tensor of torch\.int64, expected a floating-point tensor"):
        masked_inputs({"first": x.long()}, None)
    with pytest.raises(ValueError, match="second: got width 5, expected 4, as the mechanism was made for"):
        masked_inputs({"first": x, "second": x}, None, (5, 4))


MECHANISMS = {
    "alternating": (lambda: rg.AlternatingCoAttention((5, 3)), "first, second"),
    "interactive": (lambda: rg.InteractiveCoAttention((5, 3)), "first, second"),
    "parallel": (lambda: rg.ParallelCoAttention((5, 3)), "first, second"),
    "parallel by maxima": (lambda: rg.ParallelCoAttention((5, 3), scoring="max"), "first, second"),
    "multi-grained": (lambda: rg.MultiGrainedCoAttention((5, 3)), "first, second"),
    "rotatory": (lambda: rg.RotatoryAttention((5, 3)), "target, left, right"),
    "via": (lambda: partial(rg.AttentionViaAttention(7, (5, 3)), torch.randn(7)), "words, characters"),
    "gate": (lambda: rg.AttentionGate((5, 3)), "x, gate"),
    "over attention": (lambda: rg.AttentionOverAttention((5, 3), score="general"), "document, question"),
    "cross-modal": (lambda: rg.CrossModalAttention((5, 3), 4), "first, second"),
}


@pytest.mark.parametrize(("make", "named"), MECHANISMS.values(), ids=MECHANISMS)
def test_every_mechanism_names_inputs_that_cannot_meet(make, named):
    names = named.split(", ")
    module, last = make(), names[-1]
    inputs = [torch.randn(2, 4, d) for d in [5, 3, 3][: len(names)]]
    together = f"{', '.join(names[:-1])} and {last}"
    leads = r", ".join([r"\(2,\)"] * (len(names) - 1))
    with pytest.raises(
        ValueError, match=rf"^{together}: got leading axes {leads}, \(6,\), expected axes that broadcast"
    ):
        module(*inputs[:-1], torch.randn(6, 4, 3))
    with pytest.raises(TypeError, match=rf"^{last}: got .*float64, expected the dtype of {names[0]}, torch.float32"):
        module(*inputs[:-1], inputs[-1].double())
    with pytest.raises(ValueError, match=rf"^{last}: got a tensor on meta, expected the device of {names[0]}, cpu"):
        module(*inputs[:-1], inputs[-1].to("meta"))


@pytest.mark.parametrize(("make", "named"), MECHANISMS.values(), ids=MECHANISMS)
def test_an_input_that_all_share_is_as_many_of_it(make, named):
    module, count = make(), len(named.split(", "))
    inputs = [torch.randn(2, 4, d) for d in [5, 3, 3][:count]]
    expected = module(*inputs[:-1], inputs[-1][:1].expand(2, -1, -1))
    for shared in (inputs[-1][:1], inputs[-1][0]):
        torch.testing.assert_close(module(*inputs[:-1], shared), expected)


def test_a_query_is_named_beside_what_it_asks():
    attend = rg.AttentionViaAttention(7, (5, 3))
    words, characters = torch.randn(2, 4, 5), torch.randn(2, 6, 3)
    with pytest.raises(ValueError, match=r"words and query: got leading axes \(2,\), \(3,\)"):
        attend(torch.randn(3, 7), words, characters)
    with pytest.raises(ValueError, match=r"query: got shape \(1, 2, 3, 7\) beside words of shape \(2, 4, 5\)"):
        attend(torch.randn(1, 2, 3, 7), words, characters)
    with pytest.raises(TypeError, match="query: got NoneType"):
        attend(None, words, characters)
    documents = rg.HierarchicalAttention(6, score="additive")
    with pytest.raises(ValueError, match="features and query: got leading axes"):
        documents(torch.randn(2, 3, 5, 6), query=torch.randn(3, 6))


@pytest.mark.parametrize(
    ("make", "named", "wrong"),
    [
        (lambda: rg.AlternatingCoAttention((5, 3)), ("first", "second"), 1),
        (lambda: rg.InteractiveCoAttention((5, 3)), ("first", "second"), 0),
        (lambda: rg.ParallelCoAttention((5, 3)), ("first", "second"), 1),
        (lambda: rg.MultiGrainedCoAttention((5, 3)), ("first", "second"), 0),
        (lambda: rg.RotatoryAttention((5, 3)), ("target", "left", "right"), 2),
    ],
    ids=["alternating", "interactive", "parallel", "multi-grained", "rotatory"],
)
def test_every_mechanism_names_the_input_whose_width_is_wrong(make, named, wrong):
    widths = [5, 3, 3][: len(named)]
    expected, widths[wrong] = widths[wrong], 7
    with pytest.raises(ValueError, match=f"{named[wrong]}: got width 7, expected {expected}"):
        make()(*(torch.randn(2, 4, d) for d in widths))


def test_an_argument_of_other_parts_is_not_answered_with_itself():
    with pytest.raises(TypeError, match=r"features: got 4, expected .* The parts that were chosen do not take it"):
        attentions({"step": (4, 4)}, "dot", None, {"features": 4})
