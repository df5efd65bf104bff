"""Which execution `auto` takes: asked of the code itself, for devices that need not be there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

import regard as rg
from regard.ops import dispatch
from regard.ops.call import assuming
from regard.ops.dispatch import choose

N, WIDTH, DEGREE = 1024, 8, 64
DEVICES = {"cpu": "On a CPU", "cuda": "On a GPU (CUDA, with Triton)"}
DTYPES = {"float32": torch.float32, "half precision": torch.bfloat16, "float64": torch.float64}


_WIDTHS = {"query_dim": WIDTH, "key_dim": WIDTH}
SCORES: dict[str, Callable[[], rg.Score]] = {
    "dot, general, cosine, … (plain bilinear)": rg.Dot,
    "activated general": lambda: rg.ActivatedGeneral(**_WIDTHS),
    "additive": lambda: rg.Additive(**_WIDTHS, hidden_dim=WIDTH),
    "additive, multi-dimensional": lambda: rg.Additive(**_WIDTHS, hidden_dim=WIDTH, features=WIDTH),
    "general, multi-dimensional": lambda: rg.General(**_WIDTHS, features=WIDTH),
}
EDGE_SCORES = {
    "additive (GATv2), along edges": "gatv2",
    "dot products, along edges": "scaled-dot",
    "any other, along edges": "negative-l2",
}
ALIGNMENTS: dict[str, tuple[Callable[[], rg.Alignment], float]] = {
    "soft": (rg.Soft, 0.0),
    "soft, dropout": (rg.Soft, 0.1),
    "hard": (rg.Hard, 0.0),
    "local": (lambda: rg.Local(10), 0.0),
    "sparsemax, entmax": (rg.Sparsemax, 0.0),
    "reinforced, structured, …": (lambda: rg.Reinforced(WIDTH, WIDTH), 0.0),
}
# Positions, or what was selected before, neighbours do not have.
NOT_ALONG_EDGES = ("local", "reinforced, structured, …")


def masks() -> dict[str, Any]:
    """One of each kind."""
    return {
        "no mask": None,
        "causal": rg.Causal(),
        "padding": rg.Padding(torch.tensor([N // 2])),
        "window": rg.Window(16),
        "pairs": torch.ones(N, N, dtype=torch.bool),
    }


Found = dict[tuple[str, str], dict[tuple[str, str], str]]


def decisions() -> dict[str, Found]:
    """By device, by score and alignment: the execution for each dtype and mask."""
    found: dict[str, Found] = {device: {} for device in DEVICES}
    of_mask = masks()
    for score, (align, (make, dropout)) in product(SCORES, ALIGNMENTS.items()):
        attend = rg.Attention(SCORES[score](), make(), dropout=dropout)
        for (dtype, kind), (name, mask) in product(DTYPES.items(), of_mask.items()):
            x = torch.zeros(1, N, WIDTH, dtype=kind)
            call = attend.to(kind).call(x, x, mask=mask)
            for device in DEVICES:
                with assuming(device):
                    found[device].setdefault((score, align), {})[dtype, name] = choose(call, "auto").path
    return found


def along_edges() -> dict[str, Found]:
    """The same for graph attention, whose masks are of edges."""
    found: dict[str, Found] = {device: {} for device in DEVICES}
    edges = torch.stack([torch.arange(N), torch.arange(N) // DEGREE])
    for (score, name), (align, (make, dropout)) in product(EDGE_SCORES.items(), ALIGNMENTS.items()):
        for device in DEVICES:
            found[device][score, align] = {}
        for dtype, kind in DTYPES.items() if align not in NOT_ALONG_EDGES else ():
            layer = rg.GraphAttention(WIDTH, 2, score=name, align=make(), dropout=dropout).to(kind)
            with rg.record(layer) as trace, torch.no_grad():
                layer(torch.zeros(N, WIDTH, dtype=kind), edges)
            for device in DEVICES:
                with assuming(device):
                    found[device][score, align][dtype, "no mask"] = choose(trace["attention"].call, "auto").path
    return found


def told(cases: dict[tuple[str, str], str]) -> str:
    """The usual execution, and where another is taken."""
    if not cases:
        return "—"
    paths = list(cases.values())
    usual = max(dict.fromkeys(paths), key=paths.count)
    parts, explained = [usual], set[tuple[str, str]]()
    # First what dtypes or masks alone decide.
    others = sorted(set(paths) - {usual})
    for path in sorted(others, key=lambda path: sum(" with " in x for x in _where(cases, path, explained))):
        parts.append(f"{path} ({', '.join(_where(cases, path, explained))})")
        explained |= {case for case, taken in cases.items() if taken == path}
    return "; ".join(parts)


def _where(cases: dict[tuple[str, str], str], path: str, explained: set[tuple[str, str]]) -> list[str]:
    """Dtypes and masks that alone decide for a path, those cases aside that were told before; pairs of them for what is left."""
    where: list[str] = []
    left = {case for case, taken in cases.items() if taken == path}
    for axis in (0, 1):
        for value in dict.fromkeys(case[axis] for case in cases):
            same = {case for case in cases if case[axis] == value} - explained
            if same and all(cases[case] == path for case in same):
                where.append(value)
                left -= same
    return [*where, *(f"{dtype} with {mask}" for dtype, mask in sorted(left))]


def page() -> str:
    """A table a device."""
    # Asked as if no call were small, on any device.
    with patch.multiple(dispatch, SMALL_HIDDEN_ELEMENTS=0, SMALL_ON_DEVICE=0):
        of_pairs, of_edges = decisions(), along_edges()
    parts = []
    for device, title in DEVICES.items():
        found = of_pairs[device] | of_edges[device]
        scores = list(dict.fromkeys(score for score, _ in found))
        lines = ["| score | " + " | ".join(ALIGNMENTS) + " |", "|---" * (len(ALIGNMENTS) + 1) + "|"]
        lines += [
            f"| {score} | " + " | ".join(told(found[score, align]) for align in ALIGNMENTS) + " |" for score in scores
        ]
        parts += [f"**{title}**", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"
