"""Ranks that share a sequence find what one process finds: real processes, over gloo, one run of all cases."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.ops.folds import BestFold, SoftFold
from regard.ops.forms import AdditiveForm, BilinearForm
from regard.ops.parallel.ranks import first_place
from regard.ops.parts import _ROWS
from tests.ops.parallel_cases import CASES

ROOT = Path(__file__).resolve().parents[2]
SIZE = 4


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(arguments: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What went wrong on each rank, by case."""
    folder, port = tmp_path_factory.mktemp("ranks"), str(free_port())
    ranks = [start(["-m", "tests.ops.parallel_worker", str(r), str(SIZE), port, str(folder)]) for r in range(SIZE)]
    said = [rank.communicate(timeout=900)[0] for rank in ranks]
    for r, rank in enumerate(ranks):
        assert rank.returncode == 0, f"rank {r}: {said[r][-3000:]}"
    reports = [json.loads((folder / f"{r}.json").read_text()) for r in range(SIZE)]
    assert all(report["ran"] == len(CASES) for report in reports)
    return [report["wrong"] for report in reports]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_ranks_find_what_one_process_finds(name: str, wrong: list[dict[str, str]]) -> None:
    found = [f"rank {r}: {each[name]}" for r, each in enumerate(wrong) if name in each]
    assert not found, "\n".join(found)


def test_every_score_meets_every_alignment_that_folds_and_every_mask_both_forms() -> None:
    from tests.ops.parallel_cases import FOLDING, SCORES

    pairs = {tuple(name.split(" | ")[:2]) for name in CASES if name.count(" | ") == 4}
    missing = {(s, a) for s in SCORES for a in FOLDING} - pairs
    # A position is not predicted from a query that is not there.
    assert missing <= {("query-free", "predictive"), ("query-free", "renormalized")}


DYING = """
import os, sys, datetime, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import regard as rg
from regard import parallel
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
mesh, x = init_device_mesh("cpu", (2,)), torch.randn(2, 5, 4)
with parallel.context(mesh):
    rg.Attention("dot")(x, x)
    if rank == 1:
        os._exit(3)  # dead at once: what a process does on its way out is not what is asked
    rg.Attention("dot")(x, x)
"""


def test_a_rank_that_leaves_is_an_error_of_the_others() -> None:
    port = str(free_port())
    ranks = [start(["-c", DYING, str(r), port]) for r in range(2)]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert ranks[1].returncode == 3, said[1]
    assert ranks[0].returncode != 0
    assert "rank 0 of 2 lost the others while comparing attentions" in said[0]
    assert "look for the first error of another rank" in said[0]


def test_outside_of_a_context_a_rank_is_alone() -> None:
    assert first_place(5) == 0


@pytest.mark.parametrize("multi", [False, True])
def test_the_shares_of_all_blocks_add_up_to_the_whole(multi: bool) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        score = rg.Additive(3, 5, 2, features=7 if multi else None)
        aligns = [rg.Soft(0.5), rg.Hard(), rg.Local(2, "predictive", query_dim=3), rg.Reinforced(5)]
        for align in aligns:
            call = rg.Attention(score, align).call(torch.randn(2, 4, 3), torch.randn(2, 9, 5), torch.randn(2, 9, 7))
            fold = align.fold(call.tile())
            scores = call.scores()
            parts = [
                fold.absorb(fold.start(call.tile()), scores[..., j.start : j.stop], call.tile(None, j))
                for j in (range(4), range(4, 5), range(5, 9))
            ]
            whole = fold.merge(fold.merge(parts[2], parts[0]), parts[1])
            shares = [fold.share(part, whole) for part in parts]
            kinds = {SoftFold: (1, 2), BestFold: (2,)}
            sums = kinds.get(type(fold), (2, 4, 5) if isinstance(align, rg.Hard) else (1, 2, 5))
            for k in sums:
                torch.testing.assert_close(sum(share[k] for share in shares), whole[k], rtol=1e-12, atol=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("form", [BilinearForm, AdditiveForm])
def test_every_tensor_of_a_form_is_known_to_belong_to_queries_or_keys(form: type) -> None:
    tensors = {field.name for field in fields(form) if "Tensor" in str(field.type)}
    assert tensors == set(_ROWS[form])
