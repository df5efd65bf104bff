"""What the library adds where it should add nothing: importing it, recording switched off, a plain dot product."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from regard.bench.measure import Row, seconds
from regard.general.attention import Attention
from regard.general.scores import ScaledDot
from regard.observe import record

QUESTION = "overhead"


def _process_seconds(*arguments: str, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return min(times)


def rows() -> Iterator[Row]:
    """Whole processes for imports; calls for the rest."""
    yield Row(QUESTION, "import", "import torch", _process_seconds("-c", "import torch"))
    yield Row(QUESTION, "import", "regard", _process_seconds("-c", "import regard; regard.Attention"))
    yield Row(QUESTION, "command line", "regard", _process_seconds("-m", "regard", "--help"), note="regard --help")
    torch.manual_seed(0)
    attend = Attention(ScaledDot())
    q, k, v = (torch.randn(8, 8, 256, 64) for _ in range(3))
    with torch.no_grad():
        case = "B8 H8 N256 d64 float32, forward"
        yield Row(QUESTION, case, "SDPA", seconds(lambda: F.scaled_dot_product_attention(q, k, v)))
        yield Row(QUESTION, case, "regard", seconds(lambda: attend(q, k, v)))
        with record(attend):
            yield Row(QUESTION, case, "regard, recorded", seconds(lambda: attend(q, k, v)))
