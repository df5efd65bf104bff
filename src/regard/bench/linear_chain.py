"""The marginals of a chain: an associative scan beside the two loops over keys that the equations are usually written as."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from regard.bench.measure import Row, relative_error, seconds
from regard.query.linear_chain import Chain

QUESTION = "linear-chain"


def by_scan(scores: Tensor, T: Tensor) -> Tensor:
    """The library's."""
    return Chain(scores, None, T).marginals()


def by_loops(scores: Tensor, T: Tensor) -> Tensor:
    """Messages from left to right, then from right to left, one key after the other."""
    unary = torch.stack([torch.zeros_like(scores), scores], -1)
    alpha = [unary[..., 0, :]]
    for n in range(1, scores.shape[-1]):
        alpha.append(unary[..., n, :] + (alpha[-1].unsqueeze(-1) + T).logsumexp(-2))
    beta = [torch.zeros_like(alpha[0])]
    for n in range(scores.shape[-1] - 1, 0, -1):
        beta.append((T + (unary[..., n, :] + beta[-1]).unsqueeze(-2)).logsumexp(-1))
    both = torch.stack(alpha, -2) + torch.stack(beta[::-1], -2)
    return (both[..., 1] - both[..., 0]).sigmoid()


def pairs(device: str, rows_of_scores: int = 64, sizes: tuple[int, ...] = (64, 256, 1024, 4096)) -> Iterator[Row]:
    """Forward and training step, beside each other, with the error of each against float64."""
    generator = torch.Generator().manual_seed(0)
    for n in sizes:
        scores = torch.randn(rows_of_scores, n, generator=generator).to(device).requires_grad_()
        T = torch.randn(2, 2, generator=generator).to(device).requires_grad_()
        exact = by_loops(scores.detach().double(), T.detach().double())
        for what, marginals in (("regard (scan)", by_scan), ("loops", by_loops)):
            error = relative_error(marginals(scores, T).detach(), exact)
            with torch.no_grad():
                forward = seconds(partial(marginals, scores, T), device)
            case = f"{rows_of_scores} rows, N{n}, float32, {device}"
            yield Row(QUESTION, f"{case}, forward", what, forward, error=error)
            yield Row(QUESTION, f"{case}, training step", what, seconds(_step(marginals, scores, T), device))


def _step(marginals: Callable[[Tensor, Tensor], Tensor], scores: Tensor, T: Tensor) -> Callable[[], None]:
    def step() -> None:
        scores.grad = T.grad = None
        marginals(scores, T).square().sum().backward()

    return step


def rows() -> Iterator[Row]:
    """On the CPU, and on the GPU where there is one."""
    torch.set_num_threads(1)
    yield from pairs("cpu")
    if torch.cuda.is_available():
        yield from pairs("cuda", rows_of_scores=1024)
