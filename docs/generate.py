"""Write the generated part of the documentation: a page for each mechanism of the catalog, and tables of benchmarks and executions.

    python docs/generate.py

Pages go to `docs/mechanisms/`, tables to `build/docs/`, from where `docs/benchmarks.md` and `docs/guides/executions.md` take them. None
is kept in the repository: `make docs` writes them anew, whatever the catalog, `benchmarks/results` and the code then hold.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from regard import catalog
from regard.catalog import Entry
from regard.cli._example import program

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "mechanisms"
RESULTS = ROOT / "benchmarks" / "results"
TABLES = ROOT / "build" / "docs" / "benchmarks.md"
EXECUTIONS = ROOT / "build" / "docs" / "executions.md"

SECTION = re.compile(r"^(Args|Returns|Raises|Example|Examples|Note):$")
ARGUMENT = re.compile(r"^(\*{0,2}\w+): (.*)$")


# Pages of mechanisms


def page(entry: Entry) -> str:
    """Everything known of one mechanism."""
    sections = split_docstring(entry.cls)
    facts = [
        ("Name", code(entry.name)),
        ("Chinese name", entry.zh),
        ("Place", f"`{entry.path}`"),
        ("Equation", code(entry.equation)),
        ("Paper", f"{entry.paper} ({entry.year})" if str(entry.year) not in entry.paper else entry.paper),
        ("Time", entry.time),
        ("Memory", entry.memory),
        ("Choose it when", entry.choose),
        ("Rather not when", entry.avoid),
    ]
    parts = [
        f"# {title(entry)}",
        "| | |\n|---|---|\n" + "\n".join(f"| **{name}** | {cell(text)} |" for name, text in facts),
        f"## `regard.{entry.cls.__name__}`",
        fence(signature(f"regard.{entry.cls.__name__}", entry.cls)),
    ]
    if entry.preset:
        given = ", ".join(f"`{key}={value!r}`" for key, value in entry.preset.items())
        parts.append(f"The name `{entry.name}` stands for this class with {given}.")
    others = [other for other in catalog.entries() if other.cls is entry.cls and other.name != entry.name]
    if others:
        names = ", ".join(f"[{title(other)}]({other.name}.md)" for other in others)
        parts.append(f"The same class is also: {names}.")
    parts.append(prose(sections[""]))
    if "Args" in sections:
        parts += ["### Arguments", arguments(sections["Args"])]
    if "forward" in vars(entry.cls):
        parts += ["### Call", fence(signature("forward", entry.cls.forward)), call_notes(entry.cls.forward)]
    parts += ["## Example", fence(program(entry))]
    return "\n\n".join(part for part in parts if part) + "\n"


def title(entry: Entry) -> str:
    """The name as a heading."""
    words = entry.name.replace("-", " ").replace("co attention", "co-attention")
    return words[0].upper() + words[1:]


def code(text: str) -> str:
    """As code, so that nothing in it is taken for markup."""
    return f"`{text}`"


def cell(text: str) -> str:
    """Inside a table, where code is left alone and a bar is otherwise the end."""
    return "".join(part if k % 2 else part.replace("|", r"\|") for k, part in enumerate(re.split(r"(`[^`]*`)", text)))


def fence(text: str) -> str:
    return f"```python\n{text}\n```"


def split_docstring(thing: Any) -> dict[str, list[str]]:
    """Lines of a docstring by section; those before any section under the empty name."""
    sections: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(thing.__doc__ or "").splitlines():
        if SECTION.match(line):
            name = line[:-1]
            sections[name] = []
        else:
            sections[name].append(line)
    return sections


def prose(lines: Iterable[str]) -> str:
    """Paragraphs, with formulas on lines of their own and links that say where they lead."""
    text = "\n".join(lines).strip()
    text = re.sub(r"^[ \t]*\$\$(.+?)\$\$", display, text, flags=re.DOTALL | re.MULTILINE)
    # A list needs an empty line before it.
    text = re.sub(r"(?m)^(?!- |  )(.+)\n(?=- )", r"\1\n\n", text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"https://[^\s)\],;]+", link, text))


def display(found: re.Match[str]) -> str:
    """A formula on lines of its own; what the docstring writes on a new line after a wide space gets one here too."""
    parts = re.split(r"\\qquad[ \t]*\n", found[1])
    if any(part.count("{") != part.count("}") for part in parts):
        parts = [found[1]]
    return "\n" + "\n\n".join(f"$${part.strip()}$$" for part in parts) + "\n"


def link(found: re.Match[str]) -> str:
    """A link under the name that the literature has for it."""
    url = found[0].rstrip(".")
    for pattern, label in (
        (r"https://arxiv\.org/abs/(.+)", "arXiv:{}"),
        (r"https://doi\.org/(.+)", "doi:{}"),
        (r"https://aclanthology\.org/(.+?)/?", "ACL {}"),
    ):
        match = re.fullmatch(pattern, url)
        if match:
            return f"[{label.format(match[1])}]({url})" + found[0][len(url) :]
    return f"<{url}>" + found[0][len(url) :]


def arguments(lines: Iterable[str]) -> str:
    """One list item an argument."""
    items: list[str] = []
    for line in inspect.cleandoc("\n".join(lines)).splitlines():
        match = ARGUMENT.match(line)
        if match:
            items.append(f"- `{match[1]}`: {match[2]}")
        elif line.strip() and items:
            items[-1] += " " + line.strip()
    return prose(items)


def call_notes(function: Any) -> str:
    """Arguments and result of a method, where its docstring tells them."""
    sections = split_docstring(function)
    parts = [prose(sections[""])]
    if "Args" in sections:
        parts.append(arguments(sections["Args"]))
    if "Returns" in sections:
        parts.append("Returns: " + prose(inspect.cleandoc("\n".join(sections["Returns"])).splitlines()))
    return "\n\n".join(part for part in parts if part)


def signature(name: str, of: Any) -> str:
    """A signature as it would be written, an argument a line where one line is too short."""
    found = inspect.signature(of)
    shown, star = [], False
    for key, parameter in found.parameters.items():
        if key == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        shown.append(str(parameter.replace(annotation=plain(parameter.annotation))).replace("'", '"'))
    result = plain(found.return_annotation)
    back = "" if result is inspect.Signature.empty or inspect.isclass(of) else f" -> {result}".replace("'", '"')
    line = f"{name}({', '.join(shown)}){back}"
    if len(line) <= 96:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in shown) + f"){back}"


class Plain(str):
    """An annotation that prints as it was written."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def plain(annotation: Any) -> Any:
    return Plain(annotation) if isinstance(annotation, str) else annotation


def index(entries: Iterable[Entry]) -> str:
    """All mechanisms by their place in the taxonomy."""
    parts = [
        "# Mechanisms",
        "Every mechanism of the catalog, by its place in the taxonomy of Brauwers and Frasincar "
        "([arXiv:2203.14263](https://arxiv.org/abs/2203.14263)). `regard list` prints the same, `regard show NAME` one of them.",
    ]
    family = ""
    for path, group in groupby(entries, key=lambda entry: entry.path):
        top, _, rest = path.partition("/")
        if top != family:
            parts.append(f"## {top.capitalize()}")
            family = top
        if rest:
            parts.append(f"### {rest.replace('/', ', ').capitalize()}")
        rows = [
            f"| [{title(entry)}]({entry.name}.md) | {entry.zh} | {cell(code(entry.equation))} | {entry.year} |"
            for entry in group
        ]
        parts.append("\n".join(["| name | 名称 | equation | year |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def write_mechanisms(folder: Path = PAGES) -> list[Path]:
    """Write every page anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    entries = list(catalog.entries())
    texts = {"index": index(entries)} | {entry.name: page(entry) for entry in entries}
    for name, text in texts.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return sorted(folder.iterdir())


# Tables of benchmarks


def tables(folder: Path = RESULTS) -> str:
    """One section a stored question, with each case as it was measured last."""
    parts = []
    for path in sorted(folder.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if rows:
            parts += list(section(path.stem, latest(rows)))
    if not parts:
        parts = ["Nothing is stored yet: run `regard bench`."]
    return "\n\n".join(parts) + "\n"


def latest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of each case's last run on each device: files are appended to, so the last commit stands last."""
    run_of = {(row["device"], row["case"]): (row["commit"], row["date"]) for row in rows}
    kept: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        if run_of[row["device"], row["case"]] == (row["commit"], row["date"]):
            # Measured again within a commit: the later figure stands.
            kept[row["device"], row["case"], row["what"]] = row
    return list(kept.values())


def section(name: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"### {name}"
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault((row["device"], row["date"], row["commit"]), []).append(row)
    # Of a device, the latest run first.
    for (device, _, _), ran in sorted(
        sorted(runs.items(), key=lambda run: run[0][1:], reverse=True), key=lambda run: run[0][0]
    ):
        first = ran[0]
        yield (
            f"{device}, {first['cores']} cores, {first['threads']} thread(s); torch {first['torch']}, "
            f"Python {first['python']}; regard {first['regard']}, commit `{first['commit']}`, {first['date']}; "
            f"`{first['command']}`."
        )
        # Figures of one kind make one table: none has columns that most of its rows leave empty.
        kinds: dict[tuple[bool, ...], list[dict[str, Any]]] = {}
        for row in ran:
            kinds.setdefault((row["seconds"] is None, row["peak_mib"] is None), []).append(row)
        for rows_of_kind in kinds.values():
            yield table(rows_of_kind)


def table(rows: list[dict[str, Any]]) -> str:
    """A row a figure, peers together, without the columns that nobody fills."""
    order = {case: k for k, case in enumerate(dict.fromkeys(row["case"] for row in rows))}
    rows = sorted(rows, key=lambda row: order[row["case"]])
    ours = {row["case"]: row["seconds"] for row in rows if row["what"] == "regard"}

    def ratio(row: dict[str, Any]) -> str:
        mine = ours.get(row["case"])
        return f"{row['seconds'] / mine:.2f}" if row["seconds"] and mine else ""

    columns = {
        "case": lambda row: row["case"],
        "what": lambda row: row["what"],
        "ms": lambda row: number(row["seconds"], 1e3),
        "× ours": ratio,
        "MiB": lambda row: number(row["peak_mib"]),
        "error": lambda row: "" if row["error"] is None else f"{row['error']:.1e}",
        "note": note,
    }
    filled = {name: [show(row) for row in rows] for name, show in columns.items()}
    filled = {name: texts for name, texts in filled.items() if any(texts)}
    right = {"ms", "× ours", "MiB", "error"}
    lines = [list(filled), ["---:" if name in right else "---" for name in filled]]
    before = None
    for row, texts in zip(rows, zip(*filled.values(), strict=True), strict=True):
        shown = [cell(text) for text in texts]
        # A case is named once, above its peers.
        lines.append(["", *shown[1:]] if row["case"] == before else shown)
        before = row["case"]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def note(row: dict[str, Any]) -> str:
    """What was said of a figure, or else what was kept beside it."""
    numbers = {name: x for name, x in row["extra"].items() if isinstance(x, int | float)}
    return row["note"] or ", ".join(f"{name.replace('_', ' ')} {x:.3g}" for name, x in numbers.items())


def number(x: float | None, scale: float = 1.0) -> str:
    """Three significant figures."""
    if x is None:
        return ""
    x *= scale
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def write_tables(path: Path = TABLES) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tables(), encoding="utf-8")


def write_executions(path: Path = EXECUTIONS) -> None:
    # Beside this file, which is no package.
    import executions

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(executions.page(), encoding="utf-8")


if __name__ == "__main__":
    written = write_mechanisms()
    write_tables()
    write_executions()
    print(f"{len(written)} pages in {PAGES.relative_to(ROOT)}, tables in {TABLES.parent.relative_to(ROOT)}")
