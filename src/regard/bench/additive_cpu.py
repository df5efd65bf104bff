"""Additive attention on a CPU: how fast, how much memory, beside both eager formulas and torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from regard.bench.measure import Row, cpu_peak_mib, exponent, relative_error, seconds
from regard.general.attention import Attention
from regard.general.scores import Additive

QUESTION = "additive-cpu"
ALIGNMENTS = ("soft", "hard", "local-monotonic", "local-predictive", "reinforced", "sparsemax", "entmax")

_MEMORY = """
import torch, regard as rg
torch.set_num_threads(1)  # a second one changes nothing here, and on a busy machine waits at every operation
align, n, width = argv[0], int(argv[1]), int(argv[2])
options = {"window": 10} if align.startswith("local") else {}
attend = rg.Attention("additive", align, query_dim=width, key_dim=width, hidden_dim=width, **options)
query, key = (torch.randn(1, n, width, requires_grad=True) for _ in range(2))
warm = attend(query[:, :64], key[:, :64]).sum().backward()
query.grad = key.grad = None
ready()
attend(query, key).sum().backward()
"""


def by_matmul(query: Tensor, key: Tensor, score: Additive) -> Tensor:
    """The usual eager formula, `tanh(...) @ w`."""
    a, u = query @ score.W1.mT + score.b, key @ score.W2.mT
    return (torch.tanh(a[:, :, None] + u[:, None]) @ score.w).softmax(-1) @ key


def by_sum(query: Tensor, key: Tensor, score: Additive) -> Tensor:
    """The other eager formula, `(tanh(...) * w).sum(-1)`."""
    a, u = query @ score.W1.mT + score.b, key @ score.W2.mT
    return (torch.tanh(a[:, :, None] + u[:, None]) * score.w).sum(-1).softmax(-1) @ key


def speed(batch: int = 4, n: int = 512, width: int = 64) -> Iterator[Row]:
    """Forward and training step at the size of record."""
    torch.manual_seed(0)
    attend = Attention(Additive(width, width, width))
    score: Additive = attend.score  # type: ignore[assignment]
    query, key = (torch.randn(batch, n, width, requires_grad=True) for _ in range(2))
    exact = by_matmul(query.detach().double(), key.detach().double(), _double(score))
    compiled = torch.compile(by_matmul)
    peers: dict[str, Callable[[], Tensor]] = {
        "regard": lambda: attend(query, key),
        "eager (@ w)": lambda: by_matmul(query, key, score),
        "eager (* w).sum": lambda: by_sum(query, key, score),
        "torch.compile": lambda: compiled(query, key, score),
    }
    size = f"B{batch} N{n} D{width} float32"
    for what, run in peers.items():
        with torch.no_grad():
            error = relative_error(run(), exact)
            yield Row(QUESTION, f"{size}, forward", what, seconds(run), error=error)

        def step(run: Callable[[], Tensor] = run) -> None:
            query.grad = key.grad = None
            run().sum().backward()

        yield Row(QUESTION, f"{size}, training step", what, seconds(step))


def memory(width: int = 64, sizes: tuple[int, ...] = (8192, 16384, 32768)) -> Iterator[Row]:
    """Peak memory of forward and backward against N, for every alignment."""
    for align in ALIGNMENTS:
        peaks = [cpu_peak_mib(_MEMORY, align, n, width) for n in sizes]
        slope = exponent(sizes, peaks)
        for n, peak in zip(sizes, peaks, strict=True):
            case = f"B1 N{n} D{width} float32, {align}, step"
            yield Row(QUESTION, case, "regard", peak_mib=peak, extra={"exponent": slope})


def rows() -> Iterator[Row]:
    """All of it."""
    torch.set_num_threads(2)
    yield from speed()
    yield from memory()


def _double(score: Additive) -> Additive:
    copy = Additive(score.W1.shape[-1], score.W2.shape[-1], score.hidden_dim)
    copy.load_state_dict(score.state_dict())
    return copy.double()
