"""The shapes in public signatures are true: calls run with every annotation checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Kernels stay out: the hook rewrites functions, and a just-in-time compiler reads their source.
HOOKED = "regard.general"
CALLS = [
    "tests/general/test_product.py::test_whatever_auto_chooses_is_dense",
    "tests/general/test_scores.py::test_leading_axes_are_a_loop",
    "tests/general/test_disan.py::test_directional_self_attention_is_its_equation",
]


@pytest.mark.timeout(280)
def test_annotated_shapes_hold_in_every_call_of_the_product() -> None:
    check = [
        f"--jaxtyping-packages={HOOKED},tests.checked",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-x",
    ]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *check, *CALLS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


def test_a_wrong_shape_would_be_seen() -> None:
    code = (
        "from jaxtyping import install_import_hook, TypeCheckError\n"
        f"install_import_hook({HOOKED!r}, 'beartype.beartype')\n"
        "import torch, regard as rg\n"
        "try:\n"
        "    rg.Dot()(torch.zeros(3), torch.zeros(5, 3))\n"
        "except TypeCheckError:\n"
        "    print('seen')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "seen", result.stderr[-1000:]
