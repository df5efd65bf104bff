"""Convolutions: the sums of the formula, of sequences and of pictures."""

from __future__ import annotations

import pytest
import torch

from regard.model import Chain, Convolution1d, Convolution2d, Embedding, RecurrentEncoder
from regard.model.features import mask_after
from tests.model.features.common import gradients_flow, padding_never_matters

DIM, FILTERS = 3, 5


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernels", [1, 2, (3, 4), (5, 2, 7)])
def test_a_feature_is_the_sum_over_its_neighbourhood(kernels: object, stride: int) -> None:
    convolve, x = (
        Convolution1d(DIM, FILTERS, kernels, stride, activation="tanh").double(),
        torch.randn(2, 11, DIM).double(),
    )
    found = convolve(x)
    lengths = (kernels,) if isinstance(kernels, int) else kernels
    assert found.shape == (2, -(-11 // stride), convolve.out_dim)
    for b in range(2):
        for i in range(found.shape[1]):
            expected = []
            for part, k in zip(convolve.convolutions, lengths, strict=True):
                total = part.bias.clone()
                for r in range(k):
                    place = stride * i + r - (k - 1) // 2
                    if 0 <= place < 11:
                        total = total + part.weight[:, :, r] @ x[b, place]
                expected.append(torch.tanh(total))
            torch.testing.assert_close(found[b, i], torch.cat(expected))


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("padding", [float("nan"), 7.0])
def test_padding_never_matters_to_sequences(stride: int, padding: float) -> None:
    examples = [torch.randn(n, DIM) for n in (7, 2, 13, 1)]
    padding_never_matters(Convolution1d(DIM, FILTERS, (2, 5), stride), examples, padding)


def test_a_chain_gives_each_part_its_own_mask() -> None:
    chain = Chain(Convolution1d(DIM, FILTERS, 3, 2), RecurrentEncoder(FILTERS, 2), Convolution1d(4, FILTERS, 3, 2))
    padding_never_matters(chain, [torch.randn(n, DIM) for n in (7, 2, 13)], float("nan"))
    assert chain.mask_after(torch.ones(2, 13).bool()).shape == (2, 4)
    assert mask_after(chain, None) is None
    assert mask_after(Embedding(5, 2), torch.ones(2, 3).bool()).shape == (2, 3)


def test_nothing_and_gradients() -> None:
    convolve = Convolution1d(DIM, FILTERS, (2, 3), 2)
    assert convolve(torch.randn(2, 0, DIM)).shape == (2, 0, 2 * FILTERS)
    gradients_flow(convolve, convolve(torch.randn(3, 17, DIM)))


def test_bad_sequences_are_refused() -> None:
    convolve = Convolution1d(DIM, FILTERS)
    with pytest.raises(ValueError, match=r"x: got width 4, expected 3"):
        convolve(torch.randn(1, 5, 4))
    with pytest.raises(ValueError, match=r"x: got shape .*expected \(B, N, d\)"):
        convolve(torch.randn(5, DIM))
    with pytest.raises(ValueError, match="kernels: got none"):
        Convolution1d(DIM, FILTERS, ())
    with pytest.raises(ValueError, match="stride: got 0"):
        Convolution1d(DIM, FILTERS, stride=0)


def looped(convolve: Convolution2d, image: torch.Tensor) -> torch.Tensor:
    """Regions of one picture (C, H, W), by the formula."""
    for part, norm in zip(convolve.convolutions, convolve.norms, strict=True):
        (stride, _), (k, _) = part.stride, part.kernel_size
        rows, columns = (-(-side // stride) for side in image.shape[1:])
        after = torch.zeros(part.out_channels, rows, columns, dtype=image.dtype)
        for h in range(rows):
            for w in range(columns):
                total = part.bias.clone()
                for r in range(k):
                    for c in range(k):
                        y, x = stride * h + r - k // 2, stride * w + c - k // 2
                        if 0 <= y < image.shape[1] and 0 <= x < image.shape[2]:
                            total = total + part.weight[:, :, r, c] @ image[:, y, x]
                centred = total - total.mean()
                normal = centred / (centred.square().mean() + norm.eps).sqrt()
                after[:, h, w] = (normal * norm.weight + norm.bias).clamp(min=0)
        image = after
    return torch.stack([image[:, h, w] for h in range(image.shape[1]) for w in range(image.shape[2])])


@pytest.mark.parametrize(("kernel", "stride", "widths"), [(3, 2, (4, 5)), (1, 1, (4,)), (5, 3, (4,)), (3, 1, (2, 3))])
def test_a_picture_becomes_a_grid(kernel: int, stride: int, widths: tuple[int, ...]) -> None:
    convolve = Convolution2d(2, widths, (7, 11), kernel, stride).double()
    for parameter in convolve.parameters():
        torch.nn.init.normal_(parameter)
    images = torch.randn(2, 2, 7, 11).double()
    found = convolve(images)
    assert found.shape == (2, convolve.grid[0] * convolve.grid[1], widths[-1])
    torch.testing.assert_close(found, torch.stack([looped(convolve, image) for image in images]))


def test_padding_never_matters_to_pictures() -> None:
    whole, small = Convolution2d(2, (4, 5), (7, 11)), Convolution2d(2, (4, 5), (3, 6))
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter)
    small.load_state_dict(whole.state_dict())
    image = torch.full((1, 2, 7, 11), float("nan"))
    image[:, :, :3, :6] = torch.randn(1, 2, 3, 6)
    mask = torch.zeros(1, 7, 11, dtype=torch.bool)
    mask[:, :3, :6] = True
    found, after = whole(image, mask)[0], whole.mask_after(mask)[0]
    assert after.sum() == 2
    torch.testing.assert_close(found[after], small(image[:, :, :3, :6])[0])
    assert (found[~after] == 0).all()


def test_a_mask_of_channels_says_nothing_of_pixels() -> None:
    convolve, image = Convolution2d(2, (4,), 6), torch.randn(3, 2, 6, 6)
    mask = torch.ones(3, 2, dtype=torch.bool)
    assert torch.equal(convolve(image, mask), convolve(image))
    assert convolve.mask_after(mask).shape == (3, 9)
    assert convolve.mask_after(mask).all()
    assert convolve.mask_after(None) is None


def test_bad_pictures_are_refused() -> None:
    convolve = Convolution2d(2, (4,), 6)
    gradients_flow(convolve, convolve(torch.randn(3, 2, 6, 6)))
    with pytest.raises(ValueError, match=r"x: got shape \(1, 2, 6, 5\), expected pictures \(B, 2, 6, 6\)"):
        convolve(torch.randn(1, 2, 6, 5))
    with pytest.raises(TypeError, match="expected a floating-point tensor"):
        convolve(torch.zeros(1, 2, 6, 6).long())
    with pytest.raises(ValueError, match="mask: got torch.bool, shape"):
        convolve(torch.randn(1, 2, 6, 6), torch.ones(1, 5, 6).bool())
    with pytest.raises(ValueError, match="kernel: got 2, expected an odd number"):
        Convolution2d(2, (4,), 6, kernel=2)
    with pytest.raises(ValueError, match=r"widths: got 4"):
        Convolution2d(2, 4, 6)
