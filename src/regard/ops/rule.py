r"""What a kernel must know of an alignment: one rule that soft, hard and local alignment are cases of.

For a row of scores $e_j$ over the allowed keys, with Gumbel noise $G_j$ and $b_j = -(j-p)^2 / 2\sigma^2$, $\sigma = D/2$:

$$t_j = (e_j [+ G_j]) / \tau \, [+ b_j], \qquad p = \mathrm{softmax}(t) \text{ over } \lceil p - D \rceil \le j \le \lfloor p + D \rfloor$$

The weights are $p_j$, or $p_j e^{b_j}$, or those of one key, $1[j = \arg\max_l e_l [+ G_l]]$, with the gradient of $p$ or none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """One alignment as numbers."""

    temperature: float | Tensor | None = 1.0
    # Gumbel noise, counted from the call's seed, on the scores of the softmax.
    noise: bool = False
    # "" for all keys; else one key: "largest" or "sampled" (the largest score with noise).
    choice: str = ""
    # Whether a choice has the gradient of the softmax.
    learns: bool = True
    # Centre of a window of each query, and how far it reaches.
    position: Tensor | None = None
    window: float = 0.0
    # Whether the centres stand nearly in the order of the queries.
    ordered: bool = False
    # "", "added" to the scores in the softmax, or "scaled": times the weights after it.
    gaussian: str = ""
