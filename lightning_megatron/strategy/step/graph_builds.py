"""Construction of the CUDA graphs of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_megatron.errors import SpeedWarning
from lightning_megatron.graphs.backend import CaptureBackend
from lightning_megatron.graphs.cuda import CudaBackend
from lightning_megatron.graphs.items import CaptureTools
from lightning_megatron.graphs.report import StepCaptures
from lightning_megatron.graphs.runner import GraphRunner
from lightning_megatron.graphs.step_graph import StepGraphs
from lightning_megatron.graphs.update_graph import UpdateGraph
from lightning_megatron.graphs.user_hooks import find_refusal
from lightning_megatron.groups.collectives import is_true_anywhere
from lightning_megatron.groups.journal import DeviceCounter
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.layered import LayeredModule, layered_modules
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.strategy.checks.graph_checks import check_static_experts, check_update
from lightning_megatron.strategy.optimization.training_state import TrainingState
from lightning_megatron.strategy.step.run_graphs import RunGraphs
from lightning_megatron.strategy.step.whole_steps import (
    WholeSteps,
    attributes_of,
    refuse_kept_changes,
)

#: Function that creates the backend that captures.
MakeBackend = Callable[[ParallelMesh], CaptureBackend]


def build_graphs(
    settings: CudaGraphs,
    module: LightningModule,
    mesh: ParallelMesh,
    state: TrainingState,
    make_backend: MakeBackend | None,
) -> RunGraphs | None:
    """Return the CUDA graphs of a run; warn and return None if no part can be captured.

    Args:
        make_backend: Function that creates the backend that captures; None means CUDA itself.
    """
    check_static_experts(settings, module)
    if settings.optimizer:
        check_update(state, module.trainer)
    reason = _reason_against(settings, module)
    if reason is not None:
        rank_zero_warn(
            f"CUDA graphs ({settings.mode}): nothing is captured. {reason}", category=SpeedWarning
        )
        return None
    if mesh.world.size > 1:
        mesh.journal.device = DeviceCounter(mesh.device)
    backend = CudaBackend() if make_backend is None else make_backend(mesh)
    update: UpdateGraph[Tensor | None] | None = None
    if settings.optimizer:
        update = UpdateGraph(backend, mesh, settings, rank_zero_info, _warn)
    state.update_graph = update
    captures: StepCaptures
    whole_steps: WholeSteps | None = None
    models = layered_modules(module)
    if settings.mode == "full":
        captures = StepGraphs(
            backend,
            state.effect_observers,
            mesh,
            settings,
            models,
            partial(refuse_kept_changes, module),
            partial(attributes_of, module),
        )
        whole_steps = WholeSteps(module, mesh, state, captures)
    else:
        captures = _segments(settings, models[0], mesh, state, backend)
    num_capturing = module.trainer.accumulate_grad_batches + 1
    return RunGraphs(settings, captures, module, mesh, num_capturing, update, whole_steps)


def _segments(
    settings: CudaGraphs,
    model: LayeredModule,
    mesh: ParallelMesh,
    state: TrainingState,
    backend: CaptureBackend,
) -> GraphRunner:
    """Return the runner of a model's segments.

    Communication: one all-reduce of a flag on the CPU over the pipeline stages.
    """
    has_transport = settings.captures("experts") and any(
        layer.transport_choice.transport not in ("none", "all_to_all")
        for layer in model.mixtures.values()
    )
    tools = CaptureTools(
        backend,
        state.effect_observers,
        mesh.random,
        state.reducer.weight_gradients,
        settings.scopes,
        list(_shared_buckets(state)),
        redraws=not model.recompute.is_off,
        wait_for=state.main.gather.wait_for,
        max_shapes=settings.most_shapes,
    )
    # Stages without experts must take part in the agreements of the other stages.
    communicates = is_true_anywhere(has_transport, mesh.pp_cpu)
    return GraphRunner(model, tools, state.reducer, communicates)


def _shared_buckets(state: TrainingState) -> Iterator[Sequence[nn.Parameter]]:
    """Yield the parameters of each bucket that several ranks reduce or gather."""
    for buffer in state.main.buffers:
        if state.mesh.replica_axis(buffer.sharding.is_expert).size > 1:
            for bucket in buffer.plan.buckets:
                yield [buffer.members[placed.name] for placed in bucket.placed]


def _warn(sentence: str) -> None:
    rank_zero_warn(sentence, category=SpeedWarning)


def _reason_against(settings: CudaGraphs, module: LightningModule) -> str | None:
    """Return the reason why no part of a module can be captured; None if some part can."""
    if settings.mode == "full":
        hook = find_refusal(module)
        return None if hook is None else hook[0].upper() + hook[1:]
    models = layered_modules(module)
    if len(models) == 1:
        return None
    return (
        f"{type(module).__name__} has {len(models)} models with segments, and graphs serve exactly "
        "one, such as lightning_megatron.GPT or a Hugging Face model of a known family. Use mode "
        "full for other models."
    )
