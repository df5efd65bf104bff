"""Hard alignment: read one key, chosen at random while training, the best one in evaluation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._errors import nearest, refusal
from regard.catalog import register
from regard.general.alignments.base import Alignment, best, masked, one_hot, readable, softmax
from regard.ops.blockwise import over_rows
from regard.ops.call import Call, Tile
from regard.ops.fill import where
from regard.ops.folds import BestFold, Fold, SoftFold, State, StraightThroughFold
from regard.ops.random import SAMPLE, gumbel
from regard.ops.rule import Rule

GRADIENTS = ("straight-through", "reinforce", "gumbel", "gumbel-straight-through")


@register(
    name="hard",
    zh="硬对齐",
    path="general/alignment",
    equation="m ~ Categorical(softmax(e)),  a_j = 1[j = m]",
    paper="Xu et al., Show, Attend and Tell: Neural Image Caption Generation with Visual Attention, ICML 2015",
    year=2015,
    time="N²",
    memory="linear",
    choose="exactly one thing must be read, or reading is costly",
    avoid="training must be smooth: the choice is not differentiable, its estimators are noisy",
)
class Hard(Alignment):
    r"""Read a single key (Xu et al. 2015, https://arxiv.org/abs/1502.03044).

    $$m_i \sim \mathrm{Categorical}\big(p_i\big),\quad p_i = \mathrm{softmax}(e_i), \qquad a_{ij} = \mathbb{1}[j = m_i]$$

    While training, $m$ is drawn as $\arg\max_j (e_{ij} + G_{ij})$ with Gumbel noise $G$; in evaluation it is $\arg\max_j e_{ij}$, the
    first of equals. What the scores learn from is one of:

    - `straight-through`: $a = \text{onehot}(m) + p - \text{sg}(p)$; the forward is hard, scores get the gradient of soft weights;
    - `reinforce`: no gradient through the choice; give `regard.reinforce(trace, reward)` to the loss (Williams 1992);
    - `gumbel`: $a = \mathrm{softmax}((e + G)/\tau)$, not hard while training (Jang et al. 2017; Maddison et al. 2017);
    - `gumbel-straight-through`: hard forward, the gradient of `gumbel`.

    Multi-dimensional scores choose a key for each feature.

    Args:
        gradient: the estimator.
        temperature: $\tau$ of the two Gumbel estimators.
        evaluation: `"argmax"`, or `"sample"` to draw in evaluation too.

    Example:
        >>> from regard import Attention, Dot
        >>> attend, x = Attention(Dot(), Hard()).eval(), torch.eye(3)
        >>> torch.equal(attend(5 * x, x), x)
        True
    """

    is_random = True
    is_rowwise = True
    numbers = ("temperature",)

    def __init__(
        self, gradient: str = "straight-through", temperature: float = 1.0, evaluation: str = "argmax"
    ) -> None:
        super().__init__()
        if gradient not in GRADIENTS:
            fix = nearest(str(gradient), GRADIENTS, listed=True)
            raise ValueError(refusal("gradient", repr(gradient), f"one of {', '.join(GRADIENTS)}", fix))
        if not 0 < temperature < float("inf"):
            raise ValueError(refusal("temperature", temperature, "a finite number > 0"))
        if temperature != 1.0 and not gradient.startswith("gumbel"):
            fix = "Fix: choose gradient='gumbel', or divide the scores."
            raise ValueError(refusal("temperature", temperature, f"1 with gradient={gradient!r}", fix))
        if evaluation not in ("argmax", "sample"):
            raise ValueError(refusal("evaluation", repr(evaluation), "'argmax' or 'sample'"))
        self.gradient, self.temperature, self.evaluation = gradient, float(temperature), evaluation

    def needs_seed(self, training: bool) -> bool:
        return training or self.evaluation == "sample"

    @property
    def learns_by_reward(self) -> bool:
        return self.gradient == "reinforce"

    def perturbed(self, scores: Tensor, tile: Tile) -> Tensor:
        """Scores whose largest entry is the choice."""
        if not self.needs_seed(tile.call.training):
            return scores
        return scores + gumbel(tile.uniform(SAMPLE)).to(scores.dtype)

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        perturbed = self.perturbed(scores, tile)
        if self.gradient == "gumbel" and tile.call.training:
            return softmax(perturbed / self.temperature, mask)
        hot = one_hot(best(perturbed, mask), scores)
        if self.gradient == "reinforce":
            # Elsewhere the relaxed weights say so.
            lost = masked(scores, mask).isnan().any(-1, keepdim=True)
            return where(~(lost & readable(scores, mask)), hot, math.nan)
        relaxed = softmax(scores, mask) if self.gradient == "straight-through" else None
        if relaxed is None:
            relaxed = softmax(perturbed / self.temperature, mask)
        return hot + (relaxed - relaxed.detach())

    def choice(self, call: Call) -> Tensor:
        """Index that is read, (..., [F], Nq); -1 where nothing may be."""
        return torch.cat(over_rows(call, lambda i: self._sampled(call, i)), -1)

    def log_prob(self, call: Call) -> Tensor:
        def chosen(i: range) -> Tensor:
            log_p, index = self._log_policy(call, i), self._sampled(call, i)
            if log_p.shape[-1] == 0:
                return log_p.new_zeros(log_p.shape[:-1])
            picked = log_p.gather(-1, index.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            return where(index >= 0, picked, 0.0)

        return torch.cat(over_rows(call, chosen), -1)

    def policy_entropy(self, call: Call) -> Tensor:
        def entropy(i: range) -> Tensor:
            log_p = self._log_policy(call, i)
            return -(log_p.exp() * where(log_p > -math.inf, log_p, 0.0)).sum(-1)

        return torch.cat(over_rows(call, entropy), -1)

    def _sampled(self, call: Call, i: range) -> Tensor:
        tile = call.tile(i)
        return best(self.perturbed(self._scores(call, i), tile), tile.mask())

    @staticmethod
    def _scores(call: Call, i: range) -> Tensor:
        """Scores with every leading axis of the call, since each of its entries draws for itself."""
        scores = call.scores(i, tiled=True)
        return scores.expand(*call.lead, *scores.shape[-3 if call.form.multi else -2 :])

    def _log_policy(self, call: Call, i: range) -> Tensor:
        """Log-probabilities of the keys; minus infinity where a key may not be read."""
        scores = masked(self._scores(call, i), call.tile(i).mask())
        allowed = scores > -math.inf
        safe = where(allowed.any(-1, keepdim=True), scores, 0.0) if scores.shape[-1] else scores
        return where(allowed, safe.log_softmax(-1), -math.inf)

    def rule(self, call: Call) -> Rule:
        drawn = self.needs_seed(call.training)
        perturbed = drawn and self.gradient.startswith("gumbel")
        if self.gradient == "gumbel" and call.training:
            return Rule(self.temperature, noise=True)
        choice = "sampled" if drawn else "largest"
        return Rule(self.temperature, noise=perturbed, choice=choice, learns=self.gradient != "reinforce")

    def fold(self, tile: Tile) -> Fold:
        relaxed = SoftFold(self.temperature, self.perturbed)
        if self.gradient == "gumbel" and tile.call.training:
            return relaxed
        if self.gradient == "reinforce":
            return _SeenFold(self.perturbed)
        hard = BestFold(self.perturbed)
        if self.gradient == "straight-through":
            return StraightThroughFold(hard, SoftFold(detach_values=True))
        return StraightThroughFold(hard, SoftFold(self.temperature, self.perturbed, detach_values=True))

    def extra_repr(self) -> str:
        return f"gradient={self.gradient!r}, temperature={self.temperature}, evaluation={self.evaluation!r}"


class _SeenFold(BestFold):
    """The same, but NaN where a key that may be read has a score of NaN."""

    def merge(self, left: State, right: State) -> State:
        top, index, value = super().merge(left, right)
        known = ~(left[0].isnan() | right[0].isnan())
        return where(known, top, math.nan), where(known, index, -1), value

    def read(self, state: State) -> Tensor:
        return where(~state[0].isnan(), super().read(state), math.nan)
