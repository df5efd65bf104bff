"""What does the engine cost? Updates a second of `regard run` beside a loop in torch, written by hand, of the same model.

Both see the same examples in the same order, padded alike, with the same optimiser, clipping and precision. What happens once (data, the
first updates, evaluations, files) is left out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.bench.measure import Row
from regard.model import collate
from regard.recipes.recipe import Recipe, configured

QUESTION = "recipe-throughput"
SETTINGS: dict[str, dict[str, Any]] = {
    "sentiment": {"train_size": 6000, "hidden_dim": 128},
    # The sizes of the real task, on sentences that need no download.
    "translate": {
        "train_size": 4000,
        "validation_size": 4,
        "hidden_dim": 512,
        "embedding_dim": 256,
        "batch": 128,
        "dropout": 0.5,
        "smoothing": 0.1,
    },
}


class Encoder(nn.Module):
    """Vectors and a packed recurrent network in both directions."""

    def __init__(self, count: int, dim: int, hidden_dim: int, kind: type[nn.LSTM | nn.GRU], dropout: float) -> None:
        super().__init__()
        self.table, self.dropout = nn.Embedding(count, dim), nn.Dropout(dropout)
        self.network = kind(dim, hidden_dim // 2, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.dropout(self.table(tokens))
        packed = pack_padded_sequence(x, mask.sum(-1).cpu(), batch_first=True, enforce_sorted=False)
        states: Tensor = pad_packed_sequence(self.network(packed)[0], batch_first=True, total_length=tokens.shape[1])[0]
        return states


class Additive(nn.Module):
    """w · tanh(W q + U k + b), a softmax over the real keys, a sum."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.of_query, self.of_key = nn.Linear(dim, hidden_dim), nn.Linear(dim, hidden_dim, bias=False)
        self.w = nn.Linear(hidden_dim, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        scores = self.w(torch.tanh(self.of_query(query).unsqueeze(2) + self.of_key(keys).unsqueeze(1))).squeeze(-1)
        weights: Tensor = scores.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(-1)
        return weights @ keys


class Sentiment(nn.Module):
    """The default model of the recipe, by hand."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        h = recipe.hidden_dim
        self.encoder = Encoder(len(recipe.vocabulary), recipe.word_dim, h, nn.LSTM, recipe.dropout)
        self.query, self.attention = nn.Parameter(torch.randn(h) / h**0.5), Additive(h, h // 2)
        self.dropout, self.linear = nn.Dropout(recipe.dropout), nn.Linear(h, len(recipe.classes))

    def forward(self, batch: Any) -> Tensor:
        tokens, mask = batch.inputs["tokens"], batch.masks["tokens"]
        context = self.attention(self.query.expand(len(tokens), 1, -1), self.encoder(tokens, mask), mask)
        return F.cross_entropy(self.linear(self.dropout(context.squeeze(1))), batch.target)


class Translate(nn.Module):
    """The default model of the recipe, by hand."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        h, d, count = recipe.hidden_dim, recipe.embedding_dim, len(recipe.pieces)
        self.encoder = Encoder(count, d, h, nn.GRU, recipe.dropout)
        self.table, self.begin, self.start = nn.Embedding(count + 1, d), nn.Linear(h, h), nn.Parameter(torch.randn(d))
        self.network, self.attention = nn.GRU(d, h, batch_first=True), Additive(h, h // 2)
        self.joined, self.linear = nn.Linear(2 * h, h), nn.Linear(h, count + 1)
        self.dropout, self.smoothing = nn.Dropout(recipe.dropout), recipe.smoothing

    def forward(self, batch: Any) -> Tensor:
        tokens, mask, target = batch.inputs["tokens"], batch.masks["tokens"], batch.target
        keys = self.dropout(self.encoder(tokens, mask))
        mean = (keys * mask.unsqueeze(-1)).sum(1) / mask.sum(-1, keepdim=True)
        before = torch.cat([self.start.expand(len(tokens), 1, -1), self.table(target[:, :-1].clamp(min=0))], 1)
        states, _ = self.network(self.dropout(before), torch.tanh(self.begin(mean)).unsqueeze(0))
        context = self.attention(states, keys, mask)
        logits = self.linear(self.dropout(torch.tanh(self.joined(torch.cat([context, states], -1)))))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1, label_smoothing=self.smoothing)


BY_HAND: dict[str, Callable[[Any], nn.Module]] = {"sentiment": Sentiment, "translate": Translate}


def by_hand(recipe: Recipe, few: int, many: int, device: str) -> float:
    """Seconds an update of a plain loop, after the first few."""
    examples, begin = recipe.examples("train"), 0.0
    order = recipe.order(examples)
    model = BY_HAND[recipe.name](recipe).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    for update in range(many):
        if update == few:
            _wait(device)
            begin = time.perf_counter()
        batch = collate([examples[k] for k in order.chosen(update)]).to(device)
        optimizer.zero_grad(set_to_none=True)
        model(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
    _wait(device)
    return (time.perf_counter() - begin) / (many - few)


class Clock:
    """The order of a recipe's examples, which looks at the clock when an update chooses among them."""

    def __init__(self, order: Any, first: int, last: int, device: str) -> None:
        self.order, self.marks, self.device = order, (first, last), device
        self.times: list[float] = []

    def chosen(self, update: int) -> Any:
        if update in self.marks:
            _wait(self.device)
            self.times.append(time.perf_counter())
        return self.order.chosen(update)


def by_engine(name: str, settings: dict[str, Any], few: int, many: int, device: str) -> float:
    """Seconds an update of `regard run`, from the beginning of one to that of another; evaluations come after the last."""
    from regard.recipes.engine import train
    from regard.recipes.runs import Run

    recipe = configured(name, {**settings, "steps": many + 1, "every": many + 1})
    clock = Clock(recipe.order(recipe.examples("train")), few, many, device)
    recipe.order = lambda _: clock  # type: ignore[method-assign, assignment, return-value]
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, Run.begin(recipe, Path(folder)), progress=False)
    return (clock.times[1] - clock.times[0]) / (many - few)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rows(turns: int = 3) -> Iterator[Row]:
    """Both recipes, each beside a loop by hand, in turns: the machine is not the same from minute to minute."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, settings in SETTINGS.items():
        # Updates of the larger one take a CPU long.
        few, many = (3, 43) if device == "cpu" and name == "translate" else (20, 320)
        pairs = []
        for _ in range(turns):
            theirs = by_hand(configured(name, settings), few, many, device)
            pairs.append((by_engine(name, settings, few, many, device), theirs))
        ours, theirs = (min(times) for times in zip(*pairs, strict=True))
        case = f"{name}, an update, batch {configured(name, settings).batch}, {device}"
        yield Row(QUESTION, case, "regard", seconds=ours, extra={"relative_throughput": theirs / ours})
        yield Row(QUESTION, case, "loop by hand", seconds=theirs)
