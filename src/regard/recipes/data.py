"""Reading the files of a data set: what is missing is said by name, what is packed is unpacked, and nothing in a file is ever run."""

from __future__ import annotations

import gzip
import json
import math
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from regard._errors import refusal

Files = dict[str, bytes]

# More than any file of a data set here holds; a small one may be packed so as to fill any memory.
MOST = 4 << 30
_PIECE = 1 << 20


class Folder:
    """A folder of data; every file may be packed with gzip, under its name and `.gz`.

    Args:
        path: of the folder.
        *names: files that it must have.
    """

    def __init__(self, path: str | Path, *names: str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(refusal("data", repr(str(path)), "a folder"))
        missing = [name for name in names if self._find(name) is None]
        if missing:
            fix = "Fix: docs/data.md shows the files of every data set."
            raise ValueError(refusal("data", repr(str(path)), f"a folder that also has {', '.join(missing)}", fix))

    def _find(self, name: str) -> Path | None:
        for path in (self.path / name, self.path / f"{name}.gz"):
            if path.is_file():
                return path
        return None

    def has(self, name: str) -> bool:
        """Whether there is such a file, packed or not."""
        return self._find(name) is not None

    def bytes(self, name: str) -> bytes:
        """The unpacked content of a file."""
        path = self._find(name)
        if path is None:
            raise ValueError(refusal("data", repr(str(self.path)), f"a folder that has {name}"))
        try:
            return unpacked(_content(path)) if path.suffix == ".gz" else _content(path)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(refusal("data", f"{path}: {error}", "a whole file")) from error

    def text(self, name: str, encoding: str = "utf-8") -> str:
        return text_of(self.bytes(name), str(self.path / name), encoding)

    def lines(self, name: str, encoding: str = "utf-8") -> list[str]:
        """Lines without their ends; a last empty one is none."""
        return lines_of(self.text(name, encoding))

    def rows(self, name: str) -> Iterator[dict[str, Any]]:
        """Objects of a file of JSON lines."""
        yield from rows_of(self.bytes(name), str(self.path / name))

    def members(self, name: str, suffixes: Sequence[str] = ()) -> Files:
        """Files of an archive by their path in it; nothing is written to the disk."""
        # All of it is unpacked first: only so is the sum at the end of a packed file looked at.
        packed, path = self.bytes(name), self.path / name
        try:
            packed = unpacked(packed) if packed[:2] == b"\x1f\x8b" else packed
            if packed[-1024:].strip(b"\0") or not packed:
                raise tarfile.ReadError("it has no end")
            with tarfile.open(fileobj=BytesIO(packed), mode="r:") as archive:
                wanted = [
                    m
                    for m in archive
                    if m.isreg() and m.sparse is None and (not suffixes or m.name.endswith(tuple(suffixes)))
                ]
                opened = ((m.name, archive.extractfile(m)) for m in wanted)
                return {name: file.read() for name, file in opened if file is not None}
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise ValueError(refusal("data", f"{path}: {error}", "a whole archive")) from error

    def collected(self, *suffixes: str) -> Files:
        """Files whose names end so, by their path: those of the folder and its subfolders, and those of its archives."""
        found: Files = {}
        for path in sorted(self.path.rglob("*")):
            if path.is_file() and path.name.endswith((".tar", ".tar.gz", ".tgz")):
                found |= self.members(str(path.relative_to(self.path)), suffixes)
            elif path.is_file() and path.name.endswith(suffixes):
                name = str(path.relative_to(self.path))
                found[name] = self.bytes(name)
        return found

    def idx(self, name: str) -> np.ndarray[Any, Any]:
        """An array of bytes in the format of MNIST."""
        raw = self.bytes(name)
        if len(raw) < 4 or raw[:3] != b"\0\0\x08":
            raise ValueError(refusal("data", str(self.path / name), "an idx file of bytes"))
        axes = raw[3]
        whole = len(raw) >= 4 + 4 * axes
        shape = tuple(np.frombuffer(raw, ">i4", axes, 4).tolist()) if whole else (-1,)
        body = np.frombuffer(raw, np.uint8, offset=4 + 4 * axes if whole else 4)
        # As whole numbers of Python: what a header claims may be more than 64 bits can say.
        if min(shape, default=0) < 0 or body.size != math.prod(shape):
            raise ValueError(refusal("data", f"{self.path / name}: {body.size} bytes", f"as many as {shape}"))
        return body.reshape(shape)

    def npy(self, name: str) -> np.ndarray[Any, Any]:
        """An array in the format of numpy, of numbers alone."""
        raw = self.bytes(name)
        file, where = BytesIO(raw), str(self.path / name)
        try:
            version = np.lib.format.read_magic(file)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = header(file)
            # Before numpy makes room for what the header claims.
            claimed = math.prod(shape) * dtype.itemsize
            if claimed != len(raw) - file.tell():
                raise ValueError(f"{len(raw) - file.tell()} bytes where its header says {claimed}")
            file.seek(0)
            found: np.ndarray[Any, Any] = np.lib.format.read_array(file, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(refusal("data", f"{where}: {error}", "a numpy array of numbers")) from error
        return found


def _content(path: Path) -> bytes:
    # A file with holes may claim to be larger than the disk that it lies on.
    if path.stat().st_size > MOST:
        raise OSError(f"{path.stat().st_size} bytes, more than {MOST}")
    return path.read_bytes()


def unpacked(packed: bytes) -> bytes:
    """What gzip has packed, piece by piece, so that no more is made room for than there may be."""
    pieces, size = [], 0
    with gzip.GzipFile(fileobj=BytesIO(packed)) as file:
        while piece := file.read(_PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > MOST:
                raise OSError(f"more than {MOST} bytes when unpacked")
    return b"".join(pieces)


def own_file(text: str, kind: str) -> bytes:
    """What is in a file that a user names where a recipe reads files."""
    try:
        if not Path(text).is_file():
            raise OSError(0, "no such file")
        return _content(Path(text))
    except OSError as error:
        got = f"{text!r}: {(error.strerror or str(error)).lower()}"
        raise ValueError(refusal("text", got, f"the path of {kind}")) from error


def text_of(content: bytes, where: str, encoding: str = "utf-8") -> str:
    """The text that a file holds."""
    try:
        # A mark at the beginning says that it is UTF-8, and is no letter of the first word.
        return content.decode("utf-8-sig" if encoding == "utf-8" else encoding)
    except UnicodeDecodeError as error:
        raise ValueError(refusal("data", f"{where}: {error}", f"{encoding} text")) from error


def lines_of(text: str) -> list[str]:
    """Lines without their ends; a last empty one is none."""
    # Not splitlines: text has characters that it takes for ends of lines.
    text = text.replace("\r\n", "\n")
    # Where nothing else ends a line, as on old Macintoshes, this does; in a line it is a blank.
    found = (text if "\n" in text else text.replace("\r", "\n")).split("\n")
    return found[:-1] if found and not found[-1] else found


def rows_of(content: bytes, where: str) -> Iterator[dict[str, Any]]:
    """Objects of a file of JSON lines."""
    for number, line in enumerate(lines_of(text_of(content, where)), 1):
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(refusal("data", f"{where}, line {number}: {error}", "JSON lines")) from error
        if not isinstance(row, dict):
            raise ValueError(refusal("data", f"{where}, line {number}: {type(row).__name__}", "an object"))
        yield row


def numbered(line: str, names: Sequence[str], where: str) -> int:
    """A class given by its number, checked."""
    if line not in {str(k) for k in range(len(names))}:
        raise ValueError(refusal("data", f"{where}: {line!r}", f"a class from 0 to {len(names) - 1}"))
    return int(line)
