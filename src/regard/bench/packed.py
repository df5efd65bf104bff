"""What do sequences end to end cost, beside the same with padding, and beside a loop over them by hand?

Lengths are drawn as those of sentences and documents are, log-normally; a training step of attention with scaled dot products and with
additive scores, without and with a causal mask. Beside ours: a padded batch of the same, the whole sequence under a mask of pairs, and a
loop in torch that takes one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.bench.measure import Row, relative_error, seconds
from regard.general.attention import Attention
from regard.general.masks import Causal, Padding
from regard.general.packed import Packed
from regard.general.scores import Additive, ScaledDot

QUESTION = "packed"
WIDTH, HIDDEN = 64, 32
# Sequences, and the middle of their lengths.
SETS = {"cpu": (24, 100), "cuda": (128, 400)}
# Pairs of a mask that is written out.
MOST = 1 << 28

Run = Callable[[Tensor], Tensor]


def lengths(count: int, middle: int) -> list[int]:
    """Many short, a few long; the same every time."""
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(0))
    found: list[int] = (middle * (0.7 * drawn).exp()).round().clamp(min=1).int().tolist()
    return found


def rows() -> Iterator[Row]:
    """Time a step of each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = lengths(*SETS[device])
    tokens = torch.randn(sum(sizes), WIDTH, device=device, dtype=dtype)
    for name, score in {"scaled dot": ScaledDot(), "additive": Additive(WIDTH, WIDTH, HIDDEN)}.items():
        attend = Attention(score).to(device, dtype)
        for causal in (False, True):
            case = f"{name}{', causal' if causal else ''}, {len(sizes)} sequences of up to {max(sizes)}, {device}, training step"
            with torch.no_grad():
                exact = by_hand(deepcopy(attend).double(), sizes, causal)(tokens.double())
            for what, run in ways(attend, sizes, causal, device).items():
                with torch.no_grad():
                    error = relative_error(run(tokens), exact)
                taken = seconds(lambda run=run: step(run, tokens), device)  # type: ignore[misc]
                yield Row(QUESTION, case, what, taken, error=error)


def ways(attend: Attention, sizes: list[int], causal: bool, device: str) -> dict[str, Run]:
    """The same function of the tokens in several ways."""
    packed, count = Packed(sizes), torch.tensor(sizes, device=device)
    padding, real = Padding(count), torch.arange(max(sizes), device=device) < count[:, None]

    def padded(x: Tensor) -> Tensor:
        batch = pad_sequence(list(x.split(sizes)), batch_first=True)
        context: Tensor = attend(batch, batch, mask=padding & Causal() if causal else padding)
        return context[real]

    found: dict[str, Run] = {
        "regard": lambda x: attend(x, x, mask=packed & Causal() if causal else packed),
        "regard, padded batch": padded,
        "loop by hand": by_hand(attend, sizes, causal),
    }
    if sum(sizes) ** 2 <= MOST:
        pairs = torch.block_diag(*(torch.ones(n, n) for n in sizes)).bool().to(device)
        pairs = pairs.tril() if causal else pairs
        found["regard, a mask of pairs"] = lambda x: attend(x, x, mask=pairs)
    return found


def by_hand(attend: Attention, sizes: list[int], causal: bool) -> Run:
    """One sequence after the other: torch's attention, or the equation of additive scores in eager mode."""
    score: Any = attend.score

    def dot(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=causal)[0]

    def additive(x: Tensor) -> Tensor:
        e: Tensor = torch.tanh((x @ score.W1.mT)[:, None] + x @ score.W2.mT + score.b) @ score.w
        if causal:
            e = e.masked_fill(torch.ones_like(e).triu(1).bool(), -torch.inf)
        return e.softmax(-1) @ x

    one = dot if isinstance(score, ScaledDot) else additive
    return lambda x: torch.cat([one(part) for part in x.split(sizes)])


def step(run: Run, tokens: Tensor) -> None:
    """Forward and backward."""
    x = tokens.detach().requires_grad_()
    run(x).sum().backward()
