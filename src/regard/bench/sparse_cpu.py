"""Sparsemax and entmax on a CPU: rows of scores beside the equation, eager and compiled, and the entmax package; and whole attentions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from regard.bench.beside import Formula, beside, first_queries
from regard.bench.measure import Row
from regard.general.alignments import Entmax, Soft, Sparsemax
from regard.general.alignments.sparse import entmax
from regard.general.attention import Attention
from regard.ops.dispatch import execution

QUESTION = "sparse-cpu"
ALPHAS = {"sparsemax": 2.0, "entmax 1.5": 1.5, "entmax 1.3": 1.3, "entmax 1.3, learned": 1.3}
# How far scores reach: few keys have weight, or all of them.
REACHES = {"peaked": 4.0, "flat": 1e-3}
WIDTH = 64


def published(alpha: float | Tensor) -> Formula:
    """The same by the package, exactly where it knows how."""
    import entmax as package

    if alpha == 2.0:
        return lambda z: package.sparsemax(z, dim=-1)
    if alpha == 1.5:
        return lambda z: package.entmax15(z, dim=-1)
    return lambda z: package.entmax_bisect(z, alpha, dim=-1)


def aligned(
    name: str, reach: str, rows: int = 1024, n: int = 1024, compiled: bool = True, budget: float = 1.0
) -> Iterator[Row]:
    """Weights of rows and a step down to their scores, and to alpha where it is learned; the error is that of the first rows."""
    alpha: float | Tensor = ALPHAS[name]
    learned = [torch.tensor(alpha, requires_grad=True)] if "learned" in name else []
    alpha = learned[0] if learned else alpha
    z = (REACHES[reach] * torch.randn(rows, n)).requires_grad_()
    who: dict[str, Formula] = {
        "regard": lambda z: entmax(z, None, alpha, kernels=True),
        "equation": lambda z: entmax(z, None, alpha),
    }
    if compiled:
        torch.compiler.reset()
        who["torch.compile (equation)"] = torch.compile(who["equation"], dynamic=False)
    if find_spec("entmax") is not None:
        who["entmax package"] = published(alpha)
    with torch.no_grad():
        exact = entmax(z[:64].double(), None, alpha)
    case = f"{name}, {reach}, {rows} x {n} float32"
    yield from beside(QUESTION, case, who, [z], learned, first_queries(exact), "cpu", budget)


def attended(name: str, batch: int = 4, n: int = 1024, budget: float = 1.0) -> Iterator[Row]:
    """Whole attentions of scaled dot products, blockwise and dense, beside soft ones."""
    xs = [torch.randn(batch, n, WIDTH, requires_grad=True) for _ in range(3)]
    align = Sparsemax() if name == "sparsemax" else Entmax(ALPHAS[name], learnable="learned" in name)
    attend = Attention("scaled-dot", align)
    who = {"regard": _by("blockwise", attend), "equation": _by("dense", attend)}
    who["soft, blockwise"] = _by("blockwise", Attention("scaled-dot", Soft()))
    yield from beside(
        QUESTION, f"{name} attention, B{batch} N{n} D{WIDTH} float32", who, xs, device="cpu", budget=budget
    )


def _by(impl: str, attend: Callable[..., Tensor]) -> Formula:
    def run(*xs: Tensor) -> Tensor:
        with execution(impl):
            return attend(*xs)

    return run


def rows() -> Iterator[Row]:
    """All of it."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    for name in ALPHAS:
        for reach in REACHES:
            # Sixty bisections unrolled take the compiler minutes.
            yield from aligned(name, reach, compiled=name in ("sparsemax", "entmax 1.5"))
        yield from attended(name)
