"""The trace: the calls that were made, by the path of the module, and what can be asked of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from regard._errors import nearest, refusal
from regard._files import DamagedError, read_tensors, write_tensors
from regard.general.alignments.base import softmax
from regard.observe.fields import FIELDS, asking, compute, shown
from regard.ops.blockwise import over_rows
from regard.ops.call import Call
from regard.ops.dispatch import rows_of_panel, wants_dense
from regard.ops.edges import EdgeCall
from regard.ops.made_of import changed, stamps

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# What says which queries are meant.
Places: TypeAlias = "int | slice | Sequence[int] | Tensor | NDArray[np.integer[Any]]"

ADOPT = "Attention of torch or Hugging Face is seen after regard.adopt(model)."
_NOTHING = f"did the model run inside record()? {ADOPT}"


class Recorded:
    """One recorded call. Fields are computed when asked for, from what the call was made of, differentiably.

    A trace that was told its fields up front, or was loaded from a file, holds those and nothing else.
    """

    def __init__(
        self,
        path: str,
        call: Call | None,
        fields: Mapping[str, Tensor] | None = None,
        region: Tensor | None = None,
    ) -> None:
        self.path = path
        self._call = call
        self._fields = dict(fields or {})
        self._region = region  # of which the mass is among these fields, where it is known
        self._graded = torch.is_grad_enabled()
        self._versions = [] if call is None else stamps(call)

    def __getstate__(self) -> dict[str, Any]:
        """Copies count the changes of their own tensors; a stale record has nothing to copy."""
        if self._call is not None:
            _ = self.call
        return {key: value for key, value in vars(self).items() if key != "_versions"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._versions = [] if self._call is None else stamps(self._call)

    def __repr__(self) -> str:
        kept = "all fields" if self._call is not None else ", ".join(self._fields)
        return f"Recorded({self.path!r}: {kept})"

    @property
    def call(self) -> Call:
        """What the attention was computed from."""
        if self._call is None:
            raise AttributeError(f"{self!r} has no call: it was recorded with named fields, or loaded from a file")
        if changed(self._versions):
            raise RuntimeError(
                f"{self!r}: what the call was made of has been changed in place since (an optimiser step, x += …). "
                "Fix: read the trace before that, or name the fields to keep: record(model, 'weights')."
            )
        return self._call

    @property
    def weights(self) -> Tensor:
        """Weights (..., Nq, N), with features last when multi-dimensional; before dropout."""
        return self._get("weights")

    def weights_of(self, queries: Places) -> Tensor:
        """Weights of some queries, (..., how many, N) and features last, in the order they are asked for; no others are computed.

        Args:
            queries: their places, from the end where negative: a number, several (a list, a range, a tensor or an array of whole numbers
                on one axis), or a slice.
        """
        call = self.call
        if isinstance(call, EdgeCall):
            raise ValueError(
                "weights_of: along edges there is a weight for each edge. Fix: trace.weights, (..., edges)."
            )
        if call.single:
            raise ValueError("weights_of: the call had a single query. Fix: trace.weights is its row.")
        wanted = _places(queries, call.nq)
        runs = _runs(wanted, rows_of_panel(call))
        with torch.set_grad_enabled(self._graded and torch.is_grad_enabled()), asking(call):
            found = [call.weights(run, tiled=not wants_dense()) for run in runs]
        features = () if call.form.features is None else (call.form.features,)
        whole = torch.cat(found, -2).expand(*call.lead, *features, len(wanted), call.n)
        return shown(call, whole, -2)

    @property
    def scores(self) -> Tensor:
        """Scores, laid out like the weights; biases included, masked pairs not removed."""
        return self._get("scores")

    def entropy(self) -> Tensor:
        """Entropy of the weights of each query, in nats."""
        return self._get("entropy")

    def log_sum_exp(self) -> Tensor:
        """Log-sum-exp of the allowed scores of each query."""
        return self._get("log_sum_exp")

    def expected_position(self) -> Tensor:
        """Mean index of the key that is read, by weight; NaN where nothing is."""
        return self._get("expected_position")

    def mass_on(self, region: Tensor | None = None) -> Tensor:
        """Weight of each query that falls on a region of the keys, booleans (..., N)."""
        return self._get("mass_on", region)

    def mass_received(self) -> Tensor:
        """Weight that each key receives from all queries, (..., N)."""
        return self._get("mass_received")

    def topk(self, k: int | None = None) -> tuple[Tensor, Tensor]:
        """The k largest weights of each query (5 when not said), and the keys they are on; both (..., Nq, k).

        Where there are fewer than k keys, the rest are weights of 0 at key -1; a weight of 0 may have any key, or -1.
        """
        both = self._get("topk", k)
        values, index = (both[..., 0], both[..., 1]) if not self._multi else (both[..., 0, :], both[..., 1, :])
        return values, index.round().long()

    @property
    def _multi(self) -> bool:
        return self._call.form.multi if self._call is not None else "multi" in self._fields

    def log_prob(self) -> Tensor:
        """Log-probability of what was sampled: (..., Nq), features last, of keys chosen by each query; else (...)."""
        call = self.call
        with asking(call):
            found = call.align.log_prob(call)
        if found is None:
            raise ValueError(f"{type(call.align).__name__} samples nothing: it has no log-probability")
        by_query = found.dim() == len(call.lead) + 1 + call.form.multi
        return shown(call, found, -1) if by_query else found

    def expected_loss(self, loss: Callable[[Tensor], Tensor]) -> Tensor:
        r"""The exact marginal $\sum_j p_{ij}\, \mathrm{loss}(v_j)$ over what a hard alignment may read, for small N.

        Args:
            loss: maps contexts (..., Nq, d_v) to losses (..., Nq), without the query axis for a single query.
        """
        call = self.call
        if call.form.multi:
            raise ValueError("expected_loss: a multi-dimensional alignment chooses a key for each feature")
        if isinstance(call, EdgeCall):
            raise ValueError("expected_loss: along edges every query has keys of its own")

        def probabilities(i: range) -> Tensor:
            return softmax(call.scores(i, tiled=not wants_dense()), call.tile(i).mask())

        with asking(call):
            p = torch.cat(over_rows(call, probabilities), -2).expand(*call.lead, call.nq, call.n)
        p = p.squeeze(-2) if call.single else p
        total = torch.zeros(p.shape[:-1], dtype=p.dtype, device=p.device)
        for j in range(call.n):
            context = call.value[..., j : j + 1, :].expand(*call.lead, call.nq, -1)
            context = context.squeeze(-2) if call.single else context
            found = loss(context)
            if not isinstance(found, Tensor) or found.shape != total.shape:
                got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
                expected = f"{tuple(total.shape)}, one number for each context of {tuple(context.shape)}"
                raise ValueError(refusal("loss", f"a function that gives {got}", expected))
            total = total + p[..., j] * found
        return total

    def _get(self, name: str, argument: Any = None) -> Tensor:
        if self._call is None:
            if name not in self._fields:
                raise AttributeError(f"{self!r} does not hold {name!r}: name it when recording or saving")
            if argument is not None and not self._was_given(name, argument):
                got = f"a tensor of shape {tuple(argument.shape)}" if isinstance(argument, Tensor) else repr(argument)
                raise ValueError(refusal(name, got, "nothing, or what was given when recording or saving"))
            return self._fields[name]
        # Whether a field has a gradient is decided by the call it describes, not by where it is asked for.
        with torch.set_grad_enabled(self._graded and torch.is_grad_enabled()):
            return compute(self.call, {name: argument})[name]

    def _was_given(self, name: str, argument: Any) -> bool:
        """Whether a field that is held was computed with this argument; a file does not say of which region."""
        if name == "topk":
            return bool(argument == self._fields[name].shape[-3 if self._multi else -2])
        mine = self._region
        if mine is None or not isinstance(argument, Tensor) or argument.device != mine.device:
            return False
        return torch.equal(argument, mine)

    @property
    def held(self) -> dict[str, Any]:
        """The fields that it holds, each as it is; none where it can compute all of them."""
        return {name: None for name in self._fields if name in FIELDS}

    def computed(self, wanted: Mapping[str, Any]) -> Recorded:
        """The same record, holding these fields alone."""
        if self._call is None:
            fields = {name: self._get(name, argument) for name, argument in wanted.items()}
        else:
            fields = compute(self.call, wanted)
        if self._multi:
            fields["multi"] = torch.ones(())
        region = wanted.get("mass_on", self._region)
        return Recorded(self.path, None, fields, None if region is None else region.clone())


def _places(queries: Places, count: int) -> list[int]:
    """Places of queries among so many, counted from the first."""
    try:
        listed = range(count)[queries] if isinstance(queries, slice) else _plain(queries)
        given = [_plain(i) for i in listed] if isinstance(listed, Iterable) else [listed]
    except TypeError:
        given = []
    whole = all(isinstance(i, int) and not isinstance(i, bool) and -count <= i < count for i in given)
    if not given or not whole:
        expected = f"places of queries, whole numbers from {-count} to {count - 1}, at least one"
        raise ValueError(refusal("queries", repr(queries), expected))
    return [i % count for i in given]


def _plain(x: Any) -> Any:
    """What a tensor, an array, or a number of theirs holds, as Python has it."""
    return x.tolist() if hasattr(x, "tolist") else x


def _runs(places: Sequence[int], most: int) -> list[range]:
    """Neighbours that follow each other, as ranges of up to so many."""
    runs: list[range] = []
    for i in places:
        if runs and i == runs[-1].stop and len(runs[-1]) < most:
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
    return runs


class Calls(list[Recorded]):
    """All calls of one module in order; with a single one, its fields are at hand directly."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if len(self) != 1:
            where = self[0].path if self else ""
            raise AttributeError(
                f"trace[{where!r}] holds {len(self)} calls: take one, such as trace[{where!r}][0].{name}"
            )
        return getattr(self[0], name)


class Trace:
    """What was recorded: `trace[path]` is the list of calls of that module, in order."""

    def __init__(self) -> None:
        self._calls: dict[str, Calls] = {}

    def __getitem__(self, path: str) -> Calls:
        if path not in self._calls:
            if not self._calls:
                raise KeyError(f"trace: nothing was recorded, so there is no {path!r}; {_NOTHING}")
            raise KeyError(refusal("path", repr(path), "a recorded attention", nearest(path, self._calls)))
        return self._calls[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, path: object) -> bool:
        return path in self._calls

    def __repr__(self) -> str:
        return f"Trace({', '.join(f'{path!r}: {len(calls)}' for path, calls in self._calls.items())})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if not self._calls:
            raise AttributeError(f"trace: nothing was recorded, so there is no {name!r}; {_NOTHING}")
        if len(self) != 1:
            raise AttributeError(f"{self!r} holds {len(self)} modules: take one, such as trace[path].{name}")
        return getattr(next(iter(self._calls.values())), name)

    def items(self) -> Iterator[tuple[str, Calls]]:
        """Paths and their calls."""
        return iter(self._calls.items())

    def add(self, record: Recorded) -> None:
        """Append a call."""
        self._calls.setdefault(record.path, Calls()).append(record)

    def save(self, path: str | Path, *fields: str, **with_argument: Any) -> None:
        """Write fields of every call to a safetensors file, whole or not at all.

        When none are named, these are the fields that the trace holds, where it was recorded with named fields or loaded from a file;
        else the weights.
        """
        named = dict.fromkeys(fields) | with_argument
        tensors, index = {}, []
        for calls in self._calls.values():
            for record in calls:
                kept = record.computed(named or record.held or {"weights": None})._fields
                index.append({"path": record.path, "fields": sorted(kept)})
                for name, x in kept.items():
                    tensors[f"{len(index) - 1}.{name}"] = x.detach().cpu().contiguous()
        write_tensors(Path(path), tensors, {"regard_trace": json.dumps(index)})


def _index(metadata: Mapping[str, str] | None, path: str | Path) -> list[dict[str, Any]]:
    """What a trace file says it holds; anything that Trace.save would not have written is refused."""
    try:
        index = json.loads((metadata or {}).get("regard_trace", "null"))
    except json.JSONDecodeError:
        index = None
    known = isinstance(index, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("path"), str) and isinstance(entry.get("fields"), list)
        for entry in index
    )
    if not known:
        raise ValueError(refusal("path", repr(str(path)), "a file written by Trace.save"))
    found: list[dict[str, Any]] = index
    return found


def load_trace(path: str | Path) -> Trace:
    """Read a trace that was saved; it holds the fields it was saved with."""
    if Path(path).is_dir():
        raise IsADirectoryError(refusal("path", f"the folder {str(path)!r}", "a file written by Trace.save"))
    try:
        tensors, metadata = read_tensors(Path(path))
        index, trace = _index(metadata, path), Trace()
        for number, entry in enumerate(index):
            trace.add(Recorded(entry["path"], None, {name: tensors[f"{number}.{name}"] for name in entry["fields"]}))
        return trace
    except (DamagedError, KeyError) as error:
        expected = "a complete safetensors file written by Trace.save"
        raise ValueError(refusal("path", f"{str(path)!r} ({error})", expected)) from error


__all__ = ["FIELDS", "Calls", "Recorded", "Trace", "load_trace"]
