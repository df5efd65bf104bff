"""Multi-dimensional bilinear attention by the kernel of activated scores: as exact as the dense execution in the same dtype."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.ops.call import assuming
from regard.ops.dense import dense
from regard.ops.features import features_kernel, why_not_features
from regard.ops.ready import kernel_problem

QUERIES, KEYS, FEATURES = 7, 13, 3
SCORES = {
    "general": lambda: rg.General(5, 4, features=FEATURES),
    "biased": lambda: rg.BiasedGeneral(5, 4, features=FEATURES),
    "activated": lambda: rg.ActivatedGeneral(5, 4, features=FEATURES),
    "low rank": lambda: rg.LowRankGeneral(5, 4, 2, features=FEATURES),
    "heads": lambda: rg.General(5, 4, features=FEATURES, heads=2),
}
MASKS = {
    "none": lambda: None,
    "pairs": lambda: torch.rand(2, QUERIES, KEYS) > 0.4,
    "causal": rg.Causal,
    "padding": lambda: rg.Padding(torch.tensor([5, KEYS])),
}


def found(attend: rg.Attention, inputs: list[Tensor], mask: object, do: Tensor, execute) -> dict[str, Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    context = execute(attend.call(*leaves, mask=mask)).to(leaves[2].dtype)
    named = dict(zip(("query", "key", "value"), leaves, strict=True)) | dict(attend.named_parameters())
    return {"o": context.detach()} | dict(
        zip(named, torch.autograd.grad(context, list(named.values()), do.to(context.dtype)), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("score", "mask"),
    [("general", "pairs"), ("biased", "none"), ("activated", "causal"), ("low rank", "padding"), ("heads", "none")],
)
def test_features_are_heads_that_read_one_number(score: str, mask: str, dtype: torch.dtype) -> None:
    assert kernel_problem("bilinear_attend", "identity") == ""
    torch.manual_seed(0)
    low = rg.Attention(SCORES[score](), rg.Soft(0.7)).to(dtype)
    wide = copy.deepcopy(low).double()
    inputs = [torch.randn(2, n, d).to(dtype) for n, d in ((QUERIES, 5), (KEYS, 4), (KEYS, FEATURES))]
    bound, do = MASKS[mask](), torch.randn(2, QUERIES, FEATURES).to(dtype)
    exact = found(wide, [x.double() for x in inputs], bound, do, dense)
    rival, ours = (found(low, inputs, bound, do, execute) for execute in (dense, features_kernel))
    for name, reference in exact.items():
        distance, budget = (float((x[name].double() - reference).norm()) for x in (ours, rival))
        budget = 2 * (budget + torch.finfo(dtype).eps * float(reference.norm()))
        # What a query adds to all keys cancels: its gradient is the rounding of a sum.
        budget += 8 * torch.finfo(torch.float32).eps * float(do.double().norm() * inputs[2].double().norm())
        assert distance <= budget, f"{name}: distance {distance:.2e} beyond {budget:.2e}"


@pytest.mark.parametrize("options", [{"align": rg.Hard()}, {"dropout": 0.5}, {"align": rg.Local(2)}], ids=str)
def test_what_is_drawn_by_feature_is_refused_by_name(options: dict[str, object]) -> None:
    x = torch.randn(5, 3)
    call = rg.Attention(rg.General(3, 3, features=3), **options).call(x, x)
    with assuming("cuda"):
        assert "other than by a softmax without dropout" in str(why_not_features(call))
