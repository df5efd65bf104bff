"""Which execution runs: an explicit choice is obeyed or refused, `auto` takes the cheapest that is right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._errors import nearest, refusal
from regard.ops import hooks
from regard.ops.banded import banded, why_not_banded
from regard.ops.blockwise import blockwise, near_rows, panel_rows
from regard.ops.call import Call
from regard.ops.dense import dense
from regard.ops.edges import EdgeCall, panel_by_panel
from regard.ops.forms import AdditiveForm
from regard.ops.fused import fused, why_not_fused, why_not_library, why_not_worthwhile
from regard.ops.hashed import HashedCall
from regard.ops.kernels import by_panels, mapped
from regard.ops.near import span
from regard.ops.packed import packed, why_not_packed
from regard.ops.padded import padded, why_not_padded
from regard.ops.parallel.ranks import current, refuse
from regard.ops.parallel.ring import agree, ring, why_not_ring
from regard.ops.parallel.sharded import ShardedCall, check_splits, facts
from regard.ops.places import are_known, product_of_known
from regard.ops.transforms import backward_or_mapped, only_mapped, transformed

IMPLS = ("auto", "dense", "blockwise", "fused")

# Below this many hidden units in all, on a CPU, the equation itself is quicker than tiling it.
SMALL_HIDDEN_ELEMENTS = 1 << 16
# On a GPU what takes time below this is to launch: the equation's few operators are quicker than kernels or tiles, and take 64 MiB.
SMALL_ON_DEVICE = 1 << 24


# Executions that cut a call into calls, each of which takes an execution of its own.
_CUTS = {"banded": banded, "packed": packed, "padded": padded}


@dataclass(frozen=True)
class Dispatch:
    """The execution that a call takes, and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


_LIBRARY = Dispatch("fused", "plain bilinear scores under a softmax: one library call")


@dataclass(frozen=True)
class _Override:
    impl: str
    rows: int | None


_overrides: list[_Override] = []


def check_impl(impl: str) -> str:
    """Return a known execution name, or refuse it."""
    if impl not in IMPLS:
        fix = nearest(str(impl), IMPLS, listed=True)
        raise ValueError(refusal("impl", repr(impl), f"one of {', '.join(IMPLS)}", fix))
    return impl


@contextmanager
def execution(impl: str, *, panel: int | None = None) -> Iterator[None]:
    """Choose the execution of every attention inside, whatever its constructor said.

    Args:
        impl: `auto`, `dense`, `blockwise` or `fused`.
        panel: query rows of a blockwise panel; chosen from the memory budget when not given.

    Example:
        >>> import regard as rg
        >>> attend, x = rg.Attention(rg.Dot()), torch.randn(2, 5, 4)
        >>> with rg.execution("dense"):
        ...     context = attend(x, x)
    """
    if panel is not None and (not isinstance(panel, int) or isinstance(panel, bool) or panel < 1):
        raise ValueError(refusal("panel", repr(panel), "a whole number of rows >= 1"))
    mine = _Override(check_impl(impl), panel)
    _overrides.append(mine)
    try:
        yield
    finally:
        # One's own entry, wherever it stands: threads share this list and may leave in any order.
        del _overrides[next(k for k, entry in enumerate(_overrides) if entry is mine)]


def choose(call: Call, impl: str) -> Dispatch:
    """Decide without running."""
    if _overrides:
        impl = _overrides[-1].impl
    if isinstance(call, ShardedCall):
        return _across_ranks(call, impl)
    refuse(f"a {type(call).__name__}", "an attention along edges, by hashes, or of another library is not")
    return _alone(call, impl)


def _across_ranks(call: ShardedCall, impl: str) -> Dispatch:
    ranks = call.shard.ranks
    check_splits(call)
    if ranks.exchange == "gather" and ranks.size > 1:
        return Dispatch(
            "parallel", f"the keys of {ranks.size} ranks are gathered, and each reads them with impl={impl!r}"
        )
    reason = why_not_ring(call) if ranks.exchange == "ring" else None
    if reason is not None:
        fix = "Fix: parallel.context(mesh, exchange='gather'), which holds the keys of all ranks on each."
        raise NotImplementedError(f"parallel.context: no ring here: {reason}. {fix}")
    if impl in ("dense", "fused") and ranks.exchange == "ring":
        fix = "Fix: use impl='auto' or 'blockwise', or parallel.context(mesh, exchange='gather')."
        raise NotImplementedError(f"impl={impl!r} is not available here: keys that go round a ring are folded. {fix}")
    if ranks.size == 1:
        return Dispatch("parallel", f"one rank, as without a context: {_alone(call.whole(), impl)}")
    return Dispatch("parallel", f"keys go round {ranks.size} ranks, each folds them into the states of its own queries")


def _alone(call: Call, impl: str) -> Dispatch:
    if impl == "fused":
        reason = why_not_fused(call)
        if reason is not None:
            raise NotImplementedError(
                f"impl='fused' is not available here: {reason}. Fix: use impl='auto', 'blockwise' or 'dense'."
            )
        return Dispatch("fused", "asked for")
    if impl == "blockwise" and not torch.compiler.is_compiling() and transformed():
        reason = _why_not_transformed(call)
        if reason is not None:
            raise NotImplementedError(
                f"impl='blockwise' is not available here: {reason}. Fix: use impl='auto' or 'dense'."
            )
    if impl != "auto":
        return Dispatch(impl, "asked for")
    if isinstance(call, EdgeCall):
        return _along_edges(call)
    if isinstance(call, HashedCall) and call.why_not_chunked() is None:
        if transformed():
            return Dispatch("dense", "torch.func takes no hand-written gradient")
        return Dispatch("chunked", "tokens sorted by bucket: each chunk reads its neighbours")
    # How many blocks there would be, a graph for any length cannot say.
    cuts = call.mask is not None and not torch.compiler.is_compiling()
    if cuts and why_not_packed(call) is None:
        return Dispatch("packed", "sequences end to end: each by itself, those of about one length together")
    if cuts and why_not_banded(call) is None:
        return Dispatch(
            "banded", "a softmax over few keys around each query: blocks of queries beside the keys they reach"
        )
    if cuts and why_not_padded(call) is None:
        return Dispatch("padded", "padded sequences side by side: those of about one length together")
    library = call.form.is_plain and why_not_library(call) is None
    reason = (None if library else why_not_fused(call)) or why_not_worthwhile(call)
    if library and reason is None:
        return Dispatch(_LIBRARY.path, f"{_LIBRARY.reason}{_no_blocks(call)}")
    because = "" if reason is None else f"{reason}; "
    if _is_small(call) and not (reason is None and _draws_on_device(call)):
        return Dispatch("dense", f"{because}small enough for the equation itself")
    if transformed() and (reason is not None or not mapped(call)):
        return Dispatch("dense", f"{because}torch.func takes neither recomputation nor gradients of operators")
    if reason is None:
        how = f"{_panels(call)}, scores by our kernel" if by_panels(call) else "our kernel"
        return Dispatch("fused", f"{_described(call)}: {how}{_no_blocks(call)}")
    form = call.form
    kernel = isinstance(form, AdditiveForm) and form.why_not_by_kernel(call.device_type) is None
    scores = ", scores by our kernel" if kernel else ""
    return Dispatch("blockwise", f"{reason}; {_panels(call)}{scores}{_no_blocks(call)}")


def _why_not_transformed(call: Call) -> str | None:
    """The reason why the blockwise execution of a call cannot be mapped or differentiated by torch.func, or None."""
    if isinstance(call, EdgeCall):
        return "torch.func takes neither recomputation nor gradients of operators"
    form = call.form
    if isinstance(form, AdditiveForm) and form.by_operator and not only_mapped():
        return "torch.func takes no gradients of operators, which compute additive scores tile by tile"
    if backward_or_mapped() and rows_of_panel(call, near=True) < call.nq:
        return "torch.func takes no recomputation, by which panels of queries are learned from"
    return None


def _panels(call: Call) -> str:
    if torch.compiler.is_compiling():
        # To be told, a size that is a symbol would have to become a number.
        return "panels"
    rows = rows_of_panel(call, near=True)
    number = math.ceil(call.nq / rows) if call.nq else 1
    # One panel alone stands beside all keys.
    near = [len(span(call, i)) for i in call.panels(rows)] if number > 1 else [call.n]
    told = f"{number} panel(s) of {rows} rows"
    if max(near) < call.n:
        return f"{told} beside at most {max(near)} keys"
    # Under a causal mask the last panel reads all keys, but the others do not.
    mean = math.ceil(sum(near) / number)
    return f"{told} beside {mean} keys on average" if mean < call.n else told


def _no_blocks(call: Call) -> str:
    """Why a window is not computed by blocks, but for what its alignment says already."""
    if torch.compiler.is_compiling() or call.align.temperature_of_softmax is None:
        return ""
    if getattr(call.mask, "reach", None) is None or type(call) is not Call:
        return ""
    why = why_not_banded(call)
    return "" if why is None else f"; not banded: {why}"


def _described(call: Call) -> str:
    form = call.form
    if isinstance(form, AdditiveForm):
        score = "additive"
    else:
        score = "bilinear" if form.activation is None else "activated bilinear"
    align = "a softmax" if call.align.temperature_of_softmax is not None else f"alignment {type(call.align).__name__}"
    return f"{score} scores under {align}"


def _along_edges(call: EdgeCall) -> Dispatch:
    score = "additive scores" if isinstance(call.form, AdditiveForm) else "dot products"
    if why_not_fused(call) is None and not transformed():
        return Dispatch("fused", f"{score} under a softmax along edges: our kernel")
    reason = call.why_not_segment()
    # How many slots a row needs is known only by looking at the edges, which would break a graph.
    if reason is None and torch.compiler.is_compiling():
        return Dispatch("blockwise", "one operator")
    if transformed():
        return Dispatch("dense", "torch.func takes neither recomputation nor gradients of operators")
    if _is_small(call):
        return Dispatch("dense", "small enough for the equation itself")
    if reason is None:
        return Dispatch(
            "blockwise", f"{score} under a softmax along edges: one operator, by panels of about one degree"
        )
    return Dispatch("blockwise", f"{reason}; panels of {rows_of_panel(call)} of the longest rows")


def rows_of_panel(call: Call, near: bool = False) -> int:
    """Query rows of a blockwise panel: as many as were asked for, or as many as fit, beside all keys or those `near` to them."""
    asked = _asked_rows()
    if asked is not None:
        return asked
    return near_rows(call) if near else panel_rows(call)


def _asked_rows() -> int | None:
    return _overrides[-1].rows if _overrides else None


def is_free(impl: str) -> bool:
    """Whether nobody chose an execution, and no ranks share the keys."""
    return impl == "auto" and not _overrides and current() is None


def wants_dense() -> bool:
    """Whether everything inside is to be dense, with derivatives of every order."""
    return bool(_overrides) and _overrides[-1].impl == "dense"


def autocasting(device: torch.device) -> bool:
    """Whether autocast is on for a device; meta knows none, and asking it is an error."""
    kind = device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def execute(call: Call, impl: str) -> Tensor:
    """Run a call: (..., Nq, d_v) in the dtype of its values."""
    dispatch = choose(call, impl)
    path = dispatch.path
    if not torch.compiler.is_compiling():
        hooks.decided(dispatch)
    if call.asked is not None and path != "fused":
        # Parts of a call, one at a time, would each answer for the whole.
        call = call.with_(asked=None)
    if not autocasting(call.device):
        context = _shared(call, impl) if isinstance(call, ShardedCall) else _run(call, path)
        return context if context.dtype == call.value.dtype else context.to(call.value.dtype)
    # The operands already have autocast's dtype; what is computed from them here must stay wide.
    with torch.autocast(call.device.type, enabled=False):
        context = _shared(call, impl) if isinstance(call, ShardedCall) else _run(call, path)
        return context.to(call.value.dtype)


def _run(call: Call, path: str) -> Tensor:
    if path == "dense":
        return dense(call)
    if path == "fused":
        return fused(call, _asked_rows())
    if path in _CUTS:
        cut = _CUTS[path]
        return cut(call, lambda part: _run(part, _alone(part, "auto").path))
    if path == "chunked" and isinstance(call, HashedCall):
        return call.chunked()
    if isinstance(call, EdgeCall):
        return (
            call.segment(_asked_rows() or 0)
            if call.why_not_segment() is None
            else panel_by_panel(call, rows_of_panel(call))
        )
    return blockwise(call, rows_of_panel(call, near=True))


def _shared(call: ShardedCall, impl: str) -> Tensor:
    ranks = call.shard.ranks
    if ranks.exchange == "ring":
        agree(call)
        if ranks.size > 1:
            return ring(call, _asked_rows())
    else:
        ranks.agree("attending", facts(call), {})
    whole = call.whole()
    return _run(whole, _alone(whole, _overrides[-1].impl if _overrides else impl).path)


def _draws_on_device(call: Call) -> bool:
    """Whether several queries draw random numbers on a GPU: in torch these are a hundred launches, more than everything else."""
    return call.seed is not None and call.device_type == "cuda" and call.nq > 1


def _is_small(call: Call) -> bool:
    if call.form.sizes[0] == 1:
        # The hidden layer of a single query is no larger than the projected keys.
        return True
    if not are_known(call.pairs):
        return False
    width = call.form.a.shape[-1] if isinstance(call.form, AdditiveForm) else call.form.features or 1
    most = SMALL_HIDDEN_ELEMENTS if call.device_type == "cpu" else SMALL_ON_DEVICE
    return product_of_known(call.lead) * call.pairs * width <= most
