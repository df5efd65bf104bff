"""What a recipe is: a task, its data, its model and how it is judged, with a configuration that is plain data."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard import catalog
from regard._errors import nearest, refusal
from regard.evaluate.outer import Score
from regard.model import Batch, Example, TaskModel, collate
from regard.observe import Trace
from regard.recipes.order import Order

RECIPES = {
    "aspect": "regard.recipes.aspect",
    "captions": "regard.recipes.captions",
    "dates": "regard.recipes.dates",
    "denoise": "regard.recipes.denoise",
    "digits": "regard.recipes.digits",
    "documents": "regard.recipes.documents",
    "duplicate": "regard.recipes.duplicate",
    "facts": "regard.recipes.facts",
    "language": "regard.recipes.language",
    "nodes": "regard.recipes.nodes",
    "pairs": "regard.recipes.pairs",
    "points": "regard.recipes.points",
    "questions": "regard.recipes.questions",
    "recommend": "regard.recipes.recommend",
    "segment": "regard.recipes.segment",
    "sentiment": "regard.recipes.sentiment",
    "speech": "regard.recipes.speech",
    "translate": "regard.recipes.translate",
}
_LARGEST = 1e9
SPLITS = ("train", "validation", "test")
DECAYS = ("none", "linear", "cosine", "inverse-sqrt")
# Not 16-true: what Adam divides by, squares of gradients, vanishes in float16, and the weights with it.
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true")


@dataclass(frozen=True)
class Judged:
    """How well a model does.

    Attributes:
        metrics: by name.
        answers: what it answered, for each example; plain data.
        signatures: by name of the metric, everything that its number depends on beside the answers.
    """

    metrics: dict[str, float]
    answers: list[Any]
    signatures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A score is a number with a signature; where only the number is asked for, it is one.
        object.__setattr__(self, "metrics", {name: float(value) for name, value in self.metrics.items()})

    @staticmethod
    def of(scores: Mapping[str, Score], answers: list[Any]) -> Judged:
        """From scores by name."""
        return Judged(
            {name: float(score) for name, score in scores.items()},
            answers,
            {name: score.signature for name, score in scores.items()},
        )


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
        warmup: updates over which it rises from zero.
        decay: what becomes of it then: `none`, `linear` or `cosine` (to zero at the last update), `inverse-sqrt`.
        weight_decay: of AdamW.
        clip: largest norm of a gradient.
        precision: as Lightning names it: `32-true`, `bf16-mixed`, …
        data: folder of the real data; generated data where there is none.
        limit: examples of each split at most, for a quick try: a draw that is the same for every seed.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    watch: ClassVar[str]  # the metric that says which state is the best
    lower: ClassVar[bool] = False  # whether less of it is better
    alternatives: ClassVar[tuple[str, ...]] = ()  # attentions that make sense here
    made_up_only: ClassVar[tuple[str, ...]] = ()  # settings of generated data, which real data do not heed
    by_length: ClassVar[bool] = False  # whether the examples of an update should be equally long, nearly

    attention: str = "additive"
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    batch: int = 64
    steps: int = 1000
    every: int = 100
    patience: int = 5
    lr: float = 1e-3
    warmup: int = 0
    decay: str = "none"
    weight_decay: float = 0.0
    clip: float = 1.0
    precision: str = "32-true"
    data: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        one_of("decay", self.decay, DECAYS)
        one_of("precision", self.precision, PRECISIONS)
        if not isinstance(self.data, str | None):
            raise ValueError(refusal("data", repr(self.data), "a folder"))
        sizes = [key for key in ("train_size", "test_size") if hasattr(self, key)]
        self.at_least_one("batch", "steps", "every", "patience", *sizes)
        for key in ("lr", "clip"):
            # More than any that trains, and products of it are still numbers.
            if not 0 < getattr(self, key) <= _LARGEST:
                raise ValueError(refusal(key, getattr(self, key), f"a number > 0, at most {_LARGEST:g}"))
        for key in ("warmup", "weight_decay"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(refusal(key, getattr(self, key), "a number >= 0"))
        if self.limit is not None and (type(self.limit) is not int or self.limit < 1):
            raise ValueError(refusal("limit", repr(self.limit), "a whole number >= 1"))
        # Everything random is drawn from products of the seed, which must stay whole numbers of 64 bits.
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(refusal("seed", self.seed, "a whole number from 0 to 4294967295"))
        try:
            catalog.find(self.attention, argument="attention")
        except ValueError as error:
            if not self.alternatives:
                raise
            near = nearest(self.attention, [entry.name for entry in catalog.entries()], listed=True)
            fix = f"{near} {self.fitting()}".strip()
            raise ValueError(
                refusal("attention", repr(self.attention), "a name that `regard list` shows", fix)
            ) from error

    @classmethod
    def fitting(cls) -> str:
        """Which attentions are known to fit, as a message says it."""
        return f"Known to fit: {', '.join(cls.alternatives)}." if cls.alternatives else ""

    def at_least_one(self, *keys: str) -> None:
        """Refuse settings that count something and are less than one."""
        for key in keys:
            if getattr(self, key) < 1:
                raise ValueError(refusal(key, getattr(self, key), "a whole number >= 1"))

    @classmethod
    def usual(cls, attention: str, data: str | None) -> dict[str, Any]:
        """Settings that suit an attention, or generated data where there are no others; what is said of them goes first."""
        return {}

    @property
    def known(self) -> dict[str, Any]:
        """What was learnt from the training examples before training; a run keeps it, and needs the data no more."""
        if "_known" not in self.__dict__:
            self.__dict__["_known"] = self.learn()
        found: dict[str, Any] = self.__dict__["_known"]
        return found

    @known.setter
    def known(self, known: dict[str, Any]) -> None:
        self.__dict__["_known"] = known

    def learn(self) -> dict[str, Any]:
        """Plain data that `build` and `parse` need, such as a vocabulary and the names of the classes."""
        return {}

    def examples(self, split: str) -> Sequence[Example]:
        """Those of `train`, `validation` or `test`."""
        raise NotImplementedError

    def cached(self, split: str) -> Sequence[Example]:
        """The examples of a split, read or made once; `limit` of them."""
        known: dict[str, Sequence[Example]] = self.__dict__.setdefault("_examples", {})
        if split not in known:
            found = self.examples(split)
            within = self.limit is None or len(found) <= self.limit
            known[split] = found if within else [found[k] for k in self.drawn(split, len(found))]
        return known[split]

    def drawn(self, split: str, count: int) -> Sequence[int]:
        """Numbers of the `limit` examples that stand for so many, in their order; not the first ones: files may be sorted by class."""
        return sorted(random.Random(f"limit {split}").sample(range(count), self.limit or count))

    def build(self) -> TaskModel:
        """A model with fresh parameters."""
        raise NotImplementedError

    def initialise(self, model: TaskModel) -> None:
        """Give a fresh model what lies in files, such as pretrained vectors; a resumed or trained one has it already."""

    def groups(self, model: TaskModel) -> list[dict[str, Any]]:
        """Parameters with the learning rate of each group."""
        return [{"params": [p for p in model.parameters() if p.requires_grad], "lr": self.lr}]

    def rate(self, update: int) -> float:
        """The share of the learning rate at an update, the first of which is 0."""
        if update < self.warmup:
            return (update + 1) / self.warmup
        left = 1 - (update - self.warmup) / max(1, self.steps - self.warmup)
        if self.decay == "linear":
            return max(left, 0.0)
        if self.decay == "cosine":
            return (1 - math.cos(math.pi * max(left, 0.0))) / 2
        return (max(1, self.warmup) / (update + 1)) ** 0.5 if self.decay == "inverse-sqrt" else 1.0

    def parse(self, text: str) -> Example:
        """An input of a user's own, without a target."""
        raise ValueError(refusal("recipe", repr(self.name), "one that reads text"))

    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """Metrics of a model on examples."""
        raise NotImplementedError

    def right_answer(self, example: Example) -> Any:
        """What `judge` should have answered: the words of the target where it has some, or a number; nothing where it is large."""
        if "target" in example.words:
            return list(example.words["target"])
        return example.target.tolist() if example.target is not None and example.target.numel() <= 64 else None

    def glance(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """What is watched while training: `judge`, or something cheaper of the same names."""
        return self.judge(model, examples, device)

    def draw(self, trace: Trace, examples: Sequence[Example], folder: Path) -> None:
        """Draw what the attention looked at in recorded examples into the run folder."""
        from regard.recipes.look import draw

        draw(trace, examples, folder, self.heading(examples[0]))

    def heading(self, example: Example) -> str:
        """What stands above the figure of an example."""
        return f"{self.name}: {self.attention}"

    def batches(self, examples: Sequence[Example], size: int = 256) -> list[Batch]:
        """All examples in order."""
        return [
            collate([examples[k] for k in range(i, min(i + size, len(examples)))])
            for i in range(0, len(examples), size)
        ]

    def order(self, examples: Sequence[Example]) -> Order:
        """Which examples each update sees."""
        lengths = [size(examples[k]) for k in range(len(examples))] if self.by_length else None
        return Order(len(examples), self.batch, self.seed, lengths)

    def seed_of(self, step: int) -> int:
        """What everything random of an update is drawn from."""
        return self.seed * 1_000_003 + step

    @classmethod
    def path(cls) -> str:
        """What names the recipe on the command line: its name, or for one's own `module:Class`."""
        known = RECIPES.get(cls.name)
        inside = known is not None and (cls.__module__ == known or cls.__module__.startswith(f"{known}."))
        return cls.name if inside else f"{cls.__module__}:{cls.__qualname__}"

    @property
    def label(self) -> str:
        """The attention and what was set of it, for names and tables."""
        return "-".join([self.attention, *(f"{key}={value}" for key, value in self.options.items())])

    @property
    def data_label(self) -> str:
        """Where the examples come from: `generated`, or what is chosen of the data folder, which may be nothing."""
        if self.data is None:
            return "generated"
        return " ".join(str(getattr(self, key)) for key in ("set", "task") if hasattr(self, key))

    def as_dict(self) -> dict[str, Any]:
        """The configuration as plain data."""
        return {"recipe": self.path(), **dataclasses.asdict(self)}


def recipe(name: str) -> type[Recipe]:
    """The recipe of a name, or `module:Class` for one's own; an unknown one is answered with the nearest."""
    if not isinstance(name, str):
        raise ValueError(refusal("recipe", repr(name), "a name, such as dates"))
    if ":" in name:
        return _own(name)
    if name not in RECIPES:
        listed = "one of " + ", ".join(RECIPES) + ", or module:Class for one of your own"
        raise ValueError(refusal("recipe", repr(name), listed, nearest(name, RECIPES, listed=True)))
    found: type[Recipe] = import_module(RECIPES[name]).RECIPE
    return found


def _own(name: str) -> type[Recipe]:
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in module.split(".")):
        fix = "Fix: run in the folder of my_module.py, and name it my_module:Class."
        raise ValueError(refusal("recipe", repr(name), "a module, in dots and without a path, and a class in it", fix))
    _import_from_here()
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        fix = "Fix: run where the module can be imported, or put its folder into PYTHONPATH."
        raise ValueError(refusal("recipe", f"{name!r}: {error}", "a module and a class in it", fix)) from error
    if not isinstance(found, type) or not issubclass(found, Recipe):
        raise ValueError(refusal("recipe", repr(name), "a subclass of Recipe"))
    return found


def _import_from_here() -> None:
    """Modules of the working directory can be imported, as with `python -m`, and unless Python was told not to."""
    if sys.flags.safe_path:
        return
    try:
        here = os.getcwd()
    except OSError:  # it was deleted
        return
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)


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
        head, _, rest = str(key).partition(".")
        if head == "attention" and rest:
            options[rest] = plain(value)
        elif key == "options":
            if not isinstance(value, Mapping):
                raise ValueError(refusal("options", repr(value), "options of the attention by name"))
            for option in value:
                if not isinstance(option, str):
                    raise ValueError(refusal("options", f"{option!r} as a name", "names of options of the attention"))
            options |= value
        elif key == "attention" and isinstance(value, Mapping):
            fix = "Fix: attention: NAME, and its parts as attention.score: …, attention.align: …"
            raise ValueError(refusal("attention", repr(dict(value)), "the name of a mechanism", fix))
        elif key in fields:
            values[key] = _typed(key, value, fields[key].default)
        elif key != "recipe":
            raise ValueError(
                refusal(
                    str(key), repr(value), f"a setting of {name!r}", nearest(str(key), [*fields, "attention.score"])
                )
            )
    usual = cls.usual(values.get("attention", cls.attention), values.get("data"))
    return cls(**{**usual, **values}, options=options)


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
    whole = isinstance(default, int) and isinstance(value, float) and not value.is_integer()
    if isinstance(value, bool) or whole or not isinstance(value, int | float | str):
        raise ValueError(refusal(key, repr(value), f"a value like {default!r}"))
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(refusal(key, repr(value), f"a value like {default!r}")) from None


def one_of(key: str, value: str, known: Sequence[str]) -> str:
    """The value of a setting that has few; another is answered with the nearest."""
    if value not in known:
        raise ValueError(refusal(key, repr(value), "one of " + ", ".join(known), nearest(value, known, listed=True)))
    return value


def size(example: Example) -> int:
    """Length of an example: of its longest input."""
    return max(len(x) for x in example.inputs.values())


def without_padding(tokens: Tensor, end: int) -> list[list[int]]:
    """Sequences as lists, up to their end."""
    found = []
    for row in tokens.tolist():
        stop = next((k for k, token in enumerate(row) if token in (end, -1)), len(row))
        found.append(row[:stop])
    return found
