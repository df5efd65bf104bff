"""Recipes that give each example a class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from regard.evaluate.outer import accuracy, f1
from regard.model import Classifier, Example, Output, TaskModel
from regard.recipes.recipe import Judged, Recipe


@dataclass(kw_only=True)
class Classification(Recipe):
    """A recipe whose `learn` names the classes, and whose output is a class."""

    watch: ClassVar[str] = "accuracy"

    @property
    def classes(self) -> list[str]:
        """Their names, in the order of their numbers."""
        found: list[str] = self.known["classes"]
        return found

    def output(self, context: Any, dropout: float = 0.0) -> Output:
        """A classifier of what the attention reads; capsules are classes themselves."""
        if hasattr(context, "probability"):
            from regard.model import CapsuleClassifier

            return CapsuleClassifier()
        return Classifier(context.shape[-1], len(self.classes), dropout)

    def decided(
        self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """The class of each example, as a number."""
        found = [model.output.decide(model(batch.to(device))).cpu() for batch in self.batches(examples)]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.long)

    @torch.no_grad()
    def probabilities(self, model: TaskModel, example: Example) -> dict[str, float]:
        """How likely each class of an example is, the likeliest first; nothing where the model tells no classes apart."""
        (batch,) = self.batches([example])
        found = model.output.probabilities(model(batch))
        if found is None:
            return {}
        named = dict(zip(self.classes, found[0].tolist(), strict=True))
        return dict(sorted(named.items(), key=lambda item: -item[1]))

    def right_answer(self, example: Example) -> Any:
        """The name of the class, as answers have it."""
        return None if example.target is None else self.classes[int(example.target)]

    def heading(self, example: Example) -> str:
        """With the class that was answered, and the true one."""
        return "\n".join(filter(None, (super().heading(example), self.outcome(example))))

    def outcome(self, example: Example) -> str:
        """What was answered and what is true, as far as it is known."""
        told = [f"answer: {word}" for word in example.words.get("predicted", ())]
        if example.target is not None and example.target.numel() == 1:
            told.append(f"truth: {self.classes[int(example.target)]}")
        return ", ".join(told)

    @torch.no_grad()
    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """Accuracy, and F1 with every class counting the same."""
        decided = self.decided(model, examples, device)
        answers = [self.classes[k] for k in decided.tolist()]
        targets = [example.target for example in examples]
        if not targets or targets[0] is None:
            return Judged({}, answers)
        truth = torch.stack([t for t in targets if t is not None])
        scores = {"accuracy": accuracy(decided, truth), "f1": f1(decided, truth, average="macro")}
        return Judged.of(scores, answers)
