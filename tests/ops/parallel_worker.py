"""One rank of the cases of tests/ops/parallel_cases.py: `python -m tests.ops.parallel_worker RANK SIZE PORT FOLDER [PATTERN]`."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def main(rank: int, size: int, port: int, folder: Path, pattern: str = "") -> None:
    """Run every case that has so many ranks or fewer, and write what went wrong."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    from tests.ops.parallel_cases import CASES, Ranks

    wrong: dict[str, str] = {}
    for name, (wanted, run) in CASES.items():
        if pattern not in name:
            continue
        # Ranks that fell out of step in one case shall not be so in the next.
        group = dist.new_group(list(range(wanted)))
        if rank >= wanted:
            continue
        torch.manual_seed(0)
        try:
            run(Ranks(DeviceMesh.from_group(group, "cpu"), rank, wanted))
        except Exception:
            wrong[name] = traceback.format_exc(limit=-4)
    (folder / f"{rank}.json").write_text(json.dumps({"ran": len(CASES), "wrong": wrong}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), *sys.argv[5:])
