"""Scores: how well a key answers a query."""

from regard.general.scores.additive import Additive, QueryFree, SourceToToken, TokenToToken
from regard.general.scores.base import Score
from regard.general.scores.bilinear import (
    ActivatedGeneral,
    BiasedGeneral,
    Dot,
    General,
    LowRankGeneral,
    ScaledDot,
)
from regard.general.scores.similarity import Cosine, NegativeL2

__all__ = [
    "ActivatedGeneral",
    "Additive",
    "BiasedGeneral",
    "Cosine",
    "Dot",
    "General",
    "LowRankGeneral",
    "NegativeL2",
    "QueryFree",
    "ScaledDot",
    "Score",
    "SourceToToken",
    "TokenToToken",
]
