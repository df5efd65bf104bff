"""Arcs over a sentence."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib.patches import FancyArrowPatch

from regard.report.figures import arcs, save

WORDS = ["the", "cat", "sleeps"]
TREE = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.1, 0.9], [0.0, 0.0, 1.0]])


def arrows(figure):
    return [patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch)]


def test_an_arrow_for_each_head_that_is_likely_enough(tmp_path):
    figure = arcs(TREE, WORDS, title="a tree")
    assert len(arrows(figure)) == 4
    assert len(arrows(arcs(TREE, WORDS, least=0.5))) == 3
    assert [text.get_text() for text in figure.axes[0].texts] == [*WORDS, "root"]
    for suffix in ("svg", "png"):
        assert save(figure, tmp_path / f"tree.{suffix}").stat().st_size > 1000


def test_arrows_go_from_head_to_word_the_likelier_the_thicker():
    drawn = arrows(arcs(TREE, WORDS))
    # What was asked for, before an arrowhead was put on it.
    ends = [(p._path_original.vertices[0, 0], p._path_original.vertices[-1, 0]) for p in drawn]
    widths = [p.get_linewidth() for p in drawn]
    assert widths == sorted(widths)
    assert ends[0] == (1, 1)
    assert ends[1] == (2, 1)
    assert drawn[0].get_edgecolor() != drawn[-1].get_edgecolor()


def test_gold_arcs_stand_out():
    plain, marked = arrows(arcs(TREE, WORDS)), arrows(arcs(TREE, WORDS, gold=[(1, 2)]))
    assert [a.get_edgecolor() != b.get_edgecolor() for a, b in zip(plain, marked, strict=True)] == [
        False,
        True,
        False,
        False,
    ]


def test_nothing_to_draw():
    assert arcs(torch.zeros(0, 0)).axes[0].texts[0].get_text() == "no words"
    assert not arrows(arcs(torch.zeros(2, 2)))


def test_refusals():
    with pytest.raises(ValueError, match="weights: got \\(2, 3\\), expected shape \\(N, N\\)"):
        arcs(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="gold: got \\(0, 3\\), expected pairs of 3 words"):
        arcs(TREE, gold=[(0, 3)])
    with pytest.raises(ValueError, match="words"):
        arcs(TREE, ["a"])
