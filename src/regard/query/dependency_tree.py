"""Dependency trees: every word reads its head, in a tree whose arcs do not cross."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from regard._errors import refusal
from regard.catalog import register
from regard.general.alignments.base import Alignment, one_hot, readable, refuse_packed, softmax
from regard.ops.call import Call, Tile
from regard.ops.fill import where
from regard.query.parts import uncast
from regard.query.scans import log_sum_exp
from regard.query.structured import recorded, selection

Choose = Callable[[Tensor], Tensor]


@register(
    name="dependency-tree",
    zh="依存树结构化注意力",
    path="query/structured",
    part="align",
    equation="a_ij = p(head of i is j),  p(tree) ∝ exp(Σ_i e_{i, head(i)})",
    paper="Kim, Denton, Hoang & Rush, Structured Attention Networks, ICLR 2017",
    year=2017,
    time="N³",
    memory="N³",
    choose="words are to be read by a syntax that nobody annotated: one head each, no crossing arcs, no cycles",
    avoid="long inputs, or relations that form no tree: softmax chooses each head by itself, in N²",
)
class DependencyTree(Alignment):
    r"""Read one's head: marginals over projective trees (Kim et al. 2017, https://arxiv.org/abs/1702.00887; Eisner 1996).

    $$p(t) \propto \exp\Big(\sum_i e_{i, t(i)}\Big) \;\text{ over the projective trees } t, \qquad a_{ij} = p(t(i) = j)$$

    Queries and keys are the same $N$ words; $e_{ij}$ is the score of word $j$ as the head of word $i$, and $e_{ii}$ that of $i$ as a root:
    the weight $a_{ii}$ is the probability that the word is one, and it then reads itself. Rows sum to one. The sum over all trees is that
    of Eisner's algorithm, spans from short to long (inside); probabilities go the way back (outside).

    A word that may attend nothing, or that nobody may, itself included, is left out of the sentence; any other forbidden pair is an arc
    that no tree has. Where no tree is left, nothing is read. `distribution(call)` gives samples, entropy and log-probabilities.

    Args:
        single_root: trees with one root, instead of one or more.

    Example:
        >>> from regard import SelfAttention
        >>> read_heads = SelfAttention(6, align=DependencyTree())
        >>> read_heads(torch.randn(2, 5, 6)).shape
        torch.Size([2, 5, 6])
    """

    def __init__(self, single_root: bool = False) -> None:
        super().__init__()
        self.single_root = bool(single_root)

    def prepare(self, call: Call) -> Mapping[str, Any]:
        # A tree is decided by all rows together, and an execution may show a few at a time.
        return {"marginals": self.distribution(call).marginals()}

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        marginals: Tensor = tile.call.prepared["marginals"]
        return marginals[..., tile.i.start : tile.i.stop, :].to(scores.dtype)

    def distribution(self, call: Call) -> Trees:
        """The trees of a recorded call: `attend.align.distribution(trace.call)`, to sample from, for their entropy."""
        if recorded(call).single or call.nq != call.n:
            got = f"{call.nq} queries beside {call.n} keys"
            raise ValueError(refusal("query", got, "as many as there are keys: each word looks for its head"))
        if self.single_root:
            refuse_packed(call, "a tree has a single root")
        with uncast(call.device):
            return Trees(call.scores(), call.tile().mask(), self.single_root)

    def extra_repr(self) -> str:
        return f"single_root={self.single_root}"


class Spans(NamedTuple):
    """The ways to build each span of one width, in logarithms, (..., spans, ways); span i is that from word i on."""

    joined: Tensor  # two complete halves, under an arc between the ends
    right: Tensor  # complete, headed by its first word: an arc to the right, and what hangs below its end
    left: Tensor  # complete, headed by its last word


class Trees:
    """Distributions over the projective trees of sentences with scores (..., N, N), one row a word, one column a head."""

    def __init__(self, scores: Tensor, mask: Tensor | None, single_root: bool) -> None:
        allowed = readable(scores, mask)
        words = allowed.any(-1) & allowed.any(-2)
        self.allowed = allowed & words.unsqueeze(-2) & words.unsqueeze(-1)
        self.scores, self.single_root = where(self.allowed, scores, 0.0), single_root
        self._words, self._length = words, words.sum(-1)
        # Words that are left out go to the end, where no span of the sentence reaches them.
        self._order = (~words).to(torch.uint8).argsort(dim=-1, stable=True)
        self._arcs = self._between()
        self._spans, self._totals = self._inside()

    def _between(self) -> Tensor:
        """Scores of arcs from row to column between the words, the root at 0, (..., N + 1, N + 1)."""
        scores = _permuted(where(self.allowed, self.scores, -math.inf), self._order)
        root = scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        return F.pad(torch.cat([root, scores.mT], -2), (1, 0), value=-math.inf)

    def _inside(self) -> tuple[list[Spans], Tensor]:
        """All spans from short to long, and the total of the sentences that end at each word, (..., N + 1)."""
        arcs, size = self._arcs, self._arcs.shape[-1]
        single = arcs.new_zeros(*arcs.shape[:-1], 1)
        # Spans of every width so far, by the word where they start and by the one where they end.
        right_from = right_to = left_from = left_to = single
        arc_from = arc_to = single[..., :0]
        found = []
        for width in range(1, size):
            right_from, left_from, arc_from = (x[..., :-1, :] for x in (right_from, left_from, arc_from))
            right_to, left_to, arc_to = (x[..., 1:, :] for x in (right_to, left_to, arc_to))
            joined = right_from + left_to.flip(-1)
            if self.single_root:
                joined = _without_second_roots(joined)
            both = log_sum_exp(joined, -1)
            arc_from = _with(arc_from, both + arcs.diagonal(width, -2, -1))
            arc_to = _with(arc_to, both + arcs.diagonal(-width, -2, -1))
            spans = Spans(joined, arc_from + right_to.flip(-1), left_from + arc_to.flip(-1))
            right, left = log_sum_exp(spans.right, -1), log_sum_exp(spans.left, -1)
            right_from, right_to = _with(right_from, right), _with(right_to, right)
            left_from, left_to = _with(left_from, left), _with(left_to, left)
            found.append(spans)
        return found, right_from[..., 0, :]

    def _outside(self, choose: Choose) -> Tensor:
        """How much of each arc is in the tree (..., N, N), when of the ways to build a span `choose` gives each a share.

        With their probabilities these are the marginals; with one that is drawn, a tree.
        """
        size = self._arcs.shape[-1]
        # Where there is no tree, no span has a way to be built, and nothing is handed down.
        top = one_hot(self._length, self._arcs)
        # Shares of spans (..., N + 1, width) by their first word (from) and by their last (to), as parts of longer ones.
        none = torch.zeros_like(self._arcs)
        right_from = torch.cat([top.unsqueeze(-2), none[..., 1:, :]], -2)
        right_to = left_from = left_to = arc_from = arc_to = none
        for width in range(size - 1, 0, -1):
            ways, count = self._spans[width - 1], size - width
            by_start, by_end = (0, count), (width, size)
            share = right_from[..., :count, width] + right_to[..., width:, width]
            parts = choose(ways.right) * share.unsqueeze(-1)
            arc_from, right_to = _add(arc_from, parts, by_start, 1), _add(right_to, parts.flip(-1), by_end, 0)
            share = left_from[..., :count, width] + left_to[..., width:, width]
            parts = choose(ways.left) * share.unsqueeze(-1)
            left_from, arc_to = _add(left_from, parts, by_start, 0), _add(arc_to, parts.flip(-1), by_end, 1)
            share = arc_from[..., :count, width] + arc_to[..., width:, width]
            parts = choose(ways.joined) * share.unsqueeze(-1)
            right_from, left_to = _add(right_from, parts, by_start, 0), _add(left_to, parts.flip(-1), by_end, 0)
        return self._of_words(arc_from, arc_to)

    def _of_words(self, arc_from: Tensor, arc_to: Tensor) -> Tensor:
        """Shares of arcs by width, as weights (..., N, N): one row a word, one column a head, the root on the diagonal."""
        place = torch.arange(arc_from.shape[-1], device=arc_from.device)
        apart = place - place[:, None]
        index = apart.abs().expand(arc_from.shape)
        arcs = torch.where(apart > 0, arc_from.gather(-1, index), arc_to.gather(-1, index))
        heads = torch.where(apart[1:, 1:] == 0, arcs[..., :1, 1:], arcs[..., 1:, 1:].mT)
        return where(self.allowed, _permuted(heads, self._order.argsort(-1)), 0.0)

    def log_partition(self) -> Tensor:
        """The logarithm of the normaliser, (...); minus infinity where there is no tree."""
        return self._totals.gather(-1, self._length.unsqueeze(-1)).squeeze(-1)

    def marginals(self) -> Tensor:
        """Probability of each head of each word, (..., N, N)."""
        return self._outside(lambda ways: softmax(ways, None))

    def entropy(self) -> Tensor:
        """Entropy of the tree, (...)."""
        total = self.log_partition()
        found = total - (self.marginals() * self.scores).sum((-2, -1))
        return where(total > -math.inf, found, 0.0)

    def sample(self, generator: Generator | None = None) -> Tensor:
        """A tree: booleans (..., N, N), the head of each word, itself for a root."""

        def draw(ways: Tensor) -> Tensor:
            chances = softmax(ways, None).double().cumsum(-1)
            numbers = torch.rand(ways.shape[:-1], generator=generator, dtype=torch.float64, device=ways.device)
            # Of a total that rounding left below one, so that the draw falls inside.
            drawn = (chances <= numbers.unsqueeze(-1) * chances[..., -1:]).sum(-1)
            return one_hot(drawn, ways)

        with torch.no_grad():
            return self._outside(draw) > 0.5

    def log_prob(self, selected: Tensor) -> Tensor:
        """Of a tree (..., N, N); minus infinity for what is none, or has an arc that is forbidden."""
        selected = selection(selected, self.allowed)
        fits = self._is_tree(selected)
        total = where(fits, self.log_partition(), 0.0)
        return where(fits, (self.scores * selected).sum((-2, -1)) - total, -math.inf)

    def _is_tree(self, selected: Tensor) -> Tensor:
        """Whether every word has one head that it may have, all lead to a root, and no arcs cross, (...)."""
        place, roots = torch.arange(selected.shape[-1], device=selected.device), selected.diagonal(dim1=-2, dim2=-1)
        one = ((selected & self.allowed).sum(-1) == self._words).all(-1) & ~(selected & ~self.allowed).any((-2, -1))
        if not len(place):
            return one
        head = selected.to(torch.uint8).argmax(-1)
        top = head
        for _ in range(len(place).bit_length()):
            top = top.gather(-1, top)
        rooted = (roots.gather(-1, top) | ~self._words).all(-1)
        # The root stands before the first word; a word that is left out has an arc of no length.
        other = where(~roots, torch.where(self._words, head, place), -1)
        low, high = torch.minimum(other, place).unsqueeze(-1), torch.maximum(other, place).unsqueeze(-1)
        crossing = ((low < low.mT) & (low.mT < high) & (high < high.mT)).any((-2, -1))
        fits = one & rooted & ~crossing
        return fits & (roots.sum(-1) <= 1) if self.single_root else fits


def _permuted(x: Tensor, order: Tensor) -> Tensor:
    """Rows and columns of (..., N, N) in another order (..., N)."""
    rows = x.gather(-2, order.unsqueeze(-1).expand(x.shape))
    return rows.gather(-1, order.unsqueeze(-2).expand(x.shape))


def _with(chart: Tensor, column: Tensor) -> Tensor:
    """A chart with one more width."""
    return torch.cat([chart, column.unsqueeze(-1)], -1)


def _without_second_roots(joined: Tensor) -> Tensor:
    """Only the first way of the first span, in which nothing hangs below the root yet."""
    first, way = (torch.arange(size, device=joined.device) for size in joined.shape[-2:])
    return where((first[:, None] > 0) | (way == 0), joined, -math.inf)


def _add(chart: Tensor, parts: Tensor, rows: tuple[int, int], width: int) -> Tensor:
    """A chart (..., N + 1, N + 1) with parts added in these rows, from this width on."""
    size = chart.shape[-1]
    sides = (width, size - width - parts.shape[-1], rows[0], size - rows[1])
    return chart + F.pad(parts, sides)
