"""Search of the best layouts of a module from Python, before a job runs."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.forecast.cluster import Cluster
from lightning_megatron.forecast.layout_plans import LayoutPlans
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.nest import leaves
from lightning_megatron.pipeline.microbatch import count_samples, count_tokens
from lightning_megatron.plan.global_batch import GlobalBatch
from lightning_megatron.strategy.layout_choice import config_of, plans_of, space_of
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from lightning_megatron.strategy.optimization.precision import MegatronPrecision


def plan_layout(
    model: LightningModule | GPTConfig,
    batch: Any,
    cluster: Cluster,
    *,
    strategy: MegatronStrategy | None = None,
    precision: str = "bf16-mixed",
    fp8: bool = False,
    most: int = 10,
) -> LayoutPlans:
    """Search the fastest layouts and options that fit into the memory of a cluster, by estimates.

    It needs no GPU and no process group, and changes nothing. ``plans.best.options`` are arguments
    of :class:`MegatronStrategy`, ``print(plans.table())`` shows all plans. A step is computed by
    AdamW, and routing of experts is even.

    Args:
        model: Module whose model is a GPT or a Hugging Face decoder of a supported family, before
            it is built; or the configuration of a GPT.
        batch: Global batch: a pair (samples, tokens of a sample), or a batch of that size, whose
            tensors may be on the meta device.
        cluster: Devices, and what connects them.
        strategy: Strategy whose options stay, except those that are chosen and have their default.
        precision: Precision of the Trainer.
        fp8: Whether products in 8 bits may be chosen, which change the losses.
        most: Number of layouts.

    Returns:
        The fastest plan of each of the fastest layouts, and layouts that do not fit.

    Raises:
        ParallelPlanError: If no layout is legal for the model and the batch.
        UnsupportedError: If the sizes of the model are not known before it is built, or no layout
            fits; the message names the nearest and what it lacks.
    """
    options = (strategy or MegatronStrategy()).options
    module = None if isinstance(model, GPTConfig) else model
    config = model if isinstance(model, GPTConfig) else config_of(model, options)
    space = space_of(config, module, options, MegatronPrecision(precision), "cuda", cluster, fp8)
    samples, seq_length = _sizes_of(batch)
    return plans_of(space, samples, seq_length, options, cluster, most=most)


def _sizes_of(batch: Any) -> tuple[GlobalBatch, int]:
    """Return the global batch, and the tokens of a sample."""
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], int):
        samples, seq_length = batch
        return samples if isinstance(samples, GlobalBatch) else GlobalBatch(samples), seq_length
    num_tokens = (
        count_tokens(batch) if any(isinstance(one, Tensor) for _, one in leaves(batch)) else 0
    )
    if not num_tokens:
        raise ParallelPlanError(
            f"batch must have tokens: it is {type(batch).__name__}. Use a pair (samples, tokens of "
            "a sample), or a batch of tokens."
        )
    samples = count_samples(batch)
    return GlobalBatch(samples), num_tokens // samples
