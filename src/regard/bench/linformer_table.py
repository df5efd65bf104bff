"""What Linformer saves against a Transformer, in the layout of its paper: lengths n down, projected lengths k across.

Forward passes without gradients of one encoder layer. The paper's Transformer wrote its weights out; a fused one, of which no weights
ever stand in memory, is harder to beat, so both are there. *Saved* is the Transformer's time or memory over Linformer's, for the
same batch of about 65,536 tokens. (Table 3 of Wang et al. 2020, https://arxiv.org/abs/2006.04768.)
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.bench.measure import Row, cuda_peak_mib, seconds
from regard.query import MultiHeadAttention
from regard.transformer import LinformerAttention, TransformerEncoder

QUESTION = "linformer-table"
LENGTHS = tuple(512 << k for k in range(8))
RANKS = (128, 256, 512, 1024, 2048)
TOKENS = 1 << 16
WRITTEN, FUSED = "Transformer, weights written out", "Transformer, fused"


class Written(MultiHeadAttention):
    """Softmax attention as it is usually written: scores and weights of all pairs stand in memory."""

    def forward(self, tokens: Tensor, *, mask: None = None) -> Tensor:  # type: ignore[override]
        q, k, v = self.project(tokens, tokens, tokens)
        return self.join((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v)


def measured(module: nn.Module, x: Tensor) -> tuple[float, float | None] | None:
    """Seconds and MiB of a forward pass; None where it does not fit."""
    device = x.device.type
    module = module.to(x.device, x.dtype).eval()

    def run() -> None:
        module(x)

    try:
        with torch.no_grad():
            return seconds(run, device, budget=0.5, least=3), cuda_peak_mib(run) if device == "cuda" else None
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def rows(
    lengths: Sequence[int] = LENGTHS,
    ranks: Sequence[int] = RANKS,
    dim: int = 512,
    heads: int = 8,
    tokens: int = TOKENS,
    device: str = "cuda",
) -> Iterator[Row]:
    """Both Transformers, then Linformer with every k below n."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for n in lengths:
        torch.manual_seed(0)
        x = torch.randn(max(1, tokens // n), n, dim, device=device, dtype=dtype)
        case = f"n {n}, B{len(x)} d{dim} H{heads}"
        before: dict[str, tuple[float, float | None] | None] = {}
        for name, attention in ((WRITTEN, Written), (FUSED, None)):
            found = before[name] = measured(TransformerEncoder(dim, heads, 1, attention=attention), x)
            yield _row(case, name, found, {"n": n})
        for k in ranks:
            if k >= n:
                continue
            found = measured(
                TransformerEncoder(
                    dim, heads, 1, attention=lambda d, h, n=n, k=k: LinformerAttention(d, h, n, k, share="key-value")
                ),
                x,
            )
            saved = {name: _saved(other, found) for name, other in before.items()}
            yield _row(case, f"Linformer, k {k}", found, {"n": n, "k": k, "saved": saved})


def _row(case: str, name: str, found: tuple[float, float | None] | None, extra: dict[str, object]) -> Row:
    if found is None:
        return Row(QUESTION, case, name, note="does not fit", extra=extra)
    return Row(QUESTION, case, name, *found, extra=extra)


def _saved(before: tuple[float, float | None] | None, now: tuple[float, float | None] | None) -> dict[str, float]:
    if before is None or now is None:
        return {}
    saved = {"time": before[0] / now[0]}
    if before[1] and now[1]:
        saved["memory"] = before[1] / now[1]
    return saved


def layout(found: Sequence[Row]) -> str:
    """The tables of the paper: time saved and memory saved, against each Transformer."""
    lengths = sorted({row.extra["n"] for row in found})
    ranks = sorted({row.extra["k"] for row in found if "k" in row.extra})
    cells = {(row.extra["n"], row.extra["k"]): row.extra["saved"] for row in found if "k" in row.extra}
    parts = []
    for name in (WRITTEN, FUSED):
        for what in ("time", "memory"):
            lines = [f"{what.capitalize()} saved against: {name}", ""]
            lines += ["| n \\ k | " + " | ".join(map(str, ranks)) + " |", "|---" * (len(ranks) + 1) + "|"]
            for n in lengths:
                each = [cells.get((n, k), {}).get(name, {}).get(what) for k in ranks]
                lines.append(f"| {n} | " + " | ".join("-" if x is None else f"{x:.1f}×" for x in each) + " |")
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def draw(found: Sequence[Row], folder: Path) -> Path:
    """Write the tables."""
    path = folder / f"{QUESTION}.md"
    path.write_text(layout(found))
    return path
