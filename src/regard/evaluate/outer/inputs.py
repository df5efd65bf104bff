"""What all metrics ask of their arguments; each refusal says which, and why the number would have been another."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard._errors import refusal


def several(argument: str, given: Any, of: str = "sentence") -> list[Any]:
    """A list of one thing or more; a single text is not a list of its characters."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        fix = f"Fix: put the one text into a list, [{argument}]." if isinstance(given, str) else ""
        raise TypeError(refusal(argument, _short(given), f"a list with one entry a {of}", fix))
    if not given:
        raise ValueError(refusal(argument, "nothing", "at least one entry: a metric of nothing has no value"))
    return list(given)


def same_count(predicted: Sized, truth: Sized) -> None:
    """One truth a prediction."""
    if len(predicted) != len(truth):
        raise ValueError(refusal("truth", f"{len(truth)} entries", f"as many as were predicted, {len(predicted)}"))


def texts(argument: str, given: Any) -> list[str]:
    """A list of texts."""
    found = several(argument, given)
    for k, text in enumerate(found):
        if not isinstance(text, str):
            raise TypeError(refusal(f"{argument}[{k}]", _short(text), "a text (str)"))
    return found


def references(given: Any) -> list[list[str]]:
    """For each sentence its references, one or several; a text stands for a list of one.

    Example:
        >>> references(["a cat", ["a dog", "the dog"]])
        [['a cat'], ['a dog', 'the dog']]
    """
    found = [[entry] if isinstance(entry, str) else entry for entry in several("truth", given)]
    for k, entry in enumerate(found):
        for text in texts(f"truth[{k}]", entry):
            if not text.strip():
                fix = "Fix: leave the sentence out of both lists; an empty reference rewards an empty prediction."
                raise ValueError(refusal(f"truth[{k}]", repr(text), "a reference with words in it", fix))
    return [list(entry) for entry in found]


def whole_numbers(argument: str, given: Any) -> Tensor:
    """Classes, as a tensor of integers."""
    found = _tensor(argument, given, "classes")
    # An empty list has no dtype of its own.
    if found.numel() and (found.is_floating_point() or found.is_complex()):
        fix = "Fix: take the argmax of scores, or compare a probability with a threshold, first."
        raise TypeError(refusal(argument, f"dtype {found.dtype}", "classes, which are whole numbers", fix))
    return found.long()


def same_shape(predicted: Tensor, truth: Tensor) -> None:
    """Neither is broadcast."""
    if predicted.shape != truth.shape:
        raise ValueError(
            refusal("truth", f"shape {tuple(truth.shape)}", f"that of what was predicted, {tuple(predicted.shape)}")
        )


def numbers(argument: str, given: Any) -> Tensor:
    """Scores to compare, without NaN: it is neither more nor less than anything, and would win every comparison."""
    found = _tensor(argument, given, "numbers")
    if found.is_complex():
        raise TypeError(refusal(argument, f"dtype {found.dtype}", "real numbers, which can be compared"))
    if bool(found.isnan().any()):
        raise ValueError(refusal(argument, "NaN", "numbers"))
    return found


def logits_of(argument: str, given: Any) -> Tensor:
    """Numbers with a fraction, of which a softmax makes probabilities."""
    found = _tensor(argument, given, "logits")
    if not found.is_floating_point():
        raise TypeError(refusal(argument, f"dtype {found.dtype}", "logits or log-probabilities, of a floating dtype"))
    return found


def _tensor(argument: str, given: Any, kind: str) -> Tensor:
    """What torch makes of it, if it can be read."""
    expected = f"a tensor or list of {kind}"
    if given is None or isinstance(given, str | bytes | bytearray):
        raise TypeError(refusal(argument, _short(given), expected))
    written = _text_in(given)
    if written is not None:
        fix = (
            "Fix: number the names of classes first, each with its place in a list of them."
            if kind == "classes"
            else ""
        )
        raise TypeError(refusal(argument, f"{_short(written)} among them", expected, fix))
    if isinstance(given, np.ndarray) and any(step < 0 for step in given.strides):
        given = given.copy()  # read backwards, which torch cannot
    try:
        found = torch.as_tensor(given)
    # For what it cannot read torch has a kind of error for each way to fail.
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(refusal(argument, f"{_short(given)} ({str(error).splitlines()[0]})", expected)) from error
    if found.is_quantized:
        raise TypeError(refusal(argument, f"dtype {found.dtype}", expected, "Fix: call its dequantize() first."))
    if found.is_meta or found.layout != torch.strided:
        got = "a tensor without values" if found.is_meta else f"a tensor of layout {found.layout}"
        raise TypeError(refusal(argument, got, "a dense tensor"))
    return found


def _text_in(given: Any) -> str | bytes | None:
    """The first text in lists, or in an array."""
    if isinstance(given, np.ndarray):
        given = given.ravel().tolist() if given.dtype.kind in "OSU" else ()
    if not isinstance(given, list | tuple):
        return given if isinstance(given, str | bytes) else None
    return next((found for found in map(_text_in, given) if found is not None), None)


def whole_number(argument: str, given: Any, least: int | None = None) -> None:
    """A whole number; True and False are none."""
    expected = "a whole number" if least is None else f"a whole number >= {least}"
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise TypeError(refusal(argument, _short(given), expected))
    if not -(1 << 63) <= int(given) < 1 << 63:
        raise ValueError(refusal(argument, "a number of more than 64 bits", expected))
    if least is not None and given < least:
        raise ValueError(refusal(argument, given, expected))


def one_of(argument: str, given: object, known: Sequence[str], fix: str = "") -> None:
    """A choice among names."""
    if given not in known:
        raise ValueError(refusal(argument, repr(given), f"one of {', '.join(map(repr, known))}", fix))


def _short(given: object) -> str:
    shown = repr(given) if isinstance(given, str | bytes | int | float | None) else f"a {type(given).__name__}"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
