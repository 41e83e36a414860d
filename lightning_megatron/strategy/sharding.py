"""Sharding of the user's module at the start of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.context_parallel.position_wise import check_declared
from lightning_megatron.models.fp8_layers import MODULES, set_fp8, set_part, unset_fp8
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.layered import LayeredModule, layered_modules
from lightning_megatron.models.stage import pipelined_modules
from lightning_megatron.plan.recomputation import Recomputation
from lightning_megatron.strategy.checks.engine_checks import emulates
from lightning_megatron.strategy.checks.run_checks import check_is_sharded, check_module
from lightning_megatron.strategy.optimization.layer_states import LayerStates, check_experts
from lightning_megatron.strategy.options.sizes import check_places
from lightning_megatron.strategy.options.strategy_options import StrategyOptions, notes_on
from lightning_megatron.strategy.private.callback_patches import record_module_names_again
from lightning_megatron.swap import parallelize
from lightning_megatron.swap.apply import rejoin
from lightning_megatron.swap.decide.automatic import (
    automatic_pipeline_plan,
    automatic_tensor_plan,
    yaml_of,
)
from lightning_megatron.swap.decide.hugging_face_models import check_cut
from lightning_megatron.swap.decide.model_plan import describe_unsharded


def shard_module(
    module: LightningModule, mesh: ParallelMesh, options: StrategyOptions
) -> Sequence[LayeredModule]:
    """Replace the parts of a module that the mesh shards; return its models of this package.

    The log names the replaced parts, and the options without effect.

    Communication: that of :func:`~lightning_megatron.swap.parallelize`.
    """
    rejoin(module, mesh)
    record_module_names_again(module.trainer)
    if mesh.cp.size > 1:
        # Modules that configure_model creates could not be checked before the groups existed.
        check_cut(module, mesh.cp.size, options.tensor_parallel_plan)
    plan = options.tensor_parallel_plan
    stages = options.pipeline_plan
    chosen = {}
    if plan is None:
        plan = chosen["tensor_parallel_plan"] = automatic_tensor_plan(module, mesh)
    if stages is None:
        stages = chosen["pipeline_plan"] = automatic_pipeline_plan(module, mesh.layout)
    _show_plans(chosen)
    earlier = {name: model.delayed_scales for name, model in _named_models(module).items()}
    for record in parallelize(
        module,
        mesh,
        plan,
        stages,
        module.trainer.progress_bar_callback is not None,
        options.needs_tables,
    ):
        rank_zero_info(str(record))
    if plan is None:
        check_is_sharded(module, mesh)
    elif mesh.tp.size > 1:
        rank_zero_info(
            f"tensor_parallel_plan: {describe_unsharded(module) or 'everything is cut.'}"
        )
    check_module(module, mesh)
    models = layered_modules(module)
    for model in models if mesh.cp.size > 1 else ():
        check_declared(model)
    _set_memory_options(models, module, options)
    for name, model in _named_models(module).items():
        # The model may be a new object, rebuilt for this layout, that lacks the earlier scales.
        model.delayed_scales = earlier.get(name)
    _set_products(models, module, options, mesh.device)
    for note in notes_on(options, str(module.trainer.precision), mesh.device.type):
        rank_zero_info(note)
    return models


def _show_plans(plans: Mapping[str, Mapping[str, str] | None]) -> None:
    """Log the plans that were chosen without an option, for users to paste and change."""
    if any(plans.values()):
        rank_zero_info(
            "Plans that this fit chose, because MegatronStrategy has none; as its options they can "
            f"be pasted and changed:\n{yaml_of(plans)}"
        )


def _named_models(module: LightningModule) -> dict[str, LayeredModule]:
    named = pipelined_modules(module)
    return {name: model for name, model in named if isinstance(model, LayeredModule)}


def _without_model(setting: str, module: LightningModule, kind: str = "model") -> UnsupportedError:
    return UnsupportedError(
        f"{setting} needs a {kind} of this package: {type(module).__name__} has none. Other "
        f"modules would ignore the setting. Use a lightning_megatron.GPT or a Hugging Face {kind} "
        "of a supported family, or leave the setting out."
    )


def _set_memory_options(
    models: Sequence[LayeredModule], module: LightningModule, options: StrategyOptions
) -> None:
    decoders = [model for model in models if isinstance(model, GPT)]
    if not Recomputation.of(options.recompute).is_off and not models:
        raise _without_model(f"recompute ({options.recompute!r})", module)
    if options.loss_chunk is not None and not decoders:
        raise _without_model(f"loss_chunk ({options.loss_chunk!r})", module, "decoder")
    if options.recompute is not None:
        for model in models:
            model.recompute = options.recompute
    if options.loss_chunk is not None:
        for decoder in decoders:
            decoder.loss_chunk = options.loss_chunk


def _set_products(
    models: Sequence[LayeredModule],
    module: LightningModule,
    options: StrategyOptions,
    device: torch.device,
) -> None:
    """Set whether layers compute in 8 bits, and whether Transformer Engine computes them."""
    settings = options.products
    backend = options.linear.backend_of("products")
    uses_engine = options.linear.backend == "te"
    if not models and (settings is not None or uses_engine):
        named = "linear.backend ('te')" if settings is None else f"fp8 ({settings.recipe})"
        raise _without_model(named, module)
    for model in models:
        found = {part: set_part(model, part, options.linear.backend_of(part)) for part in MODULES}
        if uses_engine:
            chosen = options.linear.parts
            words = ["the linear layers"] if "products" in chosen else []
            words += [f"{number} {part}" for part, number in found.items() if part in chosen]
            rank_zero_info(
                f"backend te: Transformer Engine computes {', '.join(words)} of "
                f"{type(model).__name__} on this rank."
            )
        if settings is None:
            unset_fp8(model, device, backend)
            continue
        emulate = backend == "native" and emulates(settings, device)
        names = set_fp8(model, settings, emulate, device, backend)
        rank_zero_info(
            f"fp8: {len(names)} linear layers of {type(model).__name__} on this rank compute in 8 "
            f"bits, {settings.recipe}" + (", emulated." if emulate else ".")
        )


def start_layers(
    module: LightningModule,
    models: Sequence[LayeredModule],
    mesh: ParallelMesh,
    options: StrategyOptions,
) -> LayerStates:
    """Set up the layers of this rank whose state steps accumulate."""
    check_experts(module, models, mesh, options.recompute)
    for model in models:
        check_places(model.config, options)
    experts = options.experts
    holds_transport = options.graphs is not None and options.graphs.holds_transport
    return LayerStates(
        models, mesh, experts.transport, experts.rows, options.clones, holds_transport
    )
