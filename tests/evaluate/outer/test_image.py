"""PSNR and SSIM: the papers' formulas in loops, and the range that must be said."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from regard.evaluate.outer import Score, psnr, ssim

pytest.importorskip("torchmetrics")


def looped_ssim(x: NDArray[np.float64], y: NDArray[np.float64], L: float) -> float:
    """Wang et al. 2004, one window at a time, of one channel."""
    axis = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
    w = np.outer(axis, axis)
    w /= w.sum()
    c1, c2 = (0.01 * L) ** 2, (0.03 * L) ** 2
    found = []
    for i in range(x.shape[0] - 10):
        for j in range(x.shape[1] - 10):
            a, b = x[i : i + 11, j : j + 11], y[i : i + 11, j : j + 11]
            ma, mb = (w * a).sum(), (w * b).sum()
            va, vb, cov = (w * (a - ma) ** 2).sum(), (w * (b - mb) ** 2).sum(), (w * (a - ma) * (b - mb)).sum()
            found.append((2 * ma * mb + c1) * (2 * cov + c2) / ((ma**2 + mb**2 + c1) * (va + vb + c2)))
    return float(np.mean(found))


@pytest.mark.parametrize("data_range", [1.0, 255])
def test_ssim_is_the_papers(data_range: float) -> None:
    truth = torch.rand(2, 3, 13, 17, dtype=torch.float64)
    predicted = (truth + 0.2 * torch.randn_like(truth)).clamp(0, 1)
    truth, predicted = data_range * truth, data_range * predicted
    each = [
        np.mean([looped_ssim(p.numpy(), t.numpy(), data_range) for p, t in zip(x, y, strict=True)])
        for x, y in zip(predicted, truth, strict=True)
    ]
    score = ssim(predicted, truth, data_range=data_range)
    assert float(score) == pytest.approx(float(np.mean(each)), rel=1e-6)
    assert score.details["least"] == pytest.approx(float(min(each)), rel=1e-6)
    assert "edge:valid" in score.signature
    assert f"data_range:{data_range:g}" in score.signature


def test_variances_survive_a_large_mean() -> None:
    truth = 1000 + torch.rand(1, 1, 12, 12, dtype=torch.float64)
    predicted = truth + 0.1 * torch.randn_like(truth)
    expected = looped_ssim(predicted[0, 0].numpy(), truth[0, 0].numpy(), 1.0)
    assert float(ssim(predicted, truth, data_range=1.0)) == pytest.approx(expected, rel=1e-5)


def test_psnr_is_the_mean_of_the_images() -> None:
    truth = torch.rand(3, 2, 5, 7)
    predicted = truth + torch.tensor([0.1, 0.01, 0.001])[:, None, None, None]
    score = psnr(predicted, truth, data_range=1.0)
    assert float(score) == pytest.approx((20 + 40 + 60) / 3, rel=1e-4)
    assert (score.details["least"], score.details["images"]) == (pytest.approx(20.0, rel=1e-4), 3.0)
    assert float(psnr(predicted, truth, data_range=10.0)) == pytest.approx(float(score) + 20, rel=1e-5)


def test_bytes_do_not_wrap_around() -> None:
    predicted, truth = torch.zeros(1, 1, 11, 11, dtype=torch.uint8), torch.ones(1, 1, 11, 11, dtype=torch.uint8)
    assert float(psnr(predicted, truth, data_range=255)) == pytest.approx(20 * math.log10(255), rel=1e-6)
    assert float(ssim(predicted, truth, data_range=255)) == pytest.approx(2.55**2 / (1 + 2.55**2), rel=1e-6)


def test_the_same_image() -> None:
    image = torch.rand(2, 3, 11, 12)
    assert float(psnr(image, image, data_range=1.0)) == math.inf
    assert float(ssim(image, image, data_range=1.0)) == pytest.approx(1.0, abs=1e-12)


def test_ssim_is_symmetric_and_at_most_one() -> None:
    x, y = torch.rand(2, 1, 16, 19), torch.rand(2, 1, 16, 19)
    there, back = (float(ssim(a, b, data_range=1.0)) for a, b in ((x, y), (y, x)))
    assert there == pytest.approx(back, rel=1e-9)
    assert -1.0 <= there < 1.0


@pytest.mark.parametrize("metric", [psnr, ssim])
def test_what_is_refused(metric: object) -> None:
    assert callable(metric)
    image = torch.rand(1, 1, 12, 12)
    with pytest.raises(TypeError, match="data_range"):
        metric(image, image)
    for wrong in (None, 0.0, -1.0, True, math.nan):
        with pytest.raises(ValueError, match="data_range: got .*, expected a number > 0: 1.0 for images in"):
            metric(image, image, data_range=wrong)
    with pytest.raises(
        ValueError, match="data_range: got 1.0, expected at least what the truth spans, .* 255 for bytes"
    ):
        metric(image, 255 * image, data_range=1.0)
    with pytest.raises(ValueError, match=r"truth: got shape \(1, 1, 12, 1\), expected that of what was predicted"):
        metric(image, image[..., :1], data_range=1.0)
    with pytest.raises(ValueError, match=r"predicted: got shape \(1, 12, 12\), expected images \(B, C, H, W\)"):
        metric(image[0], image[0], data_range=1.0)
    with pytest.raises(ValueError, match="predicted: got NaN, expected numbers"):
        metric(image * torch.nan, image, data_range=1.0)


@pytest.mark.parametrize("metric", [psnr, ssim])
def test_images_in_another_range_than_the_truth_are_refused(metric: Callable[..., Score]) -> None:
    image = torch.rand(1, 1, 12, 12)
    for wrong in (255 * image, image - 3, image + 2.5):
        with pytest.raises(
            ValueError, match="predicted: got values from .*, expected images in the range of the truth"
        ):
            metric(wrong, image, data_range=1.0)
    # Where the truth is of one colour, its span says nothing of the range.
    with pytest.raises(ValueError, match="predicted: got values from 200 to 200, expected .* 0 to 0 and data_range=1"):
        metric(torch.full_like(image, 200.0), torch.zeros_like(image), data_range=1.0)
    for name, pair in (("predicted", (image - math.inf, image)), ("truth", (image, image + math.inf))):
        with pytest.raises(ValueError, match=f"{name}: got an infinite number"):
            metric(*pair, data_range=1.0)
    # A prediction may overshoot, and a range begin anywhere.
    assert math.isfinite(metric(image + 0.5, image, data_range=1.0))
    assert math.isfinite(metric(2 * image - 1, 1 - 2 * image, data_range=2))
    assert math.isfinite(metric(torch.ones_like(image), torch.zeros_like(image), data_range=1.0))


def test_an_image_smaller_than_the_window_is_refused() -> None:
    image = torch.rand(1, 1, 10, 12)
    with pytest.raises(ValueError, match="predicted: got images of 10 x 12, expected at least 11 x 11"):
        ssim(image, image, data_range=1.0)
