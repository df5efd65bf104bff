"""The first file that people open runs, learns its task, and leaves a picture."""

import os
import re
import subprocess
import sys
from pathlib import Path

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.py"


def test_quickstart(tmp_path):
    # One thread: other tests run beside this one.
    result = subprocess.run(
        [sys.executable, str(QUICKSTART)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
    )
    assert result.returncode == 0, result.stderr
    trained = [float(x) for x in re.findall(r"accuracy ([\d.]+)%", result.stdout)]
    assert trained[-1] >= 99
    assert "attention backwards: noitnetta" in result.stdout
    picture = tmp_path / "out" / "quickstart.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in result.stdout
