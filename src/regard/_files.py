"""Files that appear whole or not at all, and say so when they have been damaged since."""

from __future__ import annotations

import json
import os
import secrets
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Where a file of tensors keeps the sum of their bytes, and of what else is said in it.
_SUM, _SUM_BESIDE = "crc32", "crc32_metadata"
# What MS-DOS says of a folder, in an archive.
_FOLDER = 0x10


class DamagedError(ValueError):
    """A file is not as it was written."""


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


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Path:
    """A safetensors file, whole or not at all, with the sum of its bytes: the format itself has none."""
    from safetensors.torch import save_file

    beside = dict(metadata or {})
    known = {**beside, _SUM: _sum(tensors), _SUM_BESIDE: _sum_of_text(beside)}
    return whole(path, lambda draft: save_file(dict(tensors), draft, metadata=known))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; one that carries a sum is held to it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DamagedError(str(error)) from error
    beside = {name: text for name, text in metadata.items() if name not in (_SUM, _SUM_BESIDE)}
    # Older files have no sum of what is said beside the tensors.
    for name, expected in ((_SUM, _sum(tensors)), (_SUM_BESIDE, _sum_of_text(beside))):
        if metadata.get(name, expected) != expected:
            raise DamagedError("its bytes have changed since it was written")
    return tensors, metadata


def _sum(tensors: Mapping[str, Tensor]) -> str:
    import torch

    total = 0
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        total = zlib.crc32(f"{name} {x.dtype} {tuple(x.shape)}".encode(), total)
        total = zlib.crc32(x.reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _sum_of_text(metadata: Mapping[str, str]) -> str:
    return f"{zlib.crc32(json.dumps(sorted(metadata.items())).encode()):08x}"


def check_archive(path: Path) -> None:
    """Refuse an archive, such as torch writes, of which a member is not what its sum says: reading one does not look."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip() or next((x.filename for x in archive.infolist() if _is_folder(x)), None)
    if damaged is not None:
        raise DamagedError(f"{damaged} has changed since it was written")


def _is_folder(member: zipfile.ZipInfo) -> bool:
    """Whether a reader may take a member for a folder: torch then reads nothing, and gives whatever the memory held before."""
    return member.filename.endswith("/") or bool(member.external_attr & _FOLDER)
