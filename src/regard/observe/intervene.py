"""`intervene`: change the attention inside a model while it runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard._errors import nearest, refusal
from regard.general.alignments import Alignment
from regard.general.alignments.base import readable, softmax
from regard.general.bound import Sizes, broadcasts
from regard.general.masks import Keys
from regard.observe.record import observing, paths_of
from regard.observe.trace import ADOPT
from regard.ops import hooks
from regard.ops.call import Align, Call, Tile
from regard.ops.edges import EdgeTile
from regard.ops.fill import where
from regard.ops.random import PERMUTE, draw_seed, uniform

Change = Callable[[Call], Call]

_SCORES = "Fix: change them, by 'erased' or a function Call -> Call, or intervene on the attentions that read them."


class Replaced(Alignment):
    """An alignment that stands in for another one during an intervention."""

    def __init__(self, original: Align) -> None:
        super().__init__()
        self.original = original
        self.of_queries = tuple(getattr(original, "of_queries", ()))
        self.of_keys = tuple(getattr(original, "of_keys", ()))

    @property
    def splits(self) -> bool:
        return bool(getattr(self.original, "splits", False))

    def prepare(self, call: Call) -> Mapping[str, Any]:
        return self.original.prepare(call)

    def original_weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        """What the replaced alignment would have given."""
        return self.original.weights(scores, mask, tile)


class Uniform(Replaced):
    """The same weight for every key that may be attended: mean pooling."""

    is_rowwise = True

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        return softmax(torch.zeros_like(scores), readable(scores, mask))


class Shuffling(Replaced):
    """One that draws its own numbers: several may be nested, and stay independent of each other and of the original."""

    def __init__(self, original: Align, seed: Tensor) -> None:
        super().__init__(original)
        self.seed = seed

    @property
    def splits(self) -> bool:
        # Numbers are drawn by the places of one rank.
        return False

    def noise(self, scores: Tensor, tile: Tile) -> Tensor:
        """A number in (0, 1) for each weight."""
        return uniform(self.seed, *tile.places(), PERMUTE).to(scores.dtype)


class Permuted(Shuffling):
    """The original weights of each row, in random order among the keys that may be attended."""

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        noise = self.noise(scores, tile)
        weights = self.original_weights(scores, mask, tile).expand(noise.shape)
        allowed = readable(scores, mask).expand(noise.shape)
        shuffled = where(allowed, noise, math.inf).argsort(-1)
        ordered = (~allowed).to(torch.uint8).argsort(dim=-1, stable=True)
        return torch.zeros_like(weights).scatter(-1, ordered, weights.gather(-1, shuffled))


class Random(Shuffling):
    """Weights drawn evenly from the simplex over the keys that may be attended."""

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        # Normalised exponential variables are uniform on the simplex; a softmax of their logarithms normalises them.
        exponential = -torch.log(self.noise(scores, tile))
        return softmax(exponential.log(), readable(scores, mask))


class Frozen(Replaced):
    """The original weights, as constants."""

    @property
    def is_rowwise(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.original, "is_rowwise", False))

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        return self.original_weights(scores, mask, tile).detach()


class Given(Replaced):
    """Weights from outside, (..., Nq, N) or of edges (..., E), features last when multi-dimensional."""

    def __init__(self, original: Align, weights: Tensor) -> None:
        super().__init__(original)
        self.given = weights

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        given, call = self.given, tile.call
        if isinstance(tile, EdgeTile):
            return tile.given(given.to(scores.dtype)).expand(scores.shape)
        features = 1 if call.form.multi else 0
        if given.dim() == 1 + features or (call.single and given.dim() < len(call.lead) + 2 + features):
            given = given.unsqueeze(-2 - features)
        if features:
            given = given.movedim(-1, -3)
        whole = (*call.lead, *([call.form.features] if features else []), call.nq, call.n)
        try:
            fits = torch.broadcast_shapes(given.shape, whole) == whole
        except RuntimeError:
            fits = False
        if not fits:
            shown = (*call.lead, call.nq, call.n, *([call.form.features] if features else []))
            shown = tuple(size for k, size in enumerate(shown) if not (call.single and k == len(call.lead)))
            axes = "".join((", queries" * (not call.single), ", keys", ", features" * features))
            expected = f"a shape that broadcasts to {shown}: (…{axes})"
            raise ValueError(refusal("how", f"weights of shape {tuple(self.given.shape)}", expected))
        rows = given if given.shape[-2] == 1 else given[..., tile.i.start : tile.i.stop, :]
        return rows.to(scores.dtype).expand(scores.shape)


def given(weights: Tensor) -> Change:
    """Use these weights: (..., Nq, N), or (..., N) for a single query, or (..., E) for edges; features last if there are any.

    What broadcasts to that will do: (N,) serves every query. They are read as they are: nothing masks or normalises them.
    """
    if not isinstance(weights, Tensor) or not weights.dtype.is_floating_point:
        kind = f"a tensor of {weights.dtype}" if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(refusal("weights", kind, "a floating-point tensor"))
    return lambda call: call.with_(align=Given(call.align, weights))


def erase(keys: Tensor | Sequence[int] | int) -> Change:
    """Forbid some keys: the same as masking them, so the others are renormalised.

    Args:
        keys: indices, which are erased in every sequence and for every query, whatever their axes; or booleans (..., N) whose
            leading axes are the first ones of the call, for keys that differ from sequence to sequence. One key a sequence, at
            `index` (B,), is `torch.nn.functional.one_hot(index, N).bool()`.
    """
    if not isinstance(keys, Tensor):
        try:
            keys = torch.as_tensor(keys)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(refusal("keys", repr(keys), "indices, or booleans (..., N)")) from None
    if keys.dtype.is_floating_point and keys.numel():
        raise TypeError(refusal("keys", f"a tensor of {keys.dtype}", "indices, or booleans (..., N)"))
    wanted = keys

    def change(call: Call) -> Call:
        if wanted.dtype == torch.bool:
            lead, whole = tuple(wanted.shape[:-1]), (*call.lead, call.n)
            if wanted.dim() == 0 or wanted.shape[-1] != call.n or not broadcasts(lead, call.lead[: len(lead)]):
                got = f"booleans of shape {tuple(wanted.shape)}"
                raise ValueError(refusal("keys", got, f"booleans over the keys, {whole}"))
            kept = ~wanted.to(call.device)
        else:
            index = wanted.to(call.device, torch.long).reshape(-1)
            if len(index) and not bool(((index >= -call.n) & (index < call.n)).all()):
                raise IndexError(refusal("keys", index.tolist(), f"indices of {call.n} keys"))
            kept = torch.ones(call.n, dtype=torch.bool, device=call.device).index_fill(0, index % max(call.n, 1), False)
        erased = Keys(kept).bind(Sizes(call.lead, call.nq, call.n))
        changed = call.with_(mask=erased if call.mask is None else call.mask.also(erased))  # type: ignore[attr-defined]
        return changed.with_(prepared=call.align.prepare(changed))

    return change


def replace_by(align: Alignment) -> Change:
    """Align the same scores otherwise."""

    def change(call: Call) -> Call:
        if call.seed is None and align.needs_seed(call.training):
            call = call.with_(seed=draw_seed(call.device))
        call = call.with_(align=align)
        return call.with_(prepared=align.prepare(call))

    return change


NAMED: dict[str, Change] = {
    "uniform": lambda call: call.with_(align=Uniform(call.align)),
    "permuted": lambda call: call.with_(align=Permuted(call.align, draw_seed(call.device))),
    "random": lambda call: call.with_(align=Random(call.align, draw_seed(call.device))),
    "frozen": lambda call: call.with_(align=Frozen(call.align)),
}


def as_change(how: str | Tensor | Alignment | Change, keys: Any = None) -> Change:
    """Resolve what `intervene` takes."""
    if keys is not None and not (isinstance(how, str) and how == "erased"):
        raise ValueError(refusal("keys", repr(keys), "nothing, unless how='erased'"))
    if isinstance(how, Tensor):
        return given(how)
    if isinstance(how, Alignment):
        return replace_by(how)
    if isinstance(how, str):
        if how == "erased":
            if keys is None:
                raise ValueError(refusal("keys", None, "which keys to erase: indices, or booleans (..., N)"))
            return erase(keys)
        if how not in NAMED:
            known = [*NAMED, "erased"]
            raise ValueError(refusal("how", repr(how), f"one of {', '.join(known)}", nearest(how, known, listed=True)))
        return NAMED[how]
    if isinstance(how, type):
        raise TypeError(
            refusal("how", f"the class {how.__name__}", "an alignment", f"Fix: make one, {how.__name__}(…).")
        )
    if callable(how):
        return how
    raise TypeError(refusal("how", type(how).__name__, "a name, weights, an alignment, or a function Call -> Call"))


@contextmanager
def intervene(
    model: nn.Module,
    how: str | Tensor | Alignment | Change,
    *,
    at: str | Sequence[str] | None = None,
    keys: Any = None,
) -> Iterator[None]:
    """Change every attention of a model, or those at some paths, while it runs.

    Under activation checkpointing the backward computes the attention again: run it inside, too. It warns where nothing was changed: no
    attention ran, or only weights would have changed where a mechanism reads scores.

    Args:
        model: any module that holds attention of this library.
        how: `"uniform"`, `"permuted"`, `"random"` (anew in every call), `"frozen"` (constants for the gradient), `"erased"` with
            `keys`; a tensor of weights; another alignment; or a function from `Call` to `Call`. The first three are over all keys
            that the mask allows, also where the alignment itself reads fewer (a window, a sample).
        at: paths, as in `named_modules()`; a path stands for everything below it too.
        keys: what `"erased"` erases.

    Example:
        >>> import regard as rg
        >>> attend, x = rg.Attention("dot"), torch.randn(2, 5, 4)
        >>> with rg.intervene(attend, "uniform"):
        ...     context = attend(x, x)
        >>> torch.allclose(context, x.mean(1, keepdim=True).expand(2, 5, 4))
        True
    """
    change, paths = as_change(how, keys), paths_of(model)
    if at is not None:
        if not isinstance(at, str | Sequence):
            raise TypeError(refusal("at", type(at).__name__, "a path, or several"))
        wanted = [at] if isinstance(at, str) else list(at)
        for path in wanted:
            if path not in paths.values():
                raise ValueError(refusal("at", repr(path), "a path of the model", nearest(path, paths.values())))
        paths = {key: p for key, p in paths.items() if any(p == w or p.startswith(f"{w}.") or w == "" for w in wanted)}

    reached, in_vain = False, ""

    def intervention(module: nn.Module, call: Call) -> Call:
        nonlocal reached, in_vain
        if id(module) not in paths:
            return call
        scores_alone = getattr(module, "scores_alone", False)
        reached = reached or not scores_alone
        changed = change(call)
        if not isinstance(changed, Call):
            raise TypeError(refusal("how", f"a function that gives {type(changed).__name__}", "one that gives a Call"))
        if not scores_alone:
            return _prepared_anew(call, changed)
        # The alignment stays, so that a trace shows what was in force.
        changed = _aligned_as(call, changed)
        if _has_other_scores(call, changed):
            reached = True
        else:
            in_vain = paths[id(module)]
        return changed

    with observing():
        hooks.interventions.append(intervention)
        try:
            yield
        finally:
            hooks.interventions.remove(intervention)
    if not reached:
        # A result that was meant to be without attention, and is not, would be believed.
        why = f"no attention ran, so nothing was changed. {ADOPT}"
        if in_vain:
            why = f"nothing was changed: of {in_vain!r} the scores are read, not the weights. {_SCORES}"
        warnings.warn(f"intervene({how!r}): {why}", stacklevel=3)


def _prepared_anew(call: Call, changed: Call) -> Call:
    """A changed call, of which the alignment prepares what it was not told: weights that are decided for all queries at once, say."""
    told = changed.align is not call.align or changed.prepared is not call.prepared
    parts = ("form", "bias", "mask", "query", "key", "value")
    if told or not call.prepared or all(getattr(changed, part) is getattr(call, part) for part in parts):
        return changed
    return changed.with_(prepared=changed.align.prepare(changed))


def _aligned_as(call: Call, changed: Call) -> Call:
    """A changed call with the alignment that it had."""
    if changed.align is call.align:
        return changed
    changed = changed.with_(align=call.align)
    return changed.with_(prepared=call.align.prepare(changed))


def _has_other_scores(call: Call, changed: Call) -> bool:
    return any(getattr(call, name) is not getattr(changed, name) for name in ("form", "mask", "bias")) or (
        call.start != changed.start
    )
