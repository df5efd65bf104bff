"""Times of two things that are to be compared, taken in turns: whatever disturbs the machine disturbs both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def paired_seconds(
    first: Callable[[], object], second: Callable[[], object], budget: float = 4.0, least: int = 20
) -> tuple[float, float]:
    """Median processor time of each; one thread, so that waiting for the core does not count.

    The best of many would hang on a single lucky run, in which the allocator had just the pages that were asked for.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for run in (first, second, first, second):
        run()
    begin = time.perf_counter()
    while len(times[1]) < least or time.perf_counter() - begin < budget:
        for run, found in zip((first, second), times, strict=True):
            start = time.process_time()
            run()
            found.append(time.process_time() - start)
    return statistics.median(times[0]), statistics.median(times[1])
