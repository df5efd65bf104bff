"""The CUDA kernels without a GPU: Triton's interpreter runs them, in a process of its own since it must be chosen first."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which this platform does not have"
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", sorted(path.name for path in (HERE / "interpreted").glob("test_*.py")))
def test_kernels_under_the_interpreter(file: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        str(HERE / "interpreted" / file),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_every_stored_series_has_the_error_it_claims() -> None:
    sines = pytest.importorskip("regard.ops.triton.sine_fits")
    for fit in (*sines.BFLOAT16, *sines.FLOAT16):
        x = torch.linspace(-fit.limit, fit.limit, 20001, dtype=torch.float64)
        omega, c = (torch.tensor(part, dtype=torch.float64) for part in (fit.omega, fit.c))
        angle = x[:, None] * omega
        value = fit.alpha * x + angle.sin() @ c
        slope = fit.alpha + angle.cos() @ (c * omega)
        assert (value - x.tanh()).abs().max() <= fit.error
        assert (slope - (1 - x.tanh() ** 2)).abs().max() <= fit.slope_error


def test_wider_ranges_come_later_and_finer_inputs_get_finer_series() -> None:
    sines = pytest.importorskip("regard.ops.triton.sine_fits")
    for fits in (sines.BFLOAT16, sines.FLOAT16):
        limits = [fit.limit for fit in fits]
        assert limits == sorted(limits)
    assert max(f.error for f in sines.FLOAT16) < max(f.error for f in sines.BFLOAT16)
