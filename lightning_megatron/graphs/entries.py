"""Entries of a tape: what a replay does, in the order of the recording."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_megatron.groups.generators import draw_from
from lightning_megatron.groups.launcher import Work

#: Entry of a tape.
Entry = Callable[[], None]


@dataclass(frozen=True)
class Operator:
    """Run of one operator, which writes into the tensors of the recorded run.

    Args:
        function: The operator.
        args: Its arguments; those that it mutates are written by the operator itself.
        kwargs: Its arguments by name.
        made: Tensors that the recorded run created, each with its position among the results.
        generator: Generator that replaces torch's default one; None keeps the default.
    """

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made: tuple[tuple[int, Tensor], ...]
    generator: torch.Generator | None = None

    def __call__(self) -> None:
        """Run the operator again."""
        with nullcontext() if self.generator is None else draw_from(self.generator):
            results = tree_leaves(self.function(*self.args, **self.kwargs))
        for position, tensor in self.made:
            tensor.copy_(results[position])


@dataclass(frozen=True)
class Constant:
    """Tensor that the recorded function created from numbers on the host.

    Args:
        tensor: Tensor of the values, which later entries may change.
        values: The values.
    """

    tensor: Tensor
    values: Tensor

    def __call__(self) -> None:
        """Restore the values."""
        self.tensor.copy_(self.values)


class RecordedWork:
    """Asynchronous collective, recorded as two entries of a tape: its start and its wait.

    Args:
        collective: Start of the collective.
        record: Function that adds an entry to the tape.
    """

    def __init__(self, collective: Callable[[], Work], record: Callable[[Entry], None]) -> None:
        self._collective = collective
        self._record = record
        self._work: Work | None = None

    @property
    def is_in_flight(self) -> bool:
        """Return whether the collective has been started but not waited for."""
        return self._work is not None

    def start(self) -> None:
        """Start the collective."""
        self._work = self._collective()

    def finish(self) -> None:
        """Wait for the collective."""
        if self._work is not None:
            self._work.wait()
        self._work = None

    def wait(self) -> None:
        """Wait for the collective, and record that."""
        if self.is_in_flight:
            self.finish()
            self._record(self.finish)

    def is_completed(self) -> bool:
        """Return ``False``: a recording does not know when a replay completes the collective."""
        return False
