"""An attention by name, for a recipe that knows the widths."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from regard import catalog
from regard._errors import nearest, refusal
from regard.general.attention import Attention


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
        known = set()
        for part, category in (("score", "general/scoring"), ("align", "general/alignment")):
            known |= set(catalog.arguments(catalog.find(parts[part], category, f"attention.{part}")))
        offered = {key: value for key, value in widths.items() if key in known}
        return Attention(**parts, **{**_defaults(parts["align"]), **offered, **given})
    parameters = inspect.signature(entry.cls).parameters
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in given:
        if key not in parameters and not takes_rest:
            raise ValueError(
                refusal(f"attention.{key}", repr(given[key]), f"an argument of {name}", nearest(key, parameters))
            )
    offered = {key: value for key, value in widths.items() if key in parameters}
    missing = [k for k, p in parameters.items() if p.default is p.empty and k not in {*offered, *given} and p.kind < 2]
    if missing:
        needs = ", ".join(f"--set attention.{key}=…" for key in missing)
        raise ValueError(refusal("attention", repr(name), f"also {', '.join(missing)}", f"Fix: {needs}."))
    made: nn.Module = entry.cls(**{**offered, **given})
    return made


def _defaults(align: str) -> dict[str, Any]:
    """What an alignment cannot do without."""
    return {"window": 5} if align.startswith("local") else {}
