"""What the verbs share: refusals, JSON, and tables that are plain lines when nobody is looking."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NoReturn

import typer


class Language(StrEnum):
    """Languages of names and labels."""

    en = "en"
    zh = "zh"


PLACES_ZH = {
    "framework": "框架",
    "general": "通用",
    "scoring": "评分",
    "alignment": "对齐",
    "dimensionality": "维度",
    "feature": "特征",
    "multiplicity": "数量",
    "levels": "层级",
    "representations": "表示",
    "query": "查询",
    "type": "类型",
    "reading": "读取",
    "emerging": "新方向",
    "graph": "图",
    "structured": "结构化",
    "application": "应用",
    "mechanism": "机制",
    "position": "位置",
}


def refuse(error: Exception) -> NoReturn:
    """Say on stderr what is wrong, and leave with the exit code of a wrong usage."""
    typer.echo(f"regard: {error}", err=True)
    raise typer.Exit(2)


def repeatable(arguments: Sequence[str]) -> str:
    """The command as it is kept beside its figures, and can be repeated elsewhere: folders have other places there."""
    words, hidden = ["regard"], {"--data": "DIR", "--out": "DIR", "--results": "DIR", "--store": "FILE"}
    for before, word in zip(["", *arguments], arguments, strict=False):
        option, equals, value = word.partition("=")
        if before in hidden:
            words.append(hidden[before])
        elif equals and (option in hidden or "/" in value):
            words.append(f"{option}={hidden.get(option, 'DIR')}")
        else:
            words.append(word)
    return " ".join(words)


def write_json(data: Any) -> None:
    """JSON on stdout."""
    typer.echo(json.dumps(data, ensure_ascii=False, indent=2))


def place(path: str, lang: str) -> str:
    """A place of the taxonomy in a language."""
    return path if lang == "en" else "/".join(PLACES_ZH.get(part, part) for part in path.split("/"))


def write_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal, of the columns that have a heading; otherwise tab-separated lines, for other programs."""
    if not sys.stdout.isatty():
        for row in rows:
            typer.echo("\t".join(row))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in heading:
        table.add_column(title, overflow="fold")
    for first, *others in rows:
        table.add_row(Text(first, style="bold"), *(Text(cell) for cell in others[: len(heading) - 1]))
    Console().print(table)


def write_fields(fields: Sequence[tuple[str, str]]) -> None:
    """Names and what they stand for, one below the other."""
    if not sys.stdout.isatty():
        for name, text in fields:
            typer.echo(f"{name}\t{text}".replace("\n", "\n\t"))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in fields:
        grid.add_row(name, Text(text))
    Console().print(grid)
