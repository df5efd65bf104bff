r"""Reversible layers: what a layer was given is computed from what it gave, so that nothing need be kept for the backward.

$$y_1 = x_1 + f(x_2), \quad y_2 = x_2 + g(y_1) \qquad\Longleftrightarrow\qquad x_2 = y_2 - g(y_1), \quad x_1 = y_1 - f(x_2)$$

Going back from the last layer, each step recovers the inputs of a layer, computes $f$ and $g$ once more, now with a graph, and
passes the gradients on,

$$\bar x_1 = \bar y_1 + g'^\top \bar y_2, \qquad \bar x_2 = \bar y_2 + f'^\top \bar x_1.$$

What was drawn (dropout) is drawn again from the same state, and what was decided (hashes) is kept. Parameters must not have changed
in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from regard._errors import refusal
from regard.general.masks import Mask
from regard.general.scores.base import width
from regard.ops import hooks
from regard.ops.blockwise import LARGE_PANEL_ELEMENTS
from regard.ops.dispatch import autocasting, wants_dense
from regard.ops.heap import return_freed_memory
from regard.transformer.feedforward import probability
from regard.transformer.lsh import Hashes, LSHAttention


class ReversibleLayer(nn.Module):
    r"""Attention and a feed-forward map on two streams (Gomez et al. 2017, https://arxiv.org/abs/1707.04585).

    $$y_1 = x_1 + \mathrm{attend}(\mathrm{LN}(x_2)), \qquad y_2 = x_2 + \mathrm{FFN}(\mathrm{LN}(y_1))$$

    Args:
        dim: width of the tokens of each stream.
        attention: called as `attend(tokens, mask=mask)`.
        feedforward: called with tokens.
        dropout: of what each part adds.

    Example:
        >>> from regard.transformer import FeedForward
        >>> layer = ReversibleLayer(8, LSHAttention(8, 2), FeedForward(8, 16))
        >>> x = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
        >>> y = layer.eval()(*x)
        >>> all(torch.allclose(a, b, atol=1e-5) for a, b in zip(layer.inverse(*y), x))
        True
    """

    def __init__(self, dim: int, attention: nn.Module, feedforward: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        dim, self.dropout = width("dim", dim), probability("dropout", dropout)
        self.attention, self.norm_attention = attention, nn.LayerNorm(dim)
        self.feedforward, self.norm_feedforward = feedforward, nn.LayerNorm(dim)

    def forward(
        self,
        x1: Float[Tensor, "*b n d"],
        x2: Float[Tensor, "*b n d"],
        mask: Tensor | Mask | None = None,
    ) -> tuple[Float[Tensor, "*b n d"], Float[Tensor, "*b n d"]]:
        """Both streams, updated; the mask says which token may look at which."""
        y1 = x1 + self.attend(x2, mask)
        return y1, x2 + self.feed(y1)

    def inverse(
        self,
        y1: Float[Tensor, "*b n d"],
        y2: Float[Tensor, "*b n d"],
        mask: Tensor | Mask | None = None,
    ) -> tuple[Float[Tensor, "*b n d"], Float[Tensor, "*b n d"]]:
        """Both streams as they were; exact but for rounding, where nothing is drawn anew."""
        x2 = y2 - self.feed(y1)
        return y1 - self.attend(x2, mask), x2

    def attend(self, x: Tensor, mask: Tensor | Mask | None, hashes: Hashes | None = None) -> Tensor:
        """What is added to the first stream."""
        kept = {"hashes": hashes} if isinstance(self.attention, LSHAttention) else {}
        return F.dropout(self.attention(self.norm_attention(x), mask=mask, **kept), self.dropout, self.training)

    def feed(self, x: Tensor) -> Tensor:
        """What is added to the second stream."""
        return F.dropout(self.feedforward(self.norm_feedforward(x)), self.dropout, self.training)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}"


def reversible(
    layers: Sequence[ReversibleLayer], x1: Tensor, x2: Tensor, mask: Tensor | Mask | None = None
) -> tuple[Tensor, Tensor]:
    """Run layers one after the other, keeping nothing of them but the end, whatever their number."""
    ordinary = torch.compiler.is_compiling() or wants_dense() or torch._C._are_functorch_transforms_active()
    # What an intervention draws or is told cannot be had again once it has ended.
    ordinary = ordinary or bool(hooks.interventions)
    # Once each, though layers may share them: the gradient of one is its sum over all layers.
    parameters = list(dict.fromkeys(p for layer in layers for p in layer.parameters() if p.requires_grad))
    if ordinary or not torch.is_grad_enabled() or not any(x.requires_grad for x in (x1, x2, *parameters)):
        for layer in layers:
            x1, x2 = layer(x1, x2, mask)
        return x1, x2
    y1, y2 = _Reversible.apply(x1, x2, layers, mask, *parameters)  # type: ignore[no-untyped-call]
    return y1, y2


class _Reversible(torch.autograd.Function):
    """Layers whose inputs are computed again from their outputs."""

    @staticmethod
    def forward(
        ctx: Any, x1: Tensor, x2: Tensor, layers: Sequence[ReversibleLayer], mask: Any, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.layers, ctx.mask, ctx.parameters = layers, mask, parameters
        ctx.versions = [p._version for p in parameters]
        ctx.modes = [(module, module.training) for layer in layers for module in layer.modules()]
        ctx.cast = _autocast_of(x1.device)
        ctx.kept = []
        for layer in layers:
            _tidy(x1)
            hashes, attending = Hashes(), _Drawn(x1, layer.training)
            x1 = x1 + layer.attend(x2, mask, hashes)
            feeding = _Drawn(x1, layer.training)
            x2 = x2 + layer.feed(x1)
            ctx.kept.append((hashes, attending, feeding))
        ctx.save_for_backward(x1, x2)
        return x1, x2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d1: Tensor, d2: Tensor) -> tuple[Tensor | None, ...]:
        y1, y2 = ctx.saved_tensors
        if [p._version for p in ctx.parameters] != ctx.versions:
            expected = "those of the forward: layers are computed once more from them"
            fix = "Fix: call backward before what changes them, such as the step of an optimiser."
            raise RuntimeError(refusal("parameters", "some that were changed in place", expected, fix))
        found: dict[int, Tensor] = {}
        for layer, (hashes, attending, feeding) in zip(reversed(ctx.layers), reversed(ctx.kept), strict=True):
            with ctx.cast(), _as_before(ctx.modes):
                with feeding.again():
                    fed, grad = _through(layer.feed, y1, d2, layer, found)
                d1, y2 = d1 + grad, y2 - fed
                with attending.again():
                    attended, grad = _through(lambda x: layer.attend(x, ctx.mask, hashes), y2, d1, layer, found)  # noqa: B023
                d2, y1 = d2 + grad, y1 - attended
        return d1, d2, None, None, *(found.get(id(p)) for p in ctx.parameters)


def _through(
    part: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor, layer: nn.Module, found: dict[int, Tensor]
) -> tuple[Tensor, Tensor]:
    """What a part gives for x, and the gradient of x; those of its parameters are added to what was found."""
    _tidy(x)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        result = part(x)
    grads = torch.autograd.grad(result, [x, *parameters], grad.to(result.dtype), allow_unused=True)
    for p, g in zip(parameters, grads[1:], strict=True):
        if g is not None:
            found[id(p)] = found[id(p)] + g if id(p) in found else g
    return result.detach(), torch.zeros_like(x) if grads[0] is None else grads[0]


def _tidy(x: Tensor) -> None:
    """Give back what the layer before has freed, where it is worth it; otherwise the process grows with every layer all the same."""
    if x.device.type == "cpu" and x.numel() >= LARGE_PANEL_ELEMENTS >> 2:
        return_freed_memory()


def _autocast_of(device: torch.device) -> Callable[[], Any]:
    """The autocast that is on now, to be entered again later."""
    if device.type == "meta":
        return lambda: torch.autocast("cpu", enabled=False)
    enabled, dtype = autocasting(device), torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype, enabled=enabled)


@contextmanager
def _as_before(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Modules in the modes of the forward, and without interventions that were entered after it."""
    changed = [(module, training) for module, training in modes if module.training != training]
    for module, training in changed:
        module.training = training
    try:
        with hooks.aside():
            yield
    finally:
        for module, training in changed:
            module.training = not training


class _Drawn:
    """The state of the random generators before something is drawn, while training."""

    def __init__(self, like: Tensor, training: bool) -> None:
        self.kept = training
        if training:
            self.cpu = torch.get_rng_state()
            self.devices, self.states = get_device_states(like)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same once more."""
        if not self.kept:
            yield
            return
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states)
            yield
