"""Arrays, sparse matrices and dictionaries out of a pickle, without running anything that it names.

A pickle is a program: it names functions, and reading it calls them. Of the few names that numeric files have, each stands here for
a record of plain data, which is checked before an array is made of it; any other name is refused. Neither numpy's nor scipy's own way
of building objects is called with what a file says.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np

from regard._errors import refusal

_TYPES = {"f4", "f8", "i1", "i2", "i4", "i8", "u1"}

Numbers = np.ndarray[Any, Any]


class _Type:
    """A kind of number, as numpy writes it."""

    def __init__(self, name: str = "", *_: Any) -> None:
        self.name, self.order = name, "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def numpy(self) -> np.dtype[Any]:
        if self.name not in _TYPES or self.order not in ("<", ">", "|"):
            raise pickle.UnpicklingError(f"numbers of type {self.name!r}")
        return np.dtype(self.order + self.name)


class _Array:
    """An array as numpy writes it: shape, type, order and bytes."""

    def __init__(self, *_: Any) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def numpy(self) -> Numbers:
        _, shape, kind, by_column, raw = self.state
        content = raw.encode("latin-1") if isinstance(raw, str) else raw
        dtype = kind.numpy()
        if math.prod(shape) * dtype.itemsize != len(content):
            raise pickle.UnpicklingError(f"{len(content)} bytes for an array {shape}")
        return np.frombuffer(content, dtype).reshape(shape, order="F" if by_column else "C")


class _Rows:
    """A sparse matrix of compressed rows, as scipy writes it: its attributes."""

    def numpy(self) -> Numbers:
        known = vars(self)
        shape = tuple(known["_shape" if "_shape" in known else "shape"])
        data, column, start = (known[name].numpy() for name in ("data", "indices", "indptr"))
        counts = np.diff(start)
        whole = (
            len(shape) == 2 and len(start) == shape[0] + 1 and start[0] == 0 and start[-1] == len(data) == len(column)
        )
        if not whole or (counts < 0).any() or (len(column) and not 0 <= column.min() <= column.max() < shape[1]):
            raise pickle.UnpicklingError(f"a broken sparse matrix {shape}")
        dense = np.zeros(shape, np.float32)
        # Entries of one place add up.
        np.add.at(dense, (np.repeat(np.arange(shape[0]), counts), column), data)
        return dense


def _reconstructed(*_: Any) -> _Array:
    return _Array()


def _dictionary(*_: Any) -> dict[Any, Any]:
    return {}


def _bytes(text: str = "", _: str = "latin-1") -> bytes:
    # How Python 3 writes bytes for Python 2; without arguments, none.
    return text.encode("latin-1")


_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): _Array,
    ("collections", "defaultdict"): _dictionary,
    ("_codecs", "encode"): _bytes,
}
for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):
    _NAMES[_module, "_reconstruct"] = _reconstructed
for _module in ("scipy.sparse.csr", "scipy.sparse._csr"):
    _NAMES[_module, "csr_matrix"] = _Rows
for _module in ("__builtin__", "builtins"):
    _NAMES[_module, "list"] = list
    _NAMES[_module, "bytes"] = _bytes


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"the name {module}.{name}")
        return _NAMES[module, name]


def read(content: bytes, where: str) -> Any:
    """An array, or plain lists, dictionaries and numbers.

    Args:
        content: of the file.
        where: its path, for errors.

    Example:
        >>> read(pickle.dumps(np.eye(2, dtype=np.float32), protocol=2), "eye")
        array([[1., 0.],
               [0., 1.]], dtype=float32)
        >>> read(pickle.dumps({0: [1, 2]}), "graph")
        {0: [1, 2]}
    """
    try:
        found = _Reader(io.BytesIO(content), encoding="latin-1").load()
        return found.numpy() if isinstance(found, _Array | _Rows) else found
    # Whatever a broken file makes of the records above.
    except Exception as error:
        expected = "a pickle of numbers: arrays, sparse matrices of rows, lists and dictionaries"
        raise ValueError(refusal("data", f"{where}: {error}", expected)) from error
