"""regard: every attention mechanism of the literature, from one equation.

score  e = score(q, k)        how well does each key answer the query
align  a = align(e)           how are scores turned into weights
sum    c = Σ a · v            what is read
"""

import logging

from regard import catalog
from regard._version import __version__
from regard.general.alignments import Alignment, Entmax, Hard, Local, Reinforced, Soft, Sparsemax
from regard.general.attention import Attention, explain_dispatch
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
from regard.ops.dispatch import execution

logging.getLogger("regard").addHandler(logging.NullHandler())
