"""Checks of CUDA graphs against a run: before any process exists, and of the built model."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.compute.choose_backend import choose_backend
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.models.layered import layered_modules
from lightning_megatron.plan.cuda_graphs import (
    CudaGraphs,
    GraphConditions,
    check_cuda_graphs,
    reason_against_reader,
)
from lightning_megatron.plan.recomputation import Recomputation
from lightning_megatron.strategy.optimization.parameter_readers import (
    first_overridden,
    gradient_reader,
)
from lightning_megatron.strategy.optimization.training_state import TrainingState
from lightning_megatron.strategy.options.strategy_options import StrategyOptions


def check_graphs(
    options: StrategyOptions,
    device_type: str,
    precision: str,
    module: nn.Module | None = None,
    trainer: Trainer | None = None,
) -> None:
    """Check that a run can capture CUDA graphs, if they are requested.

    Args:
        module: Module that is trained; None before it is known.
        trainer: Trainer of the run; None before it is known.
    """
    settings = options.graphs
    if settings is None:
        return
    reader = _reader_before_update(trainer) if settings.optimizer else None
    models = [] if module is None else layered_modules(module)
    recomputations = [Recomputation.of(options.recompute), *(model.recompute for model in models)]
    offloads = any(recomputation.offload for recomputation in recomputations)
    parts = {part for recomputation in recomputations for part in recomputation.parts}
    check_cuda_graphs(
        settings,
        GraphConditions(
            device_type=device_type,
            schedule=options.schedule_name,
            transport=options.experts.transport,
            is_automatic=module is None or bool(getattr(module, "automatic_optimization", True)),
            offloads=offloads,
            keeps_core="full_except_core" in parts,
            compile_modes=() if module is None else compile_graph_modes(module),
            environment=os.environ,
            precision=precision,
            gradient_reader=reader,
        ),
    )


def check_update(state: TrainingState, trainer: Trainer) -> None:
    """Check that a graph can update the parameters of a fit."""
    reader = _reader_before_update(trainer)
    if reader is not None:
        raise UnsupportedError(reason_against_reader(reader))
    for optimizer in trainer.optimizers:
        reason = state.fused_update.reason_against(state.main, optimizer)
        if reason is not None:
            raise UnsupportedError(
                "cuda_graphs.optimizer (True) needs the fused kernel of Adam and AdamW, which "
                f"reads learning rates on the device: {reason}. Use torch.optim.AdamW(..., "
                "fused=True) with default options, or optimizer=False."
            )


def _reader_before_update(trainer: Trainer | None) -> str | None:
    """Return a hook that may read gradients before the captured update or run inside it, if any."""
    if trainer is None or trainer.state.fn != TrainerFn.FITTING:
        return None
    return gradient_reader(trainer) or first_overridden(trainer, ("configure_gradient_clipping",))


def compile_graph_modes(module: nn.Module) -> tuple[str, ...]:
    """Return the torch.compile modes of parts for which torch.compile captures CUDA graphs."""
    return tuple("reduce-overhead" for part in module.modules() if _captures_itself(part))


def check_static_experts(settings: CudaGraphs, module: nn.Module) -> None:
    """Check that the host reads no sizes inside experts that graphs should capture.

    The check needs the built model, which has chosen the transport and the grouped products.
    """
    for layer in module.modules():
        if not isinstance(layer, MixtureOfExperts):
            continue
        if settings.captures("experts") and layer.transport_choice.dispatcher.is_static:
            _check_products(layer)


def _check_products(layer: MixtureOfExperts) -> None:
    """Refuse grouped products on a GPU if the host reads their sizes."""
    for name in (layer.experts.first_name, "down"):
        weights = layer.experts.weights(name)
        out_features, in_features = weights[0].shape
        device = weights[0].device
        choice = choose_backend(device, weights[0].dtype, len(weights), in_features, out_features)
        if device.type == "cuda" and choice.backend == "loop":
            raise UnsupportedError(
                "cuda_graphs needs grouped products of experts that read sizes on the device: here "
                f"they run as a loop over experts ({choice.reason}). Use a half precision such as "
                "bf16-mixed, or scopes without experts."
            )


def _captures_itself(part: nn.Module) -> bool:
    """Return whether torch.compile captures CUDA graphs for a module."""
    # dynamo_ctx belongs to a module that torch.compile returned, _compiled_call_impl to a module
    # whose compile() was called.
    context = getattr(part, "dynamo_ctx", None)
    config = getattr(context, "compiler_config", None)
    compiled: Any = part._compiled_call_impl
    if compiled is not None:
        config = compiled.get_compiler_config()
    return config is not None and bool(config.get("triton.cudagraphs"))
