"""Two ranks that share a sequence, beside one process: time and peak memory of each, on CPUs over gloo.

One core a process: the same work takes two processes half the time at best, and each holds half of the tokens.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from regard.bench.measure import Row

N, WIDTH, HIDDEN = 8192, 64, 64
REPEATS = 2

_WORKER = f"""
import json, sys, time, torch, torch.distributed as dist
from contextlib import nullcontext
from torch.distributed.device_mesh import init_device_mesh
import regard as rg
from regard import parallel
from regard.bench.measure import relative_error

score, exchange, rank, size, port = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
torch.set_num_threads(1)
torch.manual_seed(0)
options = dict(query_dim={WIDTH}, key_dim={WIDTH}, hidden_dim={HIDDEN}) if score == "additive" else dict()
impl = exchange if size == 1 else "auto"
attend, x = rg.Attention(score, impl=impl, **options), torch.randn(1, {N}, {WIDTH})
own = x.chunk(size, 1)[rank].clone().requires_grad_()
sharing = nullcontext
if size > 1:
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    sharing = lambda: parallel.context(mesh, exchange=exchange)

def forward():
    with torch.no_grad(), sharing():
        return attend(own, own)

def step():
    with sharing():
        attend(own, own).square().sum().backward()

def status(name):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(name))

def measured(run):
    run()
    open("/proc/self/clear_refs", "w").write("5")
    before, times, busy = status("VmRSS"), [], []
    for _ in range({REPEATS}):
        if size > 1:
            dist.barrier()
        start, begun = time.perf_counter(), time.process_time()
        run()
        times.append(time.perf_counter() - start)
        busy.append(time.process_time() - begun)
    return min(times), status("VmHWM") - before, min(busy)

few = forward()[:, :64]
exact = rg.Attention(score, **options).double()
exact.load_state_dict(attend.state_dict())
error = relative_error(few, exact(own[:, :64].double(), x.double()).detach())
found = {{"forward": measured(forward), "training step": measured(step), "error": error}}
print(json.dumps(found))
"""


def rows() -> Iterator[Row]:
    """Dot and additive scores, forward and training step."""
    for score in ("scaled-dot", "additive"):
        found = {
            "regard": _measured(score, "ring", 2),
            "keys gathered, 2 ranks": _measured(score, "gather", 2),
            "one process": _measured(score, "auto", 1),
            "one process, blockwise": _measured(score, "blockwise", 1),
        }
        for what in ("forward", "training step"):
            for who, ranks in found.items():
                busy = max(rank[what][2] for rank in ranks)
                ring = "a ring of 2 ranks, " if who == "regard" else ""
                yield Row(
                    "parallel-cpu",
                    f"{score} B1 N{N} D{WIDTH} float32, {what}",
                    who,
                    # Nobody is done before the last one is; memory is that of the rank that holds most.
                    seconds=max(rank[what][0] for rank in ranks),
                    peak_mib=max(rank[what][1] for rank in ranks),
                    error=max(rank["error"] for rank in ranks),
                    note=f"{ring}{busy:.2f} s of a processor each",
                    extra={"ranks": len(ranks), "threads of a rank": 1, "processor_seconds": busy},
                )


def _measured(score: str, exchange: str, size: int) -> list[dict[str, Any]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, score, exchange, *map(str, (rank, size, port))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(size)
    ]
    said = [rank.communicate() for rank in ranks]
    for rank, (_, errors) in zip(ranks, said, strict=True):
        if rank.returncode:
            raise RuntimeError(f"measured process failed:\n{errors[-2000:]}")
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in said]
