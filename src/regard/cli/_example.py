"""The example of a mechanism as a program: what it needs is imported, its results are comments."""

from __future__ import annotations

import ast
import builtins
import doctest
import inspect
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.catalog import Entry


def program(entry: Entry) -> str:
    """The entry's own example, or else that of its class; it runs as it stands."""
    text = inspect.cleandoc(entry.example or entry.cls.__doc__ or "")
    lines = []
    for step in doctest.DocTestParser().get_examples(text):
        source, wanted = step.source.rstrip(), step.want.strip()
        lines.append(f"{source}  # {wanted}" if wanted and "\n" not in wanted + source else source)
        if wanted and "\n" in wanted + source:
            lines += [f"# {line}" for line in wanted.splitlines()]
    body = "\n".join(line for line in lines if not line.startswith("from regard import"))
    return "\n".join([*imports(body), "", body])


def imports(text: str) -> list[str]:
    """Import what a program uses and does not define."""
    public = set(import_module("regard").__all__)
    nodes = list(ast.walk(ast.parse(text)))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    made = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            made |= {part.asname or part.name for part in node.names}
        elif isinstance(node, ast.arg):
            made.add(node.arg)
    needed = names - made - set(vars(builtins))
    ours = sorted(needed & public)
    lines = ["import torch"] if "torch" in needed else []
    lines += ["from torch import nn"] if "nn" in needed else []
    return [*lines, f"from regard import {', '.join(ours)}"] if ours else lines
