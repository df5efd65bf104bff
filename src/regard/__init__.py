"""regard: every attention mechanism of the literature, from one equation.

score  e = score(q, k)        how well does each key answer the query
align  a = align(e)           how are scores turned into weights
sum    c = Σ a · v            what is read
"""

import logging

from regard import catalog
from regard._version import __version__
from regard.general.alignments import Alignment, Entmax, Hard, Local, Reinforced, ReinforcedPairs, Soft, Sparsemax
from regard.general.attention import Attention, explain_dispatch
from regard.general.disan import DirectionalSelfAttention, ReinforcedSelfAttention
from regard.general.masks import Band, Causal, Directional, Keys, Mask, Padding, Where, Window
from regard.general.scores import (
    ActivatedGeneral,
    Additive,
    BiasedGeneral,
    Cosine,
    Dot,
    General,
    LowRankGeneral,
    NegativeL2,
    QueryFree,
    ScaledDot,
    Score,
    SourceToToken,
    TokenToToken,
)
from regard.observe import (
    MovingBaseline,
    Recorded,
    Trace,
    erase,
    given,
    intervene,
    load_trace,
    record,
    reinforce,
)
from regard.ops.dispatch import execution

__all__ = [
    "ActivatedGeneral",
    "Additive",
    "Alignment",
    "Attention",
    "Band",
    "BiasedGeneral",
    "Causal",
    "Cosine",
    "Directional",
    "DirectionalSelfAttention",
    "Dot",
    "Entmax",
    "General",
    "Hard",
    "Keys",
    "Local",
    "LowRankGeneral",
    "Mask",
    "NegativeL2",
    "MovingBaseline",
    "Padding",
    "QueryFree",
    "Recorded",
    "Reinforced",
    "ReinforcedPairs",
    "ReinforcedSelfAttention",
    "ScaledDot",
    "Score",
    "Soft",
    "SourceToToken",
    "Sparsemax",
    "TokenToToken",
    "Trace",
    "Where",
    "Window",
    "__version__",
    "catalog",
    "erase",
    "execution",
    "explain_dispatch",
    "given",
    "intervene",
    "load_trace",
    "record",
    "reinforce",
]

logging.getLogger("regard").addHandler(logging.NullHandler())
