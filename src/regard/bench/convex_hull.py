"""Convex hulls by a pointer network, trained as in its paper: one model on 5 to 50 points, judged at each size.

Vinyals et al. 2015 report, for a model trained on 5 to 50 points, the same polygon in 92.0 % of the cases at 5 points, 87.0 % at
10 and 69.6 % at 50, with 99.6 to 99.9 % of the area. Theirs is an LSTM of 512 units under plain gradient descent; here are GRUs of
the same size under Adam, on fresh points at every step, for as long as the time given.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Generator

from regard.bench.measure import Row
from regard.feature import RecurrentEncoder
from regard.query import PointerNetwork
from regard.recipes.planted.hull import ConvexHull, area, same_polygon

QUESTION = "convex-hull"
SIZES = (5, 10, 20, 30, 50)
PAPER = {5: 0.920, 10: 0.870, 50: 0.696}


def rows(
    seconds: float = 300.0,
    hidden: int = 512,
    batch: int = 1024,
    sizes: Sequence[int] = SIZES,
    marks: int = 6,
    both_ways: bool = False,
) -> Iterator[Row]:
    """Train for so many seconds; accuracy at every size, several times on the way.

    The paper's encoder reads the points once, from first to last; with `both_ways` it reads them in both directions.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    encoder = RecurrentEncoder(2, hidden // 2) if both_ways else None
    model = PointerNetwork(2, hidden, stop=True, encoder=encoder).to(device)
    what = "regard, read both ways" if both_ways else "regard"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = Generator(device).manual_seed(0)
    least, most = min(sizes), max(sizes)
    begin, step, mark = time.perf_counter(), 0, 0
    while mark < marks:
        spent = time.perf_counter() - begin
        if spent >= seconds * (mark + 1) / marks:
            mark += 1
            yield from judged(model, what, sizes, step, spent, device)
            begin += time.perf_counter() - begin - spent  # judging is not training
            continue
        # A warm start, then a linear way down to nothing.
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 200) * max(0.02, 1.0 - spent / seconds)
        n = int(torch.randint(least, most + 1, ()))
        drawn = ConvexHull(n).draw(batch, generator)
        loss = model.loss(drawn.inputs["tokens"], drawn.target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        step += 1


def judged(
    model: PointerNetwork, what: str, sizes: Sequence[int], step: int, spent: float, device: str, count: int = 2048
) -> Iterator[Row]:
    """Share of polygons found, greedily, and of their area."""
    model.eval()
    for n in sizes:
        drawn = ConvexHull(n).draw(count, Generator(device).manual_seed(n))
        tokens, target = drawn.inputs["tokens"], drawn.target
        found = model.decode(tokens, steps=min(n + 1, target.shape[1] + 5)).positions
        share = (area(tokens, found) / area(tokens, target)).mean()
        facts = {
            "accuracy": float(same_polygon(found, target).float().mean()),
            "area": float(share),
            "paper": PAPER.get(n),
            "steps": step,
            "training_seconds": round(spent, 1),
        }
        yield Row(QUESTION, f"hull of {n} points", what, extra=facts)
    model.train()


def draw(rows: Sequence[Row], folder: Path) -> Path:
    """Accuracy against training steps, a line a size, with the paper's figures at the edge."""
    from regard.report.figures import save
    from regard.report.figures.canvas import FAINT, INK, colormap, new_figure

    figure = new_figure(6.4, 3.6, layout="constrained")
    axes = figure.subplots()
    cases = list(dict.fromkeys(row.case for row in rows))
    for k, case in enumerate(cases):
        curve = [row.extra for row in rows if row.case == case]
        colour = colormap()(0.35 + 0.6 * k / max(1, len(cases) - 1))
        steps = [point["steps"] for point in curve]
        axes.plot(steps, [point["accuracy"] for point in curve], color=colour, marker="o", markersize=3, label=case)
        if curve[-1]["paper"] is not None:
            axes.plot(steps[-1] * 1.03, curve[-1]["paper"], color=colour, marker="<", markersize=6)
    axes.set(xlabel="training steps (1024 fresh examples each)", ylabel="same polygon", ylim=(0, 1))
    axes.set_title("Pointer network on convex hulls; triangles: the paper's figures", fontsize=10, color=INK)
    axes.grid(color=FAINT, alpha=0.3, linewidth=0.5)
    axes.legend(fontsize=7, frameon=False)
    return save(figure, folder / f"{QUESTION}.svg")
