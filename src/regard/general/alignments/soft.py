"""Soft, or global, alignment: a softmax over all allowed keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.general.alignments.base import Alignment, softmax
from regard.ops.call import Call, Tile
from regard.ops.fill import where
from regard.ops.folds import Fold, SoftFold, tempered
from regard.ops.forms import wide
from regard.ops.rule import Rule

# A square of the temperature, which its gradient divides by, must still be a number.
_LOG_RANGE = 30.0


@register(
    name="soft",
    zh="软对齐（全局对齐）",
    path="general/alignment",
    equation="a_j = exp(e_j/τ) / Σ_l exp(e_l/τ)",
    paper="Bahdanau, Cho & Bengio, ICLR 2015; Xu et al., Show, Attend and Tell, ICML 2015",
    year=2015,
    time="N²",
    memory="linear",
    choose="the standard case: differentiable, deterministic, every key may contribute",
    avoid="exact zeros are wanted (entmax, hard), or only a neighbourhood matters (local)",
)
class Soft(Alignment):
    r"""Softmax over the allowed keys (Bahdanau et al. 2015, https://arxiv.org/abs/1409.0473).

    $$a_{ij} = \frac{\exp(e_{ij} / \tau)}{\sum_l \exp(e_{il} / \tau)}$$

    Called soft in vision (Xu et al. 2015) and global in translation (Luong et al. 2015): the same function. A row with
    nothing to attend to weighs nothing.

    Args:
        temperature: $\tau > 0$; towards 0 the largest score takes all, towards infinity all weigh the same.
        learnable: train it, through its logarithm so that it stays positive, and within $e^{\pm 30}$ so that it stays finite.

    Example:
        >>> from regard import Attention, Dot
        >>> Attention(Dot(), Soft(temperature=0.5))(torch.randn(2, 3, 4), torch.randn(2, 5, 4)).shape
        torch.Size([2, 3, 4])
    """

    is_rowwise = True
    numbers = ("temperature",)

    def __init__(self, temperature: float = 1.0, learnable: bool = False) -> None:
        super().__init__()
        if not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
            raise ValueError(_no_temperature(temperature))
        self.temperature = float(temperature)
        if learnable and abs(math.log(temperature)) > _LOG_RANGE:
            raise ValueError(
                refusal("temperature", temperature, "a number from 1e-13 to 1e13, since it is learned there")
            )
        self.log_temperature = nn.Parameter(torch.tensor([math.log(temperature)])) if learnable else None

    @property
    def temperature_of_softmax(self) -> float | Tensor:
        if self.log_temperature is None:
            return self.temperature
        return wide(self.log_temperature[0]).clamp(-_LOG_RANGE, _LOG_RANGE).exp()

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        if self.log_temperature is not None or self.temperature != 1.0:
            scores = tempered(scores, self.temperature_of_softmax)
        if mask is None and tile.call.bias is None:
            # Nothing is forbidden, so no row is without keys.
            return scores.softmax(-1)
        if mask is not None and tile.call.bias is None and scores.shape[-1] > 0:
            return softmax_of_allowed(scores, mask)
        return softmax(scores, mask)

    def rule(self, call: Call) -> Rule:
        return Rule(self.temperature_of_softmax)

    def fold(self, tile: Tile) -> Fold:
        return SoftFold(self.temperature_of_softmax)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, learnable={self.log_temperature is not None}"


def _no_temperature(given: object) -> str:
    """Refuse what is no temperature; a tensor of one number is a step from it."""
    if not isinstance(given, Tensor):
        return refusal("temperature", repr(given), "a finite number > 0")
    # Not read without a word: as a constant it is cut off from what computed it.
    fix = "Fix: pass float(temperature), or learnable=True to train it." if given.numel() == 1 else ""
    return refusal("temperature", f"a tensor of shape {tuple(given.shape)}", "a number", fix)


def softmax_of_allowed(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the allowed keys, whose scores are more than minus infinity; zeros where there are none."""
    # Forbidden keys score as low as a number can: their weight is zero beside any other, and a row of nothing else stays
    # finite in both directions until it is dropped.
    lowest = torch.finfo(scores.dtype).min
    return where(mask, where(mask, scores, lowest).softmax(-1), 0.0)
