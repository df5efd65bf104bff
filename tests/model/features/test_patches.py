"""Patches: pieces of a picture, row by row."""

from __future__ import annotations

import pytest
import torch

from regard.model import Patches
from tests.model.features.common import gradients_flow

H, W, PH, PW, CHANNELS, DIM = 6, 15, 2, 5, 3, 7


def cut() -> Patches:
    return Patches(CHANNELS, DIM, (H, W), (PH, PW))


def test_a_feature_is_a_map_of_its_patch() -> None:
    module, images = cut().double(), torch.randn(2, CHANNELS, H, W).double()
    found = module(images)
    assert module.grid == (3, 3)
    assert found.shape == (2, 9, DIM)
    for b in range(2):
        for h in range(3):
            for w in range(3):
                piece = images[b, :, h * PH : (h + 1) * PH, w * PW : (w + 1) * PW].flatten()
                expected = module.linear.weight @ piece + module.linear.bias + module.P[3 * h + w]
                torch.testing.assert_close(found[b, 3 * h + w], expected)
    gradients_flow(module, found)


def test_pixels_that_are_not_real_never_matter() -> None:
    module, image = cut(), torch.randn(1, CHANNELS, H, W)
    mask = torch.zeros(1, H, W, dtype=torch.bool)
    mask[:, :3, :6] = True
    holes, zeros = image.masked_fill(~mask[:, None], float("nan")), image.masked_fill(~mask[:, None], 0.0)
    found, after = module(holes, mask), module.mask_after(mask)
    assert after.view(3, 3).int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0]]
    torch.testing.assert_close(found[after], module(zeros)[after])
    assert (found[~after] == 0).all()


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"size: got \(6, 14\), expected a multiple of the patch, \(2, 5\)"):
        Patches(CHANNELS, DIM, (6, 14), (2, 5))
    with pytest.raises(ValueError, match="expected pictures"):
        cut()(torch.randn(1, CHANNELS, H, W + 1))
