"""Two graph attentions, the second of which gives the classes."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.model import Batch, Output
from regard.model.naming import Available
from regard.model.outputs.base import real_terms, target_of


class GraphNetwork(nn.Module):
    r"""The network of GAT (Veličković et al. 2018, https://arxiv.org/abs/1710.10903).

    $$h = \mathrm{elu}(\mathrm{attend}_1(x)), \qquad y = \mathrm{attend}_2(\mathrm{drop}(h))$$

    Args:
        first: from nodes to what is hidden.
        second: from what is hidden to the classes.
        dropout: of what is hidden, while training.

    Example:
        >>> import torch, regard as rg
        >>> network = GraphNetwork(
        ...     rg.GraphAttention(6, heads=2), rg.GraphAttention(6, heads=1, head_dim=3), dropout=0.5
        ... )
        >>> network(torch.randn(1, 4, 6), torch.tensor([[[0, 1], [1, 2]]])).shape
        torch.Size([1, 4, 3])
    """

    def __init__(self, first: nn.Module, second: nn.Module, dropout: float) -> None:
        super().__init__()
        self.first, self.second, self.drop = first, second, nn.Dropout(dropout)

    def forward(self, nodes: Float[Tensor, "b n d"], edge_index: Int[Tensor, "b 2 e"]) -> Float[Tensor, "b n c"]:
        """Logits of every node of every graph; graphs of a batch are one graph without edges between them."""
        b, n = nodes.shape[:2]
        shift = n * edge_index.new_tensor(range(b)).view(-1, 1, 1)
        together = (edge_index + shift).movedim(0, 1).flatten(1) if b > 1 else edge_index[0]
        hidden = F.elu(self.first(nodes.flatten(0, 1), together))
        logits: Tensor = self.second(self.drop(hidden), together)
        return logits.view(b, n, -1)


class NodeClasses(Output):
    """Logits of the nodes as they come; the loss is the mean cross-entropy over those whose class is given, which is not -1."""

    def forward(self, context: Float[Tensor, "b n c"], found: Available) -> Float[Tensor, "b n c"]:
        return context

    def loss(self, prediction: Float[Tensor, "b n c"], batch: Batch) -> Tensor:
        return F.cross_entropy(prediction.flatten(0, 1), target_of(batch).flatten(), ignore_index=-1)

    def terms(self, batch: Batch) -> Tensor:
        return real_terms(batch)

    def decide(self, prediction: Float[Tensor, "b n c"]) -> Int[Tensor, "b n"]:
        return prediction.argmax(-1)
