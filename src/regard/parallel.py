"""Sequences that no rank holds alone: attention over the slices of all ranks of a device mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_pre_hook

from regard._errors import nearest, refusal
from regard.general.alignments import Alignment
from regard.general.scores import Score
from regard.ops.parallel.ranks import EXCHANGES, Ranks, entered, first_place, refuse

__all__ = ["context", "first_place"]

# Those of our modules in which tokens meet only in `Attention`, and places are those of the whole sequence. Subclasses answer for
# themselves: a Linformer is an encoder.
_SHARED = frozenset(
    {
        "AlibiPosition",
        "Attention",
        "DecoderLayer",
        "DirectionalPosition",
        "EncoderLayer",
        "FeedForward",
        "LanguageModel",
        "LearnedPosition",
        "MultiHeadAttention",
        "RotaryPosition",
        "SelfAttention",
        "Selector",
        "ShawPosition",
        "SinusoidalPosition",
        "TokenEmbedding",
        "Transformer",
        "TransformerAttention",
        "TransformerDecoder",
        "TransformerEncoder",
        "TransformerXLPosition",
    }
)


@contextmanager
def context(mesh: DeviceMesh, *, exchange: str = "ring") -> Iterator[None]:
    r"""Let every attention inside read the keys of all ranks of a mesh.

    Each rank holds a slice of the sequence, in the order of the ranks, and calls the same modules: `attend(query, key, value)` with the
    slice of its queries and the slice of its keys and values gives the contexts of its queries over the keys of all,

    $$c_i = \sum_{r} \sum_{j \in J_r} \mathrm{align}(\mathrm{score}(q_i, k))_j\, v_j, \qquad i \in I_{\text{own}}.$$

    Slices may have any lengths, none too. Positions, in masks and biases, are those of the whole sequence. Gradients of queries, keys and
    values are complete on the rank that holds them; gradients of parameters are this rank's summand, as in data parallelism, and
    are added up by whoever does so there (DDP, FSDP, an all-reduce over the same ranks). Every rank must run the backward. Mechanisms of
    this library in which tokens meet otherwise than in `Attention` are refused by name.

    Args:
        mesh: of one axis, such as `init_device_mesh("cuda", (8,))` or `mesh["context"]`.
        exchange: `"ring"` passes keys from rank to rank and folds them into partial states, for alignments that have a fold, in memory
            linear in the slice; `"gather"` puts the keys of all ranks on each, for every alignment of rows.

    Example:
        >>> import regard as rg
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> attend, x = rg.Attention("dot"), torch.randn(2, 5, 4)
        >>> with context(init_device_mesh("cpu", (1,))):
        ...     shared = attend(x, x, mask=rg.Causal())
        >>> torch.allclose(shared, attend(x, x, mask=rg.Causal()), atol=1e-6)
        True
        >>> dist.destroy_process_group()
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            refusal("mesh", type(mesh).__name__, "a DeviceMesh", "Fix: init_device_mesh(device, (ranks,)).")
        )
    if mesh.ndim != 1:
        names = ", ".join(mesh.mesh_dim_names or ()) or "without names"
        fix = "Fix: take one of its axes, mesh['context'], or flatten it."
        raise ValueError(
            refusal("mesh", f"{mesh.ndim} axes ({names})", "one axis, along which slices follow each other", fix)
        )
    if exchange not in EXCHANGES:
        fix = nearest(str(exchange), EXCHANGES, listed=True)
        raise ValueError(refusal("exchange", repr(exchange), f"one of {', '.join(EXCHANGES)}", fix))
    group = mesh.get_group()
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device.type).current_device())
    watch = register_module_forward_pre_hook(_refuse_what_is_not_shared)
    try:
        with entered(Ranks(group, dist.get_rank(group), dist.get_world_size(group), device, exchange)):
            yield
    finally:
        watch.remove()


def _refuse_what_is_not_shared(module: nn.Module, _: object) -> None:
    """A mechanism that takes a mean over its tokens, say, would take that of a slice, and nobody would see it."""
    kind = type(module)
    ours = kind.__module__.startswith("regard.") and not isinstance(module, Score | Alignment)
    if ours and kind.__qualname__ not in _SHARED:
        refuse(kind.__qualname__, "its tokens may meet outside of its attentions")
