"""Files appear whole or not at all, and are read by whoever may read what the user writes."""

from __future__ import annotations

import os
import stat
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from regard._files import (
    DamagedError,
    check_archive,
    read_tensors,
    whole,
    write_json,
    write_lines,
    write_tensors,
    write_text,
)


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


def test_tensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = {
        "x": torch.randn(3, 5).bfloat16(),
        "empty": torch.zeros(0, 2),
        "number": torch.tensor(7),
        "y": torch.eye(3).bool(),
    }
    write_tensors(tmp_path / "some", written, {"who": "me"})
    found, metadata = read_tensors(tmp_path / "some")
    assert metadata["who"] == "me"
    assert found.keys() == written.keys()
    assert all(torch.equal(found[name], x) and found[name].dtype == x.dtype for name, x in written.items())


def test_a_flipped_bit_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    written = {"x": torch.randn(4, 4), "y": torch.arange(5)}
    path = write_tensors(tmp_path / "some", written, {"path": "layers.0.attention"})
    whole = path.read_bytes()
    for place in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            found, metadata = read_tensors(path)
        except DamagedError:
            continue
        # Without a sum under its name a file may be an older one; the name is then all that changed.
        assert "crc32_metadata" not in metadata
        assert metadata["path"] == "layers.0.attention"
        assert found.keys() == written.keys()
        assert all(torch.equal(found[name], x) for name, x in written.items())


def test_a_file_that_sums_its_tensors_alone_is_read(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "new", {"x": torch.ones(2)}, {"who": "me"})
    metadata = read_tensors(path)[1]
    del metadata["crc32_metadata"]
    save_file({"x": torch.ones(2)}, tmp_path / "old", metadata=metadata)
    assert read_tensors(tmp_path / "old")[1]["who"] == "me"


def test_tensors_without_a_sum_are_read(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "theirs")
    assert torch.equal(read_tensors(tmp_path / "theirs")[0]["x"], torch.ones(2))


def test_an_archive_is_checked(tmp_path: Path) -> None:
    torch.save({"x": torch.randn(50)}, tmp_path / "state")
    check_archive(tmp_path / "state")
    whole = bytearray((tmp_path / "state").read_bytes())
    place = whole.find(torch.load(tmp_path / "state")["x"].numpy().tobytes())
    whole[place + 7] ^= 4
    (tmp_path / "state").write_bytes(whole)
    torch.load(tmp_path / "state")  # which does not notice
    with pytest.raises(DamagedError, match="has changed since"):
        check_archive(tmp_path / "state")


@pytest.mark.parametrize("how", ["attribute", "name"])
def test_an_archive_has_no_folders(tmp_path: Path, how: str) -> None:
    path = tmp_path / "state"
    torch.save({"x": torch.arange(1.0, 13.0)}, path)
    if how == "name":
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("state/more/", b"")
    else:
        whole = bytearray(path.read_bytes())
        whole[whole.rindex(b"state/data/0") - 46 + 38] ^= 0x10
        path.write_bytes(whole)
    with pytest.raises(DamagedError, match="has changed since"):
        check_archive(path)
