"""Response generation in dialogue: HRAN (Xing et al. 2018, https://arxiv.org/abs/1701.07149).

One step of the decoder. Words of an utterance are read with the decoder's state and the state of the *next* utterance; utterances
are encoded from the last to the first, and read with the decoder's state alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

import regard as rg
from regard.recipes.planted import Batch, accuracy, fit


class DialogueAttention(nn.Module):
    def __init__(self, state_dim: int, word_dim: int, hidden: int) -> None:
        super().__init__()
        self.word = rg.Attention("general", query_dim=state_dim + hidden, key_dim=word_dim)
        self.encoder = nn.GRUCell(word_dim, hidden)
        self.utterance = rg.Attention("additive", query_dim=state_dim, key_dim=hidden, hidden_dim=hidden)

    def forward(self, state: Tensor, words: Tensor, mask: Tensor) -> Tensor:
        """The context of a decoder state (B, d_s), from words (B, utterances, words, d_w)."""
        following = words.new_zeros(len(words), self.encoder.hidden_size)
        encoded = []
        for u in reversed(range(words.shape[1])):
            real = mask[:, u].any(-1, keepdim=True)
            read = self.word(torch.cat([state, following], -1), words[:, u], mask=mask[:, u])
            following = torch.where(real, self.encoder(read, following), following)
            encoded.append(following)
        return self.utterance(state, torch.stack(encoded[::-1], 1), mask=mask.any(-1))


class Responder(nn.Module):
    def __init__(self, state_dim: int, word_dim: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.attention = DialogueAttention(state_dim, word_dim, hidden)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, state: Tensor, words: Tensor, mask: Tensor) -> Tensor:
        return self.output(self.attention(state, words, mask))


@dataclass(frozen=True)
class Chat:
    """The decoder is about to answer a question about a topic, which one word of the dialogue is on; it says its class."""

    utterances: int = 3
    words: int = 4
    topics: int = 12
    classes: int = 3

    def draw(self, count: int, generator: Generator) -> Batch:
        size = self.utterances * self.words
        topics = torch.rand(count, self.topics, generator=generator).argsort(-1)[:, :size]
        classes = torch.randint(self.classes, (count, size), generator=generator)
        mask = torch.rand(count, size, generator=generator) < 0.8
        place = torch.randint(size, (count,), generator=generator)
        rows = torch.arange(count)
        mask[rows, place] = True
        eye, kinds = torch.eye(self.topics), torch.eye(self.classes)
        words = torch.cat([eye[topics], kinds[classes]], -1).view(count, self.utterances, self.words, -1)
        inputs = {"state": eye[topics[rows, place]], "words": words, "mask": mask.view(words.shape[:3])}
        truth = {"utterance": place // self.words, "word": place % self.words}
        return Batch(inputs, classes[rows, place], truth)


def main(steps: int = 300) -> dict[str, float]:
    torch.manual_seed(0)
    chat = Chat()
    model = Responder(chat.topics, chat.topics + chat.classes, 16, chat.classes)
    fit(model, chat, steps=steps, lr=0.02)
    batch = chat.draw(512, Generator().manual_seed(1))
    with torch.no_grad(), rg.record(model) as trace:
        model(**batch.inputs)
        # Utterances were read from the last to the first.
        words = torch.stack([call.weights for call in reversed(trace["attention.word"])], 1)
    on_word = words[torch.arange(512), batch.truth["utterance"], batch.truth["word"]].mean()
    found = {"accuracy": accuracy(model, chat), "chance": 1 / chat.classes, "weight on the word": float(on_word)}
    print(", ".join(f"{name} {value:.2f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()
