"""Short messages between the ranks of a job, readable while collectives hang."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store as default_store

_T = TypeVar("_T")


class Notices:
    """Notices that every rank of the job can read, in the store of the process groups.

    A separate connection makes them independent of threads that wait in the store. The process that
    runs the store may itself hang. If that process does not answer in time, methods return a
    default value, and no further requests are sent.
    """

    def __init__(self, job: str, patience: float = 5.0) -> None:
        store: Any = default_store()
        self._store = dist.PrefixStore(f"lightning_megatron/{job}", store.clone())
        self._patience = patience
        self.answers = True
        self._lock = threading.Lock()
        self._requests: set[threading.Thread] = set()
        # A request that returns while Python shuts down would abort the process.
        atexit.register(self._end)

    def post(self, name: str, text: str) -> None:
        """Write a notice, which replaces the previous one of that name."""
        self._ask(lambda: self._store.set(name, text), None)

    def read(self, names: Sequence[str]) -> dict[str, str]:
        """Return the texts of the named notices that exist, by name."""

        def read_all() -> dict[str, str]:
            if self._store.check(list(names)):
                return dict(
                    zip(names, map(bytes.decode, self._store.multi_get(list(names))), strict=True)
                )
            present = [name for name in names if self._store.check([name])]
            return {name: self._store.get(name).decode() for name in present}

        return self._ask(read_all, {})

    def claim(self, name: str) -> bool:
        """Return whether this rank claims ``name`` first; True if the store does not answer."""
        return self._ask(lambda: self._store.add(name, 1) == 1, True)

    def give_up(self, name: str) -> None:
        """Release ``name``, so that another rank can claim it."""
        self._ask(lambda: self._store.delete_key(name), None)

    def _ask(self, question: Callable[[], _T], unknown: _T) -> _T:
        answer: list[_T] = []

        def run() -> None:
            try:
                answer.append(question())
            except RuntimeError:  # torch's errors for a store whose process has ended
                self.answers = False
            self._requests.discard(threading.current_thread())

        # A request to a stopped process never returns, regardless of the store's timeout.
        thread = threading.Thread(target=run, daemon=True, name="notices")
        with self._lock:
            if not self.answers:
                return unknown
            self._requests.add(thread)
            thread.start()
        thread.join(self._patience)
        if not answer:
            self.answers = False
            return unknown
        return answer[0]

    def _end(self) -> None:
        """Send no further requests, and wait for the answers to those that were sent."""
        with self._lock:
            self.answers = False
        for thread in tuple(self._requests):
            thread.join(self._patience)
