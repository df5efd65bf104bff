"""Divided space-time attention on moving shapes (Bertasius, Wang & Torresani 2021, https://arxiv.org/abs/2102.05095).

A token is a pixel of a frame. It first reads the same pixel of the other frames, then the other pixels of its own frame: two
attentions over T and N tokens in place of one over T N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

import regard as rg
from regard.recipes.planted import Batch, accuracy, fit


@dataclass(frozen=True)
class MovingShape:
    """Say which way a bright pixel moves: left, right, up or down, a pixel a frame, among pixels that stand still.

    A single frame does not tell: the shape may be anywhere, and so may those that stand still.
    """

    side: int = 5
    frames: int = 3
    noise: float = 0.1

    @property
    def classes(self) -> int:
        """The ways."""
        return 4

    def draw(self, count: int, generator: Generator) -> Batch:
        """Input `video` (count, frames, side * side), truth `path` (count, frames): the pixel of the shape in each frame."""
        way = torch.randint(4, (count,), generator=generator)
        step = torch.tensor([[0, -1], [0, 1], [-1, 0], [1, 0]])[way]
        # The middle frame lies inside, so that all do.
        middle = 1 + torch.randint(self.side - 2, (count, 2), generator=generator)
        place = middle[:, None] + step[:, None] * (torch.arange(self.frames) - self.frames // 2)[:, None]
        path = place[..., 0] * self.side + place[..., 1]
        still = torch.randint(self.side**2, (count,), generator=generator)
        video = self.noise * torch.randn(count, self.frames, self.side**2, generator=generator)
        video.scatter_(2, still[:, None, None].expand(-1, self.frames, 1), 1.0)
        video.scatter_(2, path[..., None], 1.0)
        return Batch({"video": video}, way, {"path": path})


class SpaceTime(nn.Module):
    """Tokens read along frames, then within them, each time with a map of tokens after it; the mean of all says the way."""

    def __init__(self, frames: int, places: int, dim: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(1, dim)
        self.place, self.frame = (nn.Parameter(torch.randn(*n, dim)) for n in ((places,), (frames, 1)))
        self.time, self.space = rg.SelfAttention(dim), rg.SelfAttention(dim)
        self.after_time, self.after_space = (
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)) for _ in range(2)
        )
        self.output = nn.Linear(dim, classes)

    def forward(self, video: Tensor) -> Tensor:
        """Logits from videos (B, T, N)."""
        x = self.embed(video.unsqueeze(-1)) + self.place + self.frame
        x = x + self.time(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.after_time(x)
        x = x + self.space(x)
        return self.output((x + self.after_space(x)).mean((1, 2)))


def main(steps: int = 400) -> dict[str, float]:
    """Learn, and see how much of what a frame reads is the shape, beside what it would be by chance."""
    torch.manual_seed(0)
    task = MovingShape()
    model = SpaceTime(task.frames, task.side**2, 24, task.classes)
    fit(model, task, steps=steps, lr=5e-3)
    batch = task.draw(512, Generator().manual_seed(1))
    with torch.no_grad(), rg.record(model) as trace:
        model(**batch.inputs)
        space = trace["space.attention"].weights  # (B, T, N, N)
        on_shape = space.mean(2).gather(-1, batch.truth["path"][..., None]).mean()
    found = {"accuracy": accuracy(model, task), "weight on the shape": float(on_shape), "chance": task.side**-2}
    print(", ".join(f"{name} {value:.2f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()
