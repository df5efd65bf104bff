"""Hashed attention on a GPU: ours beside that of Hugging Face's Reformer, and full attention for scale, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.bench.measure import Row, cuda_peak_mib, relative_error
from regard.bench.transformer_gpu import in_turns, step
from regard.general.masks import Causal
from regard.ops.dispatch import execution
from regard.transformer import Hashes, LSHAttention, TransformerAttention

QUESTION = "reformer-gpu"


@dataclass(frozen=True)
class Size:
    """Of an attention and its input."""

    batch: int = 16
    n: int = 4096
    rounds: int = 4
    dim: int = 512
    heads: int = 8
    chunk: int = 64

    def __str__(self) -> str:
        return f"B{self.batch} N{self.n} d{self.dim} H{self.heads} m{self.chunk} R{self.rounds} bfloat16"


class Theirs(nn.Module):
    """The attention of Hugging Face's Reformer, with a map of the heads behind it, as ours has one."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        from transformers import ReformerConfig
        from transformers.models.reformer.modeling_reformer import LSHSelfAttention

        config = ReformerConfig(
            attn_layers=["lsh"],
            hidden_size=size.dim,
            num_attention_heads=size.heads,
            attention_head_size=size.dim // size.heads,
            lsh_attn_chunk_length=size.chunk,
            lsh_num_chunks_before=1,
            lsh_num_chunks_after=0,
            lsh_attention_probs_dropout_prob=0.0,
            num_hashes=size.rounds,
            num_buckets=2 * size.n // size.chunk,
            is_decoder=True,
            max_position_embeddings=size.n,
        )
        make: Any = LSHSelfAttention
        self.attention: nn.Module = make(config)
        self.output = nn.Linear(size.dim, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.output(self.attention(x).hidden_states)
        return found


class Full(nn.Module):
    """Full causal attention, of fused kernels."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention = TransformerAttention(size.dim, size.heads, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x, mask=Causal())
        return found


class Ours(nn.Module):
    """Causal hashed attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention = LSHAttention(size.dim, size.heads, rounds=size.rounds, chunk=size.chunk)

    def forward(self, x: Tensor, hashes: Hashes | None = None) -> Tensor:
        found: Tensor = self.attention(x, mask=Causal(), hashes=hashes)
        return found


def peers(size: Size) -> dict[str, nn.Module]:
    """Everybody who is measured; Hugging Face only where it is installed."""
    made: dict[str, Callable[[Any], nn.Module]] = {
        "regard": Ours,
        "transformers": Theirs,
        "full attention (regard)": Full,
    }
    try:
        import transformers  # noqa: F401
    except ImportError:
        made.pop("transformers")
    torch.manual_seed(0)
    return {name: make(size) for name, make in made.items()}


@torch.no_grad()
def error(ours: Ours, x: Tensor) -> float:
    """Of the first sequence, against the equation in float64 on the same buckets."""
    kept = Hashes()
    found = ours(x[:1], kept)
    with execution("blockwise"):
        exact = deepcopy(ours).double()(x[:1].double(), kept)
    return relative_error(found, exact)


def measure(
    size: Size, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, budget: float = 2.0
) -> Iterator[Row]:
    """A training step and a forward pass of each, taken in turns."""
    who = {name: module.to(device, dtype) for name, module in peers(size).items()}
    x = torch.randn(size.batch, size.n, size.dim, device=device, dtype=dtype)
    gradient = torch.randn_like(x)
    steps: dict[str, Callable[[], None]] = {
        name: lambda module=module: step(module, module, x, gradient)  # type: ignore[misc]
        for name, module in who.items()
    }
    ours = who["regard"]
    assert isinstance(ours, Ours)
    errors = {"regard": error(ours, x)}
    for name, (middle, spread) in in_turns(steps, device, budget).items():
        peak = cuda_peak_mib(steps[name]) if device == "cuda" else None
        yield Row(QUESTION, f"{size}, training step", name, middle, peak, errors.get(name), extra={"spread": spread})
    with torch.no_grad():
        runs: dict[str, Callable[[], None]] = {
            name: lambda module=module: module(x)  # type: ignore[misc]
            for name, module in who.items()
        }
        for name, (middle, spread) in in_turns(runs, device, budget / 2).items():
            yield Row(QUESTION, f"{size}, forward", name, middle, extra={"spread": spread})


def rows() -> Iterator[Row]:
    """All of it."""
    for rounds in (1, 2, 4):
        yield from measure(Size(rounds=rounds))
    yield from measure(Size(batch=128, n=1024, rounds=2, dim=256, heads=4))
    yield from measure(Size(batch=4, n=16384, rounds=4))
