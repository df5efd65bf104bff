"""All metrics by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from regard._errors import nearest, refusal
from regard.evaluate.outer.areas import dice, iou
from regard.evaluate.outer.classes import accuracy, f1, precision, recall
from regard.evaluate.outer.edits import cer, per, wer
from regard.evaluate.outer.image import psnr, ssim
from regard.evaluate.outer.meteor import meteor
from regard.evaluate.outer.perplexity import perplexity
from regard.evaluate.outer.ranking import hit_rate, mean_average_precision, mean_reciprocal_rank, ndcg
from regard.evaluate.outer.result import Score
from regard.evaluate.outer.translation import bleu, chrf

# What a metric needs beside the core is imported when it is called.
METRICS: Mapping[str, Callable[..., Score]] = MappingProxyType(
    {
        "bleu": bleu,
        "chrf": chrf,
        "meteor": meteor,
        "perplexity": perplexity,
        "wer": wer,
        "cer": cer,
        "per": per,
        "psnr": psnr,
        "ssim": ssim,
        "iou": iou,
        "dice": dice,
        "accuracy": accuracy,
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "map": mean_average_precision,
        "mrr": mean_reciprocal_rank,
        "hit_rate": hit_rate,
        "ndcg": ndcg,
    }
)


def score(name: str, predicted: Any, truth: Any, **options: Any) -> Score:
    """One metric, by its name.

    Args:
        name: a key of `METRICS`.
        predicted: what a model said.
        truth: what is so.
        options: those of the metric.

    Example:
        >>> float(score("wer", ["the cat"], ["the cats"]))
        0.5
    """
    if not isinstance(name, str):
        raise TypeError(refusal("name", f"a {type(name).__name__}", "the name of a metric"))
    if name not in METRICS:
        raise ValueError(refusal("name", repr(name), "a metric", _hint(name)))
    return METRICS[name](predicted, truth, **options)


def _hint(name: str) -> str:
    """What may be meant: the name of a function, or of what is counted from files, is close to none of the names here."""
    folded = name.casefold()
    if folded in ("aer", "corpus_aer", "alignment_error_rate"):
        return "Fix: call regard.evaluate.corpus_aer, which asks from which number the words in its files are counted."
    functions = {function.__name__: known for known, function in METRICS.items()}
    return f"Did you mean {functions[folded]!r}?" if folded in functions else nearest(name, METRICS)
