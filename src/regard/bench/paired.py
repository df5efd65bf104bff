"""Times of two things that are to be compared, taken in turns: whatever disturbs the machine disturbs both."""

from __future__ import annotations

import time
from collections.abc import Callable


def paired_seconds(
    first: Callable[[], object], second: Callable[[], object], budget: float = 4.0, least: int = 20
) -> tuple[float, float]:
    """Best processor time of each; one thread, so that waiting for the core does not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for run in (first, second, first, second):
        run()
    begin = time.perf_counter()
    while len(times[1]) < least or time.perf_counter() - begin < budget:
        for run, found in zip((first, second), times, strict=True):
            start = time.process_time()
            run()
            found.append(time.process_time() - start)
    return min(times[0]), min(times[1])
