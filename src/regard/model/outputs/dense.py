"""A map: an answer for each point of a picture."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.scores.base import width
from regard.model.batch import Batch
from regard.model.naming import Available
from regard.model.outputs.base import Output, real_terms, target_of
from regard.model.outputs.classifier import real_of
from regard.ops.fill import kept_rows
from regard.query.parts import one_of, widths

_KINDS = ("classes", "values")


class DenseMap(Output):
    r"""Contexts of the regions of a grid to a map, $m_{hw} = W c_{hw} + b$, with `scale` x `scale` points for each region.

    The points of a region are channels that are put beside each other (Shi et al. 2016, https://arxiv.org/abs/1609.05158). Of classes
    the loss is the mean cross-entropy over the points whose target is not -1; of values the mean squared difference.

    Args:
        dim: width of a context.
        channels: number of classes, or of values of a point.
        grid: rows and columns of regions; one number for a square.
        scale: points on each side of a region.
        kind: `"classes"` or `"values"`.

    Example:
        >>> import torch
        >>> from regard.model.naming import Available
        >>> DenseMap(8, 3, grid=(2, 5), scale=4)(torch.randn(1, 10, 8), Available({}, {}, {})).shape
        torch.Size([1, 3, 8, 20])
    """

    def __init__(
        self, dim: int, channels: int, grid: int | tuple[int, int], scale: int = 1, kind: str = "classes"
    ) -> None:
        super().__init__()
        rows, columns = widths("grid", grid, 2)
        self.grid, self.scale = (rows, columns), width("scale", scale)
        self.kind = one_of("kind", kind, _KINDS)
        self.linear = nn.Linear(width("dim", dim), width("channels", channels) * scale**2)

    def forward(self, context: Float[Tensor, "b n d"], found: Available) -> Float[Tensor, "b c h w"]:
        regions = self.grid[0] * self.grid[1]
        if context.dim() != 3 or context.shape[1] != regions:
            got = f"shape {tuple(context.shape)}"
            raise ValueError(refusal("context", got, f"one for each region, (B, {regions}, {self.linear.in_features})"))
        points: Tensor = self.linear(kept_rows(context, real_of(context, found)))
        return F.pixel_shuffle(points.mT.unflatten(-1, self.grid), self.scale)

    def loss(self, prediction: Float[Tensor, "b c h w"], batch: Batch) -> Tensor:
        target = target_of(batch)
        shape = prediction.shape if self.kind == "values" else (len(prediction), *prediction.shape[2:])
        if target.shape != shape:
            raise ValueError(refusal("batch", f"target of shape {tuple(target.shape)}", f"{tuple(shape)}"))
        if self.kind == "values":
            return F.mse_loss(prediction, target)
        return F.cross_entropy(prediction, target, ignore_index=-1)

    def terms(self, batch: Batch) -> Tensor | int:
        return target_of(batch).numel() if self.kind == "values" else real_terms(batch)

    def decide(self, prediction: Float[Tensor, "b c h w"]) -> Tensor:
        """The class of each point (B, H, W), or its values (B, C, H, W)."""
        return prediction if self.kind == "values" else prediction.argmax(1)
