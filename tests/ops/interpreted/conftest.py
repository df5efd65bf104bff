"""Collected only where Triton's interpreter was chosen before Triton was imported (see test_kernels.py)."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["*.py"]
