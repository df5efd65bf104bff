"""Focus and saliency: how much of a score is the match of query and key, and how much the key alone."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from regard._errors import refusal
from regard.catalog import register
from regard.ops.call import Call
from regard.ops.fill import where

_ROUNDS = 500


@runtime_checkable
class _Recorded(Protocol):
    """What a trace holds of one call."""

    @property
    def call(self) -> Call: ...


@register(
    name="focus-and-saliency",
    zh="聚焦式与显著性注意力",
    path="query/reading",
    equation="e_ij = r_i + s_j + f_ij,  Σ_i f_ij = Σ_j f_ij = 0",
    paper="Qiu, Neural Networks and Deep Learning (神经网络与深度学习), chapter 8",
    year=2020,
    time="N²",
    memory="N² (a diagnostic)",
    choose="to know whether a trained attention listens to its queries, or finds the same keys whatever it is asked",
    avoid="there is one query: then nothing can be told apart",
)
class FocusSaliency(NamedTuple):
    r"""Scores in three parts (Qiu, chapter 8, https://nndl.github.io).

    $$e_{ij} = r_i + s_j + f_{ij}, \qquad \sum_i f_{ij} = \sum_j f_{ij} = 0, \quad \sum_j s_j = 0$$

    Focus (top-down) is what depends on query and key together, $f$; saliency (bottom-up) what a key has for every query, $s$; $r$ is
    the same for all keys and changes no softmax. The shares are of the variance of all allowed scores, and sum to one; where all scores
    are equal they are zero. Under a mask of pairs the parts are those of least squares, $r$ before $s$.

    Example:
        >>> import regard as rg
        >>> attend = rg.Attention("query-free", key_dim=3, hidden_dim=4)
        >>> parts = focus_and_saliency(attend.call(torch.randn(5, 3), torch.randn(7, 3)))
        >>> parts.saliency_share.item()
        1.0
    """

    constant: Float[Tensor, "*b nq"]
    saliency: Float[Tensor, "*b n"]
    focus: Float[Tensor, "*b nq n"]
    constant_share: Float[Tensor, "*b"]
    saliency_share: Float[Tensor, "*b"]
    focus_share: Float[Tensor, "*b"]


def focus_and_saliency(recorded: _Recorded | Call) -> FocusSaliency:
    """Split the scores of a recorded call, such as `trace["attention"][0]`; a feature axis stands before queries and keys.

    Args:
        recorded: what `record` gives for one call of an attention, or a `Call`.

    Example:
        >>> import regard as rg
        >>> attend = rg.Attention("dot")
        >>> with rg.record(attend) as trace:
        ...     context = attend(torch.randn(5, 3), torch.randn(7, 3))
        >>> parts = focus_and_saliency(trace[""][0])
        >>> bool(parts.focus_share > 0)
        True
    """
    call = recorded if isinstance(recorded, Call) else getattr(recorded, "call", None)
    if not isinstance(call, Call):
        raise TypeError(refusal("recorded", type(recorded).__name__, "one recorded call, such as trace[path][0]"))
    scores = call.scores()
    features = () if call.form.features is None else (call.form.features,)
    scores = scores.expand(*call.lead, *features, call.nq, call.n)
    mask = call.tile().mask()
    allowed = (torch.ones_like(scores) if mask is None else mask.expand_as(scores)).to(scores.dtype)
    scores = where(allowed > 0, scores, 0.0)
    by_row, by_key = allowed.sum(-1, keepdim=True).clamp(min=1), allowed.sum(-2, keepdim=True).clamp(min=1)

    def left(r: Tensor, s: Tensor) -> Tensor:
        return (scores - r - s) * allowed

    r = scores.sum(-1, keepdim=True) / by_row
    centred = left(r, torch.zeros_like(r))
    s = centred.sum(-2, keepdim=True) / by_key
    # A mask that is not the same for all queries mixes rows and keys: alternate until both means are gone.
    if mask is not None:
        tolerance = 1e-13 * float(scores.detach().abs().amax()) if scores.numel() else 0.0
        for _ in range(_ROUNDS):
            change = left(r, s).sum(-1, keepdim=True) / by_row
            r = r + change
            more = left(r, s).sum(-2, keepdim=True) / by_key
            s = s + more
            if scores.numel() == 0 or float((change.abs().amax() + more.abs().amax()).detach()) <= tolerance:
                break
    seen = (allowed.sum(-2, keepdim=True) > 0).to(scores.dtype)
    mean = (s * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
    s, r = (s - mean) * seen, r + mean
    focus = left(r, s)
    count = allowed.sum((-2, -1), keepdim=True).clamp(min=1)
    about = (scores - scores.sum((-2, -1), keepdim=True) / count) * allowed
    whole, rest, unexplained = (x.square().sum((-2, -1)) for x in (about, centred, focus))
    some = where(whole > 0, whole, 1.0)
    # Differences of sums of squares: rounding must not make them negative.
    shares = ((whole - rest) / some, (rest - unexplained) / some, unexplained / some)
    constant_share, saliency_share, focus_share = (x.clamp(0.0, 1.0) for x in shares)
    return FocusSaliency(r.squeeze(-1), s.squeeze(-2), focus, constant_share, saliency_share, focus_share)
