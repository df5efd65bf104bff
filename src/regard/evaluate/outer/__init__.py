"""Outer metrics: how good the answers of a model are, whatever its attention does.

Each is `metric(predicted, truth, **options) -> Score`; a `Score` is a number with the choices that made it. Those that are sums over
batches have counts that are added: `PerplexityCounts`, `EditCounts`, `ClassCounts`, `RankCounts`.
"""

from regard.evaluate.outer.areas import dice, iou
from regard.evaluate.outer.classes import ClassCounts, accuracy, f1, precision, recall
from regard.evaluate.outer.edits import EditCounts, cer, per, wer
from regard.evaluate.outer.image import psnr, ssim
from regard.evaluate.outer.meteor import meteor
from regard.evaluate.outer.perplexity import PerplexityCounts, perplexity
from regard.evaluate.outer.ranking import (
    RankCounts,
    hit_rate,
    mean_average_precision,
    mean_reciprocal_rank,
    ndcg,
    rank_of,
)
from regard.evaluate.outer.registry import METRICS, score
from regard.evaluate.outer.result import Score
from regard.evaluate.outer.translation import bleu, chrf

__all__ = [
    "METRICS",
    "ClassCounts",
    "EditCounts",
    "PerplexityCounts",
    "RankCounts",
    "Score",
    "accuracy",
    "bleu",
    "cer",
    "chrf",
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
    "recall",
    "score",
    "ssim",
    "wer",
]
