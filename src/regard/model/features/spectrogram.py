"""Sound as frames of log-mel energies."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.scores.base import width
from regard.ops.fill import kept_rows
from regard.query.parts import uncast

# Energies below this are silence: 100 dB under a sine of full scale in a window of some hundred samples.
_LEAST = 1e-8


class Spectrogram(nn.Module):
    r"""Log-mel frames of a waveform, normalised over each utterance.

    $$X_{nk} = \sum_{t=0}^{w-1} h_t\, x_{n s + t}\, e^{-2 \pi i k t / w}, \qquad
      f_{nm} = \log \max\Big(\epsilon, \sum_k M_{mk} |X_{nk}|^2\Big), \qquad f \leftarrow \frac{f - \mu}{\sigma}$$

    with a Hann window $h$, triangles $M$ that are equally wide on the mel scale, $2595 \log_{10}(1 + f / 700)$, and mean and deviation of
    each band over the real frames. A frame is real where all its samples are; an utterance shorter than a window has one. `stack`
    frames become one, beside each other, of which there are so many times fewer.

    Args:
        rate: samples in a second.
        mels: number of bands.
        window: length of a frame in seconds.
        hop: seconds from one frame to the next.
        stack: frames that become one; `out_dim` is `mels` times this.
        lowest: where the first band begins, in hertz.
        highest: where the last one ends; half the rate when not given.

    Example:
        >>> hear = Spectrogram(8000, mels=20, stack=3)
        >>> mask = torch.arange(4000) < torch.tensor([[4000], [1600]])
        >>> hear(torch.randn(2, 4000), mask).shape, hear.mask_after(mask).sum(-1).tolist()
        (torch.Size([2, 16, 60]), [16, 6])
    """

    hann: Tensor
    bank: Tensor

    def __init__(
        self,
        rate: int = 16000,
        mels: int = 40,
        window: float = 0.025,
        hop: float = 0.01,
        stack: int = 1,
        lowest: float = 20.0,
        highest: float | None = None,
    ) -> None:
        super().__init__()
        self.rate, self.mels, self.stack = width("rate", rate), width("mels", mels), width("stack", stack)
        self.window, self.hop = _samples("window", window, rate), _samples("hop", hop, rate)
        highest = rate / 2 if highest is None else highest
        if not 0.0 <= lowest < highest <= rate / 2:
            raise ValueError(
                refusal("lowest", f"{lowest} beside highest={highest}", f"0 <= lowest < highest <= {rate / 2}")
            )
        bank = mel_bank(mels, self.window, rate, lowest, highest)
        if not bool((bank > 0).any(-1).all()):
            fix = "Fix: fewer mels, or a longer window."
            raise ValueError(
                refusal("mels", mels, f"bands that hold a frequency of a window of {self.window} samples", fix)
            )
        self.register_buffer("hann", torch.hann_window(self.window), persistent=False)
        self.register_buffer("bank", bank, persistent=False)
        self.out_dim = mels * stack

    def forward(self, x: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"] | None = None) -> Float[Tensor, "b n d"]:
        """Frames (B, N, mels · stack) of samples (B, T); zero where the mask after is False."""
        if not isinstance(x, Tensor) or not x.dtype.is_floating_point or x.dim() != 2:
            got = f"a tensor of {x.dtype}, shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(refusal("x", got, "floating-point samples (B, T)"))
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != x.shape:
                raise ValueError(
                    refusal("mask", f"{mask.dtype}, shape {tuple(mask.shape)}", f"booleans {tuple(x.shape)}")
                )
            x = x.where(mask, 0.0)
        real = self._frames(torch.ones_like(x, dtype=torch.bool) if mask is None else mask)
        x = F.pad(x, (0, max(0, self.window - x.shape[-1])))
        hann = self.hann.to(x.dtype)
        with uncast(x.device):
            # Energies span ten orders of magnitude: no numbers of half precision.
            found = torch.stft(x, self.window, self.hop, window=hann, center=False, return_complex=True)
            power = found.real.square() + found.imag.square()
            energy = (self.bank.to(x.dtype) @ power).clamp(min=_LEAST).log().mT
        return kept_rows(self._stacked(_normalised(energy, real)), real[:, :: self.stack])

    def mask_after(self, mask: Bool[Tensor, "b t"] | None) -> Bool[Tensor, "b n"] | None:
        """Which frames are real, of these samples."""
        return None if mask is None else self._frames(mask)[:, :: self.stack]

    def _frames(self, mask: Tensor) -> Tensor:
        """Which frames are real, before they are stacked."""
        mask = F.pad(mask, (0, max(0, self.window - mask.shape[-1])))
        each = mask.unfold(-1, self.window, self.hop)
        real = each.all(-1)
        first = torch.arange(real.shape[-1], device=real.device) == 0
        return real | (first & each[:, 0].any(-1, keepdim=True))

    def _stacked(self, frames: Tensor) -> Tensor:
        frames = F.pad(frames, (0, 0, 0, -frames.shape[1] % self.stack))
        each: Tensor = frames.unflatten(1, (-1, self.stack))
        return each.flatten(2)

    def extra_repr(self) -> str:
        return f"rate={self.rate}, mels={self.mels}, window={self.window}, hop={self.hop}, stack={self.stack}"


def mel_bank(mels: int, window: int, rate: int, lowest: float, highest: float) -> Float[Tensor, "m k"]:
    """Triangles (mels, window // 2 + 1) over the frequencies of a window, equally wide on the mel scale, one at their peaks.

    Example:
        >>> mel_bank(2, 8, 8000, 0.0, 4000.0).shape
        torch.Size([2, 5])
    """
    ends = torch.linspace(_mel(lowest), _mel(highest), mels + 2, dtype=torch.float64)
    hertz = 700 * (10 ** (ends / 2595) - 1)
    frequency = torch.arange(window // 2 + 1, dtype=torch.float64) * rate / window
    left, middle, right = hertz[:-2, None], hertz[1:-1, None], hertz[2:, None]
    rising, falling = (frequency - left) / (middle - left), (right - frequency) / (right - middle)
    return torch.minimum(rising, falling).clamp(min=0).float()


def _mel(hertz: float) -> float:
    return 2595 * math.log10(1 + hertz / 700)


def _normalised(frames: Tensor, real: Tensor) -> Tensor:
    """Mean zero and deviation one in every band, over the real frames; zero elsewhere."""
    keep = real.unsqueeze(-1)
    count = keep.sum(1, keepdim=True).clamp(min=1)
    centred = (frames - frames.where(keep, 0.0).sum(1, keepdim=True) / count).where(keep, 0.0)
    variance = centred.square().sum(1, keepdim=True) / count
    return centred / (variance + 1e-6).sqrt()


def _samples(name: str, seconds: float, rate: int) -> int:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or round(seconds * rate) < 1:
        raise ValueError(refusal(name, repr(seconds), f"seconds, at least {1 / rate}"))
    return round(seconds * rate)
