"""`regard list`: the mechanisms, by their place in the taxonomy."""

from __future__ import annotations

from typing import Annotated

import typer

from regard._errors import nearest, refusal
from regard.cli._output import Language, place, refuse, write_json, write_table

# The paper follows, where there is room for it: in a pipe.
_HEADINGS = {
    Language.en: ("name", "place", "equation", "year"),
    Language.zh: ("名称", "英文名", "类别", "公式", "年份"),
}


def list_mechanisms(
    category: Annotated[
        str | None, typer.Option(help="A place in the taxonomy, such as general or general/scoring.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list of objects.")] = False,
    lang: Annotated[Language, typer.Option(help="Language of headings, names and places.")] = Language.en,
) -> None:
    """List the mechanisms: name, place in the taxonomy, equation, year; in a pipe, the paper too."""
    from regard import catalog

    known = catalog.categories()
    if category is not None and category not in known:
        expected = "a place of the taxonomy"
        refuse(ValueError(refusal("--category", repr(category), expected, nearest(category, known))))
    entries = list(catalog.entries(category))
    if as_json:
        write_json([entry.as_dict() for entry in entries])
        return
    write_table(
        _HEADINGS[lang],
        [
            (
                *((entry.zh,) if lang is Language.zh else ()),
                entry.name,
                place(entry.path, lang),
                entry.equation,
                str(entry.year),
                entry.paper,
            )
            for entry in entries
        ],
    )
