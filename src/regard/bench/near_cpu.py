"""Windows and prefixes on a CPU: does what is added to them (a bias, dropout, another alignment) leave them cheap? Beside all pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.bench.beside import Formula, beside, first_queries
from regard.bench.measure import Row
from regard.general.alignments import Local
from regard.general.attention import Attention
from regard.general.masks import Causal, Mask, Window
from regard.ops.dispatch import execution

QUESTION = "near-cpu"
WIDTH, REACH = 64, 16


def slope(i: Tensor, j: Tensor) -> Tensor:
    """The bias of ALiBi with a slope of a quarter."""
    return -(i - j).abs() / 4.0


class Kind(NamedTuple):
    """An attention, what it is called with, and the same by the library where that can."""

    make: Callable[[], Attention]
    given: Mapping[str, Any]
    library: Callable[[int], Callable[..., Tensor]] | None = None


def _written_out(mask: Mask, bias: bool = False) -> Callable[[int], Callable[..., Tensor]]:
    """The library's attention under a mask, and a bias, of all pairs, which is made once."""

    def made(n: int) -> Callable[..., Tensor]:
        i, j = torch.arange(n)[:, None], torch.arange(n)
        allowed = j <= i if isinstance(mask, Causal) else (j - i).abs() <= REACH
        added = torch.zeros(n, n).masked_fill_(~allowed, -torch.inf)
        added = added + slope(i, j) if bias else added
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=added)

    return made


def _scaled(align: Any = "soft", **options: Any) -> Callable[[], Attention]:
    return lambda: Attention("scaled-dot", align, **options)


WINDOW = Window(REACH)
KINDS: dict[str, Kind] = {
    "window": Kind(_scaled(), {"mask": WINDOW}, _written_out(WINDOW)),
    "window, bias": Kind(_scaled(), {"mask": WINDOW, "bias": slope}, _written_out(WINDOW, bias=True)),
    "window, dropout": Kind(_scaled(dropout=0.1), {"mask": WINDOW}),
    "window, sparsemax": Kind(_scaled("sparsemax"), {"mask": WINDOW}),
    "window, additive": Kind(
        lambda: Attention("additive", query_dim=WIDTH, key_dim=WIDTH, hidden_dim=WIDTH), {"mask": WINDOW}
    ),
    "local": Kind(lambda: Attention("scaled-dot", Local(REACH)), {}),
    "causal, additive": Kind(
        lambda: Attention("additive", query_dim=WIDTH, key_dim=WIDTH, hidden_dim=WIDTH), {"mask": Causal()}
    ),
}


def compared(name: str, n: int, budget: float = 1.0) -> Iterator[Row]:
    """Forward and training step; the error is that of the first queries."""
    kind = KINDS[name]
    attend = kind.make()
    xs = [torch.randn(1, n, WIDTH, requires_grad=True) for _ in range(3)]

    def ours(*xs: Tensor) -> Tensor:
        result: Tensor = attend(*xs, **kind.given)
        return result

    def equation(*xs: Tensor) -> Tensor:
        with execution("dense"):
            return ours(*xs)

    def all_pairs(*xs: Tensor) -> Tensor:
        result: Tensor = attend(*xs)
        return result

    who: dict[str, Formula] = {"regard": ours, "the equation": equation}
    if kind.library is not None:
        who["SDPA, mask written out"] = kind.library(n)
    if kind.given:
        who["regard, all keys"] = all_pairs
    error = None
    if attend.dropout == 0.0:
        few = 4 * REACH
        with torch.no_grad(), execution("dense"):
            wide = kind.make().double()
            wide.load_state_dict(attend.state_dict())
            # The first queries under a window or a prefix read none of the later keys.
            exact = wide(*(x[:, :few].double() for x in xs), **kind.given)[0, : few - REACH]
        error = first_queries(exact)
    case = f"{name}, B1 N{n} D{WIDTH} reach {REACH} float32"
    for row in beside(QUESTION, case, who, xs, list(attend.parameters()), error, "cpu", budget):
        row.error = None if row.what == "regard, all keys" else row.error
        yield row


def rows(sizes: tuple[int, ...] = (2048, 4096)) -> Iterator[Row]:
    """All of it, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for n in sizes:
        for name in KINDS:
            yield from compared(name, n)
