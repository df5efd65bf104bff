"""The task model: features, a query, an attention, an output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from regard._errors import refusal
from regard.model.batch import Batch
from regard.model.features import mask_after
from regard.model.naming import Available
from regard.model.outputs import Output


class TaskModel(nn.Module):
    r"""The survey's task model (Brauwers & Frasincar 2023, https://arxiv.org/abs/2203.14263): four parts, each replaceable.

    $$F = \mathrm{features}(X), \qquad q = \mathrm{query}(F, \dots), \qquad c = \mathrm{attention}(q, F), \qquad
      \hat y = \mathrm{output}(c)$$

    A module gets what it asks for: its arguments are the inputs, features and variables of those names (`On` gives them other names).
    An output model that works step by step (a decoder) owns the loop: it is given a function that asks and reads, and calls it with its
    state.

    Args:
        features: a module that takes an input and its mask and gives (..., N, d), for all inputs; or one for each input, by name.
        query: a module of the query family; None where the attention needs no query.
        attention: any mechanism; its weights are at `attention` under a trace.
        output: an `Output`, such as `Classifier`.

    Example:
        >>> import torch, regard as rg
        >>> from regard.model import Batch, Classifier, Embedding
        >>> read = rg.Attention("additive", query_dim=4, key_dim=8, hidden_dim=8)
        >>> model = TaskModel(Embedding(20, 8), rg.LearnableQuery(4), read, Classifier(8, 3))
        >>> model(Batch({"tokens": torch.randint(20, (2, 7))})).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        features: nn.Module | Mapping[str, nn.Module],
        query: nn.Module | None,
        attention: nn.Module,
        output: Output,
    ) -> None:
        super().__init__()
        for name, part in (("attention", attention), ("output", output), ("query", query)):
            if not isinstance(part, nn.Module) and not (part is None and name == "query"):
                raise TypeError(refusal(name, type(part).__name__, "a module"))
        if not isinstance(output, Output):
            raise TypeError(refusal("output", type(output).__name__, "an Output, such as Classifier"))
        self.features = features if isinstance(features, nn.Module) else nn.ModuleDict(features)
        self.by_name = not isinstance(features, nn.Module)
        self.query, self.attention, self.output = query, attention, output

    def forward(self, batch: Batch) -> Tensor:
        """What the output model predicts, such as logits."""
        found, query, output = self.encode(batch), self.query, self.output
        if output.stepwise:
            result: Tensor = output(self.reader(found), found, batch)
            return result
        if query is None:
            context, asking = self._read(found, None)
        else:
            arguments, asking = found.matched(query, "query")
            context = self.read(found, query(**arguments))
        # A context for each token of an input stands for that of the input which asked.
        reads = tuple(asking[:1])
        result = output(context, Available(found.inputs, found.masks, found.values, reads, found.filled))
        return result

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        """Of a prediction beside the target."""
        return self.output.loss(prediction, batch)

    def encode(self, batch: Batch) -> Available:
        """The features of every input, and which of them are real: a feature model that changes the length has a `mask_after`."""
        features, masks, filled = dict(batch.inputs), dict(batch.masks), []
        for name, x in batch.inputs.items():
            if self.by_name and name not in self.features:  # type: ignore[operator]
                continue
            module = self.features[name] if self.by_name else self.features  # type: ignore[index]
            mask = batch.masks.get(name)
            features[name] = module(x, mask)
            if getattr(module, "fills_padding", False):
                filled.append(name)
            after = mask_after(module, mask)
            if after is not None:
                masks[name] = after
        return Available(features, masks, batch.variables, filled=frozenset(filled))

    def read(self, found: Available, query: Tensor | None, **more: Any) -> Tensor:
        """Call the attention with a query."""
        return self._read(found, query, **more)[0]

    def _read(self, found: Available, query: Tensor | None, **more: Any) -> tuple[Tensor, list[str]]:
        """What the attention gives, and the names of the inputs that it was given."""
        values = {**found.values, **more, "query": query}
        attention = self.attention
        arguments, given = found.with_values(values).matched(attention, "attention")
        context: Tensor = attention(**arguments)
        return context, given

    def reader(self, found: Available) -> Any:
        """A function from a decoder's state, and the position of its first step, to what the attention reads."""

        def read(state: Tensor, start: int = 0) -> Tensor:
            if self.query is None:
                asked: Tensor = state
            else:
                values = {**found.values, "state": state}
                available = Available(found.inputs, found.masks, values)
                asked = self.query(**available.arguments(self.query, "query"))
            return self.read(found, asked, start=start)

        return read
