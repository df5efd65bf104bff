"""Memory that tiles are written into, one after the other: freeing and allocating megabytes for each would fragment the heap."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


class Workspace:
    """Named buffers in the dtype and on the device of a tensor."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def shaped(self, name: str, shape: Sequence[int]) -> Tensor:
        """Part of a buffer in a shape; what it held before is lost."""
        count = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < count:
            self._buffers[name] = self._like.new_empty(count)
        return self._buffers[name][:count].view(tuple(shape))
