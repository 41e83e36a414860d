"""Interface of the backends that capture computations as graphs and replay them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

from torch import Tensor

from lightning_megatron.groups.generators import GeneratorPool

T = TypeVar("T")

#: Errors by which a computation shows that it cannot be captured.
CAPTURE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class GraphPool(Protocol):
    """Memory of graphs that are captured one after the other.

    A graph may use memory that earlier graphs of the pool have freed. A replay therefore overwrites
    tensors that later captures of the pool made: they are valid until an earlier graph of the pool
    is replayed again.
    """

    def give_up(self, tensor: Tensor) -> Tensor:
        """Give the memory of a captured tensor to later captures of the pool.

        The caller must drop all other references to the tensor. The replay of any graph that is
        captured afterwards may overwrite its values.

        Args:
            tensor: Tensor that a capture of this pool made. Other tensors keep their memory.

        Returns:
            Tensor without autograd history at the same address, which does not keep the memory.
        """


class CapturedGraph(Protocol):
    """Captured computation."""

    def replay(self) -> None:
        """Run the computation again, on the tensors that it read and wrote at the capture.

        No Python code of the captured function runs, so nothing outside of the tensors changes, not
        even their version counters.

        Raises:
            RuntimeError: If the graph has been released.
        """

    def release(self) -> None:
        """Free what the graph holds; it cannot be replayed again. Later calls do nothing."""


class OpenCapture(Protocol):
    """Capture that is under way."""

    def end(self) -> CapturedGraph:
        """End the capture, and return the graph.

        Raises:
            Exception: If a replay could not repeat the computation. Other captures may follow.
        """

    def abandon(self) -> None:
        """End the capture after an error, so that eager work and other captures can follow."""


class CaptureBackend(Protocol):
    """Backend that captures computations.

    A capture does not change tensors that existed before it. Tensors that the captured function
    creates are in the pool. They have undefined values until the first replay. Each replay writes
    into the same tensors. The function must therefore not read values on the host, and its Python
    code runs once, in the capture.

    Ordinary calls of the same function create what must exist before a capture, such as workspaces
    and communicators.
    """

    def make_pool(self) -> GraphPool:
        """Return a new pool without graphs."""

    def session(self) -> AbstractContextManager[None]:
        """Return a context in which captures may begin and end at any place of the code."""

    def begin(self, pool: GraphPool, generators: GeneratorPool | None = None) -> OpenCapture:
        """Begin a capture of what follows, inside of a session.

        Args:
            pool: Pool of this backend for the tensors that the function makes.
            generators: Generators from which it draws, besides torch's default one; None
                if there are none. Each replay continues from their states at the time of the
                replay, and advances them. The capture does not advance them.

        Raises:
            UnsupportedError: If a capture is not possible here.
        """

    def capture(
        self,
        function: Callable[[], T],
        pool: GraphPool,
        generators: GeneratorPool | None = None,
    ) -> tuple[CapturedGraph, T]:
        """Capture what a function computes, as :meth:`begin` does.

        Args:
            function: Function without arguments. It reads tensors that keep their addresses.
            pool: Pool of this backend for the tensors that the function makes.
            generators: As for :meth:`begin`.

        Returns:
            The graph, and what the function returned.

        Raises:
            UnsupportedError: If a capture is not possible here, or if the function does something
                that a replay cannot repeat.
            Exception: What the function raises. The capture has then ended, and others may follow.
        """
        with self.session():
            capture = self.begin(pool, generators)
            try:
                result = function()
            except BaseException:
                capture.abandon()
                raise
            return capture.end(), result


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage inside the block.

    A collection inside a capture could destroy another graph, which CUDA forbids.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection for a series of captures, as :func:`without_collection` does.

    Garbage is collected once before.
    """
    gc.collect()
    with without_collection():
        yield
