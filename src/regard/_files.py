"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any


def whole(path: Path, write: Callable[[Path], None]) -> Path:
    """Write a file under another name, make sure that it is on the disk, and only then give it its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        # Some writers keep what they write to the user alone; the umask says who may read it.
        draft.touch()
        mode = draft.stat().st_mode
        try:
            write(draft)
        except (OSError, KeyboardInterrupt):
            raise
        except Exception as error:
            # Writers of tensors have errors of their own for a disk that is full.
            raise OSError(f"{path} could not be written: {error}") from error
        draft.chmod(mode)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def write_text(path: Path, text: str) -> Path:
    """Text, whole or not at all."""
    return whole(path, lambda draft: _write(draft, text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> Path:
    """JSON, whole or not at all."""
    return write_text(path, json.dumps(data, ensure_ascii=False, indent=2) + "\n")


def write_lines(path: Path, rows: list[Any]) -> Path:
    """JSON lines, whole or not at all."""
    return write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
