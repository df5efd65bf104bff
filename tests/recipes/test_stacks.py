"""Causal stacks: no token sees a later one, whatever the attention in the layers is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regard.recipes.stacks import CAUSAL, Segments, causal_stack
from regard.transformer import TransformerXL

SMALL = {"dim": 8, "heads": 2, "layers": 2, "length": 11, "segment": 4}
EVERY = (*CAUSAL, "learned-position", "transformer-xl-position", "entmax", "general")


def read(stack: nn.Module, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    # Hashed attentions draw at every call.
    torch.manual_seed(1)
    found: Tensor = stack(tokens, mask=mask)
    return found


@pytest.mark.parametrize("name", EVERY)
def test_no_token_sees_a_later_one(name: str) -> None:
    stack, tokens = causal_stack(name, {}, **SMALL).eval(), torch.randn(2, 11, 8)
    changed = tokens.clone()
    changed[:, 6] = torch.randn(2, 8)
    before, after = read(stack, tokens), read(stack, changed)
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=0, atol=1e-6)
    # What comes later sees it.
    assert (before[:, 6:] - after[:, 6:]).abs().amax(-1).min() > 1e-5


@pytest.mark.parametrize("name", EVERY)
def test_padding_never_matters(name: str) -> None:
    stack, tokens = causal_stack(name, {}, **SMALL).eval(), torch.randn(2, 11, 8)
    mask = torch.arange(11) < torch.tensor([[11], [7]])
    changed = tokens.clone()
    changed[1, 7:] = 100.0
    before, after = read(stack, tokens, mask), read(stack, changed, mask)
    torch.testing.assert_close(before[mask], after[mask], rtol=0, atol=1e-5)


def test_segments_are_the_whole_where_the_memory_holds_it() -> None:
    model, tokens = TransformerXL(8, 2, 2, memory=11).eval(), torch.randn(3, 11, 8)
    whole, _ = model(tokens)
    for segment in (1, 3, 11, 20):
        torch.testing.assert_close(Segments(model, segment)(tokens), whole, rtol=1e-4, atol=1e-5)
    short = TransformerXL(8, 2, 2, memory=1).eval()
    short.load_state_dict(model.state_dict())
    assert (Segments(short, 3)(tokens) - whole).abs().max() > 1e-4


def test_options_reach_the_layers() -> None:
    assert causal_stack("dot", {"norm": "post", "dropout": 0.3}, **SMALL).layers[0].norm == "post"  # type: ignore[index]
    assert causal_stack("transformer-xl", {"memory": 5}, **SMALL).model.memory_length == 5  # type: ignore[union-attr]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="attention: got 'linformer'.*a score, an alignment, a position"):
        causal_stack("linformer", {}, **SMALL)
    with pytest.raises(ValueError, match="segment: got 0"):
        causal_stack("transformer-xl", {}, **{**SMALL, "segment": 0})
    with pytest.raises(ValueError, match="attention: got 'tranformer-decoder'"):
        causal_stack("tranformer-decoder", {}, **SMALL)
