"""What the studies of long inputs measure, made small."""

from __future__ import annotations

import gzip
import math

import pytest
import torch

from regard.bench import QUESTIONS, cost_curves, linformer_table, shakespeare
from regard.bench.measure import Row
from regard.bench.shakespeare import RELATIVE, SINUSOIDAL, XL, Size, Text, streamed_bits, text_of, windowed_bits

SMALL = Size(dim=8, heads=2, layers=1, segment=6, batch=3, dropout=0.0, streams=2)
TEXT = "".join(chr(97 + (k * k + k // 7) % 11) for k in range(3000))


def test_the_questions_are_asked():
    assert {"shakespeare", "cost-curves", "linformer-table"} <= QUESTIONS.keys()


def test_the_text_is_found_plain_or_packed(tmp_path, monkeypatch):
    plain = tmp_path / "a.txt"
    plain.write_text(TEXT)
    assert text_of(plain) == TEXT
    folder = tmp_path / "tinyshakespeare"
    folder.mkdir()
    (folder / "input.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    assert text_of(tmp_path) == TEXT
    with pytest.raises(ValueError, match="path: got None.*REGARD_DATA"):
        text_of(None)
    with pytest.raises(ValueError, match="path: got .*nowhere.*a folder with tinyshakespeare"):
        text_of(tmp_path / "nowhere")


def test_the_text_is_cut_in_order():
    text = Text.of(TEXT, "cpu")
    assert (len(text.train), len(text.valid), len(text.test)) == (2700, 150, 150)
    known = sorted(set(TEXT))
    assert "".join(known[k] for part in (text.train, text.valid, text.test) for k in part.tolist()) == TEXT


def test_models_have_equal_parameters():
    for size in (Size(), shakespeare.ON_CPU):
        counts = {name: sum(p.numel() for p in m.parameters()) for name, m in shakespeare.models(size, 65).items()}
        assert counts[XL] == counts[RELATIVE]
        assert abs(counts[SINUSOIDAL] / counts[XL] - 1) < 0.005


def test_bits_are_those_of_each_character():
    model, text = shakespeare.models(SMALL, 11)[XL].eval(), Text.of(TEXT, "cpu")
    codes = text.valid
    found = streamed_bits(model, codes, 6, rows=2)
    n = 149 // 2 // 6 * 6
    assert found.shape == (2, n)
    # With all of it in memory, segment by segment is the whole.
    model.decoder.memory_length = 1000
    found = streamed_bits(model, codes, 6, rows=2)
    with torch.no_grad():
        log_p = model(codes[: 2 * n].view(2, n)).output.log_softmax(-1)
    target = codes[1 : 2 * n + 1].view(2, n)
    expected = -log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1) / math.log(2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_windows_that_overlap_tell_each_character_once():
    model, codes = shakespeare.models(SMALL, 11)[SINUSOIDAL].eval(), Text.of(TEXT, "cpu").valid
    found = windowed_bits(model, codes, 6)
    windows = (149 - 6) // 3 + 1
    assert found.shape == (3 * windows,)
    with torch.no_grad():
        logits, _ = model(codes[3:9].unsqueeze(0))
    expected = -logits.log_softmax(-1)[0, 4, codes[8]] / math.log(2)
    torch.testing.assert_close(found[4], expected, rtol=1e-4, atol=1e-5)


def test_training_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_RUNS", str(tmp_path / "runs"))
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    first = list(shakespeare.rows(text, seconds=0.2, size=SMALL))
    assert [row.what for row in first] == [XL] * 3 + [RELATIVE] * 2 + [SINUSOIDAL] * 2
    assert all(0 < row.extra["bits"] < 8 for row in first)
    assert len(list((tmp_path / "runs").glob("*.pt"))) == 3
    again = list(shakespeare.rows(text, seconds=0.2, size=SMALL))
    assert [row.extra["bits"] for row in again] == [row.extra["bits"] for row in first]
    assert [row.extra["steps"] for row in again] == [row.extra["steps"] for row in first]
    pytest.importorskip("matplotlib")
    assert shakespeare.draw(first, tmp_path).stat().st_size > 1000


def test_an_interrupted_training_keeps_its_clock(tmp_path):
    text = Text.of(TEXT, "cpu")

    def training() -> shakespeare.Training:
        return shakespeare.Training(XL, shakespeare.models(SMALL, 11)[XL], text, SMALL, 0.3, tmp_path)

    one = training()
    one.progress.seconds, one.progress.step, one.best_state = 0.29, 40, one.model.state_dict()
    one._save()
    two = training()
    progress = two.run()
    assert progress.step >= 41
    assert len(progress.curve) == 1
    three = training()
    three.size = Size()
    with pytest.raises(ValueError, match="REGARD_RUNS: got a run of size"):
        three._load()


@pytest.mark.parametrize("name", list(cost_curves.layers(cost_curves.CONFIGS["cpu"], 64)))
def test_a_step_of_every_kind(name):
    cost_curves.step(name, 70, "cpu")()


def measured(n: int, seconds: float) -> Row:
    return Row("cost-curves", f"N {n}", "window", seconds, 3.0 * n, extra={"n": n, "program": seconds, "system": 0.0})


def test_exponents_are_those_of_the_large_end(tmp_path):
    config = cost_curves.CONFIGS["cpu"]
    found = [measured(n, 5.0 + 0.001 * n) for n in (512, 1024, 2048, 4096)]
    found += [measured(n, 1e-4 * n) for n in (8192, 16384, 65536)]
    row = cost_curves.growth("window", found, config)
    assert (row.extra["from"], row.extra["to"]) == (8192, 65536)
    assert row.extra["time"] == pytest.approx(1.0)
    assert row.extra["memory"] == pytest.approx(1.0)
    assert row.extra["holds"]
    assert row.note == "time N^1.00, at the end N^1.00, memory N^1.00 (holds: time at most N^1.1)"
    found[-1].extra["system"] = 6.5536
    row = cost_curves.growth("window", found, config)
    assert row.extra["holds"]
    assert row.extra["with system"] > 1.2
    # Constant costs at first hide what grows.
    row = cost_curves.growth("window", [measured(8192, 1.0), measured(16384, 1.0), measured(65536, 6.0)], config)
    assert row.extra["time"] < 1.1 < row.extra["last"]
    assert not row.extra["holds"]
    found = [measured(n, (n / 1e4) ** 2) for n in (8192, 16384, 65536)]
    row = cost_curves.growth("window", found, config)
    assert not row.extra["holds"]
    assert "does not hold" in row.note
    assert cost_curves.growth("window", found[:1], config) is None
    pytest.importorskip("matplotlib")
    assert cost_curves.draw([*found, row], tmp_path).stat().st_size > 1000


def test_curves_end_where_a_run_would_take_too_long(monkeypatch):
    monkeypatch.setitem(cost_curves.LONGEST_RUN, "cpu", 1e-6)
    assert [row.extra["n"] for row in cost_curves.curve("Linformer", "cpu", (64, 128), memory=False)] == [64]


def test_the_table_has_the_layout_of_the_paper(tmp_path):
    found = list(linformer_table.rows((16, 32), (8, 16), dim=8, heads=2, tokens=64, device="cpu"))
    assert [row.what for row in found if row.extra["n"] == 16][2:] == ["Linformer, k 8"]
    lines = linformer_table.layout(found).splitlines()
    assert lines[0] == "Time saved against: Transformer, weights written out"
    assert lines[2] == "| n \\ k | 8 | 16 |"
    assert lines[4].startswith("| 16 | ")
    assert lines[4].endswith("× | - |")
    assert lines[5].count("×") == 2
    assert linformer_table.draw(found, tmp_path).name == "linformer-table.md"


def test_the_written_out_attention_is_the_fused_one():
    one, x = linformer_table.Written(8, 2).double(), torch.randn(2, 5, 8, dtype=torch.float64)
    two = linformer_table.MultiHeadAttention(8, 2).double()
    two.load_state_dict(one.state_dict())
    torch.testing.assert_close(one(x), two(x))
