"""Models that tell an item of a user from others: one that was hidden, or the next.

Each is called with sequences of items and gives an `Asked`: while training, as many states as items are asked for, each with the item that
is right; else one for each user, of what comes next. Only those states become logits, each as many as there are items.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.general.scores.base import matrix
from regard.model import Batch, Output
from regard.model.naming import Available
from regard.transformer import BERT4Rec

# Share of the users who are strangers while training, so that a stranger can be recommended to.
_STRANGERS = 0.1


class Asked(NamedTuple):
    """States from which items are told, and the right items, -1 where they are not known."""

    state: Float[Tensor, "k d"]
    item: Int[Tensor, " k"]


class Ranking(NamedTuple):
    """Logits of all items, and the right ones, -1 where they are not known."""

    logits: Float[Tensor, "k v"]
    item: Int[Tensor, " k"]


class Recommender(nn.Module):
    """What every such model is."""

    def logits(self, state: Float[Tensor, "k d"]) -> Float[Tensor, "k v"]:
        """Of all items, from states."""
        raise NotImplementedError


class Cloze(Recommender):
    """Items that are hidden now and then, from those on both sides: BERT4Rec.

    Args:
        model: with its own shares of hidden items.
    """

    def __init__(self, model: BERT4Rec) -> None:
        super().__init__()
        self.model = model

    def forward(self, items: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"]) -> Asked:
        if self.training:
            shown, chosen = self.model.cloze(items, mask)
            right = items[chosen]
        else:
            # A hidden item after the last real one.
            items, real = F.pad(items, (0, 1)), F.pad(mask, (0, 1))
            chosen = torch.arange(items.shape[1], device=items.device) == mask.sum(-1, keepdim=True)
            shown, mask = torch.where(chosen, self.model.mask_token, items), real | chosen
            right = items.new_full((len(items),), -1)
        state: Tensor = self.model.encoder(F.embedding(shown, self.model.E), mask)
        return Asked(state[chosen], right)

    def logits(self, state: Tensor) -> Tensor:
        return self.model.logits(state)


class Following(Recommender):
    """Every item from those before it, by a causal stack (as in SASRec, Kang & McAuley 2018, https://arxiv.org/abs/1808.09781).

    Args:
        stack: layers in which no item sees a later one.
        items: how many there are.
        dim: width.
        dropout: of the items' vectors, while training.
    """

    def __init__(self, stack: nn.Module, items: int, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.stack, self.dropout = stack, nn.Dropout(dropout)
        self.E, self.b = nn.Parameter(0.02 * torch.randn(items, dim)), nn.Parameter(torch.zeros(items))

    def forward(self, items: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"]) -> Asked:
        # Vectors as long as positions are, though the table begins near zero.
        vectors = self.dropout(F.embedding(items, self.E) * self.E.shape[1] ** 0.5)
        state: Tensor = self.stack(vectors, mask=mask)
        if self.training:
            return Asked(state[:, :-1][mask[:, 1:]], items[:, 1:][mask[:, 1:]])
        last = torch.arange(items.shape[1], device=items.device) == mask.sum(-1, keepdim=True) - 1
        return Asked(state[last], items.new_full((len(items),), -1))

    def logits(self, state: Tensor) -> Tensor:
        return F.linear(state, self.E, self.b)


class LongShort(Recommender):
    r"""The next item from long- and short-term preference: SHAN (Ying et al. 2018, https://doi.org/10.24963/ijcai.2018/546).

    $$u^{\mathrm{long}} = \mathrm{attend}_1(u, \text{items before}), \qquad
      h = \mathrm{attend}_2(u, [u^{\mathrm{long}}; \text{latest items}]), \qquad e_v = (W h) \cdot E_v + b_v$$

    The user asks at both levels. The paper has no $W$; without it, what follows an item would be what it follows. User 0 is a stranger.

    Args:
        past: an attention over the items before the latest.
        latest: an attention over those, and what was read of the others.
        items: how many there are.
        users: how many there are, with the stranger.
        dim: width.
        recent: how many items are the latest.
        asked: probability that an item is asked for while training.
        dropout: of the items' vectors, while training.
    """

    def __init__(
        self,
        past: nn.Module,
        latest: nn.Module,
        items: int,
        users: int,
        dim: int,
        *,
        recent: int = 3,
        asked: float = 0.5,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.past, self.latest, self.dropout = past, latest, nn.Dropout(dropout)
        self.recent, self.asked = recent, asked
        self.E, self.b = nn.Parameter(0.1 * torch.randn(items, dim)), nn.Parameter(torch.zeros(items))
        self.U, self.W = nn.Parameter(0.1 * torch.randn(users, dim)), matrix(dim, dim)

    def forward(self, items: Int[Tensor, "b n"], user: Int[Tensor, " b"], mask: Bool[Tensor, "b n"]) -> Asked:
        place, length = torch.arange(items.shape[1], device=items.device), mask.sum(-1)
        if self.training:
            chosen = (torch.rand(items.shape, device=items.device) < self.asked) & mask
            # The last item always: it is the likest to what will be asked.
            chosen = (chosen | (place == length[:, None] - 1)) & (place > 0)
            row, at = chosen.nonzero(as_tuple=True)
            right = items[row, at]
            user = user.masked_fill(torch.rand(user.shape, device=user.device) < _STRANGERS, 0)
        else:
            row, at = torch.arange(len(items), device=items.device), length
            right = items.new_full((len(items),), -1)
        vectors, asking = self.dropout(F.embedding(items, self.E))[row], F.embedding(user, self.U)[row]
        latest = (place < at[:, None]) & (place >= at[:, None] - self.recent)
        before = place < at[:, None] - self.recent
        long_term = self.past(asking, vectors, mask=before)
        both = torch.cat([long_term.unsqueeze(1), vectors], 1)
        state = self.latest(asking, both, mask=torch.cat([before.any(-1, keepdim=True), latest], 1))
        return Asked(state, right)

    def logits(self, state: Tensor) -> Tensor:
        return F.linear(F.linear(state, self.W), self.E, self.b)


class Items(Output):
    """Which item: logits of all, for the states that are asked for.

    Args:
        recommender: the task's attention, which has the items' vectors.
    """

    def __init__(self, recommender: Recommender) -> None:
        super().__init__()
        # It is the attention already, and must not be there a second time.
        self._recommender = (recommender,)

    def forward(self, context: Asked, found: Available) -> Ranking:
        return Ranking(self._recommender[0].logits(context.state), context.item)

    def loss(self, prediction: Ranking, batch: Batch) -> Tensor:
        return F.cross_entropy(prediction.logits, prediction.item)

    def decide(self, prediction: Ranking) -> Tensor:
        return prediction.logits.argmax(-1)
