"""Backend for the CPU: a recording of operators, which replaces a CUDA graph in tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lightning_megatron.graphs.backend import GraphPool
from lightning_megatron.graphs.entries import Entry
from lightning_megatron.graphs.recording import Recording
from lightning_megatron.groups.generators import GeneratorPool
from lightning_megatron.groups.launcher import CollectiveLauncher

T = TypeVar("T")


class TapePool:
    """Graphs that would share memory on a GPU.

    Here each tensor keeps its own memory. Where a replay on a GPU may overwrite tensors, because
    they share memory with it, they are filled with NaN instead (with the smallest number if they
    have integers), so that a wrong read becomes visible.
    """

    def __init__(self) -> None:
        self.graphs: list[TapeGraph] = []
        self.given_up: list[Tensor] = []

    def give_up(self, tensor: Tensor) -> Tensor:
        """Let the replays of later captures fill the tensor with NaN.

        Returns:
            Tensor of the same memory, without autograd history.
        """
        address = tensor.untyped_storage().data_ptr()
        if any(graph.has_made(address) for graph in self.graphs):
            self.given_up.append(tensor.data)
        return tensor.detach()


class TapeGraph:
    """Recorded computation.

    Args:
        entries: What a replay does.
        made: Tensors that the recording created.
        pool: Pool of the graph.
    """

    def __init__(self, entries: Sequence[Entry], made: Sequence[Tensor], pool: TapePool) -> None:
        self._entries = tuple(entries)
        self._made = tuple(made)
        self._pool: TapePool | None = pool
        self._is_spoiled = True

    def has_made(self, address: int) -> bool:
        """Return whether the recording allocated the memory at an address."""
        return any(tensor.untyped_storage().data_ptr() == address for tensor in self._made)

    @torch.no_grad()
    def replay(self) -> None:
        """Run all entries again, after spoiling what the replay would overwrite on a GPU."""
        if self._pool is None:
            raise RuntimeError(
                "a graph can be replayed only before its release: this one has been released. "
                "Capture it again."
            )
        graphs = self._pool.graphs
        for later in graphs[graphs.index(self) + 1 :]:
            later.spoil()
        for entry in self._entries:
            entry()
        self._is_spoiled = False

    @torch.no_grad()
    def spoil(self) -> None:
        """Fill the tensors of the recording with NaN, if a replay has written them since."""
        if not self._is_spoiled:
            for tensor in self._made:
                _spoil(tensor)
        self._is_spoiled = True

    def release(self) -> None:
        """Free the entries."""
        if self._pool is not None:
            self._pool.graphs.remove(self)
        self._pool = None
        self._entries = ()
        self._made = ()


class TapeBackend:
    """Backend for the CPU, with the contract of CUDA graphs.

    It runs the captured function and records its operators and collectives. Then it restores what
    the run has changed. Replays run the operators again, without Python of the package except
    inside custom operators.

    Args:
        launcher: Launcher of the collectives that may be recorded.
    """

    def __init__(self, launcher: CollectiveLauncher | None = None) -> None:
        self._launcher = launcher or CollectiveLauncher()

    @property
    def is_capturing(self) -> bool:
        """Return whether a capture is under way."""
        return self._launcher.recorder is not None

    def make_pool(self) -> TapePool:
        """Return a new pool without graphs."""
        return TapePool()

    def capture(
        self,
        function: Callable[[], T],
        pool: GraphPool,
        generators: GeneratorPool | None = None,
    ) -> tuple[TapeGraph, T]:
        """Run a function, record it, and restore what it changed; see ``CaptureBackend``.

        Raises:
            RuntimeError: If a capture is under way.
            UnsupportedError: If the function reads values on the host, draws from a generator that
                is not given, calls collectives of torch directly, or does not wait for one.

        Communication: that of the function, in the capture and in each replay.
        """
        assert isinstance(pool, TapePool), "the pool comes from this backend"
        if self.is_capturing:
            raise RuntimeError("captures must not be nested: one is under way. End it first.")
        spoiling: list[Entry] = [_spoiling(tensor) for tensor in pool.given_up]
        pool.given_up.clear()
        recording = Recording(generators)
        with recording.over(self._launcher):
            result = function()
        graph = TapeGraph([*spoiling, *recording.entries], recording.made, pool)
        pool.graphs.append(graph)
        return graph, result


def _spoiling(tensor: Tensor) -> Entry:
    return lambda: _spoil(tensor)


def _spoil(tensor: Tensor) -> None:
    """Fill a tensor with values that no computation should read."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
