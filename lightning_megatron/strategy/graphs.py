"""Construction of the CUDA graphs of a run, in the mode that the user chose."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_megatron.errors import SpeedWarning
from lightning_megatron.graphs.backend import CaptureBackend
from lightning_megatron.graphs.cuda import CudaBackend
from lightning_megatron.graphs.update_graph import UpdateGraph
from lightning_megatron.graphs.user_hooks import describe_user_hook
from lightning_megatron.groups.journal import DeviceCounter
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.layered import layered_modules
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.strategy.checks.graph_checks import check_static_experts, check_update
from lightning_megatron.strategy.optimization.training_state import TrainingState
from lightning_megatron.strategy.step.run_graphs import RunGraphs, StepCaptures
from lightning_megatron.strategy.step.segment_captures import SegmentCaptures
from lightning_megatron.strategy.step.whole_captures import WholeCaptures
from lightning_megatron.strategy.step.whole_steps import WholeSteps

#: Function that creates the backend that captures.
MakeBackend = Callable[[ParallelMesh], CaptureBackend]


def build_graphs(
    settings: CudaGraphs,
    module: LightningModule,
    executor: PipelineExecutor,
    state: TrainingState,
    make_backend: MakeBackend | None,
    is_final: Callable[[], bool],
) -> tuple[RunGraphs | None, WholeSteps | None]:
    """Return the CUDA graphs of a run, and its whole steps if the graphs hold these.

    Without a part that can be captured, warn and return neither.

    Args:
        make_backend: Function that creates the backend that captures; None means CUDA itself.
        is_final: Function that returns whether the schedule of the steps is final; its result is
            the same on all ranks.
    """
    mesh = executor.mesh
    check_static_experts(settings, module)
    if settings.optimizer:
        check_update(state, module.trainer)
    reason = _reason_against(settings, module)
    if reason is not None:
        rank_zero_warn(
            f"CUDA graphs ({settings.mode}): nothing is captured. {reason}", category=SpeedWarning
        )
        return None, None
    if mesh.world.size > 1:
        mesh.journal.device = DeviceCounter(mesh.device)
    backend = CudaBackend() if make_backend is None else make_backend(mesh)
    update: UpdateGraph[Tensor | None] | None = None
    if settings.optimizer:
        update = UpdateGraph(backend, mesh, settings, rank_zero_info, _warn)
    state.update_graph = update
    captures: StepCaptures
    whole_steps: WholeSteps | None = None
    if settings.mode == "full":
        captures = WholeCaptures(settings, module, state, mesh, backend, update)
        whole_steps = captures.steps
        # StepGraphs counts the eager steps of each form of a step itself.
        num_eager = 0
    else:
        (model,) = layered_modules(module)
        captures = SegmentCaptures(settings, model, executor, state, backend)
        num_eager = settings.warmup_steps
    num_capturing = module.trainer.accumulate_grad_batches + 1
    graphs = RunGraphs(settings, captures, module, mesh, num_eager, num_capturing, is_final, update)
    return graphs, whole_steps


def _warn(sentence: str) -> None:
    rank_zero_warn(sentence, category=SpeedWarning)


def _reason_against(settings: CudaGraphs, module: LightningModule) -> str | None:
    """Return the reason why no part of a module can be captured; None if some part can."""
    if settings.mode == "full":
        hook = describe_user_hook(module)
        return None if hook is None else hook[0].upper() + hook[1:]
    models = layered_modules(module)
    if len(models) == 1:
        return None
    return (
        f"{type(module).__name__} has {len(models)} models with segments, and graphs serve exactly "
        "one, such as lightning_megatron.GPT or a Hugging Face model of a known family. Use mode "
        "full for other models."
    )
