"""Crowd counting with spatial and channel attention: HA-CCN (Sindagi & Patel 2019, https://arxiv.org/abs/1907.10255).

Low-level maps are gated place by place, high-level maps channel by channel. A gate is attention over a set of one, aligned by a
sigmoid: it reads a·v, and nothing is summed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import regard as rg
from regard.recipes.planted import Batch, fit


class SpatialGate(nn.Module):
    """Scale every place of a map (B, C, H, W) by a gate that sees its channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = rg.Attention("query-free", rg.SigmoidGate(), key_dim=channels, hidden_dim=channels)

    def forward(self, x: Tensor) -> Tensor:
        places = x.flatten(2).mT.unsqueeze(-2)
        return self.attention(None, places).mT.view_as(x)


class ChannelGate(nn.Module):
    """Scale every channel of a map by a gate that sees what all channels hold on average."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.describe = nn.Linear(channels, channels * channels)
        self.attention = rg.Attention("query-free", rg.SigmoidGate(), key_dim=channels, hidden_dim=channels)

    def forward(self, x: Tensor) -> Tensor:
        channels = x.flatten(2)
        described = self.describe(channels.mean(-1)).view(len(x), -1, 1, x.shape[1])
        return self.attention(None, described, channels.unsqueeze(-2)).view_as(x)


class CrowdCounter(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.low = nn.Conv2d(1, channels, 3, padding=1)
        self.spatial = SpatialGate(channels)
        self.high = nn.Conv2d(channels, channels, 3, padding=1)
        self.channel = ChannelGate(channels)
        self.density = nn.Conv2d(channels, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        """How many people: the sum of a density map."""
        low = self.spatial(F.relu(self.low(image)))
        high = self.channel(F.relu(self.high(low)))
        return self.density(high).sum((1, 2, 3)) / 10


@dataclass(frozen=True)
class Crowd:
    """People are crosses, street furniture is squares of the same brightness."""

    size: int = 16

    @property
    def classes(self) -> int:
        return 1

    def draw(self, count: int, generator: Generator) -> Batch:
        shapes = torch.tensor([[[0.0, 1, 0], [1, 1, 1], [0, 1, 0]], [[1, 1, 0], [1, 1, 0], [0, 0, 0]]])
        people = torch.randint(1, 6, (count,), generator=generator)
        inside = self.size - 2
        order = torch.rand(count, inside // 4 * (inside // 4), generator=generator).argsort(-1)
        image = 0.05 * torch.randn(count, 1, self.size, self.size, generator=generator)
        where = torch.zeros(count, self.size, self.size, dtype=torch.bool)
        for b in range(count):
            # Cells of four by four, so that nobody stands on anybody.
            for k, cell in enumerate(order[b, : int(people[b]) + 3].tolist()):
                y, x = 1 + 4 * (cell // (inside // 4)), 1 + 4 * (cell % (inside // 4))
                person = k < people[b]
                image[b, 0, y : y + 3, x : x + 3] += shapes[0 if person else 1]
                where[b, y + 1, x + 1] |= bool(person)
        return Batch({"image": image}, people.float(), {"people": where})


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(**batch.inputs), batch.target)


def main(steps: int = 200) -> dict[str, float]:
    torch.manual_seed(0)
    model = CrowdCounter()
    fit(model, Crowd(), steps=steps, batch=32, lr=0.02, loss=squared_error)
    batch = Crowd().draw(256, Generator().manual_seed(1))
    with torch.no_grad(), rg.record(model) as trace:
        counted = model(**batch.inputs)
        gates = trace["spatial.attention"].weights.view(256, 16, 16)
    people = batch.truth["people"]
    found = {
        "mean error": float((counted - batch.target).abs().mean()),
        "of the mean count": float((batch.target - batch.target.mean()).abs().mean()),
        "gates on people": float(gates[people].mean()),
        "gates elsewhere": float(gates[~people].mean()),
    }
    print(", ".join(f"{name} {value:.2f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()
