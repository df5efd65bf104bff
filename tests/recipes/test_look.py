"""What the figure of a run says: what was answered, what is true, and which attention is which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

from regard.model import collate
from regard.observe import record
from regard.recipes.look import keep_attention, told_apart
from regard.recipes.recipe import configured
from regard.recipes.runs import Run
from regard.report import figures

SMALL = {"train_size": 30, "hidden_dim": 8, "embedding_dim": 8}


def texts_of(figure: Any) -> str:
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would have been written."""
    kept: list[Any] = []
    monkeypatch.setattr(figures, "save", lambda figure, path: kept.append(figure))
    return kept


def test_paths_are_told_apart() -> None:
    assert told_apart(["attention.attention"]) == {"attention.attention": "attention"}
    assert told_apart(["a.x", "b.x"]) == {"a.x": "a.x", "b.x": "b.x"}
    assert told_apart(["a", "a.b"]) == {"a": "a", "a.b": "a.b"}
    assert told_apart([""]) == {"": ""}
    assert told_apart([]) == {}


def test_a_class_is_drawn_with_the_answer_and_the_truth(tmp_path: Path, saved: list[Any]) -> None:
    task = configured("sentiment", {"attention": "additive", **SMALL})
    examples = task.cached("test")[:2]
    truth = task.classes[int(examples[0].target)]  # type: ignore[attr-defined]
    keep_attention(task, Run(tmp_path), task.build(), examples, ["negative", "positive"])
    assert f"sentiment: additive\nanswer: negative, truth: {truth}" in texts_of(saved[0])
    # Of a text of one's own nothing is known.
    example = task.parse("a good film")
    assert task.heading(example) == "sentiment: additive"


def test_attentions_are_called_by_what_tells_them_apart(tmp_path: Path, saved: list[Any]) -> None:
    task = configured("aspect", {"attention": "rotatory-attention", **SMALL})
    examples = task.cached("test")[:1]
    with record(model := task.build()) as trace, torch.no_grad():
        model(collate(examples))
    task.draw(trace, examples, tmp_path)
    drawn = {axes.get_title(loc="left") for axes in saved[0].axes} - {""}
    assert len(drawn) > 1
    assert not any(name.startswith("attention.") for name in drawn), drawn


def test_what_is_written_is_the_answer_and_what_is_read_the_input(tmp_path: Path, saved: list[Any]) -> None:
    task = configured("dates", {"attention": "additive", "train_size": 30})
    examples = task.cached("test")[:1]
    with record(model := task.build()) as trace, torch.no_grad():
        model(collate(examples))
    task.draw(trace, examples, tmp_path)
    assert (saved[0].axes[0].get_ylabel(), saved[0].axes[0].get_xlabel()) == ("answer", "input")
