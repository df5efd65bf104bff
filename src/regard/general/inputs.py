"""What a mechanism is given: tokens, and a mask of those that are real."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from regard._errors import refusal
from regard.general.masks import Mask
from regard.ops.dispatch import autocasting
from regard.ops.fill import kept
from regard.ops.forms import common_shape


def refuse_nested(name: str, x: Tensor) -> None:
    """Refuse sequences of different lengths in one tensor, which have no axes to compute on."""
    if x.is_nested:
        fix = "Fix: put the sequences end to end, x.values(), under the mask regard.Packed(lengths); or side by side and padded."
        raise TypeError(refusal(name, "a nested tensor", "a plain one", fix))


def checked_input(
    x: Tensor, mask: Tensor | Mask | None, name: str, width: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """One input (..., N, d), and its mask (..., N); or a refusal."""
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        got = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(refusal(name, got, "a floating-point tensor, (..., N, d)"))
    refuse_nested(name, x)
    if x.dim() < 2:
        raise ValueError(refusal(name, f"shape {tuple(x.shape)}", "at least two axes, (..., N, d)"))
    if width is not None and x.shape[-1] != width:
        raise ValueError(refusal(name, f"width {x.shape[-1]}", f"{width}, as the mechanism was made for"))
    if mask is None:
        return x, None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        fix = "Fix: what Padding(lengths) says is torch.arange(N) < lengths[:, None]." if got == "Padding" else ""
        if not fix and isinstance(mask, Mask):
            fix = f"Fix: {got} says which token may look at which: pass it as pairs=, where that is taken."
        raise TypeError(refusal(f"mask of {name}", got, "booleans, True for a real token", fix))
    shape = x.shape[:-1]
    if mask.shape != shape:
        try:
            mask = mask.expand(shape)
        except RuntimeError:
            got = f"shape {tuple(mask.shape)}"
            raise ValueError(refusal(f"mask of {name}", got, f"a shape that broadcasts to {tuple(shape)}")) from None
    return x, mask


def masked_input(x: Tensor, mask: Tensor | None, name: str, width: int | None = None) -> tuple[Tensor, Tensor | None]:
    """One input (..., N, d) with zeros where its mask is False, and the mask (..., N)."""
    x, mask = checked_input(x, mask, name, width)
    return (x, None) if mask is None else (kept(x, mask.unsqueeze(-1)), mask)


def check_together(inputs: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The leading axes of several inputs (..., N, d) together; or a refusal by their names, where they cannot meet."""
    (first, x), *others = inputs.items()
    for name, y in others:
        if y.device != x.device:
            raise ValueError(refusal(name, f"a tensor on {y.device}", f"the device of {first}, {x.device}"))
        if y.dtype != x.dtype and not autocasting(x.device):
            raise TypeError(refusal(name, f"a tensor of {y.dtype}", f"the dtype of {first}, {x.dtype}"))
    leads = [tuple(y.shape[:-2]) for y in inputs.values()]
    try:
        return common_shape(*leads)
    except RuntimeError:
        *most, last = inputs
        got = f"leading axes {', '.join(map(str, leads))}"
        raise ValueError(refusal(f"{', '.join(most)} and {last}", got, "axes that broadcast together")) from None
