"""Random numbers as one operator, for graphs whose sizes are symbols: written out, the rounds of every panel would be traced with them."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops import random

_library = torch.library.Library("regard", "FRAGMENT")
_WHERE = "Tensor seed, SymInt leads, SymInt features, SymInt first, SymInt rows, SymInt begin, SymInt keys, int purpose"
_library.define(f"uniform({_WHERE}) -> Tensor")
_library.define(f"at_least(float p, {_WHERE}) -> Tensor")


def _uniform(
    seed: Tensor, leads: int, features: int, first: int, rows: int, begin: int, keys: int, purpose: int
) -> Tensor:
    """Numbers (leads, features, rows, keys) of the queries from `first` on, and the keys from `begin` on."""
    return random.uniform(seed, (leads,), features, range(first, first + rows), range(begin, begin + keys), purpose)


def _at_least(
    p: float, seed: Tensor, leads: int, features: int, first: int, rows: int, begin: int, keys: int, purpose: int
) -> Tensor:
    """Which of them are no smaller than a probability."""
    where = (leads,), features, range(first, first + rows), range(begin, begin + keys), purpose
    return random.at_least(p, seed, *where)


def _uniform_fake(
    seed: Tensor, leads: int, features: int, first: int, rows: int, begin: int, keys: int, purpose: int
) -> Tensor:
    return seed.new_empty((leads, features, rows, keys), dtype=torch.float32)


def _at_least_fake(
    p: float, seed: Tensor, leads: int, features: int, first: int, rows: int, begin: int, keys: int, purpose: int
) -> Tensor:
    return seed.new_empty((leads, features, rows, keys), dtype=torch.bool)


_library.impl("uniform", _uniform, "CompositeExplicitAutograd")
_library.impl("at_least", _at_least, "CompositeExplicitAutograd")
torch.library.register_fake("regard::uniform", _uniform_fake, lib=_library)
torch.library.register_fake("regard::at_least", _at_least_fake, lib=_library)
