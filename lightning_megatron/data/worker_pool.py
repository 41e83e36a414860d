"""Parallel map over a stream of values in worker processes, with results in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TypeVar

Value = TypeVar("Value")
Result = TypeVar("Result")
#: Time for which a worker continues after SIGTERM (seconds).
_GRACE_SECONDS = 30.0


def map_in_order(
    function: Callable[[Value], Result], values: Iterator[Value], workers: int
) -> Iterator[Result]:
    """Yield the results of a function for a stream of values, in the order of the values.

    Equals ``map(function, values)`` for any number of worker processes.

    Args:
        function: Picklable function.
        values: Values; at most ``4 * workers`` of them wait for a result at a time.
        workers: Number of worker processes, which exit when this process exits; 0 calls the
            function in this process.
    """
    if workers == 0:
        yield from map(function, values)
        return
    context = multiprocessing.get_context()
    with ProcessPoolExecutor(workers, context, _exit_with_parent) as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for value in values:
                waiting.append(pool.submit(function, value))
                # Limit the number of waiting values, so that memory does not grow with the stream.
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


def _exit_with_parent() -> None:
    """Make this worker exit with its parent, and delay its exit after SIGTERM."""
    # A scheduler sends SIGTERM to all processes of a job while the parent still needs its workers
    # for a batch. A pool that has lost a worker sends SIGTERM to the others and waits for them.
    signal.signal(signal.SIGTERM, lambda *_: _in_background(_exit_later))
    parent = multiprocessing.parent_process()
    assert parent is not None, "a pool starts its workers"

    def wait_for_parent() -> None:
        # A worker waits for the queue of its pool, which other workers keep open after the parent
        # was killed.
        parent.join()
        os._exit(1)

    _in_background(wait_for_parent)


def _exit_later() -> None:
    threading.Event().wait(_GRACE_SECONDS)
    os._exit(1)


def _in_background(call: Callable[[], None]) -> None:
    threading.Thread(target=call, daemon=True).start()
