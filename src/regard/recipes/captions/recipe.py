"""Captions: what is in a picture, in a sentence.

Real data: Flickr8k, photographs with five captions each. Without data, drawn scenes of two coloured shapes, in which it is known where
to look for which word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from regard._errors import refusal
from regard.evaluate.outer import Score, bleu, meteor
from regard.model import POSSIBLE, Batch, Chain, Example, TaskModel
from regard.model.features import Convolution2d, Patches
from regard.observe import Trace
from regard.recipes.captions.scenes import SIZE, Scene, scenes
from regard.recipes.data import Folder, rows_of
from regard.recipes.pictures import decoded, from_path
from regard.recipes.recipe import Judged, one_of
from regard.recipes.runs import HEATMAP
from regard.recipes.text import Vocabulary, words_of
from regard.recipes.writing import TRANSFORMER, Dropped, Writing, aer, weights_read
from regard.transformer import TransformerEncoder
from regard.transformer.generation import How

REGIONS = ("convolution", "patches")
SPLITS = {"train": "train", "dev": "validation", "test": "test"}
# Three of colours, and two that say where a pixel is.
CHANNELS = 5


class Captioned(NamedTuple):
    """A picture (3, H, W) from 0 to 1, its captions, and the scene that it was drawn from."""

    picture: Tensor
    captions: list[list[str]]
    scene: Scene | None = None


@dataclass(kw_only=True)
class Captions(Writing):
    """Say what is in a picture: regions of it, an attention, a decoder (Xu et al. 2015, https://arxiv.org/abs/1502.03044).

    Attributes:
        regions: what is looked at: `convolution`, or `patches` that are mapped one by one.
        at_least: how often a word must occur in the training captions to be known.
        train_size: scenes drawn for training, where there are no data.
    """

    name: ClassVar[str] = "captions"
    about: ClassVar[str] = "what is in a picture, in a sentence: Flickr8k"
    watch: ClassVar[str] = "bleu"
    alternatives: ClassVar[tuple[str, ...]] = (
        *("additive", "hard", "general", "sparsemax", "multi-head", TRANSFORMER),
    )
    made_up_only: ClassVar[tuple[str, ...]] = ("train_size",)

    regions: str = "convolution"
    at_least: int = 3
    train_size: int = 2000
    hidden_dim: int = 256
    embedding_dim: int = 128
    dropout: float = 0.5
    batch: int = 64
    steps: int = 1500
    every: int = 150
    patience: int = 6
    lr: float = 1e-3
    warmup: int = 100
    decay: str = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("regions", self.regions, REGIONS)

    @classmethod
    def usual(cls, attention: str, data: str | None) -> dict[str, Any]:
        if data is not None:
            return {"layers": 2, "dropout": 0.3} if attention == TRANSFORMER else {}
        small = {"hidden_dim": 64, "embedding_dim": 32, "dropout": 0.0, "at_least": 1, "beam": 3, "warmup": 20}
        return {**small, "steps": 400, "every": 100, "lr": 5e-3 if attention != TRANSFORMER else 2e-3}

    @cached_property
    def _captioned(self) -> dict[str, list[Captioned]]:
        if self.data is not None:
            return read(self.data)
        drawn = scenes(self.train_size, self.seed)
        return {split: [Captioned(s.drawn(), [s.words], s) for s in some] for split, some in drawn.items()}

    def learn(self) -> dict[str, Any]:
        train = self._captioned["train"]
        words = Vocabulary.learnt((words for one in train for words in one.captions), self.at_least)
        return {"words": words, "size": list(train[0].picture.shape[1:])}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.known["words"])

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the pictures."""
        rows, columns = self.known["size"]
        return rows, columns

    def examples(self, split: str) -> Sequence[Example]:
        """A caption each for training, a picture each to be judged by all its captions."""
        found = []
        for one in self._captioned[split]:
            for words in one.captions if split == "train" else one.captions[:1]:
                found.append(self._example(one, words))
        return found

    def _example(self, one: Captioned, words: list[str]) -> Example:
        numbers = self.vocabulary.numbers(words).tolist()
        names = {"target": [*words, "end"], "captions": [" ".join(caption) for caption in one.captions]}
        gold = None if one.scene is None else self._links(one.scene)
        return Example(
            {"picture": _placed(one.picture)}, torch.tensor([*numbers, len(self.vocabulary)]), gold=gold, words=names
        )

    def _links(self, scene: Scene) -> Tensor:
        """Colour and name of a shape may look at the regions that its place meets."""
        rows, columns = self._regions().grid
        gold = torch.zeros(len(scene.words) + 1, rows, columns, dtype=torch.int8)
        cell = SIZE // 3
        for t, shape in enumerate(scene.named()):
            if shape is not None:
                down, right = shape.corner
                inside = [
                    slice(at * count // SIZE, -(-(at + cell) * count // SIZE))
                    for at, count in ((down, rows), (right, columns))
                ]
                gold[t, inside[0], inside[1]] = POSSIBLE
        return gold.flatten(1)

    def _regions(self) -> Convolution2d | Patches:
        # Sixteen pixels of a photograph become one region, four of a drawn scene.
        layers = 4 if min(self.size) >= 64 else 2
        if self.regions == "patches":
            return Patches(CHANNELS, self.hidden_dim, self.size, 2**layers)
        widths = [max(8, self.hidden_dim >> k) for k in reversed(range(layers))]
        return Convolution2d(CHANNELS, widths, self.size)

    def build(self) -> TaskModel:
        h = self.hidden_dim
        parts: list[nn.Module] = [self._regions(), Dropped(self.dropout)]
        if self.attention == TRANSFORMER:
            position = None if self.regions == "patches" else "sinusoidal"
            parts.append(
                TransformerEncoder(h, self.heads, self.layers, position=position, norm="pre", dropout=self.dropout)
            )
        return self.writer(Chain(*parts), len(self.vocabulary) + 1, {"picture": h})

    def longest(self, batch: Batch) -> int:
        return 30

    def parse(self, text: str) -> Example:
        return Example({"picture": _placed(from_path(text, "RGB", self.size))})

    def right_answer(self, example: Example) -> list[str]:
        """All captions of the picture."""
        return list(example.words["captions"])

    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """BLEU and METEOR of what is found by beam search beside all captions of a picture, and perplexity of the first one."""
        return self._judged(model, examples, device, self.searched)

    def glance(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """BLEU of the likeliest word at every step, and perplexity."""
        return self._judged(model, examples, device, None)

    def _judged(
        self, model: TaskModel, examples: Sequence[Example], device: torch.device | str, how: How | None
    ) -> Judged:
        written = self.written(model, examples, device, how)
        answers = [" ".join(self.vocabulary.words[k] for k in tokens) for tokens in written]
        if not examples or examples[0].target is None:
            return Judged({}, answers)
        truth = [list(example.words["captions"]) for example in examples]
        surprise, links = self.told(model, examples, device)
        # Captions are words already, and without case.
        scores: dict[str, Score] = {
            "bleu": bleu(answers, truth, tokenize="none"),
            "bleu1": bleu(answers, truth, tokenize="none", max_order=1),
            "perplexity": surprise.score(),
        }
        if examples[0].gold is not None:
            scores["aer"] = aer(links)
        told = Judged.of(scores, answers)
        if how is None:
            return told
        try:
            score = meteor(answers, truth)
        except ImportError as error:
            told.signatures["meteor"] = f"not computed: {error}"
        else:
            told.metrics["meteor"], told.signatures["meteor"] = float(score), score.signature
        return told

    def draw(self, trace: Trace, examples: Sequence[Example], folder: Path) -> None:
        """The first picture, and what was looked at for each word of its caption."""
        from regard.report.figures import picture_maps, save

        example, (rows, columns) = examples[0], self._regions().grid
        words = example.words["target"]
        weights = weights_read(trace)[0, : len(words)].unflatten(1, (rows, columns))
        # A word may come twice.
        maps = {f"{k} {word}": weights[k - 1] for k, word in enumerate(words, 1)}
        picture = example.inputs["picture"][:3] / 4 + 0.5
        save(picture_maps(picture, maps, title=self.heading(examples[0])), folder / HEATMAP)


def _placed(picture: Tensor) -> Tensor:
    """With two channels more, row and column of each pixel (Liu et al. 2018, https://arxiv.org/abs/1807.03247), all from -2 to 2.

    Filters do not know where they are, and captions tell of it: left of, above.
    """
    places = torch.meshgrid(*(torch.linspace(0, 1, side) for side in picture.shape[1:]), indexing="ij")
    return (torch.cat([picture, torch.stack(places)]) - 0.5) * 4


def read(data: str) -> dict[str, list[Captioned]]:
    """Pictures and captions by split, from `captions.jsonl` and the pictures that it names."""
    files = Folder(data).collected(".jpg", ".jpeg", ".png", "captions.jsonl")
    fix = "Fix: docs/data.md shows the files of every data set."
    listed = [path for path in files if PurePosixPath(path).name == "captions.jsonl"]
    if len(listed) != 1:
        raise ValueError(refusal("data", repr(data), "a folder or archive that has one captions.jsonl", fix))
    pictures = {PurePosixPath(path).name: content for path, content in files.items()}
    found: dict[str, list[Captioned]] = {split: [] for split in SPLITS.values()}
    for number, row in enumerate(rows_of(files[listed[0]], listed[0]), 1):
        where = f"{listed[0]}, line {number}"
        image, split, captions = (row.get(key) for key in ("image", "split", "captions"))
        if split not in SPLITS or not isinstance(captions, list) or not captions or image not in pictures:
            expected = f"an image among the files, a split ({', '.join(SPLITS)}) and captions"
            raise ValueError(refusal("data", f"{where}: {image!r}, {split!r}", expected, fix))
        words = [words_of(str(caption)) for caption in captions]
        # Pictures of one size, so that they can stand in one batch.
        picture = decoded(pictures[image], str(image), "RGB", (96, 96)).float() / 255
        found[SPLITS[split]].append(Captioned(picture, [some for some in words if some]))
    missing = [split for split, some in found.items() if not some]
    if missing:
        raise ValueError(refusal("data", repr(data), f"pictures of the {' and of the '.join(missing)}", fix))
    return found


RECIPE = Captions
