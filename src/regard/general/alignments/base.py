"""What every alignment is: a module that turns complete rows of scores into weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.bound import Bound
from regard.ops.call import Call, Tile
from regard.ops.fill import where
from regard.ops.folds import Fold
from regard.ops.rule import Rule


class Alignment(nn.Module):
    """How scores become weights.

    `weights` sees complete rows, keys last, whatever the execution; masked weights are exactly zero, and so is a row with
    nothing to attend to. `prepare` runs once a call, before any execution, and leaves what depends on more than a row of
    scores. An alignment whose result can be folded over blocks of keys says how (`fold`).
    """

    is_random = False  # whether a call needs a seed while training
    # Whether the weights of a row depend on nothing but the keys that it may attend, and on what was prepared of these and of its query.
    is_rowwise = False
    reads_panels = False  # whether its fused execution is by panels of rows whose scores a kernel wrote
    numbers: tuple[str, ...] = ()  # attributes that are floats and are read for every panel
    # Names under which `prepare` leaves one entry for each query, and for each key, on the last axis.
    of_queries: tuple[str, ...] = ()
    of_keys: tuple[str, ...] = ()

    def prepare(self, call: Call) -> Mapping[str, Any]:
        """What `weights` will need beside the scores."""
        return {}

    @property
    def splits(self) -> bool:
        """Whether `prepare` needs no more than some of the queries and some of the keys, as a rank has them that shares a sequence."""
        return type(self).prepare is Alignment.prepare

    def needs_seed(self, training: bool) -> bool:
        """Whether a call draws random numbers."""
        return self.is_random and training

    @property
    def learns_by_reward(self) -> bool:
        """Whether what it samples is taught by REINFORCE."""
        return False

    @property
    def temperature_of_softmax(self) -> float | Tensor | None:
        """Of a plain softmax over the allowed keys; None for anything else."""
        return None

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        """Weights of the rows of a tile that holds all keys."""
        raise NotImplementedError

    def rule(self, call: Call) -> Rule | None:
        """What a kernel must know of it; None where no kernel does it."""
        return None

    def fold(self, tile: Tile) -> Fold | None:
        """How to read blocks of keys one after the other; None where that cannot be done in one pass."""
        return None

    def log_prob(self, call: Call) -> Tensor | None:
        """Log-probability of what was sampled; None where nothing is sampled."""
        return None

    def policy_entropy(self, call: Call) -> Tensor | None:
        """Entropy of the distribution that was sampled from, shaped like `log_prob`."""
        return None


def refuse_packed(call: Call, since: str) -> None:
    """Refuse sequences that stand end to end, for what would be decided by all of them together."""
    if isinstance(call.mask, Bound) and call.mask.origins(call.device) is not None:
        fix = "Fix: put them side by side, with Padding(lengths)."
        raise ValueError(refusal("mask", "Packed, several sequences", f"one sequence, since {since}", fix))


def readable(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Which keys a row may read: those allowed, but for a score of minus infinity (a bias used as a mask)."""
    # NaN is read, and so is seen in the result.
    finite = scores != -math.inf
    return finite if mask is None else finite & mask


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores with minus infinity where the mask forbids."""
    return scores if mask is None else where(mask, scores, -math.inf)


def softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over the keys that may be read; zeros, with zero gradients, where there are none."""
    if scores.shape[-1] == 0:
        return scores
    scores = masked(scores, mask)
    allowed = readable(scores, None)
    # A row without any allowed key is computed from zeros and then dropped, so that no NaN arises in either direction.
    safe = where(allowed.any(-1, keepdim=True), scores, 0.0)
    return where(allowed, safe.softmax(-1), 0.0)


def one_hot(index: Tensor, like: Tensor) -> Tensor:
    """Ones at the index of each row; an index of -1 gives a row of zeros."""
    positions = torch.arange(like.shape[-1], device=like.device)
    return (positions == index.unsqueeze(-1)).to(like.dtype)


def best(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Index of the largest allowed score of each row, the first of equals, -1 where nothing is allowed."""
    scores = masked(scores, mask)
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], -1, dtype=torch.long)
    # argmax does not promise the first of equals on every device; the first position of the maximum does.
    top = scores.amax(-1, keepdim=True)
    first = (scores == top).to(torch.uint8).argmax(-1)
    return where(top.squeeze(-1) > -math.inf, first, -1)
