"""One case or more for everything in the catalog: how to make it small, and what to call it with.

A case says of every tensor, mask and result which axes it has, by name. Everything else follows from the names: which rows
nobody may read (they share an axis with a mask), what padding is, where the batch is. A new mechanism adds its case here
and is then held to the whole contract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import regard as rg
from regard import catalog
from regard.catalog import Entry
from tests.cases import scrambled

Axes = tuple[str | int, ...]

# Every size a different prime, so that no two axes can be mistaken for each other.
SIZES = {"b": 3, "nq": 5, "n": 7}
WIDTHS = {"query_dim": 2, "key_dim": 11, "value_dim": 13, "hidden_dim": 17}


@dataclass(frozen=True)
class Inputs:
    """What a mechanism is called with."""

    tensors: dict[str, Tensor]
    masks: dict[str, Tensor]

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with every tensor, not the masks, changed."""
        return replace(self, tensors={name: change(x) for name, x in self.tensors.items()})


@dataclass(frozen=True)
class Case:
    """A mechanism, made small, with the axes of what goes in and what comes out.

    The first axis of everything is `b`, the batch. A mask covers every tensor whose row axis (the last but one) it has.
    """

    name: str
    entry: str
    make: Callable[[], nn.Module]
    tensors: Mapping[str, Axes]
    masks: Mapping[str, Axes]
    result: Axes
    call: Callable[[nn.Module, Inputs], Tensor]
    training: bool = False  # random while training: called with the same seed each time
    lacks: Mapping[str, str] = field(default_factory=dict)  # what does not hold, and why not

    def __str__(self) -> str:
        return self.name

    def build(self) -> nn.Module:
        """The module in float64, every parameter away from its initial value."""
        torch.manual_seed(0)
        return scrambled(self.make()).train(self.training)

    def inputs(self, **sizes: int) -> Inputs:
        """Tensors in float64. In the last batch entry everything is masked, in the one before it some rows are."""
        size, generator = SIZES | sizes, torch.Generator().manual_seed(1)

        def shape(axes: Axes) -> list[int]:
            return [size[axis] if isinstance(axis, str) else axis for axis in axes]

        tensors = {
            name: torch.randn(shape(axes), generator=generator, dtype=torch.float64)
            for name, axes in self.tensors.items()
        }
        masks = {}
        for name, axes in self.masks.items():
            allowed = torch.rand(shape(axes), generator=generator) < 0.8
            if allowed.shape[0] > 0:
                allowed[0, ..., -1:] = True  # so that the first entry has something in every row
            if allowed.shape[0] > 1:
                allowed[-2, ..., 1:2] = False
                allowed[-2, ..., 2:3] = True
                if "nq" in axes:
                    allowed[-2, ..., 2:3, :] = False
            if allowed.shape[0] > 2:
                allowed[-1] = False
            masks[name] = allowed
        return Inputs(tensors, masks)

    def unread(self, axes: Axes, inputs: Inputs) -> Tensor | None:
        """Rows of something with these axes that no mask lets anybody use, as (..., 1); None where none covers it."""
        for name, over in self.masks.items():
            if axes[-2] in over:
                used = inputs.masks[name]
                kept = [axis for axis in over if isinstance(axis, str) and axis in axes]
                gone = [k for k, axis in enumerate(over) if axis not in kept]
                used = used.any(gone) if gone else used
                shape = [used.shape[kept.index(axis)] if axis in kept else 1 for axis in axes[:-1]]
                return ~used.reshape(*shape, 1)
        return None

    def run(self, module: nn.Module, inputs: Inputs) -> Tensor:
        torch.manual_seed(2)
        return self.call(module, inputs)


def _attend(module: nn.Module, inputs: Inputs) -> Tensor:
    x = inputs.tensors
    return module(x.get("query"), x["key"], x.get("value"), mask=inputs.masks["mask"])


def _nearer(i: Tensor, j: Tensor) -> Tensor:
    """A bias of positions."""
    return -0.3 * (i - j).abs()


def _attend_nearer(module: nn.Module, inputs: Inputs) -> Tensor:
    x = inputs.tensors
    return module(x.get("query"), x["key"], x.get("value"), mask=inputs.masks["mask"], bias=_nearer)


def attention(entry: str, make: Callable[[], rg.Attention], name: str | None = None, **more: Any) -> Case:
    """A case of the general attention, under a mask of pairs; its widths are read off the score."""
    score = make().score
    key_dim = score.key_dim or WIDTHS["key_dim"]
    query_dim = score.query_dim or key_dim
    value_dim = score.features or WIDTHS["value_dim"]
    heads = score.head_shape
    tensors = {"query": ("b", *heads, "nq", query_dim)} if score.needs_query else {}
    rows = ("nq",) if score.needs_query else ()
    return Case(
        name=name or entry,
        entry=entry,
        make=make,
        tensors=tensors | {"key": ("b", *heads, "n", key_dim), "value": ("b", *heads, "n", value_dim)},
        masks={"mask": ("b", *(1 for _ in heads), *rows, "n")},
        result=("b", *heads, *rows, value_dim),
        call=_attend,
        **more,
    )


OPTIONS = WIDTHS | {"dim": 11, "rank": 3, "window": 1.5}
ESTIMATOR = {"second derivative": "the gradient is an estimator, not that of the forward"}


def _named(entry: Entry, *, score: str = "additive", align: str = "soft", **options: Any) -> rg.Attention:
    """Attention with the score or the alignment of an entry, by its name."""
    parts = {"score": entry.name} if issubclass(entry.cls, rg.Score) else {"score": score, "align": entry.name}
    given = {"align": align} | parts | options
    taken: set[str] = set()
    for part, category in (("score", "general/scoring"), ("align", "general/alignment")):
        taken |= set(catalog.arguments(catalog.find(given[part], category))) - set(
            catalog.find(given[part], category).preset
        )
    return rg.Attention(**{key: value for key, value in OPTIONS.items() if key in taken} | given)


def _scores_and_alignments() -> Iterator[Case]:
    """One case for each, made by its name: a new one is covered by being registered."""
    for entry in catalog.entries("general"):
        if issubclass(entry.cls, rg.Score | rg.Alignment):
            lacks = ESTIMATOR if issubclass(entry.cls, rg.Hard) else {}
            yield attention(entry.name, lambda entry=entry: _named(entry), lacks=lacks)


def _variant(entry: str, suffix: str, *, training: bool = False, lacks: Any = None, **options: Any) -> Case:
    found = catalog.find(entry)
    lacks = lacks if lacks is not None else (ESTIMATOR if entry == "hard" else {})
    return attention(entry, lambda: _named(found, **options), f"{entry}, {suffix}", training=training, lacks=lacks)


def _variants() -> Iterator[Case]:
    yield _variant("soft", "learnable temperature", temperature=0.7, learnable=True)
    yield _variant("soft", "fused", score="general")
    yield _variant("soft", "dropout", dropout=0.3, training=True)
    yield _variant("cosine", "learnable strength", beta=3.0, learnable=True)
    yield _variant("additive", "relu", activation="relu")
    yield _variant("additive", "any callable", activation=torch.sin)
    yield _variant("hard", "sampled", training=True)
    yield _variant("hard", "REINFORCE", training=True, gradient="reinforce")
    yield _variant("hard", "Gumbel", training=True, gradient="gumbel", temperature=0.7, lacks={})
    yield _variant("hard", "bilinear", score="general")
    yield _variant("local-monotonic", "no Gaussian", gaussian=False, score="general")
    yield _variant("local-predictive", "renormalised", renormalize=True, score="general")
    yield _variant("reinforced", "sampled, with context", context=True, training=True)
    yield _variant("entmax", "bisection", alpha=1.3, score="general")
    yield _variant("entmax", "learnable", alpha=1.4, learnable=True)
    yield _variant("structured", "normalised", normalize=True, score="general")
    yield _variant("budget", "three", k=3, score="general")
    yield _variant("budget", "exactly two, normalised", k=2, exact=True, normalize=True)
    yield attention(
        "dot",
        lambda: rg.Attention("dot", key_map=nn.Linear(11, 11), value_map=nn.Linear(13, 13)),
        "dot, key and value maps",
    )
    for score in ("dot", "additive"):
        yield replace(_variant(score, "biased by positions"), call=_attend_nearer)
    yield attention("general", lambda: rg.Attention(rg.General(2, 11, heads=2)), "general, heads")
    yield attention("additive", lambda: rg.Attention(rg.Additive(2, 11, 17, heads=2)), "additive, heads")
    yield replace(
        attention("additive", lambda: rg.Attention(rg.Additive(2, 11, 17)), "additive, one query"),
        tensors={"query": ("b", 2), "key": ("b", "n", 11), "value": ("b", "n", 13)},
        masks={"mask": ("b", "n")},
        result=("b", 13),
    )


def _dimensionalities() -> Iterator[Case]:
    def multi(align: str, score: str = "additive", **options: Any) -> Callable[[], rg.Attention]:
        return lambda: _named(catalog.find(align), score=score, features=13, **options)

    yield attention("attention", lambda: rg.Attention("scaled-dot"))
    yield attention("single-dimensional", lambda: rg.Attention("additive", query_dim=2, key_dim=11, hidden_dim=17))
    yield attention("multi-dimensional", multi("soft"))
    yield attention("multi-dimensional", multi("soft", "activated-general"), "multi-dimensional, bilinear")
    yield attention("multi-dimensional", multi("hard"), "multi-dimensional, hard", lacks=ESTIMATOR)
    yield attention("multi-dimensional", multi("hard"), "multi-dimensional, sampled", training=True, lacks=ESTIMATOR)
    yield attention("multi-dimensional", multi("sparsemax"), "multi-dimensional, sparsemax")
    yield attention("multi-dimensional", multi("local-predictive"), "multi-dimensional, local")
    yield attention("multi-dimensional", multi("reinforced"), "multi-dimensional, reinforced")


def _self_attention(entry: str, make: Callable[[], nn.Module], name: str | None = None, **more: Any) -> Case:
    """Tokens that attend each other, under a mask of tokens."""
    return Case(
        name=name or entry,
        entry=entry,
        make=make,
        tensors={"tokens": ("b", "n", 11)},
        masks={"mask": ("b", "n")},
        result=("b", "n", 13),
        call=lambda module, inputs: module(inputs.tensors["tokens"], inputs.masks["mask"]),
        **more,
    )


def _mechanisms() -> Iterator[Case]:
    for direction in ("forward", "both"):
        yield _self_attention(
            "directional-self-attention",
            lambda direction=direction: rg.DirectionalSelfAttention(11, 13, direction),
            f"directional-self-attention, {direction}",
        )
    yield _self_attention("reinforced-self-attention", lambda: rg.ReinforcedSelfAttention(11, 13, "forward"))
    yield _self_attention(
        "reinforced-self-attention",
        lambda: rg.ReinforcedSelfAttention(11, 13, context=True),
        "reinforced-self-attention, sampled",
        training=True,
    )


def _inputs(entry: str, make: Callable[[], nn.Module], *widths: int, width: int, name: str | None = None) -> Case:
    """Several inputs of the same tokens under one mask, read into one vector."""
    names = [f"input {k}" for k in range(len(widths))]
    return Case(
        name=name or entry,
        entry=entry,
        make=make,
        tensors={name: ("b", "n", d) for name, d in zip(names, widths, strict=True)},
        masks={"mask": ("b", "n")},
        result=("b", width),
        call=lambda module, inputs: module(
            *(inputs.tensors[name] for name in names), (inputs.masks["mask"],) * len(names)
        ),
    )


def _several_inputs() -> Iterator[Case]:
    alternating, interactive, parallel = "alternating-co-attention", "interactive-co-attention", "parallel-co-attention"
    yield _inputs(alternating, lambda: rg.AlternatingCoAttention((11, 2)), 11, 2, width=13)
    yield _inputs(
        alternating,
        lambda: rg.AlternatingCoAttention((11, 2), tie_first_last=True, hidden_dim=17, features=True),
        *(11, 2),
        width=13,
        name=f"{alternating}, tied, multi-dimensional",
    )
    yield _inputs(interactive, lambda: rg.InteractiveCoAttention((11, 2)), 11, 2, width=13)
    for scoring in ("aggregated", "max"):
        for affinity in ("activated-general", "additive"):
            yield _inputs(
                parallel,
                lambda scoring=scoring, affinity=affinity: rg.ParallelCoAttention(
                    (11, 2), affinity=affinity, scoring=scoring, hidden_dim=17
                ),
                *(11, 2),
                width=13,
                name=f"{parallel}, {scoring}, {affinity}",
            )
    yield _inputs(
        parallel,
        lambda: rg.ParallelCoAttention(11, affinity="trilinear", scoring=("max", "aggregated"), output="sum"),
        *(11, 11),
        width=11,
        name=f"{parallel}, trilinear",
    )
    yield _inputs("multi-grained-co-attention", lambda: rg.MultiGrainedCoAttention((11, 2)), 11, 2, width=26)
    yield _inputs("rotatory", lambda: rg.RotatoryAttention((11, 2), hops=2), 11, 2, 2, width=26)
    yield _inputs(
        "rotatory",
        lambda: rg.RotatoryAttention((11, 2), hops=3, order="context-first", weighting=True),
        *(11, 2, 2),
        width=26,
        name="rotatory, inverse, weighted",
    )


def _several_levels() -> Iterator[Case]:
    yield Case(
        name="attention-via-attention",
        entry="attention-via-attention",
        make=lambda: rg.AttentionViaAttention(2, (11, 13), hidden_dim=17),
        tensors={"query": ("b", 2), "words": ("b", "n", 11), "characters": ("b", "n", 13)},
        masks={"mask": ("b", "n")},
        result=("b", 24),
        call=lambda module, inputs: module(*inputs.tensors.values(), (inputs.masks["mask"],) * 2),
    )
    for entry, options in (("hierarchical", {}), ("multi-level-applications", {"score": "general", "align": "entmax"})):
        yield Case(
            name=entry,
            entry=entry,
            make=lambda options=options: rg.HierarchicalAttention(11, **options),
            tensors={"features": ("b", "nq", "n", 11)},
            masks={"mask": ("b", "nq", "n")},
            result=("b", 11),
            call=lambda module, inputs: module(inputs.tensors["features"], inputs.masks["mask"]),
        )


def _gates() -> Iterator[Case]:
    for more, options in (("", {}), (", any score", {"score": "general"})):
        yield Case(
            name=f"attention-gate{more}",
            entry="attention-gate",
            make=lambda options=options: rg.AttentionGate((11, 2), **options),
            tensors={"x": ("b", "n", 11), "gate": ("b", "n", 2)},
            masks={"mask": ("b", "n")},
            result=("b", "n", 11),
            call=lambda module, inputs: module(inputs.tensors["x"], inputs.tensors["gate"], inputs.masks["mask"]),
        )


def _several_representations() -> Iterator[Case]:
    for align in ("soft", "sigmoid"):
        yield Case(
            name=f"meta-embedding, {align}",
            entry="meta-embedding",
            make=lambda align=align: rg.MetaEmbedding((2, 11), 13, align=align),
            tensors={"first": ("b", "n", 2), "second": ("b", "n", 11)},
            masks={"mask": ("b", "n")},
            result=("b", "n", 13),
            call=lambda module, inputs: module(list(inputs.tensors.values()), [inputs.masks["mask"]] * 2),
        )


def _single() -> Iterator[Case]:
    for entry in ("singular-feature", "single-level", "single-representational"):
        yield attention(entry, lambda: rg.Attention("additive", query_dim=2, key_dim=11, hidden_dim=17))


def _feature() -> list[Case]:
    return [*_several_inputs(), *_several_levels(), *_gates(), *_several_representations(), *_single()]


def _asking() -> Iterator[Case]:
    yield _self_attention("self-attention", lambda: rg.SelfAttention(11, 5, 13))
    yield _self_attention(
        "self-attention",
        lambda: rg.SelfAttention(11, 5, 13, score="additive", pairs=rg.Causal(), features=True),
        "self-attention, causal, additive, multi-dimensional",
    )
    yield replace(
        _self_attention(
            "feature-update", lambda: rg.SelfAttention(11, 5, 13, update="residual", align="entmax", pairs=rg.Others())
        ),
        result=("b", "n", 11),
    )


class Asked(nn.Module):
    """A model of queries and the attention that it asks."""

    def __init__(self, query: nn.Module, key_dim: int = 11) -> None:
        super().__init__()
        self.query, self.attention = query, rg.Attention(rg.Additive(2, key_dim, 17))

    def forward(self, query: Tensor, inputs: Inputs) -> Tensor:
        return self.attention(query, inputs.tensors["key"], inputs.tensors["value"], mask=inputs.masks["mask"])


def _queries() -> Iterator[Case]:
    def asked(
        entry: str, query: Callable[[], nn.Module], ask: Callable[[Any, Inputs], Tensor], **tensors: Axes
    ) -> Case:
        return Case(
            name=entry,
            entry=entry,
            make=lambda: Asked(query()),
            tensors=tensors | {"key": ("b", "n", 11), "value": ("b", "n", 13)},
            masks={"mask": ("b", "n")},
            result=("b", 13),
            call=lambda module, inputs: module(ask(module.query, inputs), inputs),
        )

    def of_key(query: nn.Module, inputs: Inputs) -> Tensor:
        return query(inputs.tensors["key"], inputs.masks["mask"])

    def of_features(query: nn.Module, inputs: Inputs) -> Tensor:
        return query(inputs.tensors["features"], inputs.masks["mask"])

    def of_context(query: nn.Module, inputs: Inputs) -> Tensor:
        return query(None, inputs.tensors["features"], mask=inputs.masks["mask"])

    yield asked("constant-query", lambda: rg.ConstantQuery(torch.ones(2)), of_key)
    yield asked("learnable-query", lambda: rg.LearnableQuery(2), of_key)
    yield asked("basic-query", rg.RNNStateQuery, lambda query, inputs: query(inputs.tensors["state"]), state=("b", 2))
    yield asked(
        "auxiliary-query",
        lambda: rg.AuxiliaryQuery(5, 2),
        lambda query, inputs: query(inputs.tensors["variable"], inputs.masks["mask"].any(-1)),
        variable=("b", 5),
    )
    yield asked("pooled-query", rg.PooledQuery, of_features, features=("b", "n", 2))
    yield asked(
        "specialised-query",
        lambda: rg.ContextQuery(rg.Attention("query-free", key_dim=2, hidden_dim=3)),
        of_context,
        features=("b", "n", 2),
    )


def _multi_hop() -> Iterator[Case]:
    def hops(name: str, entry: str = "multi-hop", side: bool = False, **options: Any) -> Case:
        more: dict[str, Axes] = {"side": ("b", "n", 2)} if side else {}
        return Case(
            name=name,
            entry=entry,
            make=lambda: rg.MultiHopAttention((2, 11, 13), 2, **options),
            tensors={"query": ("b", 2), "key": ("b", "n", 11), "value": ("b", "n", 13)} | more,
            masks={"mask": ("b", "n")},
            result=("b", 13),
            call=lambda module, inputs: module(
                *(inputs.tensors[name] for name in ("query", "key", "value")),
                inputs.masks["mask"],
                side=inputs.tensors.get("side"),
                side_mask=inputs.masks["mask"] if side else None,
            ),
        )

    yield hops("multi-hop, own weights", share=False)
    yield hops("multi-hop, GRU", transform="gru", score="general", align="sparsemax")
    yield hops("multi-hop-variants", "multi-hop-variants", side=True, transform="attention", start="zeros")


def _many_asking() -> Iterator[Case]:
    def multi_head(name: str, **options: Any) -> Case:
        return Case(
            name=f"multi-head, {name}",
            entry="multi-head",
            make=lambda: rg.MultiHeadAttention((2, 11, 13), 3, head_dim=(5, 7), **options),
            tensors={"query": ("b", "nq", 2), "key": ("b", "n", 11), "value": ("b", "n", 13)},
            masks={"mask": ("b", "nq", "n")},
            result=("b", "nq", 2),
            call=_attend,
        )

    yield multi_head("biased", bias=True)
    yield multi_head("grouped, additive", score="additive", key_heads=1)
    yield multi_head(
        "different heads", score=["additive", "general", "dot"], align=[None, "sparsemax", None], bias=True
    )
    yield Case(
        name="multi-query-concat",
        entry="multi-query-concat",
        make=lambda: rg.MultiQueryConcat("additive", query_dim=2, key_dim=11, hidden_dim=17),
        tensors={"query": ("b", "nq", 2), "key": ("b", "n", 11), "value": ("b", "n", 13)},
        masks={"mask": ("b", "nq", "n")},
        result=("b", "nq", 13),
        call=lambda module, inputs: _attend(module, inputs).unflatten(-1, (inputs.tensors["query"].shape[-2], 13)),
    )


class Pointwise(nn.Module):
    """An encoder of each token by itself."""

    out_dim = 5

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(11, 5)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask.unsqueeze(-1), self.map(tokens).tanh(), 0.0)


def _point(module: nn.Module, inputs: Inputs) -> Tensor:
    """Probabilities (b, n, 1) of the second step, after a first one that pointed nowhere."""
    tokens, mask = inputs.tensors["tokens"], inputs.masks["mask"]
    nowhere = torch.full((tokens.shape[0], 2), -1, device=tokens.device)
    return module(tokens, nowhere, mask)[:, 1, : tokens.shape[1], None].exp()


def _saliency() -> Iterator[Case]:
    yield attention("focus-and-saliency", lambda: rg.Attention("biased-general", query_dim=2, key_dim=11))


def _pointing() -> Iterator[Case]:
    for score, stop in (("additive", False), ("general", True)):
        yield Case(
            name=f"pointer, {score}",
            entry="pointer",
            make=lambda score=score, stop=stop: rg.PointerNetwork(11, 3, score=score, stop=stop, encoder=Pointwise()),
            tensors={"tokens": ("b", "n", 11)},
            masks={"mask": ("b", "n")},
            result=("b", "n", 1),
            call=_point,
        )


def _reading() -> Iterator[Case]:
    for score, dim in (("dot", (2, 2)), ("additive", (2, 11))):
        yield Case(
            name=f"attention-over-attention, {score}",
            entry="attention-over-attention",
            make=lambda score=score, dim=dim: rg.AttentionOverAttention(dim, score=score),
            tensors={"document": ("b", "nq", 2), "question": ("b", "n", dim[1])},
            masks={"mask": ("b", "nq", "n")},
            result=("b", "nq", 1),
            call=lambda module, inputs: module(
                *inputs.tensors.values(), (inputs.masks["mask"].any(-1), inputs.masks["mask"].any(-2))
            ).unsqueeze(-1),
        )
    for hops, dim in ((1, 13), (2, 2)):
        yield Case(
            name=f"key-value, {hops}",
            entry="key-value",
            make=lambda hops=hops, dim=dim: rg.KeyValueMemory((2, 11, dim), hops, score="general"),
            tensors={"query": ("b", 2), "key": ("b", "n", 11), "value": ("b", "n", dim)},
            masks={"mask": ("b", "n")},
            result=("b", dim),
            call=lambda module, inputs: module(*inputs.tensors.values(), inputs.masks["mask"]),
        )


def _capsules() -> Iterator[Case]:
    def case(entry: str, more: str, make: Callable[[], nn.Module], width: int, read: Callable[[Any], Tensor]) -> Case:
        return Case(
            name=f"{entry}, {more}",
            entry=entry,
            make=make,
            tensors={"features": ("b", "n", 11)},
            masks={"mask": ("b", "n")},
            result=("b", width),
            call=lambda module, inputs: read(module(inputs.tensors["features"], inputs.masks["mask"])).flatten(-2),
        )

    def reconstruction(found: rg.Capsules) -> Tensor:
        return found.reconstruction

    capsule, heads = "capsule-based-attention", "multi-head-capsules"
    yield case(capsule, "identity", lambda: rg.CapsuleAttention(11, 5), 55, reconstruction)
    for maps, align in (("shared", "sparsemax"), ("class", None)):
        make = partial(rg.CapsuleAttention, (11, 2, 13), 5, maps=maps, score="additive", align=align)
        yield case(capsule, maps, make, 65, reconstruction)
    yield case(heads, "identity", lambda: rg.MultiHeadCapsules(11, 5, 2), 110, reconstruction)
    yield case(
        heads,
        "own maps, judged by head",
        lambda: rg.MultiHeadCapsules((11, 2, 13), 5, 3, maps="head", judge="head", compare="map", score="general"),
        55,
        reconstruction,
    )
    # With a matrix for each input there are some to spare, for padding.
    for more, options in (("own matrices", {"inputs": 13}), ("sparsemax", {"align": "sparsemax"})):
        make = partial(rg.DynamicRouting, (11, 2), 5, **options)
        yield case("dynamic-routing-capsules", more, make, 10, lambda v: v)
    for link in ("attention", "routing"):
        make = partial(rg.HierarchicalCapsules, 11, (7, 5), link=[link, "attention"])
        yield case("hierarchical-capsules", link, make, 55, reconstruction)


def _structured() -> Iterator[Case]:
    for score, single_root in (("scaled-dot", False), ("additive", True)):
        yield _self_attention(
            "dependency-tree",
            lambda score=score, single_root=single_root: rg.SelfAttention(
                11, 5, 13, score=score, align=rg.DependencyTree(single_root)
            ),
            f"dependency-tree, {score}",
        )


def _emerging() -> Iterator[Case]:
    def tokens(entry: str, name: str, make: Callable[[], nn.Module], width: int) -> Case:
        return Case(
            name=f"{entry}, {name}",
            entry=entry,
            make=make,
            tensors={"query": ("b", "nq", 2), "key": ("b", "n", 11), "value": ("b", "n", 13)},
            masks={"mask": ("b", "nq", "n")},
            result=("b", "nq", width),
            call=_attend,
        )

    routing, agreement = "dynamic-query-routing", "routing-by-agreement"
    yield tokens(routing, "queries", lambda: rg.QueryRouting((2, 11, 13), 5, top_k=2), 13)
    for score, noise in (("additive", 0.0), ("general", 0.7)):
        make = partial(rg.QueryRouting, (2, 11, 13), 3, top_k=2, mix="context", score=score, noise=noise)
        yield replace(tokens(routing, f"contexts, {score}", make, 13), training=noise > 0)
    yield tokens(agreement, "as many", lambda: rg.AgreementAttention((2, 11, 13), 2, head_dim=(5, 7)), 2)
    make = partial(rg.AgreementAttention, (2, 11, 13), 3, head_dim=3, capsules=1, score="additive", bias=True)
    yield tokens(agreement, "one, biased", make, 2)
    yield attention("sinkhorn", lambda: rg.Attention(rg.Additive(2, 11, 17), rg.Sinkhorn(0.5, 7)))
    yield Case(
        name="cross-modal-query-alignment",
        entry="cross-modal-query-alignment",
        make=lambda: rg.CrossModalAttention((11, 2), 5),
        tensors={"first": ("b", "n", 11), "second": ("b", "n", 2)},
        masks={"mask": ("b", "n")},
        result=("b", "n", 13),
        call=lambda module, inputs: torch.cat(module(*inputs.tensors.values(), (inputs.masks["mask"],) * 2), -1),
    )
    for steps, rate, align in ((0, 1.0, None), (2, 0.5, "entmax")):
        yield Case(
            name=f"energy-based-query-selection, {steps} steps",
            entry="energy-based-query-selection",
            make=partial(rg.EnergySelection, 11, beta=0.7, steps=steps, rate=rate, align=align),
            tensors={"query": ("b", "nq", 11), "key": ("b", "n", 11), "value": ("b", "n", 13)},
            masks={"mask": ("b", "nq", "n")},
            result=("b", 13),
            call=lambda module, inputs: module(
                *inputs.tensors.values(), inputs.masks["mask"].any(-2), query_mask=inputs.masks["mask"].any(-1)
            ),
        )


def _conditional() -> Iterator[Case]:
    def asked(entry: str, make: Callable[[], nn.Module], x: int | None, width: int = 13) -> Case:
        def call(module: nn.Module, inputs: Inputs) -> Tensor:
            real = inputs.masks["mask"]
            given = [inputs.tensors[name] for name in ("x", "condition") if name in inputs.tensors]
            query = module.query(*given, real.any(-1))
            mask = real if query.dim() == 2 else rg.Keys(real)
            read = module.attention(query, inputs.tensors["key"], inputs.tensors["value"], mask=mask)
            return read.reshape(len(read), width)

        more: dict[str, Axes] = {} if x is None else {"x": ("b", x)}
        return Case(
            name=entry,
            entry=entry,
            make=lambda: Asked(make()),
            tensors=more | {"condition": ("b", 5), "key": ("b", "n", 11), "value": ("b", "n", 13)},
            masks={"mask": ("b", "n")},
            result=("b", width),
            call=call,
        )

    yield asked("conditional-query-generation", lambda: rg.FiLMQuery(2, 5), 2)
    yield asked("hyper-network-query", lambda: rg.HyperQuery(3, 5, 2, rank=2), 3)
    yield asked("latent-queries", lambda: rg.LatentQueries(2, 3, 5), None, 39)


def _query() -> list[Case]:
    return [
        *_asking(),
        *_queries(),
        *_many_asking(),
        *_multi_hop(),
        *_reading(),
        *_pointing(),
        *_saliency(),
        *_structured(),
        *_emerging(),
        *_conditional(),
        *_capsules(),
    ]


def _transformer() -> list[Case]:
    from tests.contract import transformer_cases

    return transformer_cases.CASES


def _graph() -> list[Case]:
    from tests.contract import graph_cases

    return graph_cases.CASES


CASES = [
    *_scores_and_alignments(),
    *_variants(),
    *_dimensionalities(),
    *_mechanisms(),
    *_feature(),
    *_query(),
    *_transformer(),
    *_graph(),
]


def named(name: str) -> Case:
    """The case of this name."""
    return next(case for case in CASES if case.name == name)
