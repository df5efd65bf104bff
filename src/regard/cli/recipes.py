"""`regard recipes`: what can be run, and what can be set."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from regard.cli._output import refuse, write_fields, write_json, write_table


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
    if as_json:
        settings = [{"name": key, "default": value, "about": said.get(key, "")} for key, value in defaults.items()]
        write_json({"name": name, "about": one.about, "alternatives": list(one.alternatives), "settings": settings})
        return
    typer.echo(f"{name}: {one.about}\nattentions that fit: {', '.join(one.alternatives)}\n")
    write_fields([(f"{key}={value}", said.get(key, "")) for key, value in defaults.items()])


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
