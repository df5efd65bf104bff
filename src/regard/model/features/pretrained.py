"""A pretrained encoder, frozen or trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard._errors import missing_extra, refusal
from regard.ops.fill import kept_rows
from regard.query.parts import one_of


class Pretrained(nn.Module):
    r"""The last states of an encoder of transformers, of pieces of words or of whole words.

    $$f = \mathrm{encoder}(x_1 \dots x_L), \qquad
      f_w = f_{\text{first}(w)} \quad\text{or}\quad f_w = \frac{1}{|w|} \sum_{j \in w} f_j$$

    Tokens (B, N) are pieces, and every piece has a feature. Tokens (B, W, P) are words of at most P pieces each (`by_word` makes them of
    what a tokenizer gives): the encoder reads their pieces one after the other, and every word has a feature. Padding is left out
    wherever it stands, not read.

    Args:
        encoder: a folder of `save_pretrained`; a configuration with its `model_type`, for weights that are random; or a module that is
            called with `input_ids` and `attention_mask` and gives `last_hidden_state`.
        freeze: leave the weights as they are: no gradients, and never in training mode.
        words: how a word is made of its pieces, `"first"` (Devlin et al. 2019, https://arxiv.org/abs/1810.04805) or `"mean"`.

    Example:
        >>> shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        >>> encode = Pretrained({"model_type": "bert", "vocab_size": 30, **shape})
        >>> encode(torch.tensor([[3, 5, 0]])).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self, encoder: str | Path | Mapping[str, Any] | nn.Module, freeze: bool = True, words: str = "first"
    ) -> None:
        super().__init__()
        self.encoder = encoder if isinstance(encoder, nn.Module) else _built(encoder)
        self.freeze, self.words = bool(freeze), one_of("words", words, ("first", "mean"))
        size = getattr(getattr(self.encoder, "config", None), "hidden_size", None)
        if not isinstance(size, int):
            expected = "an encoder whose config says its hidden_size"
            raise ValueError(refusal("encoder", type(self.encoder).__name__, expected))
        self.out_dim = size
        if self.freeze:
            self.encoder.requires_grad_(False)
            self.encoder.eval()

    def train(self, mode: bool = True) -> Pretrained:
        super().train(mode)
        if self.freeze:
            # Its dropout would change features that are meant to stay what they are.
            self.encoder.eval()
        return self

    def forward(
        self, tokens: Int[Tensor, "b n *p"], mask: Bool[Tensor, "b n *p"] | None = None
    ) -> Float[Tensor, "b n d"]:
        """Features (B, N, d) of pieces (B, N), or of words (B, N, P); zero where nothing is real."""
        if tokens.dtype.is_floating_point or tokens.dim() not in (2, 3):
            got = f"a tensor of {tokens.dtype}, shape {tuple(tokens.shape)}"
            raise TypeError(refusal("tokens", got, "whole numbers, pieces (B, N) or words (B, N, P)"))
        if mask is not None and mask.shape != tokens.shape:
            raise ValueError(
                refusal("mask", f"shape {tuple(mask.shape)}", f"that of the tokens, {tuple(tokens.shape)}")
            )
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        states = self._states(tokens.flatten(1), real.flatten(1))
        if tokens.dim() == 2:
            return states
        pieces: Tensor = states.unflatten(1, tokens.shape[1:])
        if self.words == "mean":
            return pieces.sum(2) / real.sum(2).clamp(min=1).unsqueeze(-1)
        # Of equals argmax takes the first; a word without a piece takes a zero.
        first = real.long().argmax(2)[..., None, None].expand(-1, -1, 1, pieces.shape[-1])
        return pieces.gather(2, first).squeeze(2)

    def mask_after(self, mask: Bool[Tensor, "b n *p"] | None) -> Bool[Tensor, "b n"] | None:
        """A word is real that has a piece."""
        return mask if mask is None or mask.dim() == 2 else mask.any(-1)

    def _states(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Of the real tokens of (B, L), in their places; zero elsewhere."""
        batch, length = tokens.shape
        longest = int(real.sum(-1).max()) if batch and length else 0
        if longest == 0:
            weight = next(self.encoder.parameters())
            return weight.new_zeros(batch, length, self.out_dim)
        # Real tokens first, in their order: an encoder counts positions from the left.
        order = (~real).to(torch.uint8).argsort(dim=-1, stable=True)
        packed = tokens.gather(1, order[:, :longest])
        known = real.gather(1, order[:, :longest])
        with torch.no_grad() if self.freeze else nullcontext():
            states = self.encoder(input_ids=packed.where(known, 0), attention_mask=known.long()).last_hidden_state
        back = order.argsort(-1).clamp(max=longest - 1)
        return kept_rows(states.gather(1, back.unsqueeze(-1).expand(-1, -1, states.shape[-1])), real)

    def extra_repr(self) -> str:
        return f"freeze={self.freeze}, words={self.words!r}"


class Words(NamedTuple):
    """Pieces by word, (W, P), and which of them are real."""

    tokens: Int[Tensor, "w p"]
    mask: Bool[Tensor, "w p"]


def by_word(tokens: Int[Tensor, " n"], words: Sequence[int | None]) -> Words:
    """Pieces in rows of one word each, as an example of `Pretrained` has them.

    Args:
        tokens: numbers of the pieces.
        words: for each piece which word it belongs to, as `word_ids()` of a tokenizer says; None for one that is a word by itself.

    Example:
        >>> by_word(torch.tensor([101, 7, 8, 9, 102]), [None, 0, 0, 1, None]).tokens.tolist()
        [[101, 0], [7, 8], [9, 0], [102, 0]]
    """
    if len(words) != len(tokens):
        raise ValueError(refusal("words", f"{len(words)} of them", f"one for each of {len(tokens)} tokens"))
    rows: list[list[int]] = []
    before: int | None = None
    for token, word in zip(tokens.tolist(), words, strict=True):
        if word is None or word != before:
            rows.append([])
        rows[-1].append(token)
        before = word
    longest = max(map(len, rows), default=0)
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=tokens.dtype)
    counts = torch.tensor([len(row) for row in rows])
    return Words(padded.view(len(rows), longest), torch.arange(longest) < counts[:, None])


def _built(source: Any) -> nn.Module:
    """From a folder, with its weights; or from a configuration, with random ones."""
    try:
        from transformers import AutoConfig, AutoModel
    except ImportError as error:
        raise ImportError(missing_extra("transformers", "hf", "Pretrained")) from error
    if isinstance(source, Mapping):
        if "model_type" not in source:
            raise ValueError(refusal("encoder", "a configuration without model_type", "one with it, such as 'bert'"))
        rest = {key: value for key, value in source.items() if key != "model_type"}
        models: Any = AutoModel
        made: nn.Module = models.from_config(AutoConfig.for_model(source["model_type"], **rest))
        return made
    if not isinstance(source, str | Path) or not (Path(source) / "config.json").is_file():
        got = repr(str(source)) if isinstance(source, str | Path) else type(source).__name__
        raise ValueError(refusal("encoder", got, "a folder with a config.json, a configuration, or a module"))
    loaded: nn.Module = AutoModel.from_pretrained(source, local_files_only=True)
    return loaded
