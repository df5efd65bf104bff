"""Spectrogram: the sums of the formula, real frames of real samples."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from regard.model import Spectrogram
from regard.model.features.spectrogram import mel_bank
from tests.model.features.common import padding_never_matters

RATE, MELS, WINDOW, HOP = 800, 4, 40, 17


def hear(stack: int = 1) -> Spectrogram:
    return Spectrogram(RATE, MELS, WINDOW / RATE, HOP / RATE, stack, lowest=20.0).double()


def looped(module: Spectrogram, samples: list[float]) -> torch.Tensor:
    """Log-mel frames of one utterance, before normalisation."""
    frames = []
    for start in range(0, len(samples) - WINDOW + 1, HOP):
        power = []
        for k in range(WINDOW // 2 + 1):
            total = sum(
                (0.5 - 0.5 * math.cos(2 * math.pi * t / WINDOW))
                * samples[start + t]
                * cmath.exp(-2j * math.pi * k * t / WINDOW)
                for t in range(WINDOW)
            )
            power.append(abs(total) ** 2)
        frames.append(
            [math.log(max(1e-8, sum(m * p for m, p in zip(row, power, strict=True)))) for row in module.bank.tolist()]
        )
    return torch.tensor(frames, dtype=torch.float64)


def test_frames_are_those_of_the_formula() -> None:
    module, samples = hear(), torch.randn(150).double()
    raw = looped(module, samples.tolist())
    expected = (raw - raw.mean(0)) / raw.std(0, correction=0)
    torch.testing.assert_close(module(samples[None])[0], expected, rtol=1e-5, atol=1e-5)


def test_stacked_frames_stand_beside_each_other() -> None:
    one, three = hear(), hear(stack=3)
    samples = torch.randn(1, 150).double()
    frames = one(samples)[0]
    joined = three(samples)[0]
    assert len(frames) == 7
    assert joined.shape == (3, 3 * MELS)
    for n, frame in enumerate(frames):
        torch.testing.assert_close(joined[n // 3].view(3, MELS)[n % 3], frame)
    assert (joined[2].view(3, MELS)[1:] == 0).all()


def test_triangles_meet_at_their_peaks() -> None:
    bank, ends = mel_bank(MELS, 4096, RATE, 20.0, RATE / 2), []
    for m in range(MELS + 2):
        low, high = (2595 * math.log10(1 + f / 700) for f in (20.0, RATE / 2))
        ends.append(700 * (10 ** ((low + (high - low) * m / (MELS + 1)) / 2595) - 1))
    for m in range(MELS):
        for k in range(0, 2049, 67):
            f = k * RATE / 4096
            rising = (f - ends[m]) / (ends[m + 1] - ends[m])
            falling = (ends[m + 2] - f) / (ends[m + 2] - ends[m + 1])
            assert bank[m, k].item() == pytest.approx(max(0.0, min(rising, falling)), abs=1e-5)


def test_a_tone_is_heard_in_its_band() -> None:
    module = Spectrogram(8000, 20)
    for band in (4, 11, 18):
        peak = float(module.bank[band].argmax()) * 8000 / module.window
        tone = torch.sin(2 * math.pi * peak * torch.arange(1000) / 8000)
        power = torch.stft(tone, module.window, module.hop, window=module.hann, center=False, return_complex=True)
        assert int((module.bank @ power.abs().square()).sum(-1).argmax()) == band


@pytest.mark.parametrize("stack", [1, 2, 3])
@pytest.mark.parametrize("padding", [float("nan"), 0.5])
def test_padding_never_matters(stack: int, padding: float) -> None:
    examples = [torch.randn(n).double() for n in (150, 40, 23, 391)]
    padding_never_matters(hear(stack), examples, padding)


def test_frames_are_normal_over_each_utterance() -> None:
    mask = torch.arange(400) < torch.tensor([[400], [210]])
    found, real = hear()(torch.randn(2, 400).double(), mask), hear().mask_after(mask)
    assert real.sum(-1).tolist() == [1 + (400 - WINDOW) // HOP, 1 + (210 - WINDOW) // HOP]
    for row, r in zip(found, real, strict=True):
        torch.testing.assert_close(row[r].mean(0), torch.zeros(MELS).double(), atol=1e-8, rtol=0)
        torch.testing.assert_close(row[r].std(0, correction=0), torch.ones(MELS).double(), atol=1e-5, rtol=0)


def test_silence_is_zero_and_gradients_are_finite() -> None:
    samples = torch.zeros(1, 150, dtype=torch.float64, requires_grad=True)
    found = hear()(samples)
    torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-6, rtol=0)
    found.sum().backward()
    assert samples.grad.isfinite().all()
    assert hear().mask_after(torch.zeros(1, 150).bool()).sum() == 0


def test_bad_sounds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x: got .* expected floating-point samples \(B, T\)"):
        hear()(torch.randn(1, 150, 1))
    with pytest.raises(ValueError, match=r"mask: got torch.bool"):
        hear()(torch.randn(1, 150).double(), torch.ones(1, 149).bool())
    with pytest.raises(ValueError, match=r"mels: got 300, expected bands that hold a frequency"):
        Spectrogram(8000, 300)
    with pytest.raises(ValueError, match=r"lowest: got 20.0 beside highest=5000"):
        Spectrogram(8000, highest=5000)
    with pytest.raises(ValueError, match=r"hop: got 0"):
        Spectrogram(8000, hop=0)
