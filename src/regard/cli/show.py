"""`regard show`: one mechanism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli._output import refuse, write_fields, write_json

if TYPE_CHECKING:
    from regard.catalog import Entry


def show(
    name: Annotated[str, typer.Argument(help="A name of the catalog, English or Chinese, or the name of a class.")],
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object.")] = False,
) -> None:
    """Show one mechanism: equation, paper, cost, when to choose it and when not, how to make one."""
    from regard import catalog

    try:
        entry = catalog.find(name)
    except ValueError as error:
        refuse(error)
    if as_json:
        write_json(entry.as_dict())
        return
    write_fields(
        [
            ("name", f"{entry.name} · {entry.zh}"),
            ("place", entry.path),
            ("equation", entry.equation),
            ("paper", entry.paper),
            ("year", str(entry.year)),
            ("time", entry.time),
            ("memory", entry.memory),
            ("choose", entry.choose),
            ("avoid", entry.avoid),
            ("make", _constructor(entry)),
            ("example", _example(entry)),
        ]
    )


def _constructor(entry: Entry) -> str:
    """How the class is called, with its defaults."""
    from regard.catalog import arguments

    shown = []
    for key, parameter in arguments(entry).items():
        if key in entry.preset:
            shown.append(f"{key}={entry.preset[key]!r}")
        elif parameter.default is parameter.empty:
            shown.append(key)
        else:
            shown.append(f"{key}={parameter.default!r}")
    return f"regard.{entry.cls.__name__}({', '.join(shown)})"


def _example(entry: Entry) -> str:
    """The lines to type of the class's own example."""
    lines = (line.strip() for line in (entry.cls.__doc__ or "").splitlines())
    return "\n".join(line for line in lines if line.startswith((">>>", "...")))
