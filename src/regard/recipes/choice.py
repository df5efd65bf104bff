"""An attention by name, for a recipe that knows the widths, and a task model around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard import catalog
from regard._errors import nearest, refusal
from regard.general.alignments import Alignment, Local
from regard.general.attention import Attention
from regard.model import Output, TaskModel
from regard.model.naming import Available, On


def make_attention(name: str, options: Mapping[str, Any], **widths: int) -> nn.Module:
    """Any mechanism of the catalog: a score or an alignment means `Attention` with it.

    Args:
        name: of the catalog.
        options: what the user set: `score`, `align`, and arguments of the parts.
        **widths: what the recipe offers (`query_dim`, `key_dim`, `hidden_dim`, `dim`, …); each part takes what it knows.

    Example:
        >>> make_attention("general", {}, query_dim=4, key_dim=6, hidden_dim=8).score
        General(query_dim=4, key_dim=6, features=None)
        >>> type(make_attention("sparsemax", {"score": "dot"}, query_dim=4, key_dim=4).align).__name__
        'Sparsemax'
    """
    entry = catalog.find(name, argument="attention")
    given = {**entry.preset, **options}
    if entry.path in ("general/scoring", "general/alignment") or entry.cls is Attention:
        parts: dict[str, Any] = {"score": "additive", "align": "soft"}
        if entry.path == "general/scoring":
            parts["score"] = name
        elif entry.path == "general/alignment":
            parts["align"] = name
        parts |= {key: given.pop(key) for key in ("score", "align") if key in given}
        if name == "multi-dimensional":
            given.setdefault("features", widths.get("value_dim", widths["key_dim"]))
        known = _arguments_of(parts)
        for key in given:
            if key not in known:
                raise ValueError(_unknown(name, key, given[key], {"score", "align", *known}))
        # Heads are axes of a score's inputs, which these are not: mechanisms that have heads make them.
        offered = {key: value for key, value in widths.items() if key in known and key != "heads"}
        return Attention(**parts, **{**_defaults(parts["align"]), **offered, **given})
    if not issubclass(entry.cls, nn.Module) or issubclass(entry.cls, Alignment):
        fix = f"Fix: give it to a mechanism: --set attention.align={entry.name}." if entry.part == "align" else ""
        raise ValueError(refusal("attention", repr(name), "a mechanism that reads by itself", fix))
    if entry.path == "query/position" or (entry.path == "query/type" and entry.name.endswith("-query")):
        kind = "where tokens stand" if entry.path == "query/position" else "what is asked, not what reads"
        raise ValueError(refusal("attention", f"{name!r}, which says {kind}", "a mechanism that reads"))
    parameters = inspect.signature(entry.cls).parameters
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in given:
        if key not in parameters and not takes_rest:
            raise ValueError(_unknown(name, key, given[key], parameters))
    offered = {key: value for key, value in widths.items() if key in parameters}
    named = [
        k for k, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    missing = [key for key in named if key not in {*offered, *given}]
    if missing:
        needs = ", ".join(f"--set attention.{key}=…" for key in missing)
        raise ValueError(refusal("attention", repr(name), f"also {', '.join(missing)}", f"Fix: {needs}."))
    try:
        made: nn.Module = entry.cls(**{**offered, **given})
    except TypeError as error:
        # Where a mechanism hands the rest on to its parts, they say what none of them takes.
        refused = next((key for key in given if key not in parameters and str(error).startswith(f"{key}: got ")), None)
        if refused is None:
            raise
        own = {key for key, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
        chosen = {part: given.get(part, parameters[part].default) for part in ("score", "align") if part in parameters}
        raise ValueError(_unknown(name, refused, given[refused], own | _arguments_of(chosen))) from error
    return made


def _arguments_of(parts: Mapping[str, Any]) -> set[str]:
    """What an attention takes whose score and alignment have these names; those that have none are as they are."""
    known = {"dropout", "impl"}
    for part, category in (("score", "general/scoring"), ("align", "general/alignment")):
        if isinstance(parts.get(part), str):
            known |= set(catalog.arguments(catalog.find(parts[part], category, f"attention.{part}")))
    return known


def _unknown(name: str, key: str, value: Any, known: Iterable[str]) -> str:
    # Widths are the recipe's to give.
    options = set(known) - {"query_dim", "key_dim", "value_dim", "dim"}
    return refusal(f"attention.{key}", repr(value), f"an option of {name!r}", nearest(key, options))


def _defaults(align: str) -> dict[str, Any]:
    """What an alignment cannot do without."""
    return {"window": 5} if align.startswith("local") else {}


def asks(attention: nn.Module) -> bool:
    """Whether an attention cannot do without a query."""
    inner = attention.module if isinstance(attention, On) else attention
    if isinstance(inner, Attention):
        predicts = isinstance(inner.align, Local) and inner.align.position == "predictive"
        return inner.score.needs_query or predicts
    parameter = inspect.signature(inner.forward).parameters.get("query")
    return parameter is not None and parameter.default is parameter.empty


def assembled(
    features: nn.Module | Mapping[str, nn.Module],
    attention: nn.Module,
    output: Callable[[Any], Output],
    inputs: Mapping[str, int],
    query: Callable[[], nn.Module],
    variables: Mapping[str, Tensor] | None = None,
) -> TaskModel:
    """A task model around any attention: a query where it needs one, and an output as wide as what it reads.

    Args:
        features: of the inputs.
        attention: what the user chose.
        output: makes the output model from what the attention reads of made-up features, whose last axis says how wide it is.
        inputs: width of the features of every input, by name.
        query: makes the query model; called where the attention asks.
        variables: those of one example, where the parts look at any.

    Example:
        >>> import regard as rg
        >>> from regard.model import Classifier, Embedding
        >>> attention = make_attention("self-attention", {}, dim=8)
        >>> model = assembled(
        ...     Embedding(20, 8),
        ...     attention,
        ...     lambda c: Classifier(c.shape[-1], 3),
        ...     {"tokens": 8},
        ...     lambda: rg.LearnableQuery(8),
        ... )
        >>> model.query is None, model.output.linear.in_features
        (True, 8)
    """
    ask = query() if asks(attention) else None
    made = TaskModel(features, ask, attention, Output())
    context = tried(
        made, inputs, lambda found: None if ask is None else ask(**found.arguments(ask, "query")), variables
    )
    made.output = output(context)
    return made


def tried(
    model: TaskModel,
    inputs: Mapping[str, int],
    query: Callable[[Available], Tensor | None],
    variables: Mapping[str, Tensor] | None = None,
    **more: Any,
) -> Any:
    """What the attention of a model reads of made-up features: one example of three tokens in every input.

    Args:
        model: whose attention is called.
        inputs: width of the features of every input, by name.
        query: makes the query from what there is.
        variables: those of one example.
        **more: what else a reader is given, such as `start`.
    """
    found = Available(
        {name: torch.ones(1, 3, dim) for name, dim in inputs.items()},
        {name: torch.ones(1, 3, dtype=torch.bool) for name in inputs},
        variables or {},
    )
    # Looking must leave no mark: not on the random numbers that follow, nor on the state of the modules.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        was = model.attention.training
        model.eval()
        context = model.read(found, query(found), **more)
        model.train(was)
    return context
