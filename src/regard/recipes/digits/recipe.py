"""The recipe: capsules by routing, and attentions on the places of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from regard.model import CapsuleClassifier, Chain, Classifier, Example, On, Output, TaskModel
from regard.observe import Trace
from regard.query import CapsuleDecoder, CapsuleLoss, Capsules, LearnableQuery
from regard.recipes.choice import assembled, make_attention
from regard.recipes.classification import Classification
from regard.recipes.digits.data import Pictures, mnist, small
from regard.recipes.digits.parts import Places, PrimaryCapsules, Shifts, Strokes
from regard.recipes.look import one_for_each_pair
from regard.recipes.pictures import from_path
from regard.recipes.runs import HEATMAP


@dataclass(kw_only=True)
class Digits(Classification):
    """Which digit is it: two convolutions, capsules by routing (or any attention on places), the surest capsule.

    Without data these are the 1797 pictures of 8 x 8 that come with scikit-learn. `--attention hard --set
    attention.gradient=reinforce` looks at one place alone, and learns where by reward.

    Attributes:
        hidden_dim: channels between the convolutions.
        place_dim: width of a place.
        capsule_dim: width of a primary capsule, of which a place has `place_dim / capsule_dim`.
        shift: by how many pixels, at most, pictures are moved while training.
        train_size: pictures of MNIST for training and validation.
    """

    name: ClassVar[str] = "digits"
    about: ClassVar[str] = "which digit a picture shows: MNIST, or the small ones of scikit-learn; nothing to download"
    alternatives: ClassVar[tuple[str, ...]] = (
        *("dynamic-routing-capsules", "capsule-based-attention", "multi-head-capsules", "additive", "hard"),
        "self-attention",
    )

    attention: str = "dynamic-routing-capsules"
    hidden_dim: int = 32
    place_dim: int = 64
    capsule_dim: int = 8
    shift: int = 1
    train_size: int = 4000
    batch: int = 32
    steps: int = 1500
    every: int = 100
    patience: int = 6
    lr: float = 3e-3
    decay: str = "cosine"

    @property
    def data_label(self) -> str:
        return "scikit-learn" if self.data is None else super().data_label

    @cached_property
    def pictures(self) -> dict[str, Pictures]:
        return small() if self.data is None else mnist(self.data, self.train_size)

    def learn(self) -> dict[str, Any]:
        return {"classes": [str(k) for k in range(10)], "size": self.pictures["train"].image.shape[-1]}

    def examples(self, split: str) -> Sequence[Example]:
        found = self.pictures[split]
        return [Example({"image": image}, digit) for image, digit in zip(found.image, found.digit, strict=True)]

    def build(self) -> TaskModel:
        size, d = self.known["size"], self.place_dim
        see = Strokes(size, self.hidden_dim, d)
        routed = self.attention == "dynamic-routing-capsules"
        if routed:
            primary = PrimaryCapsules(self.capsule_dim)
            inputs = see.grid**2 * (d // self.capsule_dim)
            widths = {"dim": (self.capsule_dim, 2 * self.capsule_dim), "capsules": 10, "inputs": inputs}
            attention: Any = On(make_attention(self.attention, {**widths, **self.options}), u="image")
            features = Chain(Shifts(self.shift), see, primary)
        else:
            own = {"heads": 4} if self.attention == "multi-head-capsules" else {}
            dims = {"query_dim": d, "key_dim": d, "value_dim": d, "dim": d, "hidden_dim": d // 2, "classes": 10}
            attention = make_attention(self.attention, {**own, **self.options}, **dims)
            features = Chain(Shifts(self.shift), see, Places(see.grid**2, d))
        wide = self.capsule_dim if routed else d
        return assembled(features, attention, self._output, {"image": wide}, lambda: LearnableQuery(d))

    def _output(self, context: Any) -> Output:
        """The surest capsule where there are capsules, with a decoder where they are vectors; a linear map otherwise."""
        if isinstance(context, Capsules):
            return CapsuleClassifier(CapsuleLoss(weight=0.0))
        if self.attention == "dynamic-routing-capsules":
            drawn = self.known["size"] ** 2
            decoder = CapsuleDecoder(10, context.shape[-1], drawn, hidden=(drawn // 2 + 32, drawn // 2 + 96))
            return CapsuleClassifier(decoder=decoder, drawn="image")
        return Classifier(context.shape[-1], 10)

    def parse(self, text: str) -> Example:
        """A picture of a bright digit on a dark ground, scaled to the size of the others."""
        size = self.known["size"]
        return Example({"image": from_path(text, "L", (size, size))})

    def draw(self, trace: Trace, examples: Sequence[Example], folder: Path) -> None:
        """The first picture, and the places that were looked at: what the capsule of its digit was sent, or what was attended."""
        from regard.report.figures import picture_maps, save

        path = next(iter(trace), None)
        if path is None:
            return
        weights = one_for_each_pair(trace[path][-1])[0]
        places = Strokes(self.known["size"], 1, 1).grid
        image, digit = examples[0].inputs["image"], examples[0].target
        if path.endswith("routing"):
            # Inputs (places x kinds) send shares of themselves to outputs.
            sent = weights.unflatten(0, (places**2, -1)).mean(1).T
            weights = sent if digit is None else sent[digit]
        elif weights.dim() == 2 and len(weights) == 10 and digit is not None:
            weights = weights[digit]
        seen = weights if weights.dim() == 1 else weights.mean(0)
        shown = {self.attention: seen.reshape(places, places)}
        save(picture_maps(image, shown, title=self.heading(examples[0])), folder / HEATMAP)


RECIPE = Digits
