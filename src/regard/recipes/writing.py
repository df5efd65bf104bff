"""Recipes that write: their answer is a sequence of tokens, each of which is read for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard._errors import refusal
from regard.evaluate.alignment import AlignmentCounts
from regard.evaluate.outer import PerplexityCounts, Score
from regard.evaluate.outer.result import signed
from regard.model import Batch, Example, On, TaskModel
from regard.model.outputs import Output, SequenceDecoder, TokenDecoder, TransformerSequenceDecoder
from regard.observe import Trace, record
from regard.recipes.choice import make_attention, tried
from regard.recipes.look import one_for_each_pair
from regard.recipes.recipe import Recipe, without_padding
from regard.recipes.runs import HEATMAP
from regard.transformer.generation import Beam, Greedy, How

# A setting of `attention` rather than one mechanism: self-attention on both sides, and heads that read across.
TRANSFORMER, MULTI_HEAD = "transformer", "multi-head"


@dataclass(kw_only=True)
class Writing(Recipe):
    """A recipe whose output is a sequence of tokens, by a recurrent network or a Transformer.

    Attributes:
        embedding_dim: width of the vectors of tokens; a Transformer's are `hidden_dim` wide.
        hidden_dim: width of features and states.
        layers: of encoder and decoder.
        heads: of attentions that have several.
        feeding: whether the state sees what was read at the step before, which makes every step wait for it.
        dropout: share of the numbers dropped while training.
        smoothing: share of the target that is spread over all tokens.
        beam: sequences that are followed side by side when the answer is searched; 1 takes the likeliest token each time.
        penalty: by how much longer answers are favoured then.
    """

    embedding_dim: int = 64
    hidden_dim: int = 128
    layers: int = 1
    heads: int = 4
    feeding: bool = False
    dropout: float = 0.0
    smoothing: float = 0.0
    beam: int = 5
    penalty: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one("embedding_dim", "hidden_dim", "layers", "heads", "beam")

    def writer(
        self,
        features: nn.Module | Mapping[str, nn.Module],
        count: int,
        inputs: Mapping[str, int],
        attention: str | None = None,
    ) -> TaskModel:
        """A model that writes what it reads from features.

        Args:
            features: of the inputs.
            count: number of output tokens, the last of which ends a sequence.
            inputs: width of the features of every input, by name; that of the first is `hidden_dim`.
            attention: what reads; the one that is set when not given.
        """
        h, name = self.hidden_dim, self.attention if attention is None else attention
        transformer = name == TRANSFORMER
        widths: dict[str, Any] = {"query_dim": h, "key_dim": h, "value_dim": h, "hidden_dim": h // 2}
        widths["dim"] = h if len(inputs) == 1 else tuple(inputs.values())
        name = MULTI_HEAD if transformer else name
        options = {"heads": self.heads, **self.options} if name == MULTI_HEAD else self.options
        read = fitted(make_attention(name, options, **widths), inputs, h, h)
        output: Output
        if transformer:
            output = TransformerSequenceDecoder(
                count,
                h,
                self.heads,
                self.layers,
                dropout=self.dropout,
                smoothing=self.smoothing,
                norm="pre",
            )
        else:
            output = SequenceDecoder(
                count, self.embedding_dim, h, h, self.feeding, self.layers, self.dropout, self.smoothing
            )
        return TaskModel(features, None, read, output)

    @property
    def searched(self) -> How:
        """How the answer is found when it counts; while training it is `Greedy`."""
        return Beam(self.beam, self.penalty) if self.beam > 1 else Greedy()

    def longest(self, batch: Batch) -> int:
        """The most tokens that are written for a batch, the end among them."""
        return 2 * max(x.shape[1] for x in batch.inputs.values()) + 10

    @torch.no_grad()
    def written(
        self, model: TaskModel, examples: Sequence[Example], device: torch.device | str, how: How | None = None
    ) -> Iterator[list[int]]:
        """Tokens that the model writes for each example, without the end."""
        decoder = model.output
        assert isinstance(decoder, TokenDecoder)
        for batch in self.batches(examples):
            batch = batch.to(device)
            found = model.encode(batch)
            tokens = decoder.generate(model.reader(found), found, self.longest(batch), how).tokens
            yield from without_padding(tokens, decoder.end)

    @torch.no_grad()
    def told(
        self, model: TaskModel, examples: Sequence[Example], device: torch.device | str
    ) -> tuple[PerplexityCounts, AlignmentCounts]:
        """When told the tokens before: how surprising the next one is, and, where links are known, whether the attention is there."""
        surprise, links = PerplexityCounts(), AlignmentCounts()
        for batch in self.batches(examples, 128):
            batch = batch.to(device)
            if batch.gold is None:
                logits = model(batch)
            else:
                with record(model) as trace:
                    logits = model(batch)
                links += AlignmentCounts.of_weights(weights_read(trace), batch.gold)
            assert batch.target is not None
            surprise += PerplexityCounts.of(logits, batch.target)
        return surprise, links

    def draw(self, trace: Trace, examples: Sequence[Example], folder: Path) -> None:
        """A heat map: which tokens of the first example were written when what was looked at."""
        from regard.report.figures import heatmap, save

        example = examples[0]
        queries, keys = example.words["target"], example.words[next(iter(example.inputs))]
        shown = weights_read(trace)[0, : len(queries), : len(keys)]
        gold = None if example.gold is None else example.gold > 0
        names, title = ("answer", "input"), self.heading(example)
        figure = heatmap(shown, queries=queries, keys=keys, gold=gold, names=names, title=title)
        save(figure, folder / HEATMAP)


class Mapped(On):
    """An attention whose result is mapped to another width, for a decoder whose features are narrower.

    Args:
        module: the attention.
        dim: width of what it reads.
        out_dim: width of the result.
    """

    def __init__(self, module: nn.Module, dim: int, out_dim: int) -> None:
        super().__init__(module)
        self.map = nn.Linear(dim, out_dim)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        mapped: Tensor = self.map(self.module(*args, **kwargs))
        return mapped


class Dropped(nn.Dropout):
    """Dropout in a chain of feature models."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


def fitted(attention: nn.Module, inputs: Mapping[str, int], query_dim: int, out_dim: int) -> nn.Module:
    """An attention that gives what a decoder takes: itself, or with a map after it; one that does not fit is refused."""
    made = TaskModel(nn.Identity(), None, attention, Output())
    context = tried(made, inputs, lambda _: torch.ones(1, 2, query_dim), start=0)
    if not isinstance(context, Tensor) or context.shape[:-1] != (1, 2):
        got = f"{type(attention).__name__}, which does not give a context for each query"
        raise ValueError(refusal("attention", got, "one that reads for every token that is written"))
    return attention if context.shape[-1] == out_dim else Mapped(attention, context.shape[-1], out_dim)


def aer(links: AlignmentCounts) -> Score:
    """The alignment error rate of where each token that is told looks most."""
    details = {"precision": links.precision, "recall": links.recall}
    signature = signed(links="largest weight", of="tokens with known links", level="corpus")
    return Score("aer", links.error_rate, signature, higher=False, details=details)


def weights_read(trace: Trace) -> Tensor:
    """Weights (B, M, N) of the task's attention: of its first level, the mean over features and heads where there are several."""
    path = next((path for path in trace if path.split(".")[0] == "attention"), None)
    if path is None:
        raise ValueError(refusal("trace", ", ".join(trace) or "nothing", "calls of the task's attention"))
    return torch.cat([one_for_each_pair(told) for told in trace[path]], 1)
