"""A linear chain of decisions: whether a key is read depends on whether its neighbours are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from regard.catalog import register
from regard.general.alignments.base import readable
from regard.general.scores.base import zeros
from regard.ops.fill import where
from regard.ops.forms import wide
from regard.query.scans import followed, scan, shifted
from regard.query.structured import Structured, drawn, selection

# As good as minus infinity in any sum, but a number: nothing that is computed from it is NaN, in any derivative.
_NEVER = -1e30


@register(
    name="structured",
    zh="结构化注意力",
    path="general/alignment",
    equation="a_j = p(z_j = 1),  p(z) ∝ exp(Σ_j e_j z_j + Σ_j T[z_j, z_{j+1}])",
    paper="Kim, Denton, Hoang & Rush, Structured Attention Networks, ICLR 2017",
    year=2017,
    time="N² (a scan of depth log N)",
    memory="linear",
    choose="what is to be read comes in segments: whether a key matters tells about its neighbours",
    avoid="keys in no order, or one key to be read: then the neighbours tell nothing",
)
class LinearChain(Structured):
    r"""Select segments: marginals of a linear-chain CRF (Kim et al. 2017, https://arxiv.org/abs/1702.00887).

    $$p(z) \propto \exp\Big(\sum_j e_j z_j + \sum_j T_{z_j, z_{j+1}}\Big), \quad z \in \{0, 1\}^N, \qquad a_j = p(z_j = 1)$$

    By forward and backward messages in log space,
    $\alpha_j(z) = e_j z + \log \sum_{z'} e^{\alpha_{j-1}(z') + T_{z' z}}$, all at once: the messages are prefixes and suffixes of
    products of $2 \times 2$ matrices, found by an associative scan of depth $\log N$. The chain runs through the keys that a row may
    attend, in their order: one that it may not is left out, and its neighbours become neighbours. With $T = 0$, where it starts, these are
    independent sigmoids. A score of 0 is then a chance of one half; a score with a bias of its own, or $T$, learns how many to read.

    A row sums to the expected number of keys that are read. `distribution(call)` gives samples, entropy and log-probabilities.

    Args:
        normalize: divide by that number, so that a row sums to one.

    Example:
        >>> from regard import Attention, Dot
        >>> attend = Attention(Dot(), LinearChain())
        >>> attend(torch.randn(2, 3, 4), torch.randn(2, 7, 4)).shape
        torch.Size([2, 3, 4])
    """

    def __init__(self, normalize: bool = False) -> None:
        super().__init__(normalize)
        self.T = zeros(2, 2)

    def structure(self, scores: Tensor, mask: Tensor | None) -> Chain:
        return Chain(scores, mask, wide(self.T).to(scores.dtype))


class Chain:
    """Distributions over selections of rows (..., N) of keys in a chain; keys come first inside."""

    def __init__(self, scores: Tensor, mask: Tensor | None, T: Tensor) -> None:
        self.allowed = readable(scores, mask)
        self.scores, self.T = where(self.allowed, scores, 0.0), T
        self._seen = self.allowed.movedim(-1, 0)
        count = self._seen.long().cumsum(0)
        self._later = self._seen & (count > 1)  # keys with another one before them
        self._steps = self._matrices()
        # Messages from the left up to a factor, the key's own score included, (N, 2, ...). The first step has no T: any row will do.
        self._alpha = scan(self._steps, _scaled_product)[:, 0]

    def _matrices(self) -> Tensor:
        """What each key multiplies a message by, (N, 2, 2, ...); a key that is left out, by one."""
        # The short axes stand before the rows, which are many: sums over them are then sums of long vectors.
        e = self.scores.movedim(-1, 0)
        unary = torch.stack([torch.zeros_like(e), e], 1)
        alone = (2, 2, *(1,) * (e.dim() - 1))
        T = where(self._later[:, None, None], self.T.reshape(alone), 0.0)
        one = ((1.0 - torch.eye(2, dtype=T.dtype, device=T.device)) * _NEVER).reshape(alone)
        return torch.where(self._seen[:, None, None], T + unary.unsqueeze(1), one)

    def _before(self) -> Tensor:
        """Log-odds of the key before each, given this one, (N, ..., 2); 0 where there is none."""
        alpha = shifted(self._alpha, 1, torch.zeros_like(self._alpha[0]))
        ratio = alpha[:, 1] - alpha[:, 0]
        # Odds without a key before are infinite, and must not reach a product with zero.
        ratio = where(self._later, ratio, 0.0)
        return where(self._later.unsqueeze(-1), ratio.unsqueeze(-1) + (self.T[1] - self.T[0]), 0.0)

    def _last(self) -> Tensor:
        """Log-odds of the last key of each row, 0 where there is none, (...)."""
        odds = self._alpha[-1, 1] - self._alpha[-1, 0]
        return where(self.allowed.any(-1), odds, 0.0)

    def log_odds(self) -> Tensor:
        """Of each key to be selected, (..., N)."""
        after = scan(self._steps, _scaled_product, reverse=True).logsumexp(2)
        # Messages from the right do not hold the key's own score.
        both = self._alpha + shifted(after, -1, torch.zeros_like(after[0]))
        return where(self._seen, both[:, 1] - both[:, 0], 0.0).movedim(0, -1)

    def marginals(self) -> Tensor:
        """Probability of each key to be selected, (..., N)."""
        return where(self.allowed, self.log_odds().sigmoid(), 0.0)

    def log_partition(self) -> Tensor:
        """The logarithm of the normaliser, (...)."""
        return scan(self._steps, _product)[-1, 0].logsumexp(0)

    def entropy(self) -> Tensor:
        """Entropy of the selection, (...): of the last key, and of every key before another one, given that one."""
        chance = self.marginals().movedim(-1, 0)
        given = torch.stack([1 - chance, chance], -1)
        each = where(self._later, (given * _entropy(self._before())).sum(-1), 0.0).sum(0)
        return each + where(self.allowed.any(-1), _entropy(self._last()), 0.0)

    def sample(self, generator: Generator | None = None) -> Tensor:
        """A selection (..., N), drawn from the last key to the first; what is drawn of each is a map, so a scan joins them."""
        with torch.no_grad():
            maps = drawn(self._before(), generator).long()
            same = torch.arange(2, device=maps.device).expand_as(maps)
            maps = torch.where(self._later.unsqueeze(-1), maps, same)
            last = drawn(self._last().unsqueeze(-1), generator).squeeze(-1).long()
            return (followed(maps, last) == 1).movedim(0, -1) & self.allowed

    def log_prob(self, selected: Tensor) -> Tensor:
        """Of a selection (..., N); what may not be attended does not count."""
        selected = selection(selected, self.allowed)
        seen, later = (x.movedim(0, -1).expand(selected.shape).movedim(-1, 0) for x in (self._seen, self._later))
        z = (selected & self.allowed).movedim(-1, 0).long()
        place = torch.arange(len(z), device=z.device).reshape(-1, *(1,) * (z.dim() - 1))
        latest = where(seen, place, 0).cummax(0).values
        before = z.gather(0, shifted(latest, 1, torch.zeros_like(latest[0])))
        pairs = where(later, self.T[before, z], 0.0).sum(0)
        return (self.scores * selected).sum(-1) + pairs - self.log_partition()


def _product(a: Tensor, b: Tensor) -> Tensor:
    r"""Of matrices (N, 2, 2, ...), with sums for products: $c_{ij} = \log \sum_k e^{a_{ik} + b_{kj}}$."""
    return (a.unsqueeze(3) + b.unsqueeze(1)).logsumexp(2)


def _scaled_product(a: Tensor, b: Tensor) -> Tensor:
    """The product up to a factor, which odds do not feel: along a chain it would grow, and leave them few digits."""
    product = _product(a, b)
    return product - product.detach().amax((1, 2), keepdim=True)


def _entropy(odds: Tensor) -> Tensor:
    """Of a Bernoulli variable with these log-odds."""
    return F.softplus(-odds) + (1 - odds.sigmoid()) * odds
