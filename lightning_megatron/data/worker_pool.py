"""A function over a stream of values by several processes, with its results in order."""

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
#: Time in which a worker goes on after a signal that asks it to end.
_GRACE_SECONDS = 30.0


def map_in_order(
    function: Callable[[Value], Result], values: Iterator[Value], workers: int
) -> Iterator[Result]:
    """Yield the results of a function for a stream of values, in the order of the values.

    Equals ``map(function, values)``, whatever the number of processes.

    Args:
        function: Function that can be pickled.
        values: Values; at most ``4 * workers`` of them wait at a time.
        workers: Number of processes, which end with this one; 0 calls the function in this process.
    """
    if workers == 0:
        yield from map(function, values)
        return
    context = multiprocessing.get_context()
    with ProcessPoolExecutor(workers, context, _follow) as pool:
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


def _follow() -> None:
    """End this worker with its parent, and some time after a signal that asks it to end."""
    # A scheduler signals all processes of a job, and the parent still needs its workers for a
    # batch. A pool that has lost a worker signals the others, and waits for them.
    signal.signal(signal.SIGTERM, lambda *_: _in_background(_end_later))
    parent = multiprocessing.parent_process()
    assert parent is not None, "a pool starts its workers"

    def end_with_parent() -> None:
        # A pool waits for its queue, which other workers keep open once the parent was killed.
        parent.join()
        os._exit(1)

    _in_background(end_with_parent)


def _end_later() -> None:
    threading.Event().wait(_GRACE_SECONDS)
    os._exit(1)


def _in_background(call: Callable[[], None]) -> None:
    threading.Thread(target=call, daemon=True).start()
