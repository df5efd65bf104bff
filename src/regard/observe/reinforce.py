"""REINFORCE from a trace: the loss that teaches alignments which sample."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._errors import refusal
from regard.observe.trace import Trace


class MovingBaseline:
    """A baseline that follows the mean reward: b <- decay b + (1 - decay) R.

    Example:
        >>> baseline = MovingBaseline(decay=0.9)
        >>> baseline.update(torch.tensor([1.0, 3.0]))
        >>> round(baseline.value, 4)
        2.0
    """

    def __init__(self, decay: float = 0.9) -> None:
        if not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ValueError(refusal("decay", repr(decay), "a number from 0 up to, not including, 1"))
        self.decay, self.value, self.started = decay, 0.0, False

    def update(self, reward: Tensor) -> None:
        """Take in the rewards of a batch; the first batch sets the baseline."""
        mean = float(reward.detach().mean())
        self.value = self.decay * self.value + (1 - self.decay) * mean if self.started else mean
        self.started = True


def reinforce(
    trace: Trace,
    reward: Tensor,
    baseline: Tensor | float | MovingBaseline = 0.0,
    entropy: float = 0.0,
) -> Tensor:
    r"""The loss whose gradient is the REINFORCE estimate (Williams 1992, https://doi.org/10.1007/BF00992696).

    $$L = -\frac{1}{B} \sum_b (R_b - \beta_b) \sum_t \log p(z_{bt}) - \lambda\, \frac{1}{B} \sum_b \sum_t H(p_{bt})$$

    summed over every sample that the trace holds: each query of each call of each hard or reinforced alignment.

    Args:
        trace: recorded, without named fields, in the forward that earned the reward.
        reward: what to maximise; its axes are the first axes of the calls, usually (batch,). No gradient flows into it.
        baseline: subtracted from the reward; a `MovingBaseline` is used, then updated.
        entropy: weight of the entropy of the policies, which keeps them exploring.

    Example:
        >>> import regard as rg
        >>> attend, x = rg.Attention("dot", rg.Hard("reinforce")), torch.randn(2, 5, 4, requires_grad=True)
        >>> with rg.record(attend) as trace:
        ...     context = attend(x, x)
        >>> rg.reinforce(trace, reward=context.sum((1, 2))).backward()
    """
    _check_trace(trace)
    reward = _as_reward(reward)
    offset: object = baseline.value if isinstance(baseline, MovingBaseline) else baseline
    if not isinstance(offset, Tensor | float | int):
        raise TypeError(refusal("baseline", type(offset).__name__, "a tensor, a number or a MovingBaseline()"))
    if not isinstance(entropy, float | int):
        raise TypeError(refusal("entropy", repr(entropy), "a number, the weight of the entropy"))
    if isinstance(offset, Tensor) and offset.dim() and offset.shape != reward.shape:
        raise ValueError(
            refusal("baseline", f"shape {tuple(offset.shape)}", f"that of the reward, {tuple(reward.shape)}")
        )
    advantage = reward - (offset.detach() if isinstance(offset, Tensor) else offset)
    total = torch.zeros((), device=reward.device)
    sampled = False
    for _, calls in trace.items():
        for record in calls:
            call = record.call
            # A choice that was not sampled, or that learns by its own estimator, has no part in this one.
            if call.seed is None or not call.align.learns_by_reward:
                continue
            log_prob, spread = call.align.log_prob(call), call.align.policy_entropy(call) if entropy else None
            if log_prob is None:
                continue
            sampled = True
            total = total - (advantage * _by_reward(log_prob, reward)).mean()
            if spread is not None:
                total = total - entropy * _by_reward(spread, reward).mean()
    if not sampled:
        raise ValueError(
            "trace: nothing in it was sampled; expected Hard(gradient='reinforce') or Reinforced, in training mode or "
            "with evaluation='sample'"
        )
    if isinstance(baseline, MovingBaseline):
        baseline.update(reward)
    return total


def _check_trace(trace: object) -> None:
    """Refuse what is no trace, such as the model itself."""
    if not isinstance(trace, Trace):
        fix = "Fix: with regard.record(model) as trace: …"
        raise TypeError(refusal("trace", type(trace).__name__, "what was recorded", fix))


def _as_reward(reward: object) -> Tensor:
    """Rewards as numbers without a gradient: a tensor, or what one can be made of; a hit or miss counts one or nothing."""
    try:
        found = torch.as_tensor(reward).detach()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(refusal("reward", repr(reward), "numbers, one for each sequence: (batch,)")) from None
    return found if found.dtype.is_floating_point else found.to(torch.get_default_dtype())


def _by_reward(x: Tensor, reward: Tensor) -> Tensor:
    """Sum over the axes that the reward does not have."""
    if x.shape[: reward.dim()] != reward.shape:
        expected = f"axes that are the first ones of the calls, {tuple(x.shape)}"
        raise ValueError(refusal("reward", f"shape {tuple(reward.shape)}", expected))
    return x.flatten(reward.dim()).sum(-1) if x.dim() > reward.dim() else x
