"""`regard show`: one mechanism."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli._example import program
from regard.cli._output import Language, place, refuse, write_fields, write_json

if TYPE_CHECKING:
    from regard.catalog import Entry

_LABELS = {
    Language.en: ("name", "place", "equation", "paper", "year", "time", "memory", "choose", "avoid", "make"),
    Language.zh: ("名称", "类别", "公式", "论文", "年份", "时间", "内存", "适用", "不适用", "构造"),
}


def show(
    name: Annotated[str, typer.Argument(help="A name of the catalog, English or Chinese, or the name of a class.")],
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object.")] = False,
    lang: Annotated[
        Language, typer.Option(help="Of labels, name and place; what is said of a mechanism is English.")
    ] = Language.en,
) -> None:
    """Show one mechanism: equation, paper, cost, when to choose it and when not, how to make one, and a program."""
    from regard import catalog

    try:
        entry = catalog.find(name)
    except ValueError as error:
        refuse(error)
    if as_json:
        write_json(entry.as_dict())
        return
    names = (entry.name, entry.zh) if lang is Language.en else (entry.zh, entry.name)
    facts = (
        " · ".join(names),
        place(entry.path, lang),
        entry.equation,
        entry.paper,
        str(entry.year),
        entry.time,
        entry.memory,
        entry.choose,
        entry.avoid,
        _constructor(entry),
    )
    write_fields(list(zip(_LABELS[lang], facts, strict=True)))
    # Below the fields and at the margin: what is copied from here is to run.
    typer.echo(f"\n{program(entry)}")


def _constructor(entry: Entry) -> str:
    """How the class is called, with its defaults."""
    from regard.catalog import arguments

    shown = []
    for key, parameter in arguments(entry).items():
        if key in entry.preset:
            shown.append(f"{key}={entry.preset[key]!r}")
        elif parameter.default is parameter.empty:
            shown.append(f"{key}=…" if parameter.kind is parameter.KEYWORD_ONLY else key)
        else:
            shown.append(f"{key}={parameter.default!r}")
    parameters = inspect.signature(entry.cls).parameters.values()
    shown += [f"**{p.name}" for p in parameters if p.kind is p.VAR_KEYWORD]
    return f"regard.{entry.cls.__name__}({', '.join(shown)})"
