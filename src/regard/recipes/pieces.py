"""Pieces of words, as a pretrained encoder was taught them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard._errors import missing_extra, refusal
from regard.model.features.pretrained import Pretrained, by_word
from regard.recipes.data import Folder

_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"


class Cut(NamedTuple):
    """Words in pieces (W, P), which of them are real, and the words by name; the first of the text is at `start`."""

    tokens: torch.Tensor
    mask: torch.Tensor
    words: list[str]
    start: int


class Pieces:
    """The tokenizer of a pretrained encoder, for texts that are cut into words already.

    Args:
        content: of its `tokenizer.json`.
    """

    def __init__(self, content: str) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError(missing_extra("tokenizers", "hf", "encoder=…")) from error
        try:
            self.tokenizer = Tokenizer.from_str(content)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(refusal("encoder", f"{_TOKENIZER}: {error}", "a tokenizer")) from error
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def cut(self, words: Sequence[str]) -> Cut:
        """With the tokens that the encoder has before and after every text, each as a word of its own."""
        found = self.tokenizer.encode(list(words), is_pretokenized=True)
        of: list[Any] = list(found.word_ids)
        rows = by_word(torch.tensor(found.ids), of)
        start = next((k for k, word in enumerate(of) if word is not None), 0)
        kept = [k for k, word in enumerate(of) if word is None or k == 0 or of[k - 1] != word]
        if sum(of[k] is not None for k in kept) != len(words):
            # A word that is nothing but marks the tokenizer leaves out would move all that follow.
            raise ValueError(refusal("text", repr(" ".join(words)), "words of which the tokenizer drops none"))
        names = [found.tokens[k] if of[k] is None else words[of[k]] for k in kept]
        return Cut(rows.tokens, rows.mask, names, start)


def learn_encoder(folder: str) -> dict[str, Any]:
    """What a run must know of a pretrained encoder to build it again and to cut texts, without its weights."""
    files = Folder(folder, _CONFIG, _TOKENIZER)
    try:
        config = json.loads(files.text(_CONFIG))
    except json.JSONDecodeError as error:
        raise ValueError(refusal("encoder", f"{Path(folder) / _CONFIG}: {error}", "JSON")) from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(refusal("encoder", str(Path(folder) / _CONFIG), "an object with model_type"))
    return {"encoder": config, "tokenizer": files.text(_TOKENIZER)}


def load_encoder(encoder: Pretrained, folder: str) -> None:
    """The weights of a folder into an encoder that was built from its configuration."""
    encoder.encoder.load_state_dict(Pretrained(folder).encoder.state_dict())
