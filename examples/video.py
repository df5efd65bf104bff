"""Video classification with attention over frames, then over segments (Wang et al. 2016, https://arxiv.org/abs/1607.06416).

Recurrent encoders give each level its context; weights say which segment decided, and which frame in it.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

import regard as rg
from regard.recipes.planted import MarkedWord, accuracy, fit


class VideoClassifier(nn.Module):
    def __init__(self, dim: int, hidden: int, classes: int) -> None:
        super().__init__()
        encoders = [None, rg.RecurrentEncoder(dim, hidden)]
        self.attention = rg.HierarchicalAttention(dim, ("frame", "segment"), encoders=encoders)
        self.output = nn.Linear(2 * hidden, classes)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """Logits from features (B, segments, frames, d) of videos of different lengths."""
        return self.output(self.attention(features, mask))


def main(steps: int = 200) -> dict[str, float]:
    """An action is visible in one frame; every frame has something else in it."""
    torch.manual_seed(0)
    task = MarkedWord(sentences=4, words=6, classes=5)
    model = VideoClassifier(task.dim, 8, task.classes)
    fit(model, task, steps=steps, lr=0.02)
    batch = task.draw(512, Generator().manual_seed(1))
    rows, segment, frame = torch.arange(512), batch.truth["sentence"], batch.truth["word"]
    with torch.no_grad(), rg.record(model) as trace:
        model(**batch.inputs)
        on_frame = trace["attention.levels.frame"].weights[rows, segment, frame].mean()
    found = {"accuracy": accuracy(model, task), "weight on the frame": float(on_frame)}
    print(", ".join(f"{name} {value:.2f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()
