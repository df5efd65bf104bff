"""Something small hidden in something with levels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from regard.recipes.planted.task import Batch, choice, hidden_signs, of_sign, one_hot, permutations, taken


@dataclass(frozen=True)
class MarkedWord:
    """Say the class of the one marked word of a document.

    Every word has a class, and noise; one word of one sentence is marked. Sentences are of different lengths, and so are
    documents.
    """

    sentences: int = 4
    words: int = 5
    classes: int = 4
    noise: int = 3

    @property
    def dim(self) -> int:
        """Width of a word."""
        return 1 + self.classes + self.noise

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `features` (count, sentences, words, dim) and `mask`; truth `sentence` and `word`."""
        shape = (count, self.sentences, self.words)
        classes = torch.randint(self.classes, shape, generator=generator)
        lengths = torch.randint(2, self.words + 1, shape[:2], generator=generator)
        lengths[:, 1:] *= torch.rand(count, self.sentences - 1, generator=generator) < 0.8
        mask = torch.arange(self.words) < lengths[..., None]
        # Any real word: the largest of random numbers.
        place = torch.where(mask, torch.rand(shape, generator=generator), -1.0).flatten(1).argmax(-1)
        marked = one_hot(place, self.sentences * self.words).view(shape)
        noise = 0.3 * torch.randn(*shape, self.noise, generator=generator)
        features = torch.cat([marked[..., None], one_hot(classes, self.classes), noise], -1)
        truth = {"sentence": place // self.words, "word": place % self.words}
        return Batch({"features": features, "mask": mask}, taken(classes.flatten(1), place), truth)


@dataclass(frozen=True)
class WordThenCharacter:
    """Find the word that has the code of the query; it names a character; say the sign of that one.

    The query says nothing about characters: without the word they cannot be told apart.
    """

    words: int = 5
    characters: int = 6
    codes: int = 8

    @property
    def dims(self) -> tuple[int, int, int]:
        """Widths of query, words and characters."""
        return self.codes, 2 * self.codes, self.codes + 1

    @property
    def classes(self) -> int:
        """Positive or not."""
        return 2

    @property
    def readout(self) -> Tensor:
        """The logits of the classes from word and character, (classes, width of both)."""
        _, of_word, of_character = self.dims
        return torch.cat([torch.zeros(self.classes, of_word), of_sign(of_character)], -1)

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `query`, `words` and `characters`; truth by the last two names."""
        codes = permutations(count, self.codes, generator)[:, : self.words]
        names = permutations(count, self.codes, generator)[:, : self.characters]
        named = names[:, : self.words].gather(1, permutations(count, self.words, generator))
        word = choice(count, self.words, generator)
        character = (names == taken(named, word)[:, None]).long().argmax(-1)
        signs = hidden_signs(character, self.characters, generator)
        inputs = {
            "query": one_hot(taken(codes, word), self.codes),
            "words": torch.cat([one_hot(codes, self.codes), one_hot(named, self.codes)], -1),
            "characters": torch.cat([one_hot(names, self.codes), signs[..., None]], -1),
        }
        target = (taken(signs, character) > 0).long()
        return Batch(inputs, target, {"words": word, "characters": character})
