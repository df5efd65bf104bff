"""One wording for every refusal: which argument, what came, what was expected, and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def refusal(argument: str, got: object, expected: str, fix: str = "") -> str:
    """Compose the message of an error.

    Example:
        >>> refusal("window", -1, "a number >= 0")
        'window: got -1, expected a number >= 0.'
    """
    message = f"{argument}: got {got}, expected {expected}."
    return f"{message} {fix}" if fix else message


def nearest(name: str, known: Iterable[str], *, listed: bool = False) -> str:
    """Say which known names are closest to an unknown one, or else all of them, unless the message has `listed` them.

    Example:
        >>> nearest("aditive", ["additive", "dot"])
        "Did you mean 'additive'?"
        >>> nearest("flash", ["dense", "fused"])
        'Known: dense, fused.'
        >>> nearest("BLEU", ["bleu", "chrf"])
        "Did you mean 'bleu'?"
    """
    names = sorted(known)
    # However it is written: capitals alone make two names as different as two words.
    alike = get_close_matches(name.casefold(), {known.casefold() for known in names}, n=3, cutoff=0.5)
    close = [known for folded in alike for known in names if known.casefold() == folded][:3]
    if close:
        return f"Did you mean {' or '.join(repr(c) for c in close)}?"
    # The path of a model itself is empty, and must still be seen.
    return "" if listed else f"Known: {', '.join(name or repr(name) for name in names)}."


def missing_extra(package: str, extra: str, purpose: str) -> str:
    """Name the install command for something that lives behind an extra.

    Example:
        >>> missing_extra("matplotlib", "evaluate", "figures")
        "figures: package 'matplotlib' is not installed. Fix: pip install 'regard[evaluate]'"
    """
    return f"{purpose}: package {package!r} is not installed. Fix: pip install 'regard[{extra}]'"
