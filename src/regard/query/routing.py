"""Dynamic routing: input capsules predict output capsules, and send more to those that agree with them."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.affinity import Sides
from regard.feature.parts import AlignLike, attentions, masked_input, masked_mean
from regard.general.scores.base import matrix, width
from regard.ops import hooks
from regard.ops.call import Call
from regard.ops.dispatch import choose
from regard.ops.fill import where
from regard.ops.forms import wide
from regard.query.capsules import Capsules, of_width
from regard.query.parts import operand, uncast, widths


def squash(s: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    r"""Keep the direction, and bring the length below one: $\frac{\lVert s \rVert^2}{1 + \lVert s \rVert^2} \frac{s}{\lVert s \rVert}$.

    Zero stays zero, with zero gradients.

    Example:
        >>> squash(torch.tensor([[0.0, 3.0], [0.0, 0.0]]))
        tensor([[0.0000, 0.9000],
                [0.0000, 0.0000]])
    """
    # In half precision the square of a length of 256 is infinite, and that of 1/4096 zero.
    square = wide(s).square().sum(-1, keepdim=True)
    return (s * (_root(square) / (1 + square))).to(s.dtype)


def lengths(v: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
    """Norms of vectors, differentiable (with zero gradients) where they are zero."""
    return _root(wide(v).square().sum(-1)).to(v.dtype)


def _root(square: Tensor) -> Tensor:
    # The root has no derivative at zero; everything that is multiplied by it here is zero there too.
    some = square > 0
    return where(some, where(some, square, 1.0).sqrt(), 0.0)


@register(
    name="dynamic-routing-capsules",
    zh="动态路由胶囊",
    path="query/multiplicity",
    equation="c_ij = softmax_j(b_ij),  v_j = squash(Σ_i c_ij û_j|i),  b_ij ← b_ij + û_j|i · v_j,  û_j|i = u_i W_ij",
    paper="Sabour, Frosst & Hinton, Dynamic Routing Between Capsules, NeurIPS 2017",
    year=2017,
    time="R I J d_out + I J d_in d_out",
    memory="I J d_out",
    choose="parts vote for wholes, and a whole should listen to the parts that agree on it",
    avoid="many capsules on many inputs: every pair has a prediction, and every iteration reads all of them",
)
class DynamicRouting(nn.Module):
    r"""Routing by agreement (Sabour, Frosst & Hinton 2017, https://arxiv.org/abs/1710.09829).

    $$\hat u_{j|i} = u_i W_{ij}, \qquad c_{ij} = \mathrm{softmax}_j(b_{ij}), \quad
      v_j = \mathrm{squash}\Big(\sum_i c_{ij}\, \hat u_{j|i}\Big), \quad b_{ij} \leftarrow b_{ij} + \hat u_{j|i} \cdot v_j$$

    $R$ times, from $b = 0$. The softmax runs over *outputs*: every input distributes itself, where in attention every output chooses
    among inputs. With one iteration each coupling is $1/J$; a padded input sends nothing. Training is by `margin` (`CapsuleLoss`) on
    the lengths of $v$, and by a `CapsuleDecoder`.

    Every iteration is a call of `routing` under a trace: inputs are its queries and outputs its keys, so that its weights are the
    couplings $c$, (..., I, J), and its scores the logits $b$. An intervention there changes them: `"uniform"` is the network without
    routing, `"erased"` closes an output.

    Args:
        dim: width of input and output capsules, or of each.
        capsules: $J$.
        inputs: $I$, with a matrix for each input and output; when not given, one for each output, for any number of inputs.
        iterations: $R$.
        detach: let the gradient through the last iteration alone, with couplings as constants, as many implementations do.
        align: what makes couplings of logits: a name, a class, or a ready-made alignment; softmax when not given.

    Example:
        >>> route = DynamicRouting((8, 16), capsules=10, inputs=36)
        >>> v = route(torch.randn(2, 36, 8))
        >>> v.shape, bool((v.norm(dim=-1) < 1).all())
        (torch.Size([2, 10, 16]), True)
    """

    def __init__(
        self,
        dim: int | tuple[int, int],
        capsules: int,
        inputs: int | None = None,
        *,
        iterations: int = 3,
        detach: bool = False,
        align: AlignLike = None,
    ) -> None:
        super().__init__()
        d_in, d_out = widths("dim", dim, 2)
        own = () if inputs is None else (width("inputs", inputs),)
        self.W = matrix(*own, width("capsules", capsules), d_in, d_out)
        self.iterations, self.detach = width("iterations", iterations), bool(detach)
        self.routing = attentions({"routing": (d_out, d_out)}, "dot", align, {})["routing"]

    def forward(
        self, u: Float[Tensor, "*b i din"], mask: Bool[Tensor, "*_ i"] | None = None
    ) -> Float[Tensor, "*b j dout"]:
        """Output capsules (..., J, d_out) of input capsules (..., I, d_in); `mask` is True for real ones, (..., I)."""
        u, mask = masked_input(of_width("u", u, self.W.shape[-2]), mask, "u")
        operand("u", u, self.W, self.W.shape[-2])
        predicted = self.predictions(u)
        every = wide(predicted)
        earlier = every.detach() if self.detach else every
        # Without an output there is no agreement: from v = 0 the first logits are zero.
        v, b = every.new_zeros(*u.shape[:-2], *every.shape[-2:]), every.new_zeros(every.shape[:-1])
        for r in range(self.iterations):
            if r > 0:
                with uncast(u.device):
                    b = b + (earlier * v.unsqueeze(-3)).sum(-1)
            call = hooks.changed(self.routing, self._call(v.to(predicted.dtype), b, mask))
            with uncast(u.device):
                c = call.weights().expand(b.shape)
                s = torch.einsum("...ij,...ijd->...jd", c, every if r == self.iterations - 1 else earlier)
                v = squash(s)
            hooks.seen(self.routing, call)
        return v.to(predicted.dtype)

    def capsules(self, u: Float[Tensor, "*b i din"], mask: Bool[Tensor, "*_ i"] | None = None) -> Capsules:
        r"""The outputs as capsules: $p_j = \lVert v_j \rVert$, the context is the direction of $v_j$, the reconstruction $v_j$."""
        u, mask = masked_input(u, mask, "u")
        v = self(u, mask)
        p = lengths(v)
        some = (p > 0).unsqueeze(-1)
        direction = where(some, v / where(some, p.unsqueeze(-1), 1.0), 0.0)
        return Capsules(direction, p, v, masked_mean(u, mask))

    def predictions(self, u: Float[Tensor, "*b i din"]) -> Float[Tensor, "*b i j dout"]:
        r"""What every input expects of every output, $\hat u_{j|i}$."""
        if self.W.dim() == 3:
            together: Tensor = (u @ self.W.movedim(-2, 0).flatten(1)).unflatten(-1, self.W.shape[::2])
            return together
        if u.shape[-2] > len(self.W):
            fix = "Fix: inputs=None, which has the same matrices for all."
            raise ValueError(refusal("u", f"{u.shape[-2]} capsules", f"at most inputs={len(self.W)}", fix))
        return torch.einsum("...id,ijde->...ije", u, self.W[: u.shape[-2]])

    def _call(self, v: Tensor, b: Tensor, mask: Tensor | None) -> Call:
        """The couplings of an iteration, from the logits."""
        # A prediction belongs to a pair, so agreement is no product of queries and keys: it enters as a bias on zero.
        query, key = v.new_zeros(*b.shape[:-1], 1), v.new_zeros(*v.shape[:-1], 1)
        sides = None if mask is None else Sides(mask, None)
        call = self.routing.call(query, key, v, mask=sides, bias=b)
        found = choose(call.with_(bias=None), self.routing.impl)
        if found.path == "fused" and found.reason == "asked for":
            raise NotImplementedError(
                "impl='fused' is not available here: outputs are summed over the side that is not normalised. "
                "Fix: use impl='auto', 'blockwise' or 'dense'."
            )
        return call

    def extra_repr(self) -> str:
        return f"W={tuple(self.W.shape)}, iterations={self.iterations}, detach={self.detach}"
