"""One input, one level, one representation: the ends of the three axes, which plain `Attention` is."""

from __future__ import annotations

from regard.catalog import register
from regard.general.attention import Attention

_PAPER = "Brauwers & Frasincar, A General Survey on Attention Mechanisms in Deep Learning, TKDE 2023"

for _name, _zh, _axis, _one, _several in (
    ("singular-feature", "单一特征注意力", "multiplicity", "one input", "co-attention, rotatory"),
    ("single-level", "单层级注意力", "levels", "one granularity", "attention-via-attention, hierarchical"),
    ("single-representational", "单一表示注意力", "representations", "one embedding of the input", "meta-embedding"),
):
    register(
        name=_name,
        zh=_zh,
        path=f"feature/{_axis}",
        equation="c_i = Σ_j align(score(q_i, k_j)) v_j: plain attention",
        paper=_PAPER,
        year=2023,
        time="that of the score",
        memory="linear (fused, blockwise)",
        choose=f"{_one}: this is `Attention` itself",
        avoid=f"there is more than {_one}: {_several}",
    )(Attention)
