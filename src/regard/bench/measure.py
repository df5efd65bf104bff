"""How everything is measured: time, peak memory, error, and where the figures go."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard._version import __version__


@dataclass
class Row:
    """One measured case: ours and its peers, in one run."""

    question: str  # such as "additive-cpu"
    case: str  # such as "B4 N512 D64 float32, forward"
    what: str  # who was measured: "regard", "eager (@ w)", "torch.compile"
    seconds: float | None = None
    peak_mib: float | None = None
    error: float | None = None  # relative to a float64 run
    note: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


def seconds(run: Callable[[], object], device: str = "cpu", budget: float = 2.0, least: int = 5) -> float:
    """Best time on a CPU, where others disturb; the median of events on a GPU."""
    if device == "cuda":
        return _cuda_seconds(run, budget)
    run()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < least or time.perf_counter() - begin < budget:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
        if len(times) >= 200 or (len(times) >= 3 and time.perf_counter() - begin > 4 * budget):
            break
    return min(times)


def _cuda_seconds(run: Callable[[], object], budget: float) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    repeats = int(min(200, max(10, budget / max(time.perf_counter() - start, 1e-5))))
    # Larger than the L2 cache: written between runs, so that none finds its inputs there.
    flush = torch.empty(1 << 27, dtype=torch.int8, device="cuda")
    begins = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    for begin, end in zip(begins, ends, strict=True):
        flush.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True))
    return float(times[repeats // 2]) / 1e3


def cuda_peak_mib(run: Callable[[], object]) -> float:
    """Most device memory held during a run, beyond what was held before."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def cpu_peak_mib(script: str, *arguments: object) -> float:
    """Peak resident memory that a Python snippet adds after its line `ready()`, in a process of its own.

    The snippet sees `arguments` as strings in `argv`.
    """
    harness = (
        "import resource, sys\n"
        "argv = sys.argv[1:]\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "def ready():\n"
        "    global _before\n"
        "    open('/proc/self/clear_refs', 'w').write('5')\n"
        "    _before = next(int(l.split()[1]) / 1024 for l in open('/proc/self/status') if l.startswith('VmRSS'))\n"
        f"{script}\n"
        "_after = next(int(l.split()[1]) / 1024 for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
        "print(_after - _before)\n"
    )
    import sys

    command = [sys.executable, "-c", harness, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"measured process failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.strip().splitlines()[-1])


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Norm of the difference to a float64 result, relative to its norm."""
    exact = exact.double()
    return float((x.double() - exact).norm() / exact.norm().clamp(min=1e-300))


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Slope of log cost against log size, by least squares."""
    x = torch.tensor(sizes, dtype=torch.float64).log()
    y = torch.tensor(costs, dtype=torch.float64).log()
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    return {
        "device": device,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "regard": __version__,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str:
    # A copy of the tree, on a machine that has only that, is told where it comes from.
    if "REGARD_COMMIT" in os.environ:
        return os.environ["REGARD_COMMIT"]
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def store(rows: Sequence[Row], path: Path, command: str, on: Mapping[str, Any] | None = None) -> None:
    """Append rows of one run to a file of JSON lines.

    Args:
        rows: some of the run, or all.
        path: of the file.
        command: what was typed.
        on: the `machine`, asked before the first of several calls: the file may be part of the commit that it names.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    context = {"command": command, **(machine() if on is None else on)}
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps({**asdict(row), **context}, ensure_ascii=False) + "\n")


def table(rows: Sequence[Row]) -> str:
    """A plain table: one line a row, with the ratio to ours within the same case."""
    ours = {row.case: row.seconds for row in rows if row.what == "regard"}
    lines = [f"{'case':44} {'what':28} {'ms':>10} {'× ours':>8} {'MiB':>9} {'error':>9}"]
    for row in rows:
        mine = ours.get(row.case)
        ratio = f"{row.seconds / mine:.2f}" if row.seconds and mine else ""
        lines.append(
            f"{row.case:44} {row.what:28} {_show(row.seconds, 1e3):>10} {ratio:>8} {_show(row.peak_mib, 1):>9} "
            f"{'' if row.error is None else format(row.error, '.1e'):>9} {row.note}"
        )
    return "\n".join(lines)


def _show(x: float | None, scale: float) -> str:
    return "" if x is None else f"{x * scale:.3f}"
