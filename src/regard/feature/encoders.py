"""Encoders between the levels of a hierarchy: maps of sequences to sequences that know which tokens are real."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard._errors import refusal
from regard.general.inputs import checked_input
from regard.general.scores.base import width
from regard.ops.fill import kept_rows, where

_KINDS = {"gru": nn.GRU, "lstm": nn.LSTM}


class RecurrentEncoder(nn.Module):
    r"""A recurrent network over the real tokens of a sequence, in both directions by default.

    $$h_j = [\overrightarrow{\mathrm{GRU}}(x_1 \dots x_j);\; \overleftarrow{\mathrm{GRU}}(x_S \dots x_j)]$$

    Padding is skipped wherever it stands, not read: each sequence gives what it would give alone.

    Args:
        dim: width of the tokens.
        hidden_dim: width of a direction; half of `dim`, rounded up, when not given.
        kind: `"gru"` or `"lstm"`.
        bidirectional: read from both ends.
        layers: how many, each reading the states of the one before.
        dropout: of what a layer gives to the next, while training.

    Example:
        >>> RecurrentEncoder(6, 4)(torch.randn(2, 3, 5, 6)).shape
        torch.Size([2, 3, 5, 8])
    """

    fills_padding = True
    skips_padding = True

    def __init__(
        self,
        dim: int,
        hidden_dim: int | None = None,
        kind: str = "gru",
        bidirectional: bool = True,
        layers: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if kind not in _KINDS:
            raise ValueError(refusal("kind", repr(kind), f"one of {', '.join(_KINDS)}"))
        dim = width("dim", dim)
        hidden_dim = (dim + 1) // 2 if hidden_dim is None else width("hidden_dim", hidden_dim)
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0.0 <= dropout <= 1.0:
            raise ValueError(refusal("dropout", repr(dropout), "a probability, from 0 to 1"))
        self.network = _KINDS[kind](
            dim,
            hidden_dim,
            width("layers", layers),
            batch_first=True,
            bidirectional=bidirectional,
            # A single layer gives to no next one.
            dropout=float(dropout) if layers > 1 else 0.0,
        )
        self.out_dim = 2 * hidden_dim if bidirectional else hidden_dim

    def forward(
        self, tokens: Float[Tensor, "*b n d"], mask: Bool[Tensor, "*_ n"] | None = None
    ) -> Float[Tensor, "*b n h"]:
        """Encode sequences with any leading axes; what is no real token becomes zero."""
        network = self.network
        tokens, mask = checked_input(tokens, mask, "tokens", network.input_size)
        weight = network.weight_ih_l0
        if tokens.dtype != weight.dtype and not torch.is_autocast_enabled(tokens.device.type):
            fix = "Fix: convert the module or the inputs, or use torch.autocast."
            raise TypeError(
                refusal("tokens", f"a tensor of {tokens.dtype}", f"the module's dtype, {weight.dtype}", fix)
            )
        lead = tokens.shape[:-1]
        if 0 in lead:
            return tokens.new_zeros(*lead, self.out_dim)
        if len(lead) == 2:
            return self._encoded(tokens, mask)
        flat = tokens.reshape(-1, *tokens.shape[-2:])
        return self._encoded(flat, None if mask is None else mask.reshape(flat.shape[:2])).reshape(*lead, self.out_dim)

    def _encoded(self, tokens: Tensor, real: Tensor | None) -> Tensor:
        """States (B, N, h) of sequences (B, N, d)."""
        if real is None:
            states: Tensor = self.network(tokens)[0]
            return states
        # The host must know the lengths, and whether a token comes after padding: it asks once, and counts by itself.
        here = real.cpu()
        lengths = here.sum(-1)
        if min(lengths.tolist()) > 0 and not (here[:, 1:] > here[:, :-1]).any():
            return self._states(tokens, lengths)
        # Real tokens first, in their order; a sequence without any reads one that is filled.
        order = (~real).to(torch.uint8).argsort(dim=-1, stable=True)
        states = _rows(self._states(_rows(kept_rows(tokens, real), order), lengths.clamp(min=1)), order.argsort(-1))
        return where(real.unsqueeze(-1), states, 0.0)

    def _states(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """States of sequences (B, N, d) that are padded on the right; zeros at the padding."""
        # Longest first. Left to the library, the order would be inverted on the device and fetched from there to no purpose.
        lengths, order = lengths.sort(descending=True)
        there, back = torch.stack([order, order.argsort()]).to(tokens.device, non_blocking=True)
        packed = pack_padded_sequence(tokens.index_select(0, there), lengths, batch_first=True)
        states: Tensor = pad_packed_sequence(self.network(packed)[0], batch_first=True, total_length=tokens.shape[1])[0]
        return states.index_select(0, back)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))
