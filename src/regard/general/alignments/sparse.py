"""Sparse alignment: weights that are exactly zero for poor scores, and differentiable."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.general.alignments.base import Alignment, masked, readable, softmax
from regard.ops.call import Tile
from regard.ops.fill import where
from regard.ops.forms import wide
from regard.ops.sparse import aligned, by_kernel

_BISECTIONS = 60


@register(
    name="entmax",
    zh="稀疏对齐（α-entmax）",
    path="general/alignment",
    equation="a_j = [(α−1) e_j − τ]₊^{1/(α−1)},  Σ a_j = 1",
    paper="Peters, Niculae & Martins, Sparse Sequence-to-Sequence Models, ACL 2019",
    year=2019,
    time="N², a few passes (dense: N² log N by sorting, or N² × 60 by bisection)",
    memory="linear",
    choose="few keys should be read, which ones is to be learned smoothly, and zeros should be exact",
    avoid="the last bit of speed: the threshold is a root of a sum over all keys, so it cannot be fused in one pass",
)
class Entmax(Alignment):
    r"""$\alpha$-entmax (Peters et al. 2019, https://arxiv.org/abs/1905.05702; learned $\alpha$: Correia et al. 2019).

    $$a_i = \arg\max_{p \in \triangle} \; p \cdot e_i + H_\alpha(p), \qquad
      a_{ij} = \big[(\alpha - 1) e_{ij} - \tau_i\big]_+^{1/(\alpha - 1)} \;\text{ with } \sum_j a_{ij} = 1$$

    $\alpha = 1$ is softmax, 2 is sparsemax. In the dense execution $\tau$ is exact, by sorting, for 1.5 and 2, and found by bisection
    otherwise; gradients of any order are those of the exact solution. In others Newton's steps find it, in a few passes for
    $\alpha \le 2$.

    Args:
        alpha: $\alpha \ge 1$; larger is sparser.
        learnable: train it within $(1, 2)$.

    Example:
        >>> from regard import Attention, Dot
        >>> x = torch.randn(2, 6, 4)
        >>> Attention(Dot(), Entmax(1.5))(x, x).shape
        torch.Size([2, 6, 4])
    """

    is_rowwise = True
    numbers = ("fixed_alpha",)
    reads_panels = True

    def __init__(self, alpha: float = 1.5, learnable: bool = False) -> None:
        super().__init__()
        if not isinstance(alpha, int | float) or not 1 <= alpha < math.inf:
            raise ValueError(refusal("alpha", repr(alpha), "a finite number >= 1"))
        if learnable and not 1 < alpha < 2:
            raise ValueError(refusal("alpha", alpha, "a number strictly between 1 and 2, since it is learned there"))
        self.fixed_alpha = float(alpha)
        self.alpha_logit = nn.Parameter(torch.logit(torch.tensor([alpha - 1.0]))) if learnable else None

    @property
    def alpha(self) -> float | Tensor:
        """The exponent in force."""
        return self.fixed_alpha if self.alpha_logit is None else 1 + wide(self.alpha_logit[0]).sigmoid()

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        return entmax(scores, mask, self.alpha, kernels=tile.tiled)

    def extra_repr(self) -> str:
        alpha = self.alpha.item() if isinstance(self.alpha, Tensor) else self.alpha
        return f"alpha={alpha:.4g}, learnable={self.alpha_logit is not None}"


@register(
    name="sparsemax",
    zh="稀疏对齐（sparsemax）",
    path="general/alignment",
    equation="a = argmin_{p ∈ simplex} ‖p − e‖²",
    paper="Martins & Astudillo, From Softmax to Sparsemax, ICML 2016",
    year=2016,
    time="N², a few passes (dense: N² log N by sorting)",
    memory="linear",
    choose="as entmax, sparser; the weights are piecewise linear in the scores",
    avoid="keys that should keep a trace of weight: outside the support there is no gradient at all",
)
class Sparsemax(Entmax):
    r"""Projection of the scores on the simplex (Martins & Astudillo 2016, https://arxiv.org/abs/1602.02068).

    $$a_i = \arg\min_{p \in \triangle} \|p - e_i\|^2, \qquad a_{ij} = [e_{ij} - \tau_i]_+$$

    Example:
        >>> from regard import Attention, Dot
        >>> x = torch.randn(2, 6, 4)
        >>> Attention(Dot(), Sparsemax())(x, x).shape
        torch.Size([2, 6, 4])
    """

    def __init__(self) -> None:
        super().__init__(2.0)


def entmax(scores: Tensor, mask: Tensor | None, alpha: float | Tensor, kernels: bool = False) -> Tensor:
    """Weights of complete rows; zeros where nothing is allowed. Only where `kernels` are welcome is an operator taken for the equation."""
    if scores.shape[-1] == 0:
        return scores
    # Closer to one the power 1 / (alpha - 1) multiplies rounding by more than alpha still differs from softmax.
    closest = 1 + math.sqrt(torch.finfo(scores.dtype).eps) / 2
    if isinstance(alpha, Tensor):
        alpha = alpha + (alpha.clamp(min=closest) - alpha).detach()
    elif alpha < closest:
        return softmax(scores, mask)
    if kernels and by_kernel(scores, alpha):
        return aligned(scores, mask, alpha)
    scores = masked(scores, mask)
    allowed = readable(scores, None)
    alive = allowed.any(-1, keepdim=True)
    safe = where(allowed, scores, 0.0)
    # The weights do not change with a shift; without it large scores would lose the threshold to rounding.
    top = where(allowed, scores.detach(), -math.inf).amax(-1, keepdim=True)
    top = where(alive, top, 0.0)
    x = (safe - top) * (alpha - 1)
    if isinstance(alpha, Tensor) or alpha not in (1.5, 2.0):
        weights = _by_bisection(x, allowed, alpha)
    else:
        weights = _by_sorting(x, allowed, alpha)
    # No threshold separates NaN or infinity from the rest: such a row is NaN, as under softmax.
    return where(allowed & alive, weights + 0.0 * top, 0.0)


def _by_sorting(x: Tensor, allowed: Tensor, alpha: float) -> Tensor:
    """Find the support by sorting, then the threshold from the support in closed form, which autograd differentiates."""
    with torch.no_grad():
        order = where(allowed, x, -math.inf).sort(-1, descending=True).values
        finite = order > -math.inf
        order = where(finite, order, 0.0)
        count = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
        mean = order.cumsum(-1) / count
        spread = (order.square().cumsum(-1) / count - mean.square()) * count if alpha == 1.5 else None
        candidate = _threshold(mean, spread, count)
        size = ((candidate <= order) & finite).sum(-1, keepdim=True).clamp(min=1)
        support = (x >= candidate.gather(-1, size - 1)) & allowed
    inside = where(support, x, 0.0)
    size = support.sum(-1, keepdim=True).clamp(min=1).to(x.dtype)
    mean = inside.sum(-1, keepdim=True) / size
    spread = where(support, x - mean, 0.0).square().sum(-1, keepdim=True) if alpha == 1.5 else None
    slack = where(support, x - _threshold(mean, spread, size), 0.0).clamp(min=0)
    return slack.square() if alpha == 1.5 else slack


def _threshold(mean: Tensor, spread: Tensor | None, size: Tensor) -> Tensor:
    """Tau of a support with this mean, sum of squared deviations and number of members."""
    if spread is None:
        return mean - 1 / size
    # A true support has spread < 1; candidates that are none must only not become NaN.
    return mean - ((1 - spread) / size).clamp(min=torch.finfo(mean.dtype).tiny).sqrt()


def _by_bisection(x: Tensor, allowed: Tensor, alpha: float | Tensor) -> Tensor:
    """Bisect for tau, then two Newton steps that autograd sees: exact first and second derivatives, alpha's too."""
    power = 1 / (alpha - 1)

    def weights(tau: Tensor) -> Tensor:
        slack = x - tau
        inside = (slack > 0) & allowed
        # The power is taken of something positive everywhere, so that its derivative is finite outside the support.
        return where(inside, where(inside, slack, 1.0) ** power, 0.0)

    with torch.no_grad():
        high = torch.zeros_like(x[..., :1])
        low = high - 1
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            too_much = weights(middle).sum(-1, keepdim=True) >= 1
            low, high = torch.where(too_much, middle, low), torch.where(too_much, high, middle)
    tau = low
    for _ in range(2):
        slack = x - tau
        inside = (slack > 0) & allowed
        slope = where(inside, where(inside, slack, 1.0) ** (power - 1), 0.0).sum(-1, keepdim=True) * power
        excess = weights(tau).sum(-1, keepdim=True) - 1
        tau = tau + where(slope > 0, excess / where(slope > 0, slope, 1.0), 0.0)
    found = weights(tau)
    # Close to one, alpha leaves the threshold few digits; the sum is one by definition, so dividing by it changes no gradient.
    total = found.sum(-1, keepdim=True)
    return found / where(total > 0, total, 1.0)
