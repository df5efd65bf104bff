"""Text as it is written: hidden characters made visible, fonts that have the letters, nothing read as mathematics."""

from __future__ import annotations

import logging
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from regard._errors import missing_extra, refusal

_LOG = logging.getLogger("regard")

_CJK = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK TC", "Noto Sans CJK KR", "Source Han Sans SC"),
    *(
        "Source Han Sans CN",
        "Noto Sans SC",
        "Noto Sans JP",
        "Noto Sans TC",
        "Noto Sans KR",
        "Noto Serif CJK SC",
    ),
    *("PingFang SC", "Hiragino Sans GB", "Hiragino Sans", "Heiti SC", "Heiti TC", "Apple SD Gothic Neo"),
    *("Microsoft YaHei", "SimHei", "SimSun", "Yu Gothic", "MS Gothic", "Malgun Gothic", "Arial Unicode MS"),
    *("WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback", "NanumGothic", "IPAGothic"),
)

_LABEL_LETTERS = 24


def labelled(labels: Sequence[str] | None, name: str, count: int, shape: tuple[int, ...]) -> list[str]:
    """The labels made visible, checked to be one for each; numbers where there are none."""
    if labels is None:
        return [str(i) for i in range(count)]
    if isinstance(labels, (str, bytes)):
        fix = f"For one label a letter, pass list({name})."
        raise ValueError(refusal(name, f"the single string {labels!r}", "a sequence of strings", fix))
    if len(labels) != count:
        raise ValueError(refusal(name, f"{len(labels)} labels", f"{count} for weights of shape {tuple(shape)}"))
    return [visible(str(label)) for label in labels]


def visible(text: str, *, edges: bool = True) -> str:
    """The text with nothing hidden: blanks at its edges, line ends, tabs, control characters get a sign.

    Without `edges` (a title) blanks stay blank and lines may break.
    """
    if not text:
        return "∅" if edges else ""
    signs = {"\n": "↵" if edges else "\n", "\t": "⇥"}
    body = range(len(text) - len(text.lstrip()), len(text.rstrip()))
    shown = []
    for index, letter in enumerate(text):
        if letter in signs:
            shown.append(signs[letter])
        elif unicodedata.category(letter) == "Zs":
            shown.append(" " if index in body or not edges else "␣")
        elif letter.isprintable():
            shown.append(letter)
        else:
            shown.append(letter.encode("unicode_escape").decode())
    return "".join(shown)


def shortened(text: str) -> str:
    """The text, cut where it is too long for a label."""
    return text if len(text) <= _LABEL_LETTERS else text[: _LABEL_LETTERS - 1] + "…"


@cache
def _letters(families: tuple[str, ...]) -> frozenset[int]:
    """Code points that the installed fonts among `families` can draw."""
    fonts = import_module("matplotlib.font_manager")
    known: set[int] = set()
    for family in families:
        try:
            path = fonts.findfont(fonts.FontProperties(family=[family]), fallback_to_default=False)
        except ValueError:
            continue
        known |= fonts.get_font(path).get_charmap().keys()
    return frozenset(known)


def _installed() -> list[str]:
    """The user's font families, then the CJK families of this machine."""
    names = {entry.name for entry in import_module("matplotlib.font_manager").fontManager.ttflist}
    return [*need_matplotlib().rcParams["font.family"], *(name for name in _CJK if name in names)]


def missing_letters(text: str) -> str:
    """The letters that no installed font can draw."""
    known = _letters(tuple(_installed()))
    return "".join(sorted({letter for letter in text if ord(letter) not in known and letter.isprintable()}))


def font_family(texts: list[str]) -> list[str]:
    """Font families that together draw the texts, as far as this machine can; the rest is logged, once."""
    base = list(need_matplotlib().rcParams["font.family"])
    needed = {ord(letter) for letter in "".join(texts) if letter.isprintable()} - _letters(tuple(base))
    for name in _installed()[len(base) :]:
        if found := needed & _letters((name,)):
            base.append(name)
            needed -= found
    if needed:
        _report_missing("".join(map(chr, sorted(needed)[:12])))
    return base


@cache
def _report_missing(letters: str) -> None:
    _LOG.warning("no installed font draws %s: install one (for Chinese, say, Noto Sans CJK) or save as SVG", letters)


@contextmanager
def quiet_glyphs() -> Iterator[None]:
    """Matplotlib warns at every letter without a glyph, at every drawing; `font_family` has said so already."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        yield


def plain(family: list[str], **properties: Any) -> dict[str, Any]:
    """Text properties under which a string is drawn letter by letter."""
    return {"family": family, "parse_math": False, "usetex": False, **properties}


def need_matplotlib() -> Any:
    """Matplotlib, or an error that names the extra to install."""
    try:
        return import_module("matplotlib")
    except ImportError as error:
        raise ImportError(missing_extra("matplotlib", "evaluate", "figures")) from error
