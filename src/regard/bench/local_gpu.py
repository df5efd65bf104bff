"""Local alignment on a GPU: windows of few keys beside the same equation, eager and through torch.compile, and all keys by SDPA."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.bench.beside import Formula, beside, first_queries
from regard.bench.measure import Row

QUESTION = "local-gpu"
WIDTH, REACH = 64, 10.0
SCALE = WIDTH**-0.5

# Centres of the windows of n queries, for all leading entries or for each of so many.
POSITIONS: dict[str, Callable[[int, int, str], Tensor]] = {
    "monotonic": lambda lead, n, device: torch.arange(n, device=device, dtype=torch.float32)[None],
    "arbitrary positions": lambda lead, n, device: torch.rand(lead, n, device=device) * n,
}


def eager(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """Softmax over the keys within reach, then the Gaussian; position (..., Nq)."""
    distance = torch.arange(k.shape[-2], device=k.device) - position[..., None]
    scores = (q @ k.mT * SCALE).masked_fill(distance.abs() > REACH, -torch.inf)
    gaussian = torch.exp(-2 * (distance / REACH).square())
    weights: Tensor = (scores.softmax(-1) * gaussian).to(v.dtype)
    return weights @ v


def ours(position: Tensor) -> Formula:
    """What `Attention` calls, outside of compiled graphs; position (L or 1, Nq)."""
    from regard.ops.triton.align import SCALED, Align
    from regard.ops.triton.bilinear_attend import bilinear_attention

    align = Align(position=position, window=REACH, gaussian=SCALED, scattered=position.shape[0] > 1)
    _, _, numbers, kinds = align.flat()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tensors = (q, k, v, None, None, None, position, None, None)
        return bilinear_attention(*tensors, False, SCALE, 1.0, "identity", numbers, kinds)[0]

    return run


def compared(
    name: str,
    n: int,
    batch: int = 2,
    heads: int = 8,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    compiled: bool = True,
    budget: float = 0.3,
) -> Iterator[Row]:
    """Forward and training step; the error is that of the first queries."""
    xs = [torch.randn(batch, heads, n, WIDTH, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    position = POSITIONS[name](batch * heads, n, device)
    each = position.view(batch, heads, n) if len(position) > 1 else position
    with torch.no_grad():
        q, k, v = (x[0, 0].double() for x in xs)
        exact = eager(q[:64], k, v, position[0, :64].double())
    who: dict[str, Formula] = {
        "regard": ours(position),
        "SDPA, all keys": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=SCALE),
    }
    if compiled:
        # Anew for every shape: past its limit of recompilations torch.compile silently runs eagerly.
        torch.compiler.reset()
        by_compiler = torch.compile(eager, dynamic=False)
        who["torch.compile"] = lambda q, k, v: by_compiler(q, k, v, each)
    who["eager"] = lambda q, k, v: eager(q, k, v, each)
    case = f"{name} B{batch} H{heads} N{n} d{WIDTH} window {REACH:g} {str(dtype).split('.')[1]}"
    # Windows are so short a work that launching it takes as long.
    graphs = ("regard", "SDPA, all keys") if device == "cuda" else ()
    for row in beside(QUESTION, case, who, xs, (), first_queries(exact), device, budget, graphs):
        row.error = None if row.what == "SDPA, all keys" else row.error
        yield row


def rows() -> Iterator[Row]:
    """All of it."""
    torch.manual_seed(0)
    for n in (16384, 4096):
        for name in POSITIONS:
            yield from compared(name, n)
            torch.cuda.empty_cache()
