"""The best tiles of the kernels for bilinear scores on this device: measured, and kept for every later process.

What was best goes to the file of `regard.ops.tiles`. Every tile gives the same results, up to rounding; one that does not is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from regard.bench.measure import Row, relative_error, seconds
from regard.ops.tiles import Tile, remember, trying

QUESTION = "tune"
CASES = tuple(product((torch.bfloat16, torch.float16, torch.float32), (64, 128)))
SHAPE = (4, 16, 2048)  # batch, heads, tokens


def candidates(wide: bool, backward: bool) -> list[Tile]:
    """Tiles, warps and stages to try; those of float32 hold each number twice and are smaller."""
    sizes: tuple[tuple[int, int], ...]
    if wide:
        sizes, warps, stages = ((32, 32), (64, 32), (32, 64)), (4, 8), (1, 2)
    elif backward:
        sizes, warps, stages = ((64, 64), (64, 128), (128, 64), (32, 64)), (4, 8), (1, 2)
    else:
        sizes, warps, stages = ((128, 64), (128, 128), (64, 64), (64, 128)), (4, 8), (2, 3)
    return [{"BM": m, "BN": n, "num_warps": w, "num_stages": s} for (m, n), w, s in product(sizes, warps, stages)]


def measured(run: Callable[[], Tensor], tile: Tile | None) -> tuple[float, Tensor] | None:
    """Seconds and result; None where a device cannot hold the tile."""
    from triton.runtime.errors import OutOfResources

    try:
        with trying(tile or {}):
            return seconds(run, "cuda", budget=0.1), run()
    except OutOfResources:
        return None


def rows() -> Iterator[Row]:
    """Every candidate beside the default; the best are remembered as soon as they are known."""
    from regard.ops.triton import bilinear
    from regard.ops.triton.bilinear import Operands

    torch.manual_seed(0)
    for dtype, width in CASES:
        q, k, v, do = (torch.randn(*SHAPE, width, device="cuda", dtype=dtype) for _ in range(4))
        x = Operands(q, k, v, None, None, None, None, False, width**-0.5, 1.0, "tanh")
        out, lse = bilinear.forward(x)
        runs: dict[bool, Callable[[], Tensor]] = {
            False: lambda x=x: bilinear.forward(x)[0],  # type: ignore[misc]
            True: lambda x=x, out=out, lse=lse, do=do: bilinear.backward(x, out, lse, do, None).k,  # type: ignore[misc]
        }
        for backward, run in runs.items():
            default = measured(run, None)
            assert default is not None
            best, quickest = None, default[0]
            name = bilinear.tile_name(x, backward)
            case = name.split(", ", 1)[1]
            yield Row(QUESTION, case, "regard", default[0], note="default")
            for tile in candidates(dtype == torch.float32, backward):
                found = measured(run, tile)
                if found is None:
                    continue
                time, result = found
                error = relative_error(result, default[1])
                what = f"{tile['BM']}x{tile['BN']}, {tile['num_warps']} warps, {tile['num_stages']} stages"
                yield Row(QUESTION, case, what, time, error=error)
                if time < quickest and error <= 4 * torch.finfo(dtype).eps:
                    best, quickest = tile, time
            if best is not None:
                remember({name: best})
