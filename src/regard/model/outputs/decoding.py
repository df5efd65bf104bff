"""Output models that write token after token: what they are told, how they go on alone, and what they are judged by."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard._errors import refusal
from regard.model.batch import Batch
from regard.model.naming import Available
from regard.model.outputs.base import Output, Read, real_terms, target_of
from regard.transformer.generation import Decoding, How, generate


class Decoded(NamedTuple):
    """Sequences, -1 after the end of each, and their log-probabilities."""

    tokens: Int[Tensor, "b m"]
    log_prob: Float[Tensor, " b"]


class TokenDecoder(Output):
    r"""What every decoder of tokens has in common: logits of each step when told the steps before, and generation without being told.

    The loss is the mean over real tokens of the cross-entropy; with `smoothing` $\varepsilon$ that of
    $(1 - \varepsilon)\, \delta_y + \varepsilon / V$ (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567).

    Args:
        end: the token that ends a sequence.
        smoothing: $\varepsilon$.
    """

    stepwise = True

    def __init__(self, end: int, smoothing: float = 0.0) -> None:
        super().__init__()
        self.end, self.smoothing = end, a_share("smoothing", smoothing)

    def forward(self, read: Read, found: Available, batch: Batch) -> Float[Tensor, "b m v"]:
        """Logits of every step, when the steps before went as they should."""
        raise NotImplementedError

    def decoding(self, read: Read, found: Available) -> Decoding:
        """The decoder before its first step."""
        raise NotImplementedError

    @torch.no_grad()
    def generate(self, read: Read, found: Available, steps: int, how: How | None = None) -> Decoded:
        """Write until the end, or so many tokens.

        Args:
            read: what `TaskModel.reader` gave.
            found: what `TaskModel.encode` gave.
            steps: the most tokens, the end among them.
            how: `Greedy()`, the likeliest token at each step, when not given; `Beam(paths, penalty)`, the likeliest whole; `Sample()`.

        Returns:
            Tokens (B, steps), -1 after the end, and their log-probabilities (B,).
        """
        features = next(iter(found.inputs.values()))
        # The first step takes no token: what is written here is not looked at.
        nothing = torch.zeros(len(features), 1, dtype=torch.long, device=features.device)
        tokens, log_prob = generate(self.decoding(read, found), nothing, steps=steps, end=self.end, how=how)
        ends = tokens == self.end
        tokens = tokens.masked_fill(ends.cumsum(-1) > ends.long(), -1)
        return Decoded(F.pad(tokens, (0, steps - tokens.shape[1]), value=-1), log_prob)

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        flat, target = prediction.flatten(0, 1), target_of(batch).flatten()
        return F.cross_entropy(flat, target, ignore_index=-1, label_smoothing=self.smoothing)

    def reward(self, prediction: Tensor, batch: Batch) -> Tensor:
        each = F.cross_entropy(prediction.transpose(1, 2), target_of(batch), ignore_index=-1, reduction="none")
        return -each.sum(-1)

    def terms(self, batch: Batch) -> Tensor:
        return real_terms(batch)

    def decide(self, prediction: Tensor) -> Tensor:
        return prediction.argmax(-1)


def read_paths(read: Read, states: Float[Tensor, "r 1 h"], paths: int, start: int) -> Float[Tensor, "r 1 d"]:
    """Read for one step of so many paths of each example.

    They are asked one after the other: a path more in place of a query more would stand at the next position, which local alignments
    look at.
    """
    if paths == 1:
        return read(states, start=start)
    each = states.unflatten(0, (len(states) // paths, paths)).unbind(1)
    return torch.stack([read(path, start=start) for path in each], 1).flatten(0, 1)


def a_share(name: str, value: float) -> float:
    """Check a share that is not the whole."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ValueError(refusal(name, repr(value), "a number from 0 to below 1"))
    return float(value)
