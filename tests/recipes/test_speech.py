"""Speech: the lexicon, what is put together, the files, every attention, and a short training."""

from __future__ import annotations

import io
import tarfile
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.model import collate
from regard.recipes import run
from regard.recipes.recipe import configured
from regard.recipes.speech import Speech
from regard.recipes.speech.lexicon import LEXICON, PHONES, heard, said
from regard.recipes.speech.recipe import made_up
from regard.recipes.speech.sound import RATE, samples_of
from regard.recipes.speech.strings import Strings

SMALL = {"hidden_dim": 16, "embedding_dim": 7, "heads": 2, "train_size": 11, "test_size": 5, "digits": 2}


def wav(samples: int, rate: int = RATE, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((np.sin(np.arange(samples * channels)) * 9000).astype("<i2").tobytes())
    return file.getvalue()


def test_words_are_heard_in_their_phones() -> None:
    every = list(LEXICON)
    assert heard(said(every)) == every
    assert set(said(every)) == set(PHONES)
    assert heard(["s", "ih", "s"]) == ["six"], "the nearest word"
    assert heard([]) == []


def test_strings_are_put_together_from_one_speaker() -> None:
    recordings = made_up(0)["test"]
    strings = Strings(recordings, 23, (2, 5), "seed")
    for k, told in enumerate(strings):
        chosen = strings.chosen[k]
        assert len({recordings[j].speaker for j in chosen}) == 1
        assert 2 <= len(chosen) <= 5
        for (start, stop), j in zip(told.spans, chosen, strict=True):
            assert torch.equal(told.sound[start:stop], recordings[j].sound)
        assert told.digits == [recordings[j].digit for j in chosen]
    again = Strings(recordings, 23, (2, 5), "seed")
    assert torch.equal(strings[7].sound, again[7].sound)
    changed = Strings(recordings, 23, (2, 5), "seed", change=True)
    assert changed.chosen == strings.chosen
    assert len(changed[7].sound) != len(strings[7].sound), "faster or slower"


def test_single_digits_are_the_recordings_as_they_are() -> None:
    task = configured("speech", {**SMALL, "digits": 1})
    assert isinstance(task, Speech)
    assert len(task.strings("test")) == 150
    assert [len(told.digits) for told in task.strings("test")] == [1] * 150


@pytest.mark.parametrize("unit", ["word", "phone"])
def test_links_are_where_the_digit_is(unit: str) -> None:
    task = configured("speech", {**SMALL, "unit": unit})
    assert isinstance(task, Speech)
    told = task.strings("test")[0]
    example = task.example(told)
    words = [list(LEXICON)[digit] for digit in told.digits]
    units = words if unit == "word" else said(words)
    assert example.words["target"] == [*units, "end"]
    assert example.gold is not None
    model = task.build().eval()
    batch = collate([example])
    assert model.encode(batch).inputs["sound"].shape[1] == example.gold.shape[1] == len(example.words["sound"])
    first = example.gold[0].nonzero().flatten().tolist()
    start, stop = (at / RATE for at in told.spans[0])
    assert all(start <= float(example.words["sound"][j]) <= stop + 0.01 for j in first)
    assert len(first) >= 1
    assert not example.gold[-1].any()


@pytest.mark.parametrize("attention", [*Speech.alternatives, "local-monotonic", "multi-head"])
def test_any_attention_fits(attention: str) -> None:
    task = configured("speech", {**SMALL, "attention": attention, "beam": 2, "unit": "phone"})
    model, examples = task.build(), task.examples("test")
    batch = collate(examples)
    loss = model.loss(model(batch), batch)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    judged = task.judge(model.eval(), examples)
    assert set(judged.metrics) == {"wer", "per", "perplexity", "aer"}
    assert len(judged.answers) == 5


@pytest.mark.parametrize("packed", [True, False])
def test_real_files(packed: bool, tmp_path: Path) -> None:
    files = {f"{d}_{who}_{k}.wav": wav(700 + 10 * d) for d in range(10) for who in ("ann", "bob") for k in (0, 5, 7)}
    if packed:
        with tarfile.open(tmp_path / "recordings.tar.gz", "w:gz") as archive:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    else:
        (tmp_path / "recordings").mkdir()
        for name, content in files.items():
            (tmp_path / "recordings" / name).write_bytes(content)
    task = configured("speech", {"data": str(tmp_path), "train_size": 3, "test_size": 2})
    assert isinstance(task, Speech)
    assert {split: len(some) for split, some in task._recordings.items()} == {"train": 20, "validation": 20, "test": 20}
    assert len(task.examples("train")) == 3
    assert task.examples("train")[0].inputs["sound"].abs().max() <= 4
    assert task.order(task.examples("train")).chosen(0)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recordings of the train and of the validation and of the test"):
        configured("speech", {"data": str(tmp_path)}).examples("test")
    (tmp_path / "one.wav").write_bytes(wav(700))
    with pytest.raises(ValueError, match=r"one.wav, expected wav files named digit_speaker_number.wav"):
        configured("speech", {"data": str(tmp_path)}).examples("test")
    with pytest.raises(ValueError, match="expected a wav file"):
        samples_of(b"RIFF", "x.wav")
    with pytest.raises(ValueError, match="1 channels of 16 bits, 16000 a second"):
        samples_of(wav(9, rate=16000), "x.wav")
    with pytest.raises(ValueError, match="no sound"):
        samples_of(wav(0), "x.wav")
    with pytest.raises(ValueError, match="unit: got 'letter'"):
        configured("speech", {"unit": "letter"})
    with pytest.raises(ValueError, match="the path of a wav file"):
        configured("speech", SMALL).parse("none.wav")


@pytest.mark.parametrize(
    ("attention", "unit"),
    [
        ("additive", "word"),
        pytest.param("self-attention", "word", marks=pytest.mark.slow),
        pytest.param("additive", "phone", marks=pytest.mark.slow),
    ],
)
def test_a_short_training_hears(attention: str, unit: str, tmp_path: Path) -> None:
    settings = {"digits": 2, "steps": 200, "every": 100, "test_size": 50, "unit": unit, "beam": 2}
    found = run("speech", out=tmp_path, progress=False, attention=attention, **settings)
    metrics = found.metrics()
    assert metrics is not None
    print(attention, metrics)
    assert metrics["wer"] < 0.5
    assert (found.folder / "attention.svg").is_file()
    (tmp_path / "own.wav").write_bytes(wav(900))
    task = found.recipe()
    (answer,) = task.judge(found.model(), [task.parse(str(tmp_path / "own.wav"))]).answers
    assert set(answer.split()) <= set(LEXICON)
