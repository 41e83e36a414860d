"""A function over a stream of values by several processes, with its results in order."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TypeVar

Value = TypeVar("Value")
Result = TypeVar("Result")


def map_in_order(
    function: Callable[[Value], Result], values: Iterator[Value], workers: int
) -> Iterator[Result]:
    """Yield the results of a function for a stream of values, in the order of the values.

    Equals ``map(function, values)``, whatever the number of processes.

    Args:
        function: Function that can be pickled.
        values: Values; at most ``4 * workers`` of them wait at a time.
        workers: Number of processes; one or less calls the function in this process.
    """
    if workers <= 1:
        yield from map(function, values)
        return
    context = multiprocessing.get_context()
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for value in values:
                waiting.append(pool.submit(function, value))
                # Bound the number of waiting values, so that memory does not grow with the stream.
                if len(waiting) >= 4 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def default_workers() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
