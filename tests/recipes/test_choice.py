"""An attention by name: what it takes is said of that attention alone."""

from __future__ import annotations

import re

import pytest

from regard.recipes.choice import make_attention

WIDTHS = {"query_dim": 6, "key_dim": 6, "value_dim": 6, "dim": 6, "hidden_dim": 6, "heads": 2, "hops": 2}


@pytest.mark.parametrize(
    ("name", "options", "known", "others"),
    [
        ("additive", {}, {"score", "align", "hidden_dim", "dropout", "impl"}, {"window", "hops", "gradient"}),
        ("dot", {}, {"score", "align", "dropout", "impl"}, {"hidden_dim", "window"}),
        ("dot", {"align": "hard"}, {"gradient", "dropout"}, {"hidden_dim", "window", "alpha"}),
        ("local-monotonic", {"score": "general"}, {"window", "score"}, {"hidden_dim", "gradient"}),
        ("multi-hop", {}, {"hops", "transform", "share", "hidden_dim"}, {"window", "gradient"}),
        ("multi-hop", {"score": "dot"}, {"hops", "transform"}, {"hidden_dim", "window"}),
        ("multi-head", {}, {"heads"}, {"window", "hops"}),
    ],
)
def test_an_unknown_option_is_answered_with_those_of_the_attention(
    name: str, options: dict[str, str], known: set[str], others: set[str]
) -> None:
    with pytest.raises(ValueError, match=rf"attention.zzzz: got 3, expected an option of '{name}'. Known: ") as refused:
        make_attention(name, {"zzzz": 3, **options}, **WIDTHS)
    listed = set(re.findall(r"\w+", str(refused.value).split("Known: ")[1]))
    assert known <= listed
    # Widths are the recipe's to give.
    assert not listed & {*others, "query_dim", "key_dim", "value_dim", "dim", "options", "kwargs"}


def test_a_misspelt_option_is_answered_with_the_nearest() -> None:
    for name in ("additive", "multi-hop"):
        with pytest.raises(ValueError, match="attention.hidden_dims: got 3.*Did you mean 'hidden_dim'"):
            make_attention(name, {"hidden_dims": 3}, **WIDTHS)


def test_known_options_are_taken() -> None:
    made = make_attention("dot", {"align": "hard", "gradient": "reinforce", "dropout": 0.1}, **WIDTHS)
    assert (made.align.gradient, made.dropout) == ("reinforce", 0.1)
    make_attention("multi-hop", {"hidden_dim": 3, "transform": "gru", "align": "sparsemax"}, **WIDTHS)


@pytest.mark.parametrize("name", ["structured", "budget", "dependency-tree", "sinkhorn"])
def test_a_structured_alignment_is_an_option(name: str) -> None:
    made = make_attention("dot", {"align": name}, **WIDTHS)
    assert made.align is not None
    assert repr(make_attention("self-attention", {"align": name}, **WIDTHS).attention.align) == repr(made.align)


def test_an_alignment_that_is_no_attention_is_an_option_of_one() -> None:
    with pytest.raises(ValueError, match="attention: got 'sinkhorn', .*Fix: .* --set attention.align=sinkhorn"):
        make_attention("sinkhorn", {}, **WIDTHS)
