"""Self-attention in the place of a convolution, and in that of a recurrent layer: the same model, one line exchanged.

A convolution sees what its window covers, a recurrent layer what its state has room for. Self-attention takes and gives tensors of the
same shape, and reads any place from any other in one step. Each comes with a task on which that decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

import regard as rg
from regard.recipes.planted import Batch, accuracy, fit


class PlaceAttention(nn.Module):
    """In the place of `nn.Conv2d(channels, channels, 3, padding=1)`: (B, C, H, W) to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = rg.SelfAttention(channels, pairs=rg.Others())

    def forward(self, image: Tensor) -> Tensor:
        return self.attention(image.flatten(2).mT).mT.view_as(image)


class SequenceAttention(nn.Module):
    """In the place of `nn.GRU(width, width, batch_first=True)`: (B, N, C) to the same, each token after those before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = rg.SelfAttention(width, pairs=rg.Causal())

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        return self.attention(tokens), None


class ImageModel(nn.Module):
    """Logits of every place of an image, from a layer that lets places see each other."""

    def __init__(self, channels: int, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.output = nn.Conv2d(channels, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.output(self.layer(image))
        return logits.flatten(2).mT


class SequenceModel(nn.Module):
    """Logits of a sequence, from what a layer says at its last token."""

    def __init__(self, width: int, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.output = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.output(self.layer(tokens)[0][:, -1])
        return logits


@dataclass(frozen=True)
class Partners:
    """An image in which every code is at two places, anywhere: say at each the sign of the other."""

    side: int = 6
    classes: int = 2

    @property
    def channels(self) -> int:
        return self.side**2 // 2 + 1

    def draw(self, count: int, generator: Generator) -> Batch:
        """Input `image` (count, channels, side, side); target and truth `place` (count, side²)."""
        n = self.side**2
        codes = torch.rand(count, n, generator=generator).argsort(-1) // 2
        signs = torch.randint(2, (count, n), generator=generator)
        same = (codes[:, :, None] == codes[:, None, :]) & ~torch.eye(n, dtype=torch.bool)
        place = same.long().argmax(-1)
        tokens = torch.cat([nn.functional.one_hot(codes, n // 2).float(), 2.0 * signs[..., None] - 1], -1)
        image = tokens.mT.reshape(count, -1, self.side, self.side)
        return Batch({"image": image}, signs.gather(1, place), {"place": place})


@dataclass(frozen=True)
class Recall:
    """Pairs of code and sign one after the other, then a code alone: say its sign."""

    pairs: int = 12
    classes: int = 2

    @property
    def width(self) -> int:
        return self.pairs + 2

    def draw(self, count: int, generator: Generator) -> Batch:
        """Input `tokens` (count, pairs + 1, width); truth `token` (count)."""
        codes = torch.rand(count, self.pairs, generator=generator).argsort(-1)
        signs = torch.randint(2, (count, self.pairs), generator=generator)
        token = torch.randint(self.pairs, (count,), generator=generator)
        asked = codes.gather(1, token[:, None])
        known = nn.functional.one_hot(torch.cat([codes, asked], 1), self.pairs).float()
        told = torch.cat([2.0 * signs - 1, torch.zeros(count, 1)], 1)
        asks = torch.cat([torch.zeros(count, self.pairs), torch.ones(count, 1)], 1)
        tokens = torch.cat([known, told[..., None], asks[..., None]], -1)
        return Batch({"tokens": tokens}, signs.gather(1, token[:, None]).squeeze(1), {"token": token})


def main(steps: int = 200) -> dict[str, float]:
    """Train each model with its usual layer and with self-attention in its place."""
    image, sequence, found = Partners(), Recall(), {}
    c, w = image.channels, sequence.width
    layers = {
        "convolution": (image, ImageModel, c, lambda: nn.Conv2d(c, c, 3, padding=1)),
        "attention for a convolution": (image, ImageModel, c, lambda: PlaceAttention(c)),
        "recurrent layer": (sequence, SequenceModel, w, lambda: nn.GRU(w, w, batch_first=True)),
        "attention for a recurrent layer": (sequence, SequenceModel, w, lambda: SequenceAttention(w)),
    }
    for name, (task, model_of, width, layer) in layers.items():
        torch.manual_seed(0)
        model = model_of(width, layer())
        fit(model, task, steps=steps, lr=0.01)
        found[name] = accuracy(model, task)
    return found


if __name__ == "__main__":
    for name, right in main().items():
        print(f"{name:32} {right:.3f} right")
