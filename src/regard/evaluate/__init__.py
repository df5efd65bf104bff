"""Metrics: of what a task model answers, and of where its attention looks.

Names are imported from their own files when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.evaluate.alignment import AlignmentCounts
    from regard.evaluate.links import Links, corpus_aer, read_pharaoh, read_wpt, write_pharaoh, write_wpt
    from regard.evaluate.outer import (
        METRICS,
        ClassCounts,
        EditCounts,
        PerplexityCounts,
        RankCounts,
        Score,
        accuracy,
        bleu,
        cer,
        chrf,
        dice,
        f1,
        hit_rate,
        iou,
        mean_average_precision,
        mean_reciprocal_rank,
        meteor,
        ndcg,
        per,
        perplexity,
        precision,
        psnr,
        rank_of,
        recall,
        score,
        ssim,
        wer,
    )

__all__ = [
    "AlignmentCounts",
    "ClassCounts",
    "EditCounts",
    "Links",
    "METRICS",
    "PerplexityCounts",
    "RankCounts",
    "Score",
    "accuracy",
    "bleu",
    "cer",
    "chrf",
    "corpus_aer",
    "dice",
    "f1",
    "hit_rate",
    "iou",
    "mean_average_precision",
    "mean_reciprocal_rank",
    "meteor",
    "ndcg",
    "per",
    "perplexity",
    "precision",
    "psnr",
    "rank_of",
    "read_pharaoh",
    "read_wpt",
    "recall",
    "score",
    "ssim",
    "wer",
    "write_pharaoh",
    "write_wpt",
]

_FILES = {
    "AlignmentCounts": "alignment",
    "Links": "links",
    "corpus_aer": "links",
    "read_pharaoh": "links",
    "read_wpt": "links",
    "write_pharaoh": "links",
    "write_wpt": "links",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES.get(name, 'outer')}"), name)


def __dir__() -> list[str]:
    """What `regard.evaluate.` completes to: names that were not used yet among them."""
    return sorted({*globals(), *__all__})
