"""Tile sizes that were measured best on a device, kept between processes; kernels have defaults that need none.

The file is `regard/tiles.json` in the cache folder of the user. `regard bench tune` writes it; removing it does no harm.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from regard._files import write_json

Tile = dict[str, int]
TUNED = ("BM", "BN", "num_warps", "num_stages")

_tried: list[Tile] = []


def place() -> Path:
    """Where the file is."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "regard" / "tiles.json"


def name_of(device: str, kernel: str, dtype: str, widths: tuple[int, ...]) -> str:
    """What an entry is kept under."""
    return f"{device}, {kernel}, {dtype}, {'x'.join(map(str, widths))}"


def tile(name: str, default: Tile) -> Tile:
    """The tile that is being tried, the best known, or the default."""
    if _tried:
        return {**default, **_tried[-1]}
    return {**default, **_known().get(name, {})}


@contextmanager
def trying(tile: Tile) -> Iterator[None]:
    """Take a tile for every kernel inside."""
    _tried.append(tile)
    try:
        yield
    finally:
        _tried.pop()


def remember(found: Mapping[str, Tile]) -> Path:
    """Add entries to the file, which is written whole, also where it was damaged."""
    _known.cache_clear()
    kept = {name: {key: tile[key] for key in TUNED} for name, tile in found.items()}
    path = write_json(place(), {**_known(), **kept})
    _known.cache_clear()
    return path


@functools.cache
def _known() -> dict[str, Tile]:
    path = place()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is ignored, defaults are taken: {error}. Fix: run regard bench tune.", stacklevel=2)
        return {}
    if isinstance(found, dict) and all(_is_tile(tile) for tile in found.values()):
        return found
    warnings.warn(
        f"{path} is ignored, defaults are taken: it holds no tiles. Fix: run regard bench tune.", stacklevel=2
    )
    return {}


def _is_tile(tile: object) -> bool:
    """Whether these are powers of two of a sensible size, and stages."""
    if not isinstance(tile, dict) or set(tile) != set(TUNED) or not all(type(x) is int for x in tile.values()):
        return False
    powers = all(tile[key] & (tile[key] - 1) == 0 for key in TUNED[:3])
    sizes = all(16 <= tile[key] <= 256 for key in ("BM", "BN")) and 1 <= tile["num_warps"] <= 8
    return powers and sizes and 1 <= tile["num_stages"] <= 6
