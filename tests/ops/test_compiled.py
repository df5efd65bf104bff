"""The CUDA kernels without a GPU: compiled for one, in a process of its own in which none is ever run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "compiled"


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which this platform does not have"
)
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("tier", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_compiled_for_a_gpu(tier: str, tmp_path: Path) -> None:
    without = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment = {**without, "REGARD_COMPILE_FOR": "sm_90", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", tier, str(FOLDER)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=FOLDER.parents[2])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
