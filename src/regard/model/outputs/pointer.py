"""A sequence of positions of the input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard._errors import refusal
from regard.model.batch import Batch
from regard.model.naming import Available
from regard.model.outputs.base import Output, Read, target_of
from regard.query.pointer import Pointed, PointerNetwork


class PointerOutput(Output):
    r"""Point at one token of the first input after the other (Vinyals et al. 2015, https://arxiv.org/abs/1506.03134).

    $$h = \mathrm{read}(f), \qquad p(c_m = j \mid c_{<m}) = \mathrm{pointer}(h, c_{<m})_j$$

    Every token first asks the task's attention, as in Kool et al. (2019, https://arxiv.org/abs/1803.08475); a `PointerNetwork` then
    points among what they read. Its weights are at `output.network.pointer` under a trace. The target are positions, -1 after the end of
    each sequence; where the network has a stop symbol, it is asked for at the end of each. The loss is the mean over steps of the
    negative log-probability.

    Args:
        network: as wide as what the attention reads.

    Example:
        >>> import regard as rg
        >>> from regard.model import Batch
        >>> output = PointerOutput(rg.PointerNetwork(4, 8))
        >>> model = rg.TaskModel({}, None, rg.Attention("dot"), output)
        >>> batch = Batch({"tokens": torch.randn(2, 5, 4)}, target=torch.tensor([[0, 3], [2, -1]]))
        >>> model(batch).shape
        torch.Size([2, 2, 5])
    """

    stepwise = True

    def __init__(self, network: PointerNetwork) -> None:
        super().__init__()
        if not isinstance(network, PointerNetwork):
            raise TypeError(refusal("network", type(network).__name__, "a PointerNetwork"))
        self.network = network

    def forward(self, read: Read, found: Available, batch: Batch) -> Float[Tensor, "b m n"]:
        """Log-probabilities of every position at every step, when the steps before went as they should."""
        options, mask = self._options(read, found)
        log_p: Tensor = self.network(options, self._asked(target_of(batch), options.shape[1]), mask)
        return log_p

    @torch.no_grad()
    def generate(self, read: Read, found: Available, steps: int | None = None, beam: int = 1) -> Pointed:
        """Point until the stop, until nothing is left, or so many times; as `PointerNetwork.decode`, with -1 for the stop too."""
        options, mask = self._options(read, found)
        found_, log_prob = self.network.decode(options, mask, steps=steps, beam=beam)
        return Pointed(found_.masked_fill(found_ == options.shape[1], -1), log_prob)

    def loss(self, prediction: Float[Tensor, "b m n"], batch: Batch) -> Tensor:
        asked = self._asked(target_of(batch), prediction.shape[-1] - (self.network.stop is not None))
        return F.nll_loss(prediction.flatten(0, 1), asked.flatten(), ignore_index=-1)

    def terms(self, batch: Batch) -> Tensor:
        target = target_of(batch)
        return (target >= 0).sum() + (len(target) if self.network.stop is not None else 0)

    def decide(self, prediction: Float[Tensor, "b m n"]) -> Int[Tensor, "b m"]:
        """The likeliest position of each step; -1 where it is the stop symbol."""
        best = prediction.argmax(-1)
        return best if self.network.stop is None else best.masked_fill(best == prediction.shape[-1] - 1, -1)

    def _options(self, read: Read, found: Available) -> tuple[Tensor, Tensor | None]:
        """What may be pointed at, and which of it is real."""
        name, features = next(iter(found.inputs.items()))
        options = read(features)
        if options.shape[:2] != features.shape[:2]:
            got = f"one that gives {tuple(options.shape)} for features {tuple(features.shape)}"
            raise ValueError(refusal("attention", got, "a context for each of the tokens that are pointed at"))
        return options, found.masks.get(name)

    def _asked(self, target: Int[Tensor, "b m"], n: int) -> Int[Tensor, "b m1"]:
        """The target, with the stop symbol, position n, at the end of each sequence where there is one."""
        if self.network.stop is None:
            return target
        target = F.pad(target, (0, 1), value=-1)
        stops = torch.arange(target.shape[1], device=target.device) == (target >= 0).sum(-1, keepdim=True)
        return target.masked_fill(stops, n)
