"""The taxonomy as data: one entry a mechanism, registered where its class is written.

`regard list`, `regard show`, names given as strings, the documentation pages and the contract tests all read this.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from regard._errors import nearest, refusal

T = TypeVar("T", bound=type)


@dataclass(frozen=True)
class Entry:
    """What the literature knows about one mechanism, and the class that is it."""

    name: str
    zh: str
    path: str  # place in the taxonomy, such as "general/scoring"
    equation: str
    paper: str
    year: int
    time: str  # cost of one call, N queries on N keys unless said
    memory: str  # beyond inputs and outputs
    choose: str
    avoid: str
    cls: type
    preset: Mapping[str, Any] = field(default_factory=dict)  # constructor arguments that make this entry of its class
    example: str = ""  # a doctest, where that of the class shows another of its entries
    part: str = ""  # what an attention takes it as, where its place does not say so
    also: tuple[str, ...] = ()  # other names under which it is looked for

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as `regard list --json` prints it."""
        plain = ("name", "zh", "path", "equation", "paper", "year", "time", "memory", "choose", "avoid")
        return {key: getattr(self, key) for key in plain} | {"class": self.cls.__name__}


_entries: dict[str, Entry] = {}


def register(*, preset: Mapping[str, Any] | None = None, **facts: Any) -> Callable[[T], T]:
    """Enter a class into the catalog under a name; a class may stand under several, with different presets."""

    def enter(cls: T) -> T:
        name = facts["name"]
        if name in _entries and _entries[name].cls.__qualname__ != cls.__qualname__:
            raise ValueError(f"catalog: {name!r} is already {_entries[name].cls.__name__}")
        _entries[name] = Entry(cls=cls, preset=preset or {}, **facts)
        return cls

    return enter


_FAMILIES = ("general", "feature", "query", "transformer", "model")
_filled: list[str] = []


def _fill() -> None:
    """Import every file of the families, so that whoever reads the catalog reads all of it."""
    while len(_filled) < len(_FAMILIES):
        family = f"regard.{_FAMILIES[len(_filled)]}"
        if find_spec(family) is not None:
            package = import_module(family)
            for module in pkgutil.walk_packages(package.__path__, f"{family}."):
                import_module(module.name)
        _filled.append(family)


def entries(category: str | None = None) -> Iterator[Entry]:
    """All entries, or those under a place of the taxonomy (`"general"`, `"general/scoring"`)."""
    _fill()
    for entry in sorted(_entries.values(), key=_order):
        if category is None or entry.path == category or entry.path.startswith(category + "/"):
            yield entry


_PLACES = ("framework", "general/scoring", "general/alignment", "general/dimensionality", "general", "feature", "query")


def _order(entry: Entry) -> tuple[int, str, int, str]:
    """By place in the taxonomy, then by age."""
    place = next((k for k, place in enumerate(_PLACES) if entry.path.startswith(place)), len(_PLACES))
    return place, entry.path, entry.year, entry.name


def categories() -> list[str]:
    """The places of the taxonomy that have entries, and their parents."""
    found: set[str] = set()
    for entry in entries():
        parts = entry.path.split("/")
        found.update("/".join(parts[: k + 1]) for k in range(len(parts)))
    return sorted(found)


def canonical(name: str) -> str:
    """Fold the usual spellings together.

    Example:
        >>> canonical("ScaledDot"), canonical("scaled dot"), canonical("scaled_dot")
        ('scaled-dot', 'scaled-dot', 'scaled-dot')
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name.strip())
    return re.sub(r"[\s_-]+", "-", spaced).lower()


def find(name: str, category: str | None = None, argument: str = "name") -> Entry:
    """The entry of a name, English or Chinese; an unknown name is answered with the nearest ones."""
    taken_as = _TAKEN_AS.get(category or "")
    elsewhere = {entry.name: entry for entry in entries() if taken_as and entry.part == taken_as}
    known = elsewhere | {entry.name: entry for entry in entries(category)}
    if not isinstance(name, str):
        raise TypeError(refusal(argument, type(name).__name__, "a name"))
    found = _called(name, known)
    if found is not None:
        return found
    where = f"a mechanism of {category}" if category else "a mechanism of the catalog"
    names = known if name.isascii() else {entry.zh for entry in known.values()}
    meant = _called(name, {entry.name: entry for entry in entries()})
    fix = nearest(canonical(name), names) if meant is None else _way_to(meant)
    raise ValueError(refusal(argument, repr(name), where, fix))


def _called(name: str, known: Mapping[str, Entry]) -> Entry | None:
    """The entry that somebody means by a name: its own, in either language, that of its class, or another that it goes by."""
    wanted = canonical(name)
    if wanted in known:
        return known[wanted]
    meant = (e for e in known.values() if e.zh == name.strip() or wanted in (canonical(e.cls.__name__), *e.also))
    return next(meant, None)


_TAKEN_AS = {"general/scoring": "score", "general/alignment": "align"}


def _way_to(entry: Entry) -> str:
    """How to use an entry that was asked for in the wrong place."""
    argument = _TAKEN_AS.get(entry.path, entry.part)
    if not argument:
        return f"Fix: {entry.name!r} is a mechanism of its own: use regard.{entry.cls.__name__}."
    return f"Fix: {entry.name!r} is a mechanism of {entry.path}: pass it as {argument}={entry.name!r}."


def arguments(entry: Entry) -> dict[str, inspect.Parameter]:
    """What the constructor of an entry takes, by name."""
    parameters = inspect.signature(entry.cls).parameters
    return {key: p for key, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def build(name: str, category: str, argument: str, options: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """Make an instance by name from those options that its constructor knows; also tell which they were."""
    entry = find(name, category, argument)
    parameters = arguments(entry)
    used = {key for key in options if key in parameters}
    missing = [key for key, p in parameters.items() if p.default is p.empty and key not in {*used, *entry.preset}]
    if missing:
        needs = ", ".join(f"{key}=…" for key in missing)
        raise TypeError(
            refusal(argument, repr(name), f"also {needs}", f"Fix: pass {needs} beside {argument}={name!r}.")
        )
    for key in used & set(entry.preset):
        if options[key] != entry.preset[key]:
            fix = f"Fix: leave {key} out, or choose another {argument}."
            raise ValueError(refusal(key, repr(options[key]), f"{entry.preset[key]!r}, which is what {name!r} is", fix))
    return entry.cls(**{**{key: options[key] for key in used}, **entry.preset}), used
