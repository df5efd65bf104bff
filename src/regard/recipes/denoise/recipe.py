"""The recipe: places of a noisy picture that look at each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard._errors import refusal
from regard.evaluate.outer import Score, psnr, ssim
from regard.model import Example, On, TaskModel
from regard.observe import Trace
from regard.recipes.choice import assembled, make_attention
from regard.recipes.denoise.data import Noisy, drawn, fashion
from regard.recipes.denoise.parts import Restored, Textures
from regard.recipes.look import one_for_each_pair
from regard.recipes.pictures import from_path
from regard.recipes.recipe import Judged, Recipe
from regard.recipes.runs import HEATMAP


@dataclass(kw_only=True)
class Denoise(Recipe):
    """Pictures without their noise: convolutions, places that look at each other for what is alike, and the noise that is taken away.

    Attributes:
        sigma: standard deviation of the noise, of pictures from 0 to 1.
        hidden_dim: width of a place.
        train_size: pictures drawn for training, where there are no data.
    """

    name: ClassVar[str] = "denoise"
    about: ClassVar[str] = "pictures without the noise that was added: Fashion-MNIST"
    watch: ClassVar[str] = "psnr"
    alternatives: ClassVar[tuple[str, ...]] = ("self-attention", "multi-head", "transformer-encoder")
    made_up_only: ClassVar[tuple[str, ...]] = ("train_size",)

    attention: str = "self-attention"
    sigma: float = 0.2
    hidden_dim: int = 32
    train_size: int = 400
    batch: int = 16
    steps: int = 2000
    every: int = 200
    patience: int = 6
    lr: float = 2e-3
    warmup: int = 50
    decay: str = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.sigma < float("inf"):
            raise ValueError(refusal("sigma", self.sigma, "a number > 0"))

    @cached_property
    def pictures(self) -> dict[str, Tensor]:
        """Without noise."""
        return drawn(self.train_size, self.seed) if self.data is None else fashion(self.data)

    def learn(self) -> dict[str, Any]:
        return {"size": list(self.pictures["train"].shape[-2:])}

    def examples(self, split: str) -> Sequence[Example]:
        """With noise, the same for a picture each time it is seen; that of test pictures does not depend on the seed of a run."""
        seed = {"train": 3 * self.seed + 2, "validation": 1, "test": 0}[split]
        return Noisy(self.pictures[split], self.sigma, seed)

    def build(self) -> TaskModel:
        rows, columns = self.known["size"]
        see = Textures((rows, columns), d := self.hidden_dim)
        widths = {"dim": d, "query_dim": d, "key_dim": d, "value_dim": d, "hidden_dim": d}
        own = {"heads": 4} if self.attention in ("multi-head", "transformer-encoder") else {}
        own |= {"layers": 1} if self.attention == "transformer-encoder" else {}
        attention = make_attention(self.attention, {**own, **self.options}, **widths)
        return assembled(
            see,
            attention,
            lambda context: Restored(context.shape[-1], d, see.grid),
            {"image": d},
            # Where there are queries, they are the places themselves.
            lambda: On(nn.Identity(), input="image"),
        )

    def parse(self, text: str) -> Example:
        """A picture with noise of its own, scaled to the size of the others."""
        rows, columns = self.known["size"]
        image = from_path(text, "L", (rows, columns))
        return Example({"image": image}, variables={"noisy": image})

    @torch.no_grad()
    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """PSNR and SSIM, with those of the noisy pictures beside them; an answer is the noise that was found in a picture."""
        restored, clean, noisy = [], [], []
        for batch in self.batches(examples):
            found = model.output.decide(model(batch.to(device))).cpu()
            restored.append(found)
            noisy.append(batch.inputs["image"].clamp(0, 1))
            if batch.target is not None:
                clean.append(batch.target)
        found, given = torch.cat(restored), torch.cat(noisy)
        answers = [{"noise": round(float(x), 4)} for x in (found - given).flatten(1).std(1)]
        if not clean:
            return Judged({}, answers)
        truth = torch.cat(clean)
        scores: dict[str, Score] = {
            "psnr": psnr(found, truth, data_range=1.0),
            "ssim": ssim(found, truth, data_range=1.0),
            "psnr_noisy": psnr(given, truth, data_range=1.0),
            "ssim_noisy": ssim(given, truth, data_range=1.0),
        }
        return Judged.of(scores, answers)

    def draw(self, trace: Trace, examples: Sequence[Example], folder: Path) -> None:
        """The first picture with and without noise, and what the place in its middle looked at."""
        from regard.report.figures import picture_maps, save

        path = next(iter(trace), None)
        if path is None:
            return
        weights = one_for_each_pair(trace[path][0])[0]
        rows, columns = (side // 2 for side in self.known["size"])
        middle = weights[(rows // 2) * columns + columns // 2].reshape(rows, columns)
        image, clean = examples[0].inputs["image"].clamp(0, 1), examples[0].target
        others = {} if clean is None else {"without noise": clean}
        title = self.heading(examples[0])
        save(picture_maps(image, {"of the middle": middle}, pictures=others, title=title), folder / HEATMAP)


RECIPE = Denoise
