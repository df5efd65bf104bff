r"""Activations by name, with the two facts a hand-written backward needs.

A *logistic* activation is an affine function of $r = 1 / (1 + e^{\rho z})$; since $e^{\rho(a+u)} = e^{\rho a} e^{\rho u}$,
the exponentials of a pair $(a_i, u_j)$ are computed once per token and a pair costs a product and a reciprocal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._errors import nearest, refusal


class Logistic(NamedTuple):
    r"""$\mathrm{act}(z) = \text{shift} + \text{gain} / (1 + e^{\text{rate}\, z})$."""

    shift: float
    gain: float
    rate: float


@dataclass(frozen=True)
class Activation:
    """A pointwise function; `derivative` is known for those that have a name."""

    spec: str
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor] | None = None
    logistic: Logistic | None = None

    def __call__(self, z: Tensor) -> Tensor:
        return self.function(z)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle a named activation by its name; its functions are closures."""
        if self.derivative is not None:
            return activation, (self.spec,)
        return Activation, (self.spec, self.function)

    @property
    def known(self) -> str:
        """Its name to those who compute it by name; a callable of one's own may be called like one of ours."""
        return self.spec if self.derivative is not None else f"{self.spec}()"

    @property
    def is_identity(self) -> bool:
        return self.known == "identity"


def _tanh(scale: float) -> Activation:
    spec = "tanh" if scale == 1.0 else f"tanh:{scale!r}"
    return Activation(
        spec,
        torch.tanh if scale == 1.0 else lambda z: scale * torch.tanh(z / scale),
        lambda z: 1 - torch.tanh(z / scale) ** 2,
        Logistic(scale, -2 * scale, 2 / scale),
    )


def _sigmoid() -> Activation:
    def derivative(z: Tensor) -> Tensor:
        s = torch.sigmoid(z)
        return s * (1 - s)

    return Activation("sigmoid", torch.sigmoid, derivative, Logistic(1.0, -1.0, 1.0))


def _leaky_relu(slope: float) -> Activation:
    return Activation(
        f"leaky_relu:{slope!r}",
        lambda z: F.leaky_relu(z, slope),
        # The library's own backward: a selection would cost three times as much.
        lambda z: torch.ops.aten.leaky_relu_backward(torch.ones_like(z), z, slope, False),
    )


def _elu(alpha: float) -> Activation:
    return Activation(
        f"elu:{alpha!r}",
        lambda z: F.elu(z, alpha),
        lambda z: torch.where(z > 0, torch.ones_like(z), alpha * torch.exp(z.clamp(max=0))),
    )


def _gelu() -> Activation:
    def derivative(z: Tensor) -> Tensor:
        density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * density

    return Activation("gelu", F.gelu, derivative)


def _silu() -> Activation:
    def derivative(z: Tensor) -> Tensor:
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s))

    return Activation("silu", F.silu, derivative)


def _relu() -> Activation:
    return Activation("relu", F.relu, lambda z: (z > 0).to(z.dtype))


def _identity() -> Activation:
    return Activation("identity", lambda z: z, torch.ones_like)


_FIXED: dict[str, Callable[[], Activation]] = {
    "identity": _identity,
    "sigmoid": _sigmoid,
    "relu": _relu,
    "gelu": _gelu,
    "silu": _silu,
}
_WITH_PARAMETER: dict[str, tuple[Callable[[float], Activation], float]] = {
    "tanh": (_tanh, 1.0),
    "leaky_relu": (_leaky_relu, 0.2),
    "elu": (_elu, 1.0),
}


def activation(spec: str | Callable[[Tensor], Tensor] | Activation) -> Activation:
    r"""Resolve a name, a name with a parameter, or any callable.

    `"identity"`, `"sigmoid"`, `"relu"`, `"gelu"`, `"silu"`, `"tanh"`, `"leaky_relu"`, `"elu"`. `"tanh:5"` is $5\tanh(z/5)$, `"elu:1"` has
    $\alpha = 1$, and `"leaky_relu:0.2"` has slope 0.2 below zero, also the default, as in graph attention; torch's is `"leaky_relu:0.01"`.

    Example:
        >>> activation("tanh")(torch.zeros(1)).item()
        0.0
        >>> activation(torch.sin).spec
        'sin'
    """
    if isinstance(spec, Activation):
        return spec
    if not isinstance(spec, str):
        if not callable(spec):
            raise TypeError(refusal("activation", type(spec).__name__, "a name or a callable"))
        return Activation(getattr(spec, "__name__", type(spec).__name__), spec)
    name, _, parameter = spec.partition(":")
    if name in _FIXED and not parameter:
        return _FIXED[name]()
    if name in _WITH_PARAMETER:
        make, default = _WITH_PARAMETER[name]
        try:
            return make(float(parameter) if parameter else default)
        except ValueError:
            raise ValueError(refusal("activation", repr(spec), f"a number after '{name}:'")) from None
    if name in _FIXED:
        raise ValueError(refusal("activation", repr(spec), f"nothing after {name!r}", f"Fix: pass {name!r}."))
    known = sorted([*_FIXED, *_WITH_PARAMETER])
    expected = f"a callable, or one of {', '.join(known)}"
    raise ValueError(refusal("activation", repr(spec), expected, nearest(name, known, listed=True)))
