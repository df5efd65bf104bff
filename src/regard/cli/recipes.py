"""`regard recipes`: what can be run, and what can be set."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli._output import refuse, write_fields, write_json, write_table

if TYPE_CHECKING:
    from regard.recipes.recipe import Recipe


def list_recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe; all of them without.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON.")] = False,
) -> None:
    """List the recipes, or the settings of one with their defaults and what they mean."""
    from regard.recipes.recipe import RECIPES, recipe

    if name is None:
        found = [(key, recipe(key)) for key in RECIPES]
        if as_json:
            write_json([{"name": key, "about": one.about, "attention": one.attention} for key, one in found])
            return
        write_table(["recipe", "attention", "about"], [[key, one.attention, one.about] for key, one in found])
        return
    try:
        one = recipe(name)
    except ValueError as error:
        refuse(error)
    said = _said(one)
    defaults = {f.name: f.default for f in dataclasses.fields(one) if f.default is not dataclasses.MISSING}
    others = {key: _others(one, key, value) for key, value in defaults.items()}
    if as_json:
        settings = [
            {"name": key, "default": value, "about": said.get(key, ""), "others": others[key]}
            for key, value in defaults.items()
        ]
        write_json({"name": name, "about": one.about, "alternatives": list(one.alternatives), "settings": settings})
        return
    typer.echo(f"{name}: {one.about}\nattentions that fit: {', '.join(one.alternatives)}\n")
    write_fields(
        [
            (f"{key}={value}", " ".join(filter(None, (said.get(key, ""), _in_words(others[key])))))
            for key, value in defaults.items()
        ]
    )


def _others(recipe: type[Recipe], key: str, default: Any) -> list[dict[str, Any]]:
    """What a setting is where nobody sets it and it is not the default: without data or with, and with which attentions."""
    found: list[dict[str, Any]] = []
    for data in (None, "DIR"):
        values = {name: recipe.usual(name, data).get(key, default) for name in (*recipe.alternatives, recipe.attention)}
        # What most attentions have goes without their names.
        most = max(values.values(), key=list(values.values()).count)
        for value in dict.fromkeys((most, *values.values())):
            if (default, default) != (value, most):
                named = [] if value == most else [name for name in values if values[name] == value]
                found.append({"value": value, "data": data is not None, "attentions": named})
    return found


def _in_words(others: list[dict[str, Any]]) -> str:
    said = []
    for other in others:
        names = f" by {', '.join(other['attentions'])}" if other["attentions"] else ""
        said.append(f"{other['value']} {'with' if other['data'] else 'without'} --data{names}")
    return f"({'; '.join(said)})" if said else ""


def _said(recipe: type[Any]) -> dict[str, str]:
    """What the docstrings of a recipe and of those that it is made from say of each setting."""
    found: dict[str, str] = {}
    for cls in reversed(recipe.__mro__):
        _, _, listed = (cls.__dict__.get("__doc__") or "").partition("Attributes:\n")
        key = ""
        for line in listed.splitlines():
            if line.startswith("        ") and not line.startswith("         ") and ": " in line:
                key, _, text = line.strip().partition(": ")
                found[key] = text
            elif key and line.startswith("            "):
                found[key] += f" {line.strip()}"
            elif not line.strip():
                break
    return found
