"""Facts that lead to one another."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator

from regard.recipes.planted.task import Batch, one_hot, permutations


@dataclass(frozen=True)
class FactChain:
    """Follow a chain of facts *from → to* from its first code, and say its last.

    There are several chains, all of one length, with no code in common. The facts together tell which codes are last, but not of
    which chain; every fact on the way is needed for that. Whoever looks fewer times than there are facts can only guess among
    the chains.
    """

    facts: int = 2
    chains: int = 3

    @property
    def codes(self) -> int:
        """Number of codes, and width of the query, a key and a value."""
        return self.chains * (self.facts + 1)

    @property
    def classes(self) -> int:
        """The codes."""
        return self.codes

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `query`, `key` (count, n, codes), the *from* of each fact, and `value`, its *to*; truth `fact 1`, … for each hop."""
        n = self.chains * self.facts
        chains = permutations(count, self.codes, generator).view(count, self.chains, self.facts + 1)
        order = permutations(count, n, generator)
        before, after = (x.flatten(1).gather(1, order) for x in (chains[..., :-1], chains[..., 1:]))
        truth = {f"fact {k + 1}": (order == k).long().argmax(-1) for k in range(self.facts)}
        inputs = {"query": chains[:, 0, 0], "key": before, "value": after}
        return Batch({name: one_hot(x, self.codes) for name, x in inputs.items()}, chains[:, 0, -1], truth)
