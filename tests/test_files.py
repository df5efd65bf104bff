"""Files appear whole or not at all, and are read by whoever may read what the user writes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from regard._files import whole, write_json, write_lines, write_text


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_the_umask_says_who_may_read(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        whole(tmp_path / "weights.safetensors", lambda draft: save_file({"x": torch.ones(2)}, draft))
        whole(tmp_path / "state.ckpt", lambda draft: torch.save({"x": 1}, draft))
        write_text(tmp_path / "a.txt", "a")
        write_json(tmp_path / "a.json", {})
        write_lines(tmp_path / "a.jsonl", [{}])
        # Another time, over the first.
        whole(tmp_path / "weights.safetensors", lambda draft: save_file({"x": torch.ones(2)}, draft))
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)
    assert len(modes) == 5


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.txt", "first")

    def broken(draft: Path) -> None:
        draft.write_text("sec")
        raise RuntimeError("the disk is full")

    with pytest.raises(OSError, match=r"a.txt could not be written: the disk is full"):
        whole(path, broken)
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "first"
