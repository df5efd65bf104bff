"""What decoding keeps, so that no token is projected twice."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard._errors import refusal
from regard.ops import hooks


class Slot:
    """Keys and values (batch, ..., N, d) of one attention, grown step by step.

    They stand in buffers, of twice the length whenever one is full, so that a step writes its own rows and copies no others. Where
    somebody will come back to what a step has seen, a gradient or a trace, they are concatenated instead.
    """

    def __init__(self) -> None:
        self.length = 0
        self.asked = 0  # queries so far, of keys that stay the same
        self._kept: tuple[Tensor, Tensor] | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append, and give all there are."""
        end = self.length + key.shape[-2]
        if self._kept is None:
            self._kept = key, value
        elif torch.is_grad_enabled() or hooks.observers:
            old_key, old_value = self.kept
            self._kept = torch.cat([old_key, key], -2), torch.cat([old_value, value], -2)
        else:
            self._kept = self._longer(self._kept[0], key, end), self._longer(self._kept[1], value, end)
        self.length = end
        return self.kept

    def once(self, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """What stays the same at every step: made at the first, kept for the others."""
        return self.extend(*make()) if self._kept is None else self.kept

    @property
    def lead(self) -> tuple[int, ...] | None:
        """The axes before those of heads, tokens and width; None while there is nothing."""
        return None if self._kept is None else tuple(self._kept[0].shape[:-3])

    @property
    def kept(self) -> tuple[Tensor, Tensor]:
        """All keys and all values."""
        if self._kept is None:
            raise ValueError(refusal("cache", "an empty one", "one that has seen a token"))
        key, value = self._kept
        return key[..., : self.length, :], value[..., : self.length, :]

    def reorder(self, rows: Tensor) -> None:
        """Keep these entries of the batch, in this order: the paths that a beam goes on with."""
        if self._kept is not None:
            key, value = self._kept
            self._kept = key.index_select(0, rows), value.index_select(0, rows)

    def _longer(self, buffer: Tensor, new: Tensor, end: int) -> Tensor:
        if buffer.shape[-2] < end:
            room = buffer.new_empty(*buffer.shape[:-2], 2 * end, buffer.shape[-1])
            room[..., : self.length, :] = buffer[..., : self.length, :]
            buffer = room
        buffer[..., self.length : end, :] = new
        return buffer


class Cache:
    """Of a whole decoder: for each layer the slot of its own attention, and that of the encoder's output.

    Args:
        layers: how many.

    Example:
        >>> from regard.transformer import TransformerDecoder
        >>> decoder = TransformerDecoder(8, 2, layers=3, cross=False)
        >>> cache, tokens = decoder.cache(), torch.randn(1, 5, 8)
        >>> steps = [decoder(tokens[:, t : t + 1], cache=cache) for t in range(5)]
        >>> torch.allclose(torch.cat(steps, 1), decoder(tokens), atol=1e-5)
        True
    """

    def __init__(self, layers: int) -> None:
        self.own, self.cross = [Slot() for _ in range(layers)], [Slot() for _ in range(layers)]
        self.length = 0
        self.real: Tensor | None = None  # which of the tokens so far are no padding; None for all

    def seen(self, count: int, mask: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
        """Note that so many tokens more have come, of which these (batch, count) are real."""
        if mask is not None or self.real is not None:
            old = torch.ones(*shape, self.length, dtype=torch.bool, device=device) if self.real is None else self.real
            new = torch.ones(*shape, count, dtype=torch.bool, device=device) if mask is None else mask
            self.real = torch.cat([old, new], -1)
        self.length += count

    def reorder(self, rows: Tensor, *, cross: bool = True) -> None:
        """Keep these entries of the batch, in this order.

        Args:
            rows: their indices.
            cross: also what was kept of the encoder's output; not needed where every entry is replaced by one with the same.
        """
        for slot in (*self.own, *(self.cross if cross else ())):
            slot.reorder(rows)
        if self.real is not None:
            self.real = self.real.index_select(0, rows)

    def spread(self, times: int) -> None:
        """Let every entry of the batch become so many, one beside the other."""
        filled = next((slot for slot in self.own if slot.length), None)
        if filled is not None:
            key, _ = filled.kept
            self.reorder(torch.arange(len(key), device=key.device).repeat_interleave(times))


def fitting(cache: Cache, layers: int, lead: tuple[int, ...], memory: Tensor | None) -> None:
    """Refuse a cache of another decoder, of another batch or of another memory, before anything is added to it."""
    again = "Fix: begin with a new cache()."
    if not isinstance(cache, Cache):
        raise TypeError(refusal("cache", type(cache).__name__, "what cache() of the decoder gave"))
    if len(cache.own) != layers:
        raise ValueError(refusal("cache", f"one of {len(cache.own)} layers", f"one of {layers}"))
    before = next((slot.lead for slot in cache.own if slot.lead is not None), lead)
    if before != lead:
        raise ValueError(refusal("tokens", f"leading axes {lead}", f"{before}, as the cache has seen", again))
    kept = next((slot.length for slot in cache.cross if slot.lead is not None), None)
    if memory is not None and kept not in (None, memory.shape[-2]):
        raise ValueError(refusal("memory", f"{memory.shape[-2]} places", f"the {kept} that the cache remembers", again))
