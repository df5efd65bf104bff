"""A score says how it was made; every metric is found by its name and called alike."""

from __future__ import annotations

import copy
import inspect
import json
import math
import operator
import pickle
import statistics
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

import regard.evaluate as evaluate
from regard.evaluate import outer
from regard.evaluate.outer import METRICS, Score, score

SENTENCES = (["the cat sat on the mat today"], ["the cat sat on a mat"])
CLASSES = ([0, 1, 2, 1], [0, 1, 1, 1])
IMAGES = (torch.rand(2, 3, 13, 17), torch.rand(2, 3, 13, 17))
# What each metric is called with here.
CALLS: dict[str, tuple[tuple[Any, Any], dict[str, Any]]] = {
    "bleu": (SENTENCES, {}),
    "chrf": (SENTENCES, {}),
    "meteor": (SENTENCES, {}),
    "perplexity": ((torch.randn(5, 7), torch.tensor([0, 1, 6, -1, 3])), {}),
    "wer": (SENTENCES, {}),
    "cer": (SENTENCES, {}),
    "per": ((["sh iy"], ["sh ih"]), {}),
    "psnr": (IMAGES, {"data_range": 1.0}),
    "ssim": (IMAGES, {"data_range": 1.0}),
    "iou": (CLASSES, {}),
    "dice": (CLASSES, {}),
    "accuracy": (CLASSES, {}),
    "precision": (CLASSES, {}),
    "recall": (CLASSES, {}),
    "f1": (CLASSES, {}),
    "map": (([0.1, 0.9], [0, 1]), {"groups": [0, 0]}),
    "mrr": (([0.1, 0.9], [0, 1]), {"groups": [0, 0]}),
    "hit_rate": ((torch.rand(3, 5), torch.tensor([0, 1, 2])), {"k": 2}),
    "ndcg": ((torch.rand(3, 5), torch.tensor([0, 1, 2])), {"k": 2}),
}


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_called_alike_and_signs_what_it_did(name: str) -> None:
    (predicted, truth), options = CALLS[name]
    result = score(name, predicted, truth, **options)
    assert isinstance(result, Score)
    assert result.name == name
    assert type(result.value) is float
    assert float(result) == result.value
    assert all(type(part) is float for part in result.details.values())
    assert result.signature.split("|")[0].split(":")[0] in ("regard", "sacrebleu", "nltk", "torchmetrics")
    assert any(c.isdigit() for c in result.signature)
    assert score(name, predicted, truth, **options) == result
    positional = [
        p.name for p in inspect.signature(METRICS[name]).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert positional == ["predicted", "truth"]
    assert (METRICS[name].__doc__ or "").count(">>>")


def test_less_is_better_of_errors_alone() -> None:
    lower = {name for name, ((p, t), options) in CALLS.items() if not score(name, p, t, **options).higher}
    assert lower == {"perplexity", "wer", "cer", "per"}


def test_a_score_is_a_value() -> None:
    one = Score("wer", 0.5, "regard:1", higher=False, details={"insertions": 2.0})
    assert pickle.loads(pickle.dumps(one)) == one
    assert len({one, Score("wer", 0.5, "regard:1", higher=False)}) == 2
    with pytest.raises(FrozenInstanceError):
        one.value = 0.0  # type: ignore[misc]
    assert str(one) == "wer 0.5, lower is better [regard:1]"
    assert str(Score("bleu", 27.123456789, "s")) == "bleu 27.1235, higher is better [s]"


def test_a_score_is_a_number() -> None:
    one = Score("wer", 0.25, "regard:1", higher=False, details={"insertions": 2.0})
    assert isinstance(one, float)
    assert (f"{one:.2f}", f"{one:.0%}", f"{one}") == ("0.25", "25%", str(one))
    assert 0 < one < 2
    assert one <= 0.25 <= one
    assert max(one, 0.5) == 0.5
    assert json.loads(json.dumps({"x": one})) == {"x": 0.25}
    assert json.dumps([one], indent=1) == "[\n 0.25\n]"
    assert np.array([one, one]).dtype == np.float64
    assert torch.tensor([one]).tolist() == [0.25]
    computed = [one + 1, 1 - one, -one, one * one, round(one, 1), abs(one), float(one), sum([one, one]), one / one]
    assert computed == [1.25, 0.75, -0.25, 0.0625, 0.2, 0.25, 0.25, 0.5, 1.0]
    # Also where a module makes its results of the type that came.
    computed += [statistics.mean([one, one]), statistics.fmean([one]), statistics.stdev([one, 0.25]), math.sqrt(one)]
    assert [type(x) for x in computed] == [float] * len(computed)


def test_scores_are_equal_where_all_that_they_say_is() -> None:
    one = Score("wer", 0.5, "regard:1", higher=False, details={"insertions": 2.0})
    same = Score("wer", 0.5, "regard:1", False, {"insertions": 2.0})
    assert one == same
    assert not operator.ne(one, same)
    for other in (
        Score("cer", 0.5, "regard:1", False, {"insertions": 2.0}),
        Score("wer", 0.5, "regard:2", False, {"insertions": 2.0}),
        Score("wer", 0.5, "regard:1", True, {"insertions": 2.0}),
        Score("wer", 0.5, "regard:1", False, {"insertions": 1.0}),
    ):
        assert one != other
        assert not operator.eq(one, other)
    assert one == 0.5 == one
    assert not operator.ne(one, 0.5)
    assert one != 0.75
    assert one != "wer"
    assert hash(one) == hash(0.5) == hash(same)
    for copied in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one), replace(one)):
        assert (copied, type(copied), copied.details) == (one, Score, one.details)
    assert repr(one) == (
        "Score(name='wer', value=0.5, signature='regard:1', higher=False, details={'insertions': 2.0})"
    )
    assert asdict(one)["signature"] == "regard:1"
    assert type(Score("n", 1, "s").value) is float
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        Score("wer")  # type: ignore[call-arg]


def test_an_unknown_metric_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="name: got 'blue', expected a metric. Did you mean 'bleu'"):
        score("blue", [], [])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("BLEU", "Did you mean 'bleu'"),
        ("Ssim", "Did you mean 'ssim'"),
        ("mean_average_precision", "Did you mean 'map'"),
        ("aer", "Fix: call regard.evaluate.corpus_aer"),
        ("AER", "Fix: call regard.evaluate.corpus_aer"),
        ("corpus_aer", "Fix: call regard.evaluate.corpus_aer"),
    ],
)
def test_what_is_written_otherwise_is_found(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"name: got '{name}', expected a metric. {hint}"):
        score(name, [], [])


def test_names_are_exported() -> None:
    assert set(outer.__all__) < set(evaluate.__all__)
    for name in evaluate.__all__:
        assert getattr(evaluate, name) is not None
    assert evaluate.wer is outer.wer
    assert {*evaluate.__all__, "__doc__"} <= set(dir(evaluate))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = evaluate.nothing  # type: ignore[attr-defined]


def test_importing_metrics_loads_no_extra() -> None:
    script = (
        "import sys; import regard.evaluate; assert 'torch' not in sys.modules; from regard.evaluate import METRICS; "
        "print([m for m in ('sacrebleu', 'nltk', 'torchmetrics', 'jiwer', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("bleu", "sacrebleu"),
        ("chrf", "sacrebleu"),
        ("meteor", "nltk"),
        ("psnr", "torchmetrics"),
        ("ssim", "torchmetrics"),
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    (predicted, truth), options = CALLS[name]
    with pytest.raises(ImportError, match=rf"{name}: package '{package}' is not installed. .*regard\[train\]"):
        score(name, predicted, truth, **options)


@pytest.mark.parametrize("name", ["bleu", "chrf", "meteor", "wer", "cer", "per"])
class TestLists:
    def test_a_text_is_not_a_list(self, name: str) -> None:
        with pytest.raises(
            TypeError, match=r"predicted: got 'a cat', expected a list .*Fix: put the one text into a list"
        ):
            score(name, "a cat", ["a cat"])
        with pytest.raises(TypeError, match=r"truth: got 'a cat', expected a list"):
            score(name, ["a cat"], "a cat")

    def test_nothing_has_no_score(self, name: str) -> None:
        with pytest.raises(ValueError, match="predicted: got nothing, expected at least one entry"):
            score(name, [], [])

    def test_unequal_numbers_are_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="truth: got 1 entries, expected as many as were predicted, 2"):
            score(name, ["a", "b"], ["a"])

    def test_what_is_no_text_is_refused(self, name: str) -> None:
        with pytest.raises(TypeError, match=r"predicted\[1\]: got (None|a NoneType), expected"):
            score(name, ["a", None], ["a", "b"])
        with pytest.raises(TypeError, match="truth: got a Tensor, expected a list"):
            score(name, ["a"], torch.zeros(1))
