"""What a recipe is: a task, its data, its model and how it is judged, with a configuration that is plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard._errors import nearest, refusal
from regard.model import Batch, Example, TaskModel, collate

RECIPES = {"dates": "regard.recipes.dates"}
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Judged:
    """How well a model does: metrics, and for each example what it answered."""

    metrics: dict[str, float]
    answers: list[Any]


@dataclass(kw_only=True)
class Recipe:
    """A task with everything it needs; the fields are its configuration, and every one of them can be set from outside.

    Attributes:
        attention: name of a mechanism.
        options: of the attention, such as `score`, `window`.
        seed: of everything that is random.
        batch: examples of an update, over all processes.
        steps: number of updates.
        every: updates between two evaluations, after each of which the state is kept.
        patience: evaluations without improvement after which training ends.
        lr: learning rate of Adam.
        clip: largest norm of a gradient.
        data: folder of the real data; generated data where there is none.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    watch: ClassVar[str]  # the metric that says which state is the best
    lower: ClassVar[bool] = False  # whether less of it is better
    alternatives: ClassVar[tuple[str, ...]] = ()

    attention: str = "additive"
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    batch: int = 64
    steps: int = 1000
    every: int = 100
    patience: int = 5
    lr: float = 1e-3
    clip: float = 1.0
    data: str | None = None

    def examples(self, split: str) -> Sequence[Example]:
        """Those of `train`, `validation` or `test`."""
        raise NotImplementedError

    def build(self) -> TaskModel:
        """A model with fresh parameters."""
        raise NotImplementedError

    def parse(self, text: str) -> Example:
        """An input of a user's own, without a target."""
        raise ValueError(refusal("recipe", repr(self.name), "one that reads text"))

    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """Metrics of a model on examples."""
        raise NotImplementedError

    def batches(self, examples: Sequence[Example], size: int = 256) -> list[Batch]:
        """All examples in order."""
        return [
            collate([examples[k] for k in range(i, min(i + size, len(examples)))])
            for i in range(0, len(examples), size)
        ]

    def training_batch(self, examples: Sequence[Example], step: int, rank: int = 0, world: int = 1) -> Batch:
        """The examples of an update: a function of seed and step alone, so that a run can be resumed anywhere."""
        generator = torch.Generator().manual_seed(self.seed_of(step))
        chosen = torch.randint(len(examples), (self.batch,), generator=generator)[rank::world]
        return collate([examples[k] for k in chosen.tolist()])

    def seed_of(self, step: int) -> int:
        """What everything random of an update is drawn from."""
        return self.seed * 1_000_003 + step

    def as_dict(self) -> dict[str, Any]:
        """The configuration as plain data."""
        return {"recipe": self.name, **dataclasses.asdict(self)}


def recipe(name: str) -> type[Recipe]:
    """The recipe of a name; an unknown one is answered with the nearest."""
    if name not in RECIPES:
        raise ValueError(refusal("recipe", repr(name), "one of " + ", ".join(RECIPES), nearest(name, RECIPES)))
    found: type[Recipe] = import_module(RECIPES[name]).RECIPE
    return found


def configured(name: str, settings: Mapping[str, Any]) -> Recipe:
    """A recipe with some of its fields set; `attention.x` sets an option of the attention.

    Example:
        >>> configured("dates", {"steps": "20", "attention": "general", "attention.dropout": "0.1"}).options
        {'dropout': 0.1}
    """
    cls = recipe(name)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for key, value in settings.items():
        head, _, rest = key.partition(".")
        if head == "attention" and rest:
            options[rest] = plain(value)
        elif key == "options" and isinstance(value, Mapping):
            options |= value
        elif key in fields:
            values[key] = _typed(key, value, fields[key].default)
        elif key != "recipe":
            raise ValueError(
                refusal(key, repr(value), f"a setting of {name!r}", nearest(key, [*fields, "attention.score"]))
            )
    made = cls(**values, options=options)
    for key in ("batch", "steps", "every", "patience"):
        if getattr(made, key) < 1:
            raise ValueError(refusal(key, getattr(made, key), "a whole number >= 1"))
    return made


def plain(value: Any) -> Any:
    """A number, True, False or None where a string reads as one."""
    if not isinstance(value, str):
        return value
    named = {"true": True, "false": False, "none": None, "null": None}
    if value.lower() in named:
        return named[value.lower()]
    for read in (int, float):
        try:
            return read(value)
        except ValueError:
            continue
    return value


def _typed(key: str, value: Any, default: Any) -> Any:
    """The value as the kind of number or text that the field holds."""
    value = plain(value) if not isinstance(default, str) else value
    if isinstance(default, bool) or default is None or default is dataclasses.MISSING:
        return value
    kind: Callable[[Any], Any] = type(default)
    whole = isinstance(default, int) and isinstance(value, float) and value != int(value)
    if isinstance(value, bool) or whole or not isinstance(value, int | float | str):
        raise ValueError(refusal(key, repr(value), f"a value like {default!r}"))
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ValueError(refusal(key, repr(value), f"a value like {default!r}")) from None


def without_padding(tokens: Tensor, end: int) -> list[list[int]]:
    """Sequences as lists, up to their end."""
    found = []
    for row in tokens.tolist():
        stop = next((k for k, token in enumerate(row) if token in (end, -1)), len(row))
        found.append(row[:stop])
    return found
