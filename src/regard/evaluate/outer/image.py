"""Metrics of images, by torchmetrics: PSNR and SSIM."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from jaxtyping import Num
from torch import Tensor

from regard._errors import missing_extra, refusal
from regard.evaluate.outer.inputs import numbers, same_shape
from regard.evaluate.outer.result import Score

# Wang et al. 2004: an 11 x 11 window of a Gaussian, and where it does not reach over the edge.
SIGMA, EDGE, K1, K2 = 1.5, 5, 0.01, 0.03
# The square of a range, and products of that, must stay numbers.
_LEAST = 1e-60


def psnr(predicted: Num[Tensor, "b c h w"], truth: Num[Tensor, "b c h w"], *, data_range: float) -> Score:
    r"""Peak signal-to-noise ratio in decibels, the mean over the images.

    $$\mathrm{PSNR} = 10 \log_{10} \frac{L^2}{\mathrm{MSE}}$$

    Infinite for an image without any error, and then the mean is.

    Args:
        predicted: (B, C, H, W).
        truth: the true images, in the same shape.
        data_range: $L$, what lies between the least and the largest value that an image may have: 1 or 255. The range that a batch
            happens to have would be another number. A truth that spans more is refused, and so is a prediction that lies a whole range
            beyond it.

    Example:
        >>> import torch
        >>> round(float(psnr(torch.full((1, 1, 2, 2), 0.6), torch.full((1, 1, 2, 2), 0.5), data_range=1.0)), 4)
        20.0
    """
    predicted, truth = _images(predicted, truth, data_range)
    functional = _torchmetrics("psnr")
    each = functional.peak_signal_noise_ratio(predicted, truth, data_range, reduction="none", dim=(1, 2, 3))
    return _mean("psnr", each, data_range, "")


def ssim(predicted: Num[Tensor, "b c h w"], truth: Num[Tensor, "b c h w"], *, data_range: float) -> Score:
    r"""Structural similarity (Wang et al. 2004, https://doi.org/10.1109/TIP.2003.819861), the mean over the images.

    $$\mathrm{SSIM} = \frac{(2 \mu_x \mu_y + C_1)(2 \sigma_{xy} + C_2)}{(\mu_x^2 + \mu_y^2 + C_1)(\sigma_x^2 + \sigma_y^2 + C_2)},
      \qquad C_1 = (0.01\, L)^2,\ C_2 = (0.03\, L)^2$$

    under a Gaussian window of 11 x 11 with standard deviation 1.5, the mean over all places where it lies inside the image, and over
    channels.

    Args:
        predicted: (B, C, H, W), no smaller than the window.
        truth: the true images, in the same shape.
        data_range: $L$, what lies between the least and the largest value that an image may have: 1 or 255.

    Example:
        >>> import torch
        >>> image = torch.rand(1, 3, 16, 16)
        >>> round(float(ssim(image, image, data_range=1.0)), 6)
        1.0
    """
    predicted, truth = _images(predicted, truth, data_range)
    if min(predicted.shape[-2:]) <= 2 * EDGE:
        got = f"images of {predicted.shape[-2]} x {predicted.shape[-1]}"
        raise ValueError(refusal("predicted", got, "at least 11 x 11, the size of the window"))
    _, similar = _torchmetrics("ssim").structural_similarity_index_measure(
        predicted, truth, sigma=SIGMA, data_range=data_range, k1=K1, k2=K2, reduction="none", return_full_image=True
    )
    # Beyond the edge torchmetrics mirrors the image, which the paper does not.
    inside = similar[..., EDGE:-EDGE, EDGE:-EDGE]
    return _mean(
        "ssim", inside.mean((1, 2, 3)), data_range, f"|window:gaussian 11 x 11|sigma:{SIGMA}|k1:{K1}|k2:{K2}|edge:valid"
    )


def _images(predicted: Any, truth: Any, data_range: float) -> tuple[Tensor, Tensor]:
    if isinstance(data_range, bool) or not isinstance(data_range, int | float) or not _LEAST < data_range < 1 / _LEAST:
        raise ValueError(refusal("data_range", data_range, "a number > 0: 1.0 for images in [0, 1], 255 for bytes"))
    # Bytes must not wrap around, nor halves be rounded, when differences are taken.
    predicted, truth = (numbers(name, x).double() for name, x in (("predicted", predicted), ("truth", truth)))
    same_shape(predicted, truth)
    if predicted.ndim != 4 or not predicted.numel():
        raise ValueError(refusal("predicted", f"shape {tuple(predicted.shape)}", "images (B, C, H, W)"))
    for name, x in (("predicted", predicted), ("truth", truth)):
        if not bool(x.isfinite().all()):
            raise ValueError(refusal(name, "an infinite number", "images of finite numbers"))
    low, high = float(truth.min()), float(truth.max())
    spread = high - low
    if spread > data_range:
        fix = "Fix: give the range that images may have, 255 for bytes."
        raise ValueError(refusal("data_range", data_range, f"at least what the truth spans, {spread:g}", fix))
    # A prediction may leave the range, but not by as much as it is wide: the range is somewhere within high - L and low + L.
    least, most = float(predicted.min()), float(predicted.max())
    if least < high - 2 * data_range or most > low + 2 * data_range:
        expected = f"images in the range of the truth, which has {low:g} to {high:g} and data_range={data_range:g}"
        fix = "Fix: bring both into one range, both bytes or both from 0 to 1, and give its width."
        raise ValueError(refusal("predicted", f"values from {least:g} to {most:g}", expected, fix))
    return predicted, truth


def _mean(name: str, each: Tensor, data_range: float, more: str) -> Score:
    signature = f"torchmetrics:{version('torchmetrics')}|data_range:{data_range:g}{more}|level:mean of images"
    details = {"images": float(len(each)), "least": float(each.min()), "most": float(each.max())}
    return Score(name, float(each.mean()), signature, details=details)


def _torchmetrics(purpose: str) -> Any:
    try:
        import torchmetrics.functional.image
    except ImportError as error:
        raise ImportError(missing_extra("torchmetrics", "train", purpose)) from error
    return torchmetrics.functional.image
