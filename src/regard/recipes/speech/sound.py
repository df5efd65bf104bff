"""Sound: reading recordings, making tones, and changing either a little."""

from __future__ import annotations

import io
import math
import random
import wave

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard._errors import refusal

RATE = 8000
# Digits as tones, in hertz: a low and a high one each, as the keys of a telephone have them, but farther apart than there.
_LOW, _HIGH = (400, 700, 1100, 1600), (2100, 2700, 3400)
KEYS = ((_LOW[3], _HIGH[1]), *((_LOW[(digit - 1) // 3], _HIGH[(digit - 1) % 3]) for digit in range(1, 10)))


def samples_of(content: bytes, where: str) -> Tensor:
    """Samples (T,) from -1 to 1 of a wav file."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            kind = file.getnchannels(), file.getsampwidth(), file.getframerate()
            raw = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise ValueError(refusal("data", f"{where}: {error}", "a wav file")) from error
    if kind != (1, 2, RATE):
        got = f"{where}: {kind[0]} channels of {8 * kind[1]} bits, {kind[2]} a second"
        raise ValueError(refusal("data", got, f"one channel of 16 bits, {RATE} a second"))
    if not raw:
        raise ValueError(refusal("data", f"{where}: no sound", "samples"))
    return torch.from_numpy(np.frombuffer(raw, "<i2").astype(np.float32) / 32768)


def tone(digit: int, draw: random.Random) -> Tensor:
    """A digit as a telephone might say it, not quite in tune, with a soft beginning and end."""
    time = torch.arange(int(RATE * draw.uniform(0.08, 0.14))) / RATE
    low, high = KEYS[digit]
    detuned = draw.uniform(0.99, 1.01)
    sound = sum(torch.sin(2 * math.pi * f * detuned * time + draw.uniform(0, 6)) for f in (low, high))
    assert isinstance(sound, Tensor)
    ramp = torch.linspace(0, 1, RATE // 100)
    sound[: len(ramp)] *= ramp
    sound[-len(ramp) :] *= ramp.flip(0)
    return sound * draw.uniform(0.1, 0.4)


def silence(seconds: float, draw: random.Random, loud: float = 1e-3) -> Tensor:
    """Nearly nothing: faint noise."""
    return noise(int(RATE * seconds), draw) * loud


def noise(count: int, draw: random.Random) -> Tensor:
    """White, of deviation one."""
    generator = torch.Generator().manual_seed(draw.getrandbits(60))
    return torch.randn(count, generator=generator)


def changed(sound: Tensor, draw: random.Random) -> Tensor:
    """The same, faster or slower, louder or softer, and with some noise."""
    faster = draw.uniform(0.85, 1.18)
    sound = F.interpolate(sound[None, None], size=max(1, round(len(sound) / faster)), mode="linear")[0, 0]
    level = float(sound.square().mean().sqrt())
    sound = sound + noise(len(sound), draw) * level * 10 ** draw.uniform(-3, -0.7)
    return sound * 2 ** draw.uniform(-1, 1)
