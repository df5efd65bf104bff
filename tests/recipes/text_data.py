"""Files of the text recipes in their real layouts, tiny."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np


def write(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """A folder with these files; those whose names end with .gz are packed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        raw = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") and isinstance(content, str) else raw)
    return folder


def archive(files: Mapping[str, str]) -> bytes:
    """A packed tar archive."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content.encode())
            tar.addfile(entry, io.BytesIO(content.encode()))
    return whole.getvalue()


def json_lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def vectors(folder: Path, words: list[str], dim: int) -> Path:
    """Pretrained vectors, the number of a word in each."""
    table = np.repeat(np.arange(1, len(words) + 1, dtype=np.float16)[:, None], dim, 1)
    raw = io.BytesIO()
    np.save(raw, table)
    return write(folder, {"words.txt.gz": "\n".join(words) + "\n", "vectors.f16.npy": raw.getvalue()})
