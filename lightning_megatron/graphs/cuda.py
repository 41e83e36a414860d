"""CUDA graphs of torch: their backend, and the stream of a run on which they are captured."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.graphs.backend import CaptureBackend, GraphPool
from lightning_megatron.groups.collective_matmul import workspaces
from lightning_megatron.groups.generators import GeneratorPool

# Data loaders and the watchdog of NCCL call CUDA from other threads during a capture.
_ERROR_MODE = "thread_local"
#: Identity of the pool for everything but graphs.
_SHARED_POOL = (0, 0)


class CudaPool:
    """Private memory of CUDA graphs in torch's allocator, which no other pool shares."""

    def __init__(self) -> None:
        #: Identity of the pool in torch's allocator.
        self.handle = torch.cuda.graph_pool_handle()

    def give_up(self, tensor: Tensor) -> Tensor:
        """Return a tensor at the same address that does not keep the memory.

        Once no other tensor keeps it, the next capture of the pool may use it.
        """
        memory = tensor.untyped_storage()
        storage = torch._C._construct_storage_from_data_pointer(
            memory.data_ptr(), tensor.device, memory.nbytes()
        )
        result = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return result.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


class CudaGraph:
    """Captured CUDA graph.

    Args:
        graph: The graph, whose capture has ended.
        kept: Memory outside of the pool that the graph uses, which nothing else may keep.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, kept: tuple[Tensor, ...] = ()) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._kept = kept

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        if self._graph is None:
            raise RuntimeError(
                "a graph can be replayed only before its release: this one has been released. "
                "Capture it again."
            )
        self._graph.replay()

    def release(self) -> None:
        """Destroy the graph; its pool is freed with its last graph and tensor."""
        if self._graph is not None:
            self._graph.reset()
        self._graph = None
        self._kept = ()


class CudaCapture:
    """Capture that is under way on the current stream.

    Args:
        generators: Generators that are registered with it.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, pool: CudaPool, generators: Sequence[torch.Generator]
    ) -> None:
        self._graph = graph
        self._pool = pool
        self._generators = generators

    def end(self) -> CudaGraph:
        """End the capture, and return the graph; see ``OpenCapture``."""
        try:
            with warnings.catch_warnings():
                # Between two calls that no graph holds there may be nothing.
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                self._graph.capture_end()
        except RuntimeError:
            _clean_up(self._graph, self._pool, self._generators)
            raise
        return CudaGraph(self._graph, workspaces())

    def abandon(self) -> None:
        """End the capture after an error; see ``OpenCapture``."""
        try:
            self._graph.capture_end()
        except RuntimeError:
            # The error that the function raised has already invalidated the capture.
            _clean_up(self._graph, self._pool, self._generators)
        else:
            self._graph.reset()
            # torch keeps no pool whose only graph was reset.
            self._pool.handle = torch.cuda.graph_pool_handle()


class CudaBackend(CaptureBackend):
    """Backend for GPUs.

    Unlike ``torch.cuda.graph``, a capture neither collects garbage nor empties caches: a series of
    captures does so once (:func:`graphs.backend.collection_paused`).
    """

    def make_pool(self) -> CudaPool:
        """Return a new pool without graphs."""
        return CudaPool()

    def session(self) -> AbstractContextManager[None]:
        """Return a context that does nothing; see ``CaptureBackend``."""
        return nullcontext()

    def begin(self, pool: GraphPool, generators: GeneratorPool | None = None) -> CudaCapture:
        """Begin to capture what is launched on the current stream; see ``CaptureBackend``.

        Raises:
            UnsupportedError: If the current stream is the default one.

        Communication: none; collectives that are launched run in each replay.
        """
        assert isinstance(pool, CudaPool), "the pool comes from this backend"
        stream = torch.cuda.current_stream()
        if stream == torch.cuda.default_stream():
            raise UnsupportedError(
                "a CUDA graph must be captured on another stream than the default one: the current "
                f"stream is the default one of {stream.device}, which CUDA cannot capture. Capture "
                "inside `with torch.cuda.stream(torch.cuda.Stream())`."
            )
        registered = [] if generators is None else generators.generators
        graph = _new_graph(registered)
        graph.capture_begin(pool=pool.handle, capture_error_mode=_ERROR_MODE)
        return CudaCapture(graph, pool, registered)


def private_pools(device: torch.device) -> dict[tuple[int, int], int]:
    """Return the memory that torch's allocator keeps for graphs, by pool (bytes).

    Args:
        device: The GPU.
    """
    sizes: dict[tuple[int, int], int] = {}
    for segment in torch.cuda.memory_snapshot():
        first, second = segment.get("segment_pool_id", _SHARED_POOL)
        if segment["device"] == device.index and (first, second) != _SHARED_POOL:
            sizes[first, second] = sizes.get((first, second), 0) + segment["total_size"]
    return sizes


def _new_graph(generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    return graph


def _clean_up(
    graph: torch.cuda.CUDAGraph, pool: CudaPool, generators: Sequence[torch.Generator]
) -> None:
    """Undo what an invalidated capture leaves behind, so that eager work and captures can follow.

    CUDA ends such a capture, but before version 2.12 torch then keeps its allocator directed to the
    pool, and holds the pool forever. All versions leave generators in the state of a capture.
    """
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool.handle)
    except RuntimeError:
        pass  # This version of torch has done it.
    else:
        torch._C._cuda_releasePool(device, pool.handle)
        # The allocator of pinned memory keeps a pointer to the graph, which must stay valid.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
    # torch 2.11 takes the failed capture of this pool for one that is still under way.
    pool.handle = torch.cuda.graph_pool_handle()
    # A capture that ends properly brings the generators back.
    small = _new_graph(generators)
    small.capture_begin(capture_error_mode=_ERROR_MODE)
    torch.zeros(1, device=device)
    small.capture_end()
    small.reset()


class RunStream:
    """CUDA stream that is current between :meth:`enter` and :meth:`leave`.

    CUDA cannot capture graphs on the default stream. The autograd nodes that accumulate gradients,
    hooks and optimizers keep the stream on which they were created. The stream must therefore be
    current before modules are created.

    Args:
        device: GPU of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._previous: torch.cuda.Stream | None = None

    def enter(self) -> None:
        """Make the stream current in this thread, after it waits for the previous stream."""
        if self._previous is None:
            self._previous = torch.cuda.current_stream(self._stream.device)
            self._stream.wait_stream(self._previous)
            torch.cuda.set_stream(self._stream)

    def leave(self) -> None:
        """Make the previous stream current again, after it waits for this stream."""
        if self._previous is not None:
            self._previous.wait_stream(self._stream)
            torch.cuda.set_stream(self._previous)
            self._previous = None
