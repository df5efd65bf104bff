"""A generator and a discriminator that attend to themselves (SAGAN: Zhang et al. 2019, https://arxiv.org/abs/1805.08318).

Convolutions see a neighbourhood; self-attention lets a place agree with all others. Its share gamma starts at zero, so that both
networks begin as plain convolutional ones and take to attention as they learn. On the digits of scikit-learn, in seconds.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import regard as rg
from regard.recipes.planted import Digits


class SelfAttended(nn.Module):
    r"""$x + \gamma\, \mathrm{attend}(x)$ over the places of a picture (B, C, H, W), from $\gamma = 0$."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attend = rg.SelfAttention(channels, key_dim=channels // 4, score="dot")
        self.gamma = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        read = self.attend(x.flatten(2).mT).mT.reshape(x.shape)
        return x + self.gamma * read


class Generating(nn.Module):
    """Pictures (B, 1, 8, 8) from noise (B, z)."""

    def __init__(self, z: int = 16, channels: int = 32) -> None:
        super().__init__()
        self.z, self.channels = z, channels
        self.first = nn.Linear(z, channels * 16)
        self.attended = SelfAttended(channels)
        self.rest = nn.Sequential(
            *(nn.BatchNorm2d(channels), nn.ReLU(), nn.Upsample(scale_factor=2), nn.Conv2d(channels, channels, 3, 1, 1)),
            *(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 1, 3, 1, 1), nn.Sigmoid()),
        )

    def forward(self, noise: Tensor) -> Tensor:
        x = self.attended(self.first(noise).view(-1, self.channels, 4, 4))
        return self.rest(x)


class Discriminating(nn.Module):
    """How real pictures (B, 1, 8, 8) look (B,); with bounded slopes, so that it stays a good teacher."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.first = spectral_norm(nn.Conv2d(1, channels, 4, 2, 1))
        self.attended = SelfAttended(channels)
        self.second = spectral_norm(nn.Conv2d(channels, channels, 3, 1, 1))
        self.last = spectral_norm(nn.Linear(channels * 16, 1))

    def forward(self, image: Tensor) -> Tensor:
        x = self.attended(nn.functional.leaky_relu(self.first(image), 0.1))
        return self.last(nn.functional.leaky_relu(self.second(x), 0.1).flatten(1)).squeeze(-1)


def distance(one: Tensor, other: Tensor) -> float:
    r"""Fréchet distance of the pixels of two sets of pictures, $\lVert \mu - \mu' \rVert^2 + \mathrm{tr}(C + C' - 2 (C C')^{1/2})$."""
    a, b = (x.flatten(1).double() for x in (one, other))
    C, D = a.T.cov(), b.T.cov()
    roots = torch.linalg.eigvals(C @ D).real.clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + C.trace() + D.trace() - 2 * roots)


def main(steps: int = 300, batch: int = 64) -> dict[str, float]:
    """Train with the hinge loss; the discriminator learns four times as fast, as in the paper."""
    torch.manual_seed(0)
    task, draw = Digits(), Generator().manual_seed(0)
    real = task.draw(len(task), draw).inputs["image"].unsqueeze(1)
    make, judge = Generating(), Discriminating()
    of_make = torch.optim.Adam(make.parameters(), 1e-3, betas=(0.0, 0.9))
    of_judge = torch.optim.Adam(judge.parameters(), 4e-3, betas=(0.0, 0.9))
    noise = torch.randn(1000, make.z, generator=draw)
    before = distance(make(noise).detach(), real)
    for _ in range(steps):
        some = real[torch.randint(len(real), (batch,), generator=draw)]
        made = make(torch.randn(batch, make.z, generator=draw))
        loss = (1 - judge(some)).relu().mean() + (1 + judge(made.detach())).relu().mean()
        of_judge.zero_grad()
        loss.backward()
        of_judge.step()
        loss = -judge(make(torch.randn(batch, make.z, generator=draw))).mean()
        of_make.zero_grad()
        loss.backward()
        of_make.step()
    found = {
        "distance before": before,
        "distance after": distance(make.eval()(noise).detach(), real),
        "gamma of the generator": float(make.attended.gamma.detach()),
        "gamma of the discriminator": float(judge.attended.gamma.detach()),
    }
    print(", ".join(f"{name} {value:.2f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()
