"""Where a position enters: the tokens, before anything asks; or the scores, by a rotation, a bias or a mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.general.masks import Mask
from regard.general.scores import Score
from regard.ops.call import Bias


class AbsolutePosition(nn.Module):
    """Positions as features: tokens in, tokens that know their place out."""

    def forward(self, tokens: Float[Tensor, "*b n d"], start: int = 0) -> Float[Tensor, "*b n d"]:
        """Tokens (..., N, d), the first of which stands at `start`."""
        raise NotImplementedError


class RelativePosition(nn.Module):
    """Positions inside the scores, of heads (..., H, N, d): whatever a kind does not need it leaves as it is.

    Keys stand at 0, 1, …, N - 1, and the last query is aligned with the last key, as in `Causal` and in cached decoding: query i
    stands at i + N - Nq.
    """

    def score(self, score: Score) -> Score:
        """The score with the positions in it; called once, when an attention is made."""
        return score

    def query(self, query: Tensor) -> Tensor:
        """The query that is scored."""
        return query

    def bias(self, query: Tensor, key: Tensor) -> Bias | None:
        """What is added to the scores, from queries (..., H, Nq, d) and keys (..., H, N, d).

        Give it to an attention together with `start=N - Nq`.
        """
        return None

    @property
    def pairs(self) -> Mask | None:
        """Who may look at whom."""
        return None


Position = AbsolutePosition | RelativePosition


@dataclass(frozen=True)
class StreamedBias:
    """The b_ij of any tile, as a function of positions i (m, 1) and j (1, n), both ascending.

    `lead` are the axes before those two, and `requires_grad` says whether a gradient flows into it: where none does, a library
    call may take it written out. `tensors` follow i and j as arguments of the function: a learned bias that names what it is made of
    can be computed where ranks share the keys (`parallel.context`).
    """

    function: Callable[..., Tensor]
    lead: tuple[int, ...] = ()
    requires_grad: bool = False
    tensors: tuple[Tensor, ...] = ()

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        return self.function(i, j, *self.tensors)


def rows_of(x: Tensor, i: Tensor, first: int) -> Tensor:
    """The rows of x (..., Nq, d) that stand at positions i (m, 1), where row 0 stands at `first`."""
    return x.index_select(-2, i.flatten() - first)


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Entry index (m, n) of each row of x (..., m, r): (..., m, n)."""
    return x.gather(-1, index.expand(*x.shape[:-1], index.shape[-1]))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Positions are computed in float32 or wider: bfloat16 cannot even count to 1000."""
    return torch.promote_types(dtype, torch.float32)


def angles(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> Tensor:
    """Position times frequency, (..., ceil(width / 2)): the frequencies fall from 1 to almost 1 / base."""
    rank = torch.arange(0, width, 2, device=positions.device, dtype=dtype)
    return positions.to(dtype).unsqueeze(-1) * base ** (-rank / max(width, 1))
