"""Words: how text is cut, numbered and given vectors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard._errors import refusal
from regard.model import Embedding, TaskModel
from regard.recipes.data import Folder
from regard.recipes.recipe import Recipe

UNKNOWN = "<unknown>"
_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


def words_of(text: str) -> list[str]:
    """Words and marks in lower case.

    Example:
        >>> words_of("It's good, isn't it?")
        ["it's", 'good', ',', "isn't", 'it', '?']
    """
    return _WORD.findall(text.lower())


_NEGATED = re.compile(r"n['’]t\b", re.IGNORECASE)
_PART = re.compile(r"\w+|[^\w\s]")


def separate_words(text: str) -> list[str]:
    """Words and marks in lower case, as tables of vectors have them: what an apostrophe joins apart, and `n't` as `not`.

    Example:
        >>> separate_words("It isn't Ann's.")
        ['it', 'is', 'not', 'ann', "'", 's', '.']
    """
    return _PART.findall(_NEGATED.sub(" not", text).lower())


# What taggers and parsers write in place of a mark, and the part that they cut off a negated verb.
_TREEBANK = {"-lrb-": "(", "-rrb-": ")", "-lsb-": "[", "-rsb-": "]", "``": '"', "''": '"', "`": "'", "n't": "not"}


def ordinary(text: str) -> list[str]:
    """Words of a text that is tokenised in the manner of the Penn Treebank, in lower case, as tables of vectors have them.

    Example:
        >>> ordinary("I ca n't say -LRB- yet -RRB-")
        ['i', 'ca', 'not', 'say', '(', 'yet', ')']
    """
    return [_TREEBANK.get(word, word) for word in text.lower().split()]


class Vocabulary:
    """Words by number; what is not among them is number 0.

    Args:
        words: without the unknown one.

    Example:
        >>> Vocabulary(["a", "b"]).numbers(["b", "z"]).tolist()
        [2, 0]
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = [UNKNOWN, *words]
        self.number = {word: k for k, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def numbers(self, words: Iterable[str]) -> Tensor:
        """(N,), whole numbers."""
        return torch.tensor([self.number.get(word, 0) for word in words], dtype=torch.long)

    @staticmethod
    def learnt(texts: Iterable[Sequence[str]], at_least: int = 1) -> list[str]:
        """Words of texts that occur so often, the commonest first."""
        counts = Counter(word for text in texts for word in text)
        common = [word for word, count in counts.items() if count >= at_least and word != UNKNOWN]
        return sorted(common, key=lambda word: (-counts[word], word))


@dataclass(kw_only=True)
class TextRecipe(Recipe):
    """A recipe whose inputs are words.

    Attributes:
        vectors: folder of pretrained vectors (`words.txt`, `vectors.npy`, or `vectors.f16.npy`), or a text file, a word and its
            numbers a line; the vocabulary then has all words that are known there.
        vectors_lr: learning rate of pretrained vectors, that of everything else when not given; 0 leaves them as they are.
        embedding_dim: width of the vectors that start at random; pretrained ones have their own.
        at_least: how often a word must occur in the training texts to be known.
        dropout: share of the numbers dropped, while training, of word vectors and of what the output model is given.
    """

    vectors: str | None = None
    vectors_lr: float | None = None
    embedding_dim: int = 64
    at_least: int = 1
    dropout: float = 0.3

    @property
    def vocabulary(self) -> Vocabulary:
        if "_vocabulary" not in self.__dict__:
            self.__dict__["_vocabulary"] = Vocabulary(self.known["words"])
        found: Vocabulary = self.__dict__["_vocabulary"]
        return found

    @property
    def word_dim(self) -> int:
        """Width of the vectors of words."""
        return int(self.known["word_dim"])

    def learn_words(self, texts: Iterable[Sequence[str]]) -> dict[str, Any]:
        """The vocabulary of the training texts, for `learn`."""
        words = Vocabulary.learnt(texts, self.at_least)
        if self.vectors is None:
            return {"words": words, "word_dim": self.embedding_dim}
        pretrained, table = read_vectors(self.vectors)
        return {"words": list(dict.fromkeys([*words, *pretrained])), "word_dim": table.shape[1]}

    def embedding(self) -> Embedding:
        """Vectors of the vocabulary, not yet those of the files."""
        return Embedding(len(self.vocabulary), self.word_dim, dropout=self.dropout)

    def groups(self, model: TaskModel) -> list[dict[str, Any]]:
        if self.vectors is None or self.vectors_lr is None:
            return super().groups(model)
        return apart(model, Embedding, self.vectors_lr, self.lr)

    def initialise(self, model: TaskModel) -> None:
        """Pretrained vectors into every table of the vocabulary; other words start as far from zero as those are."""
        if self.vectors is None:
            return
        words, table = read_vectors(self.vectors)
        place = self.vocabulary.numbers(words)
        for module in model.modules():
            if isinstance(module, Embedding) and module.table.weight.shape == (len(self.vocabulary), table.shape[1]):
                with torch.no_grad():
                    module.table.weight.normal_(std=float(table.std()))
                    module.table.weight[place] = table


def apart(model: TaskModel, kind: type[nn.Module], lr: float, others: float) -> list[dict[str, Any]]:
    """Parameters with their learning rates: those of modules of a kind have one of their own, for what knows something already."""
    taught = {id(p) for module in model.modules() if isinstance(module, kind) for p in module.parameters()}
    groups: list[dict[str, Any]] = [{"params": [], "lr": others}, {"params": [], "lr": lr}]
    for p in model.parameters():
        if p.requires_grad:
            groups[id(p) in taught]["params"].append(p)
    return groups


def read_vectors(path: str | Path) -> tuple[list[str], Tensor]:
    """Words and their vectors (V, d), from a folder or from a text file."""
    path = Path(path)
    if not path.is_dir() and not path.is_file():
        raise ValueError(refusal("vectors", repr(str(path)), "a folder or a text file of word vectors"))
    if path.is_file():
        return _vectors_of_text(path)
    names = ("vectors.npy", "vectors.f16.npy")
    name = next((n for n in names if any((path / f"{n}{end}").is_file() for end in ("", ".gz"))), names[0])
    folder = Folder(path, "words.txt", name)
    words = folder.lines("words.txt")
    table = folder.npy(name)
    if table.ndim != 2 or len(table) != len(words) or not np.issubdtype(table.dtype, np.floating):
        got = f"an array {table.shape} of {table.dtype} beside {len(words)} words"
        raise ValueError(refusal("vectors", got, "a row of numbers for each word"))
    return words, torch.from_numpy(table.astype(np.float32))


def _vectors_of_text(path: Path) -> tuple[list[str], Tensor]:
    words, rows = [], []
    for number, line in enumerate(Folder(path.parent).lines(path.name.removesuffix(".gz")), 1):
        word, *numbers = line.rstrip().split(" ")
        try:
            rows.append([float(x) for x in numbers])
        except ValueError as error:
            raise ValueError(refusal("vectors", f"{path}, line {number}: {error}", "a word and its numbers")) from error
        words.append(word)
        if len(rows[-1]) != len(rows[0]):
            got = f"{path}, line {number}: {len(rows[-1])} numbers"
            raise ValueError(refusal("vectors", got, f"{len(rows[0])} as in the first line"))
    return words, torch.tensor(rows)
