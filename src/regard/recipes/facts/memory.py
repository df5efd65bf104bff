"""End-to-end memory networks: facts as every hop finds and reads them, and hops that begin without a softmax."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.general.alignments import Alignment
from regard.general.attention import Attention
from regard.model import Batch, Embedding, Output
from regard.model.naming import Available
from regard.model.outputs.base import target_of
from regard.ops.call import Call, Tile
from regard.ops.fill import where
from regard.ops.folds import Fold
from regard.recipes.facts.parts import Sentences


class LinearStart(Alignment):
    r"""Scores are the weights at first, $a_j = e_j$; after so many updates they are aligned (Sukhbaatar et al. 2015, section 4.3).

    Without a softmax between the hops the model is linear in its facts, and does not settle on looking at all of them alike. What is
    judged is always aligned. How many updates there were is kept with the weights, so that a resumed run knows.

    Args:
        align: of the weights later on.
        updates: so many calls while training.

    Example:
        >>> from regard import Soft
        >>> attend = Attention("dot", LinearStart(Soft(), updates=1))
        >>> query, key = torch.randn(2, 3), torch.randn(2, 5, 3)
        >>> first, second = attend(query, key), attend(query, key)
        >>> (
        ...     torch.allclose(first, (key @ query.unsqueeze(-1) * key).sum(-2)),
        ...     torch.equal(second, attend.eval()(query, key)),
        ... )
        (True, True)
    """

    seen: Tensor

    def __init__(self, align: Alignment, updates: int) -> None:
        super().__init__()
        self.align, self.updates = align, updates
        self.is_random, self.of_queries, self.of_keys = align.is_random, align.of_queries, align.of_keys
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def needs_seed(self, training: bool) -> bool:
        return self.align.needs_seed(training)

    def prepare(self, call: Call) -> Mapping[str, Any]:
        linear = call.training and int(self.seen) < self.updates
        if linear:
            self.seen += 1
        return {**self.align.prepare(call), "linear": linear}

    @property
    def learns_by_reward(self) -> bool:
        return self.align.learns_by_reward

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        if not tile.call.prepared["linear"]:
            return self.align.weights(scores, mask, tile)
        return scores if mask is None else where(mask, scores, 0.0)

    def fold(self, tile: Tile) -> Fold | None:
        return None if tile.call.prepared["linear"] else self.align.fold(tile)

    def log_prob(self, call: Call) -> Tensor | None:
        return None if call.prepared["linear"] else self.align.log_prob(call)

    def policy_entropy(self, call: Call) -> Tensor | None:
        return None if call.prepared["linear"] else self.align.policy_entropy(call)


def start_linear(attentions: Iterable[nn.Module], calls: int) -> None:
    """Leave the alignment out of the first so many calls of each attention."""
    for attention in attentions:
        if calls and isinstance(attention, Attention):
            attention.align = LinearStart(attention.align, calls)


class Memories(nn.Module):
    r"""The facts of $S$ hops side by side, $m_i^{(0)}, \dots, m_i^{(S)}$, each with vectors of words of its own.

    Args:
        sentences: what makes each; how long ago the facts were is the same for all.

    Example:
        >>> from regard.model import Embedding
        >>> facts = Memories([Sentences(Embedding(20, 8), times=10) for _ in range(3)])
        >>> facts(torch.randint(20, (2, 5, 4)), torch.ones(2, 5, 4, dtype=torch.bool)).shape
        torch.Size([2, 5, 24])
    """

    def __init__(self, sentences: Sequence[Sentences]) -> None:
        super().__init__()
        self.sentences = nn.ModuleList(sentences)
        self.out_dim = sum(each.out_dim for each in sentences)

    def forward(self, words: Int[Tensor, "b n j"], mask: Bool[Tensor, "b n j"]) -> Float[Tensor, "b n m"]:
        first = self.sentences[0]
        assert isinstance(first, Sentences)
        ages = first.ages(mask.any(-1))
        return torch.cat([each(words, mask, ages) for each in self.sentences], -1)

    def mask_after(self, mask: Bool[Tensor, "b n j"]) -> Bool[Tensor, "b n"]:
        """A fact is real where any word is."""
        return mask.any(-1)


class AdjacentHops(nn.Module):
    r"""Hops each of which finds facts by what the one before read of them (Sukhbaatar et al. 2015, https://arxiv.org/abs/1503.08895).

    $$o^{(s)} = \sum_i \mathrm{align}\big(\mathrm{score}(u^{(s)}, m_i^{(s)})\big)\, m_i^{(s+1)}, \qquad u^{(s+1)} = u^{(s)} + o^{(s)}$$

    from $u^{(0)}$, the question. The result is $u^{(S)}$.

    Args:
        hops: one attention each.

    Example:
        >>> attend = AdjacentHops([Attention("dot"), Attention("dot")])
        >>> attend(torch.randn(2, 4), torch.randn(2, 5, 12)).shape
        torch.Size([2, 4])
    """

    def __init__(self, hops: Sequence[nn.Module]) -> None:
        super().__init__()
        self.hops = nn.ModuleList(hops)

    def forward(
        self, query: Float[Tensor, "b d"], key: Float[Tensor, "b n m"], mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b d"]:
        facts = key.chunk(len(self.hops) + 1, -1)
        for hop, found, read in zip(self.hops, facts, facts[1:], strict=False):
            query = query + hop(query, found, read, mask=mask)
        return query


class Said(Output):
    r"""Answers are words: how far what was read is that of each, $z_a = u \cdot E_a$.

    The last hop reads with the same vectors, so that a word that was read is the word that is said.

    Args:
        table: vectors $E$ of the last hop.
        words: number of each answer among the words (C,); -1 for one that is no word, which has a vector of its own.
        dropout: of $u$, while training.

    Example:
        >>> from regard.model import Embedding
        >>> say = Said(Embedding(20, 8), torch.tensor([3, 5, -1]))
        >>> say(torch.randn(2, 8), Available({}, {}, {})).shape
        torch.Size([2, 3])
    """

    words: Tensor

    def __init__(self, table: Embedding, words: Int[Tensor, " c"], dropout: float = 0.0) -> None:
        super().__init__()
        self.table, self.dropout = table, nn.Dropout(dropout)
        self.register_buffer("words", words, persistent=False)
        self.own = nn.Parameter(torch.zeros(len(words), table.out_dim))

    def forward(self, context: Float[Tensor, "b d"], found: Available) -> Float[Tensor, "b c"]:
        of_words = self.table.table.weight[self.words.clamp(min=0)]
        answers = torch.where(self.words.unsqueeze(-1) < 0, self.own, of_words)
        logits: Tensor = self.dropout(context) @ answers.mT
        return logits

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(prediction, target_of(batch))

    def reward(self, prediction: Tensor, batch: Batch) -> Tensor:
        return -F.cross_entropy(prediction, target_of(batch), reduction="none")

    def decide(self, prediction: Tensor) -> Tensor:
        return prediction.argmax(-1)

    def probabilities(self, prediction: Tensor) -> Tensor:
        return prediction.float().softmax(-1)
