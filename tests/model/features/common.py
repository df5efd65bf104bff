"""What every feature model must do, asked of each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.model.features import mask_after


def padding_never_matters(module: nn.Module, examples: list[Tensor], padding: float) -> None:
    """Each example gives in a padded batch what it gives alone, whatever stands in the padding; elsewhere there are zeros."""
    module = module.eval()
    longest = max(len(x) for x in examples)
    batch = examples[0].new_full((len(examples), longest, *examples[0].shape[1:]), padding)
    mask = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, real, x in zip(batch, mask, examples, strict=True):
        row[: len(x)] = x
        real[: len(x)] = True
    found, after = module(batch, mask), mask_after(module, mask)
    assert after is not None
    assert found.shape == (*after.shape, module.out_dim)
    for row, real, x in zip(found, after, examples, strict=True):
        alone = module(x.unsqueeze(0)).squeeze(0)
        torch.testing.assert_close(row[real], alone, rtol=1e-5, atol=1e-5)
        assert (row[~real] == 0).all()


def gradients_flow(module: nn.Module, found: Tensor) -> None:
    """Every parameter that can be trained has a finite gradient, and is not left out."""
    (found * torch.randn_like(found)).sum().backward()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().sum() > 0, name
