"""Several processes: DDP and FSDP through the flag are one process on the same batch, and our modules stand being sharded."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

pytest.importorskip("lightning")

import regard as rg
from regard.model import Batch, Chain, Classifier, Embedding, TaskModel
from regard.recipes.engine import check_processes
from regard.recipes.recipe import configured
from regard.recipes.runs import STATE, WEIGHTS
from regard.recipes.spread import Spread

SMALL = {"steps": 6, "every": 3, "train_size": 40, "hidden_dim": 16, "embedding_dim": 8, "batch": 8, "merges": 50}


def command(*more: object) -> list[str]:
    return [sys.executable, "-m", "regard", "run", *map(str, more), "--json"]


def begun(out: Path, *more: str) -> list[str]:
    settings = [f"--set={key}={value}" for key, value in SMALL.items()]
    # Sentences of unequal lengths: a process may hold more tokens than the other, and must count for more.
    return command("translate", *settings, "--set=dropout=0", "--out", out, *more)


ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def ran(command: list[str]) -> tuple[Path, dict[str, float]]:
    done = subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return Path(found["run"]), found["metrics"]


def assert_alike(one: Path, other: Path) -> None:
    """The same weights, up to sums in another order, and Adam, which divides by the root of what it has seen."""
    first, second = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    for name, weight in first.items():
        if name.endswith("attention.b_K") or name.endswith("cross.b_K"):
            continue  # it cancels in a softmax, so all that moves it is rounding, which Adam makes as large as any other step
        torch.testing.assert_close(
            second[name], weight, rtol=1e-3, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_two_processes_are_one_on_the_same_batch(tmp_path: Path) -> None:
    one, metrics = ran(begun(tmp_path / "one"))
    two, shared = ran(begun(tmp_path / "two", "--devices", "2", "--strategy", "ddp"))
    assert len(list((tmp_path / "two").iterdir())) == 1, "one run, one folder"
    assert_alike(one, two)
    assert shared.keys() == metrics.keys()


def test_two_processes_that_share_the_parameters_resume_as_two_or_as_one(tmp_path: Path) -> None:
    # Layers, whose parameters come together one layer at a time, and others around them.
    settings = ["--attention", "transformer", "--set=embedding_dim=16", "--set=steps=9", "--set=beam=1"]
    shared = ["--devices", "2", "--strategy", "fsdp"]
    first = subprocess.Popen(begun(tmp_path / "killed", *settings, *shared), env=ONE_THREAD, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(f"killed/*/{STATE}")) and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    first.kill()
    first.wait()
    (killed,) = (tmp_path / "killed").iterdir()
    assert 0 < torch.load(killed / STATE, weights_only=True)["update"] < 9, "killed while it was training"
    # What was kept knows nothing of processes: a copy goes on in a single one, as any run does, to the same end.
    alone = Path(shutil.copytree(killed, tmp_path / "alone"))
    ran(command("--resume", killed, *shared))
    ran(command("--resume", alone))
    assert_alike(alone, killed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_parameters_are_shared_on_one_gpu(tmp_path: Path, precision: str) -> None:
    settings = ["--attention", "transformer", "--set=embedding_dim=16", "--set=beam=1", "--precision", precision]
    spread, _ = ran(begun(tmp_path / "spread", *settings, "--devices", "1", "--strategy", "fsdp"))
    plain, _ = ran(begun(tmp_path / "plain", *settings))
    if precision == "32-true":
        assert_alike(plain, spread)
    ran(command("--resume", spread))


def test_a_precision_that_spread_parameters_cannot_have_is_refused() -> None:
    recipe = configured("dates", {"precision": "16-mixed"})
    with pytest.raises(ValueError, match="precision: got '16-mixed', expected one of 32-true, .*strategy='fsdp'"):
        check_processes(recipe, 1, "fsdp")
    check_processes(recipe, 1, "auto")


def told(path: Path) -> bytes:
    """What Linux says of a process; nothing of one that has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_process_that_is_lost_is_said_with_the_way_on(tmp_path: Path) -> None:
    endless = ["--set=steps=100000", "--set=patience=100000", "--devices", "2", "--strategy", "ddp"]
    first = subprocess.Popen(begun(tmp_path, *endless), env=ONE_THREAD, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(f"*/{STATE}")) and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    (other,) = (k for k in children if b"\0LOCAL_RANK=1\0" in told(Path("/proc", k, "environ")))
    os.kill(int(other), signal.SIGKILL)
    _, said = first.communicate(timeout=120)
    assert first.returncode == 2, said
    assert "another process of this run has ended" in said
    assert f"regard run --resume {next(tmp_path.iterdir())}" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_no_process_stays_behind_when_the_first_is_killed_at_once(tmp_path: Path) -> None:
    endless = ["--set=steps=100000", "--set=patience=100000", "--devices", "2", "--strategy", "ddp"]
    first = subprocess.Popen(begun(tmp_path, *endless), env=ONE_THREAD, stderr=subprocess.DEVNULL)
    left: list[Path] = []
    try:
        deadline = time.monotonic() + 120
        while not left and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
            children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
            left = [Path("/proc", k) for k in children if b"\0LOCAL_RANK=1\0" in told(Path("/proc", k, "environ"))]
    finally:
        first.kill()
        first.wait()
    assert left, "it was killed before it started another"
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = [process for process in left if told(process / "cmdline")]
    for process in left:
        os.kill(int(process.name), signal.SIGKILL)
    assert not left


def sharded(rank: int, folder: str) -> None:
    """Forward and backward of a task model whose parameters are spread over two processes, beside one that has them all."""
    os.environ.update(MASTER_ADDR="localhost", RANK=str(rank), WORLD_SIZE="2")
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(rank)
    batch = Batch(
        {"tokens": torch.randint(20, (4, 7), generator=generator)},
        {"tokens": torch.arange(7) < torch.tensor([[7], [3], [5], [1]])},
        torch.tensor([0, 1, 2, 1]),
    )
    problems = []
    for name, make in ATTENTIONS.items():
        torch.manual_seed(0)
        whole = model(make())
        torch.manual_seed(0)
        spread = model(make())
        for part in (spread.features, spread.attention, spread.output):
            fully_shard(part, mesh=mesh)
        fully_shard(spread, mesh=mesh)
        whole.loss(whole(batch), batch).backward()
        spread.loss(spread(batch), batch).backward()
        for (path, parameter), other in zip(whole.named_parameters(), spread.parameters(), strict=True):
            if parameter.grad is None:
                continue
            torch.distributed.all_reduce(parameter.grad)
            expected, got = parameter.grad / 2, other.grad.full_tensor()
            if not torch.allclose(expected, got, rtol=1e-4, atol=1e-6):
                problems.append(f"{name} {path}: {(expected - got).abs().max()}")
    # The engine's way, where the first process alone uses one of the parameters, and none of them another.
    uneven = Uneven(uses_both=rank == 0)
    whole = copy.deepcopy(uneven)
    over = Spread(uneven, mesh)
    loss = uneven()
    used = over.used(loss)
    loss.backward()
    over.leave_others(used)
    (Uneven.loss(whole, True) / 2 + Uneven.loss(whole, False) / 2).backward()
    for (path, parameter), other in zip(whole.named_parameters(), uneven.parameters(), strict=True):
        expected, got = parameter.grad, other.grad
        if (expected is None) != (got is None) or (got is not None and not torch.allclose(expected, got.full_tensor())):
            problems.append(f"uneven {path}: {got}, expected {expected}")
    Path(folder, f"problems-{rank}").write_text("\n".join(problems))
    torch.distributed.destroy_process_group()


ATTENTIONS = {
    "additive": lambda: rg.Attention("additive", query_dim=6, key_dim=6, hidden_dim=5),
    "sparse": lambda: rg.Attention("general", "sparsemax", query_dim=6, key_dim=6),
    "multi-head": lambda: rg.MultiHeadAttention(6, heads=2),
    "self": lambda: rg.SelfAttention(6),
    "encoder": lambda: rg.TransformerEncoder(6, heads=2, layers=2, dropout=0.0),
}


class Uneven(nn.Module):
    """A layer, which may be called in other processes alone, and what stands around it."""

    def __init__(self, uses_both: bool) -> None:
        super().__init__()
        self.uses_both = uses_both
        torch.manual_seed(0)
        self.first, self.second, self.layer = nn.Linear(3, 4), nn.Linear(4, 4), Halves(4, 1)
        self.last, self.unused = nn.Linear(4, 1), nn.Linear(2, 2)

    def forward(self) -> torch.Tensor:
        return self.loss(self.uses_both)

    def loss(self, both: bool) -> torch.Tensor:
        self.layer.both = both
        x = self.first(torch.ones(2, 3))
        return self.last(self.layer(self.second(x) if both else x)).sum()


class Halves(rg.EncoderLayer):
    """A layer that does not always use all of itself."""

    both = True

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(tokens, mask) if self.both else self.norm_attention(tokens)


def model(attention: nn.Module) -> TaskModel:
    asks = isinstance(attention, rg.Attention | rg.MultiHeadAttention)
    features = Chain(Embedding(20, 6), rg.RecurrentEncoder(6, 3))
    return TaskModel(features, rg.PooledQuery() if asks else None, attention, Classifier(6, 3))


def test_modules_can_be_sharded(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(sharded, (str(tmp_path),), nprocs=2, start_method="spawn")
    for rank in range(2):
        assert (tmp_path / f"problems-{rank}").read_text() == ""
