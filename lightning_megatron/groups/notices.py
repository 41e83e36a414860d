"""Short texts that the ranks of a job leave for each other, readable while collectives hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store as default_store

_T = TypeVar("_T")


class Notices:
    """Hang notices where every rank of the job can read them: in the store in which the process groups were made.

    A connection of its own keeps it apart from threads that wait in the store. The store lives in one process, which
    may itself be the one that hangs: what gets no answer in time returns ``unknown`` values, and nothing is asked
    again.

    Args:
        job: A name that no other job, and no other run of this one, has.
        patience: How long to wait for an answer (seconds).
    """

    def __init__(self, job: str, patience: float = 5.0) -> None:
        store: Any = default_store()
        self._store = dist.PrefixStore(f"lightning_megatron/{job}", store.clone())
        self._patience = patience
        self.answers = True

    def post(self, name: str, text: str) -> None:
        """Hang a notice, in place of the one of that name."""
        self._ask(lambda: self._store.set(name, text), None)

    def read(self, names: Sequence[str]) -> dict[str, str]:
        """Return those of the named notices that hang."""

        def read_all() -> dict[str, str]:
            if self._store.check(list(names)):
                return dict(zip(names, map(bytes.decode, self._store.multi_get(list(names))), strict=True))
            present = [name for name in names if self._store.check([name])]
            return {name: self._store.get(name).decode() for name in present}

        return self._ask(read_all, {})

    def claim(self, name: str) -> bool:
        """Tell whether this is the first rank that claims ``name``; True without an answer."""
        return self._ask(lambda: self._store.add(name, 1) == 1, True)

    def give_up(self, name: str) -> None:
        """Let another rank claim ``name``."""
        self._ask(lambda: self._store.delete_key(name), None)

    def _ask(self, question: Callable[[], _T], unknown: _T) -> _T:
        if not self.answers:
            return unknown
        answer: list[_T] = []

        def run() -> None:
            try:
                answer.append(question())
            except RuntimeError:  # torch's errors of a store that has gone away
                self.answers = False

        # A question to a stopped process never returns, whatever the store's timeout.
        thread = threading.Thread(target=run, daemon=True, name="notices")
        thread.start()
        thread.join(self._patience)
        if not answer:
            self.answers = False
            return unknown
        return answer[0]
