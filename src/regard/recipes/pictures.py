"""Pictures of files as numbers; only the formats that recipes name are decoded."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard._errors import missing_extra, refusal
from regard.recipes.data import own_file

_FORMATS = ("PNG", "JPEG")
# More pixels than any data set here has in a picture; a small file may claim to be a huge one.
_PIXELS = 1 << 24


def decoded(content: bytes, where: str, mode: str, size: tuple[int, int] | None = None) -> Tensor:
    """A picture (C, H, W), bytes from 0 to 255; class numbers stay as they are.

    Args:
        content: of a PNG or JPEG file.
        where: its path, for errors.
        mode: `"RGB"`, `"L"` for grey, or `"P"` for numbers of classes.
        size: rows and columns to scale to; where there are none it stays as large as it is.

    Example:
        >>> from PIL import Image
        >>> Image.new("L", (3, 2), 7).save(file := BytesIO(), "PNG")
        >>> decoded(file.getvalue(), "grey.png", "L").tolist()
        [[[7, 7, 7], [7, 7, 7]]]
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(missing_extra("pillow", "train", "pictures")) from error
    try:
        with Image.open(BytesIO(content), formats=_FORMATS) as picture:
            if picture.width * picture.height > _PIXELS:
                raise OSError(f"{picture.width} x {picture.height} pixels")
            found = picture if mode == "P" else picture.convert(mode)
            if size is not None and found.size != size[::-1]:
                found = found.resize(size[::-1], Image.Resampling.BILINEAR)
            numbers: np.ndarray[Any, Any] = np.array(found)
    # A broken picture is a dozen kinds of errors.
    except Exception as error:
        raise ValueError(refusal("data", f"{where}: {error}", "a PNG or JPEG picture")) from error
    if numbers.dtype != np.uint8 or numbers.ndim != (3 if mode == "RGB" else 2):
        raise ValueError(refusal("data", f"{where}: {numbers.dtype}, {numbers.shape}", f"a picture of mode {mode}"))
    return torch.from_numpy(numbers).movedim(-1, 0) if mode == "RGB" else torch.from_numpy(numbers)[None]


def from_path(text: str, mode: str, size: tuple[int, int]) -> Tensor:
    """A user's own picture (C, H, W), from 0 to 1, scaled to the size of the others."""
    return decoded(own_file(text, "a PNG or JPEG picture"), text, mode, size).float() / 255
