"""The recipe: a U-Net with attention gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard import catalog
from regard.evaluate.outer import ClassCounts, Score
from regard.feature import AttentionGate
from regard.model import DenseMap, Example, TaskModel
from regard.observe import Trace
from regard.recipes.choice import make_attention
from regard.recipes.pictures import from_path
from regard.recipes.recipe import Judged, Recipe, one_of
from regard.recipes.runs import HEATMAP
from regard.recipes.segment.data import Labelled, Pictures, camvid, drawn, membrane
from regard.recipes.segment.unet import UNet

SETS = ("camvid", "membrane")


@dataclass(kw_only=True)
class Segment(Recipe):
    """The class of every pixel: a small U-Net whose skip connections pass attention gates, or whose bottom attends to itself.

    With any attention but `attention-gate` skip connections pass as they are, and the coarsest places attend to each other.

    Attributes:
        set: `camvid` or `membrane`, of the data folder.
        base_dim: channels of the finest level; each level has twice as many as the one before.
        levels: of the U-Net.
        turned: also train on mirrored pictures (and, for membranes, on turned ones).
        train_size: pictures drawn for training, where there are no data.
    """

    name: ClassVar[str] = "segment"
    about: ClassVar[str] = "the class of every pixel: CamVid, membranes"
    watch: ClassVar[str] = "iou"
    alternatives: ClassVar[tuple[str, ...]] = ("attention-gate", "self-attention", "transformer-encoder")
    made_up_only: ClassVar[tuple[str, ...]] = ("train_size",)

    attention: str = "attention-gate"
    set: str = "camvid"
    base_dim: int = 16
    levels: int = 3
    turned: bool = True
    train_size: int = 200
    batch: int = 8
    steps: int = 3000
    every: int = 200
    patience: int = 8
    lr: float = 2e-3
    warmup: int = 50
    decay: str = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("set", self.set, SETS)

    @cached_property
    def pictures(self) -> Pictures:
        if self.data is None:
            return drawn(self.train_size, self.seed)
        return camvid(self.data) if self.set == "camvid" else membrane(self.data)

    def learn(self) -> dict[str, Any]:
        some = self.pictures.split["train"]
        every = torch.stack([picture.float().mean((1, 2)) / 255 for picture, _ in some])
        spread = torch.stack([picture.float().std((1, 2)) / 255 for picture, _ in some])
        shape = some[0][0].shape
        return {
            "classes": list(self.pictures.classes),
            "channels": shape[0],
            "size": list(shape[1:]),
            "mean": every.mean(0).tolist(),
            "spread": spread.mean(0).clamp(min=1e-3).tolist(),
        }

    def examples(self, split: str) -> Sequence[Example]:
        pairs = self.pictures.split[split]
        if split == "train" and self.turned:
            pairs = [
                other for pair in pairs for other in _turned(pair, square=self.data is None or self.set == "membrane")
            ]
        return [Example({"image": self._normalised(picture.float() / 255)}, classes) for picture, classes in pairs]

    def _normalised(self, picture: Tensor) -> Tensor:
        mean, spread = (torch.tensor(self.known[name])[:, None, None] for name in ("mean", "spread"))
        return (picture - mean) / spread

    def build(self) -> TaskModel:
        rows, columns = self.known["size"]
        widths = [self.base_dim * 2**k for k in range(self.levels)]
        gated = catalog.find(self.attention, argument="attention").cls is AttentionGate

        def gate(dim: tuple[int, int]) -> nn.Module:
            return make_attention(self.attention, {"dim": dim, **self.options})

        # A bottom needs heads of its own width, and a place one query.
        own = {"heads": 4, "layers": 1} if not gated else {}
        d = widths[-1]
        bottom = None if gated else make_attention(self.attention, self.options, dim=d, key_dim=d, query_dim=d, **own)
        net = UNet(self.known["channels"], widths, gate if gated else None, bottom)
        output = DenseMap(net.out_dim, len(self.known["classes"]), (rows // 2, columns // 2), scale=2)
        return TaskModel({}, None, net, output)

    def parse(self, text: str) -> Example:
        """A picture, scaled to the size of the others."""
        rows, columns = self.known["size"]
        mode = "RGB" if self.known["channels"] == 3 else "L"
        return Example({"image": self._normalised(from_path(text, mode, (rows, columns)))})

    @torch.no_grad()
    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """IoU of every class and in the mean, Dice, accuracy of pixels; an answer is the share of the picture that each class takes."""
        counts, answers = ClassCounts(), []
        names = self.known["classes"]
        for batch in self.batches(examples, 16):
            decided = model.output.decide(model(batch.to(device))).cpu()
            for one in decided:
                shares = one.flatten().bincount(minlength=len(names)).double() / one.numel()
                answers.append({name: round(share, 4) for name, share in zip(names, shares.tolist(), strict=True)})
            if batch.target is not None:
                counts += ClassCounts.of(decided, batch.target, classes=len(names), ignore=-1)
        if not counts.true:
            return Judged({}, answers)
        scores: dict[str, Score] = {name: counts.score(name, ignore=-1) for name in ("iou", "dice", "accuracy")}
        for k, name in enumerate(names):
            scores[f"iou_{name}"] = counts.score("iou", "binary", k, ignore=-1)
        return Judged.of(scores, answers)

    def draw(self, trace: Trace, examples: Sequence[Example], folder: Path) -> None:
        """The first picture, and what the gates let through, or what the middle of the bottom looked at."""
        from regard.report.figures import picture_maps, save

        image = examples[0].inputs["image"]
        mean, spread = (torch.tensor(self.known[name])[:, None, None] for name in ("mean", "spread"))
        rows, columns = (side // 2 for side in image.shape[1:])
        maps = {}
        for path, calls in trace.items():
            weights = calls[0].weights[0]
            if path.startswith("attention.gates"):
                level = int(path.split(".")[2])
                maps[f"gate {level}"] = weights.reshape(rows >> level, columns >> level)
            else:
                seen = weights.reshape(-1, *weights.shape[-2:]).mean(0)
                coarse = (rows >> (self.levels - 1), columns >> (self.levels - 1))
                maps[f"{path}, of the middle"] = seen[len(seen) // 2 + coarse[1] // 2].reshape(coarse)
        title = self.heading(examples[0])
        save(picture_maps((image * spread + mean).clamp(0, 1), maps, title=title), folder / HEATMAP)


def _turned(pair: Labelled, square: bool) -> list[Labelled]:
    """A picture and its mirror image; where no side is up, also both turned."""
    both = [pair, (pair[0].flip(-1), pair[1].flip(-1))]
    quarters = range(4) if square else range(1)
    return [(picture.rot90(k, (-2, -1)), classes.rot90(k, (-2, -1))) for picture, classes in both for k in quarters]


RECIPE = Segment
