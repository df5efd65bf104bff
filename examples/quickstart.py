"""Compose attentions, train one, and look at what it attends to. Takes seconds on two cores."""

import string
from pathlib import Path

import torch
from torch import Tensor, nn

import regard as rg
from regard.report import figures

LETTERS = string.ascii_lowercase
LONGEST = 12


def compose() -> None:
    """Any score with any alignment, by objects or by names."""
    query, key = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    mask = rg.Padding(torch.tensor([7, 4]))  # the second sequence has four keys
    three = {
        "scaled dot, soft": rg.Attention(rg.ScaledDot(), rg.Soft()),
        "general, sparse": rg.Attention("general", "entmax", alpha=1.5, query_dim=16, key_dim=16),
        "one weight a feature": rg.Attention("additive", query_dim=16, key_dim=16, hidden_dim=8, features=16),
    }
    for name, attend in three.items():
        with rg.record(attend) as trace:
            context = attend(query, key, mask=mask)
        zeros = (trace.weights == 0).float().mean()
        print(
            f"{name:22} context {tuple(context.shape)}, weights {tuple(trace.weights.shape)}, {zeros:.0%} exact zeros"
        )


class Reverser(nn.Module):
    """Spell a word backwards: each step asks for a letter by its own number and the length of the word."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.letter = nn.Embedding(len(LETTERS), dim)
        self.place = nn.Embedding(LONGEST, dim)
        self.length = nn.Embedding(LONGEST + 1, dim)
        self.attention = rg.Attention(rg.Additive(query_dim=dim, key_dim=dim, hidden_dim=dim))
        self.output = nn.Linear(dim, len(LETTERS))

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        places = self.place.weight[: words.shape[1]]
        query = places + self.length(lengths)[:, None]
        letters = self.letter(words)
        return self.output(self.attention(query, letters + places, letters, mask=rg.Padding(lengths)))


def sample(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Words of random letters, their lengths, the same words reversed, and where there is a letter at all."""
    words, lengths = torch.randint(len(LETTERS), (size, LONGEST)), torch.randint(4, LONGEST + 1, (size,))
    steps = torch.arange(LONGEST)
    reverse = words.gather(1, (lengths[:, None] - 1 - steps).clamp(min=0))
    return words, lengths, reverse, steps < lengths[:, None]


def accuracy(model: Reverser) -> float:
    """Share of letters that are right, in words never seen."""
    words, lengths, target, real = sample(1000)
    with torch.no_grad():
        return (model(words, lengths).argmax(-1) == target)[real].float().mean().item()


def train(model: Reverser, steps: int = 120) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        words, lengths, target, real = sample(64)
        loss = nn.functional.cross_entropy(model(words, lengths)[real], target[real])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step}: loss {loss.item():.3f}, accuracy {accuracy(model):.1%}")


def main() -> None:
    torch.manual_seed(0)
    compose()

    model = Reverser()
    train(model)
    with rg.intervene(model, "uniform", at="attention"):
        print(f"accuracy when every letter weighs the same: {accuracy(model):.1%}")

    word = "attention"
    letters = torch.tensor([[LETTERS.index(letter) for letter in word]])
    with rg.record(model) as trace, torch.no_grad():
        spelled = model(letters, torch.tensor([len(word)])).argmax(-1)[0]
    backwards = "".join(LETTERS[k] for k in spelled)
    print(f"{word} backwards: {backwards}")
    figure = figures.heatmap(
        trace["attention"].weights[0], queries=list(backwards), keys=list(word), title=f"{word}, backwards"
    )
    path = figures.save(figure, Path("out", "quickstart.png"))
    print(f"where it looked, letter by letter: {path.resolve()}")


if __name__ == "__main__":
    main()
