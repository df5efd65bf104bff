"""The stored studies of the Reformer, at sizes of a moment."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from regard.bench import duplication, reformer_gpu, reformer_memory
from regard.bench.duplication import EVALUATED, Setting, Writer
from regard.recipes.planted import Duplicate

TINY = Setting(
    task=Duplicate(n=7, symbols=5),
    dim=16,
    heads=2,
    chunk=4,
    batch=3,
    warmup=2,
    seconds=1e9,
    steps=3,
    examples=4,
    device="cpu",
)


def test_every_model_is_evaluated_with_every_number_of_hashes(tmp_path):
    rows = list(duplication.answer(TINY, (2, "full")))
    assert [(row.extra["trained"], row.extra["evaluated"]) for row in rows] == [
        (hashes, seen) for hashes in (2, "full") for seen in EVALUATED
    ]
    assert all(row.extra["steps"] == 3 and 0.0 <= row.extra["accuracy"] <= 1.0 for row in rows)
    pytest.importorskip("matplotlib")
    assert duplication.draw(rows, tmp_path).stat().st_size > 1000


def test_a_run_goes_on_where_it_was_stopped(tmp_path):
    path = tmp_path / "state" / "two.pt"
    whole = duplication.train(TINY, 2)
    duplication.train(replace(TINY, steps=2), 2, path)
    again = duplication.train(TINY, 2, path, say=lambda _: None)
    assert again.step == 3
    assert [p.name for p in path.parent.iterdir()] == ["two.pt"]
    assert torch.equal(again.generator.get_state(), whole.generator.get_state())
    assert duplication.train(TINY, 2, path).step == 3


def test_a_state_that_was_half_written_is_not_read(tmp_path):
    path = tmp_path / "two.pt"
    path.with_suffix(".partial").write_bytes(b"half")
    assert duplication.train(TINY, 2, path).step == 3


def test_full_attention_sees_all_but_the_token_itself():
    torch.manual_seed(0)
    model = Writer(TINY, "full").eval()
    import regard as rg

    with rg.record(model) as trace:
        model(TINY.task.draw(1, torch.Generator()).inputs["tokens"])
    weights = trace["decoder.layers.0.attention.attention"].weights[0, 0]
    seen = torch.ones(16, 16).tril(-1).bool()
    seen[0, 0] = True
    assert torch.equal(weights > 0, seen)
    model.see(2)
    assert (model.attention.rounds, model.attention.chunk, model.attention.buckets) == (2, 4, None)


def test_the_comparison_runs(monkeypatch):
    size = reformer_gpu.Size(batch=1, n=32, rounds=2, dim=8, heads=2, chunk=4)
    rows = list(reformer_gpu.measure(size, "cpu", torch.float32, budget=0.001))
    assert {"regard", "full attention (regard)"} <= {row.what for row in rows}
    assert next(row.error for row in rows if row.what == "regard") < 1e-5


def test_memory_is_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(reformer_memory, "measure", lambda layers, kind: 10.0 + layers * (kind == "ordinary"))
    rows = list(reformer_memory.rows())
    assert [row.peak_mib for row in rows if row.case == "a layer more"] == [0.0, 1.0]
    assert reformer_memory.draw(rows, tmp_path).stat().st_size > 1000
