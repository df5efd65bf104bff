"""Additive attention by the kernels, under the interpreter or on a GPU, held to what the dense execution reaches in the same dtype.

The budget of a result is twice the error of the dense execution against float64, and a few roundings of the size of the result. A single
number may by chance be very near or very small: so error and size are the largest of those found when the contribution of each query gets
a sign of its own, drawn a few times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import regard as rg
from regard.general.alignments import Alignment

WIDTH = 24

ALIGNMENTS: dict[str, Callable[[], Alignment]] = {
    "soft": rg.Soft,
    "warm": lambda: rg.Soft(0.7, learnable=True),
    "straight-through": rg.Hard,
    "reinforce": lambda: rg.Hard("reinforce"),
    "gumbel": lambda: rg.Hard("gumbel", 0.6),
    "gumbel-straight-through": lambda: rg.Hard("gumbel-straight-through", 0.6),
    "monotonic": lambda: rg.Local(3),
    "monotonic, flat": lambda: rg.Local(5, gaussian=False),
    "predictive": lambda: rg.Local(3, "predictive", query_dim=WIDTH),
    "predictive, renormalised": lambda: rg.Local(4.5, "predictive", renormalize=True, query_dim=WIDTH),
    "predictive, often empty": lambda: rg.Local(0.3, "predictive", query_dim=WIDTH),
}

# Alignments of complete rows: panels whose scores a kernel writes.
PANELS: dict[str, Callable[[], Alignment]] = {
    "sparsemax": rg.Sparsemax,
    "entmax": rg.Entmax,
    "entmax, bisected": lambda: rg.Entmax(1.3),
    "entmax, learned": lambda: rg.Entmax(1.7, learnable=True),
}


@dataclass(frozen=True)
class Case:
    """One attention and its sizes."""

    align: str = "soft"
    act: str = "tanh"
    dtype: torch.dtype = torch.float32
    mask: str = "none"
    hidden: int = 7
    d_v: int = 5
    nq: int = 19
    n: int = 37
    dropout: float = 0.0
    bias: bool = False
    train: bool = True
    panel: int | None = None

    def __str__(self) -> str:
        name = f"{self.align}-{self.act}-{self.dtype}-{self.mask}-{self.hidden}-{self.d_v}-{self.nq}-{self.n}"
        more = f"{'-dropout' if self.dropout else ''}{'-bias' if self.bias else ''}{'' if self.train else '-eval'}"
        return name.replace("torch.", "") + more

    def attention(self) -> rg.Attention:
        made = rg.Attention(
            "additive",
            {**ALIGNMENTS, **PANELS}[self.align](),
            query_dim=WIDTH,
            key_dim=WIDTH,
            hidden_dim=self.hidden,
            activation=self.act,
            dropout=self.dropout,
        )
        return made.train(self.train)

    def masked(self, device: str) -> object:
        nq, n = self.nq, self.n
        pairs = torch.rand(2, nq, n, device=device) > 0.3
        # A query that sees nothing, and one that sees only the last keys.
        pairs[0, nq // 2], pairs[1, nq // 3, : max(0, n - 2)] = False, False
        padding = rg.Padding(torch.tensor([max(1, n // 2), n], device=device))
        known = {
            "pairs": pairs,
            "causal": rg.Causal(),
            "padding": padding,
            "causal and padding": rg.Causal() & padding,
            "window": rg.Window(9),
        }
        return known.get(self.mask)


def results(
    attend: rg.Attention, inputs: list[Tensor], mask: object, bias: Tensor | None, cotangent: Tensor
) -> dict[str, Tensor]:
    """The context and every gradient, by name, with the same random numbers each time."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in zip(("q", "k", "v"), inputs, strict=True)}
    bias = None if bias is None else bias.detach().clone().requires_grad_()
    torch.manual_seed(5)
    context = attend(*leaves.values(), mask=mask, bias=bias)
    wanted = {**leaves, **dict(attend.named_parameters()), **({} if bias is None else {"bias": bias})}
    found = torch.autograd.grad(context, list(wanted.values()), cotangent.to(context.dtype), allow_unused=True)
    gradients = zip(wanted.items(), found, strict=True)
    return {
        "context": context.detach(),
        **{name: torch.zeros_like(x) if g is None else g for (name, x), g in gradients},
    }


def check(case: Case, device: str) -> None:
    """The fused execution against float64, twice, within its budget.

    Under sparse alignments that counts what one rounding of every score makes of the result: a weight that is about to leave its support
    carries it on many times over.
    """
    torch.manual_seed(case.hidden + 3 * case.d_v + 5 * case.nq + 7 * case.n)
    wide, low = case.attention().double().to(device), case.attention().to(case.dtype).to(device)
    low.load_state_dict({name: p.to(case.dtype) for name, p in wide.state_dict().items()})
    wide.load_state_dict({name: p.double() for name, p in low.state_dict().items()})
    sizes = ((case.nq, WIDTH), (case.n, WIDTH), (case.n, case.d_v))
    x = [torch.randn(2, m, d, device=device).to(case.dtype) for m, d in sizes]
    mask = case.masked(device)
    bias = torch.randn(2, case.nq, case.n, device=device) if case.bias else None
    cotangent = torch.randn(2, case.nq, case.d_v, device=device).to(case.dtype)
    signs = torch.randint(0, 2, (4, 2, case.nq, 1), device=device).to(case.dtype) * 2 - 1
    signs[0] = 1
    exactly = ([t.double() for t in x], mask, None if bias is None else bias.double())
    with rg.execution("dense"):
        exact = [results(wide, *exactly, cotangent * sign) for sign in signs]
        rival = [results(low, x, mask, bias, cotangent * sign) for sign in signs]
        rounded = exact[0]
        if case.align in PANELS:
            scores = wide.score(exactly[0][0], exactly[0][1]).detach()
            roundings = scores * torch.finfo(torch.float32).eps * (2 * torch.randint_like(scores, 2) - 1)
            roundings = roundings if bias is None else roundings + exactly[2]
            rounded = results(wide, *exactly[:2], roundings, cotangent)
    with rg.execution("fused", panel=case.panel):
        mine, again = (results(low, x, mask, bias, cotangent) for _ in range(2))
    eps = torch.finfo(case.dtype).eps
    # Where a query reads one key alone, what is left of the gradient of its scores is the rounding of do · v, carried on.
    noise = case.nq / (1 - case.dropout) * torch.stack([t.float().norm(dim=-1).max() for t in (*x, cotangent)]).prod()
    problems = []
    for name, ours in mine.items():
        natural = max(float(reference[name].norm()) for reference in exact)
        error = max(float((x[name].double() - y[name]).norm()) for x, y in zip(rival, exact, strict=True))
        error += float((rounded[name] - exact[0][name]).norm())
        distance, budget = float((ours.double() - exact[0][name]).norm()), 2 * (error + 2 * eps * natural)
        if natural < 1e-9 * float(noise):
            budget = eps * float(noise)
        if not distance <= budget:
            problems.append(f"{name}: distance {distance:.2e}, budget {budget:.2e}, size {natural:.2e}")
        if not torch.equal(ours, again[name]):
            problems.append(f"{name}: two runs differ by {float((ours.double() - again[name].double()).norm()):.2e}")
    assert not problems, "; ".join(problems)
