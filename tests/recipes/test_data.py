"""Files of data: what claims to be more than any memory holds is refused before room is made for it."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
import pytest

from regard.recipes import data
from regard.recipes.data import Folder, lines_of, own_file, unpacked
from regard.recipes.text import read_vectors
from tests.recipes.text_data import archive


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MOST", 3 << 20)


@pytest.mark.usefixtures("little")
def test_what_unpacks_to_more_than_there_may_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fits.txt.gz").write_bytes(gzip.compress(bytes(3 << 20)))
    assert Folder(tmp_path).bytes("fits.txt") == bytes(3 << 20)
    # In one member or in several.
    for name, packed in (
        ("bomb.txt.gz", gzip.compress(bytes(4 << 20))),
        ("chain.txt.gz", gzip.compress(bytes(1 << 20)) * 4),
    ):
        (tmp_path / name).write_bytes(packed)
        with pytest.raises(
            ValueError, match=r"data: got .*more than 3145728 bytes when unpacked, expected a whole file"
        ):
            Folder(tmp_path).bytes(name.removesuffix(".gz"))
    (tmp_path / "some.tgz").write_bytes(archive({"a.txt": "a" * (4 << 20)}))
    with pytest.raises(
        ValueError, match=r"data: got .*more than 3145728 bytes when unpacked, expected a whole archive"
    ):
        Folder(tmp_path).members("some.tgz")


def test_unpacking_is_that_of_gzip() -> None:
    for packed in (gzip.compress(b"") + gzip.compress(b"ab") * 2, gzip.compress(b"ab") + bytes(7)):
        assert unpacked(packed) == gzip.decompress(packed)
    whole = gzip.compress(b"a" * 1000)
    for broken in (whole[:-5], whole[:-8] + bytes(8), whole + b"more"):
        with pytest.raises((OSError, EOFError)):
            unpacked(broken)


def test_a_file_of_holes_is_refused_by_its_size(tmp_path: Path) -> None:
    for name in ("large.txt", "large.bin"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 41)
    refused = "2199023255552 bytes, more than 4294967296"
    with pytest.raises(ValueError, match=f"{refused}, expected a whole file"):
        Folder(tmp_path).bytes("large.bin")
    with pytest.raises(ValueError, match=f"{refused}, expected a whole file"):
        Folder(tmp_path).collected(".txt")
    with pytest.raises(ValueError, match=f"text: got .*{refused}, expected the path of a picture"):
        own_file(str(tmp_path / "large.bin"), "a picture")


def test_a_header_may_claim_anything(tmp_path: Path) -> None:
    # The product of the last is zero in 64 bits.
    for shape in ((1 << 30, 1 << 10), (-1, -1), (1 << 16,) * 4):
        header = b"\0\0\x08" + bytes([len(shape)]) + np.array(shape, ">i4").tobytes()
        (tmp_path / "a-idx").write_bytes(header)
        with pytest.raises(ValueError, match=r"a-idx: 0 bytes, expected as many as \("):
            Folder(tmp_path).idx("a-idx")
    for cut in (b"\0\0\x08", b"\0\0\x08\xff\0\0"):
        (tmp_path / "a-idx").write_bytes(cut)
        with pytest.raises(ValueError, match="data: got "):
            Folder(tmp_path).idx("a-idx")


def npy(shape: tuple[int, ...], body: bytes = b"") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue() + body


def test_arrays_of_numpy(tmp_path: Path) -> None:
    given = np.arange(6, dtype=np.float16).reshape(2, 3)
    np.save(tmp_path / "vectors.npy", given)
    (tmp_path / "words.txt").write_text("a\nb\n")
    words, table = read_vectors(tmp_path)
    assert (words, table.tolist()) == (["a", "b"], given.tolist())
    for content in (
        npy((1 << 40, 300)),
        npy((2, 3), bytes(20)),
        npy((2, 3), bytes(28)),
        npy((-2, -3), bytes(24)),
        b"PK\3\4",
    ):
        (tmp_path / "vectors.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"data: got .*vectors.npy: .*, expected a numpy array of numbers"):
            read_vectors(tmp_path)
    np.save(tmp_path / "vectors.npy", np.array(["a", {}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="expected a numpy array of numbers"):
        read_vectors(tmp_path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_as_on_any_system(end: str) -> None:
    assert lines_of(f"one{end}two{end}") == lines_of(f"one{end}two") == ["one", "two"]
    assert lines_of("one\rand\ntwo\n") == ["one\rand", "two"]
