"""Memory of CUDA graphs, found by capturing a step on a pretended device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.graphs.backend import CaptureBackend
from lightning_megatron.graphs.effects import EffectObservers
from lightning_megatron.graphs.graph_keys import TRAINING
from lightning_megatron.graphs.items import CaptureTools
from lightning_megatron.graphs.runner import GraphRunner
from lightning_megatron.memory.live_memory import LiveMemory
from lightning_megatron.memory.lone_stage import LoneStage
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.step_run import BackwardPasses
from lightning_megatron.plan.cuda_graphs import CudaGraphs


class PoolMemory(LiveMemory):
    """Memory that the captures of one pool allocate; tensors that existed before do not count.

    Args:
        outside: Memory of everything else, which must not count the pool; None if nothing counts.
    """

    def __init__(self, outside: LiveMemory | None) -> None:
        super().__init__(counts_meta=outside is not None)
        self._outside = outside

    @override
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for argument in tree_leaves((args, kwargs)):
            if isinstance(argument, Tensor):
                self.know(argument)
        return super().__torch_dispatch__(function, types, args, kwargs)

    @override
    def _count(self, tensor: Tensor) -> None:
        super()._count(tensor)
        self.hide(tensor)

    def hide(self, tensor: Tensor) -> None:
        """Let nothing outside count a tensor that is, or stands for, memory of the pool."""
        if self._outside is not None:
            self._outside.leave_out([tensor])


class MeasuringPool:
    """Pool that tracks the memory that its captures allocate and keep."""

    def __init__(self, memory: PoolMemory) -> None:
        self.memory = memory

    def give_up(self, tensor: Tensor) -> Tensor:
        """Return another tensor, so that the memory of the first is free."""
        other = torch.empty_like(tensor)
        self.memory.hide(other)
        return other


class _MeasuredGraph:
    """Graph that computes nothing: the results are those of the capture."""

    def replay(self) -> None:
        """Compute nothing."""

    def release(self) -> None:
        """Free nothing."""


class _MeasuredCapture:
    """Capture that runs eagerly, while its pool tracks its live memory."""

    def __init__(self, pool: MeasuringPool) -> None:
        self._memory = pool.memory
        self._memory.__enter__()

    def end(self) -> _MeasuredGraph:
        self._memory.__exit__(None, None, None)
        return _MeasuredGraph()

    def abandon(self) -> None:
        self.end()


class MeasuringBackend(CaptureBackend):
    """Backend whose captures run eagerly, while their pools track their live memory.

    Args:
        make: Class of the memory of a pool.
        outside: Memory of everything else; None if nothing counts it.
    """

    def __init__(
        self, make: type[PoolMemory] = PoolMemory, outside: LiveMemory | None = None
    ) -> None:
        self._make = make
        self._outside = outside
        self.pools: list[MeasuringPool] = []

    @property
    def num_bytes(self) -> int:
        """Return the size of all pools (bytes)."""
        return sum(pool.memory.peak for pool in self.pools)

    @override
    def make_pool(self) -> MeasuringPool:
        self.pools.append(MeasuringPool(self._make(self._outside)))
        return self.pools[-1]

    @override
    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def begin(self, pool: Any, generators: Any = None) -> _MeasuredCapture:
        return _MeasuredCapture(pool)


def segment_bytes(stage: LoneStage, graphs: CudaGraphs) -> int:
    """Return the memory of the graphs of segments of a stage: pools, and copies of inputs (bytes).

    The stage runs a step that it observes, and then one whose microbatches are captured.
    """
    backend = MeasuringBackend(outside=stage.device)
    reducer = stage.reducer
    if len(stage.models) != 1:
        raise UnsupportedError(
            "the memory of graphs of segments is estimated for one model of this package: this "
            f"module has {len(stage.models)}. Measure it with MemoryReport in a short run."
        )
    model = stage.models[0]
    tools = CaptureTools(
        backend,
        EffectObservers(model.mesh.random, model.mesh.journal, reducer, stage.main.gather),
        model.mesh.random,
        reducer.weight_gradients,
        graphs.scopes,
        redraws=not model.recompute.is_off,
        max_shapes=graphs.most_shapes,
    )
    runner = GraphRunner(model, tools, reducer, communicates_across_data=True)
    try:
        return _capture(stage, runner, backend)
    finally:
        runner.close()


def _capture(stage: LoneStage, runner: GraphRunner, backend: MeasuringBackend) -> int:
    microbatches = [stage.microbatch] * stage.schedule.num_microbatches
    executor = _LoneExecutor(stage.mesh, stage.pipelined, lambda *_: stage.schedule, actions=runner)
    passes = BackwardPasses(lambda loss, _: loss, weight_gradients=stage.reducer.weight_gradients)

    def step() -> None:
        runner.permit(TRAINING, True)
        executor.run(stage.step, microbatches, passes)
        runner.end_step()

    step()
    # The first backward pass of a step has graphs of its own, which overwrite the gradients.
    stage.reducer.clear(set(stage.main.names))
    runner.begin()
    before = stage.device.restart()
    step()
    if runner.failure is not None:
        raise RuntimeError(runner.failure)
    # What is left outside of the pools are copies of inputs and of gradients.
    return backend.num_bytes + stage.device.now - before


class _LoneExecutor(PipelineExecutor):
    """Executor without a trial of the step, for which the stages would need each other."""

    @override
    def _prepare(self, *_: Any) -> None:
        """Take the plan of a step with one call of the model."""
