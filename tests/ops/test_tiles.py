"""Tiles kept between processes: what is known is taken, what is damaged is ignored and written anew."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from regard.bench import QUESTIONS, run, tune
from regard.ops import tiles

DEFAULT = {"BM": 64, "BN": 64, "BD": 32, "num_warps": 4, "num_stages": 2}
BEST = {"BM": 128, "BN": 32, "num_warps": 8, "num_stages": 1}
NAME = tiles.name_of("a GPU", "bilinear forward", "float16", (64, 128))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiles._known.cache_clear()
    yield tmp_path / "regard" / "tiles.json"
    tiles._known.cache_clear()


def test_without_a_file_there_are_defaults() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiles.tile(NAME, DEFAULT) == DEFAULT


def test_what_is_remembered_is_taken_by_the_next_process(own_cache: Path) -> None:
    assert tiles.remember({NAME: {**DEFAULT, **BEST}}) == own_cache
    assert json.loads(own_cache.read_text()) == {NAME: BEST}
    tiles._known.cache_clear()
    assert tiles.tile(NAME, DEFAULT) == {**DEFAULT, **BEST}
    assert tiles.tile(NAME + "!", DEFAULT) == DEFAULT
    tiles.remember({NAME + "!": {**BEST, "BM": 16}})
    assert tiles.tile(NAME, DEFAULT)["BM"] == 128, "entries are added, not exchanged"


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        '{"x": {"BM": 48, "BN": 32, "num_warps": 8, "num_stages": 1}}',
        '{"x": {"BM": 128, "BN": 32, "num_warps": 8}}',
        '{"x": {"BM": 128, "BN": 32, "num_warps": 8, "num_stages": true}}',
        '{"x": {"BM": 4096, "BN": 32, "num_warps": 8, "num_stages": 1}}',
        "\x00",
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning_and_rewritten_whole(damage: str, own_cache: Path) -> None:
    own_cache.parent.mkdir()
    own_cache.write_text(damage)
    with pytest.warns(UserWarning, match=r"tiles\.json is ignored, defaults are taken.*regard bench tune"):
        assert tiles.tile(NAME, DEFAULT) == DEFAULT
    with pytest.warns(UserWarning, match="ignored"):
        tiles.remember({NAME: BEST})
    assert json.loads(own_cache.read_text()) == {NAME: BEST}
    assert [path.name for path in own_cache.parent.iterdir()] == ["tiles.json"], "no drafts are left"


def test_a_tile_on_trial_comes_first() -> None:
    tiles.remember({NAME: BEST})
    with tiles.trying({"BM": 16}):
        assert tiles.tile(NAME, DEFAULT)["BM"] == 16
    with tiles.trying({}):
        assert tiles.tile(NAME, DEFAULT) == DEFAULT, "the default is measured, not what is known"
    assert tiles.tile(NAME, DEFAULT)["BM"] == 128


def test_candidates_can_be_remembered() -> None:
    for wide in (False, True):
        for backward in (False, True):
            assert all(tiles._is_tile(tile) for tile in tune.candidates(wide, backward))


def test_tuning_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert QUESTIONS["tune"] == ("regard.bench.tune", "tune")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"'tune'.*It needs a CUDA device"):
        run("tune", None, "regard bench tune")
