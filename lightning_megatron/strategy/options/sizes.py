"""Checks of model, layout and batch sizes, before other processes start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.config_checks import ModelConfig
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.models.fp8_layers import check_fp8_config
from lightning_megatron.models.hugging_face_lm import HuggingFaceCausalLM
from lightning_megatron.plan.context import context_multiple
from lightning_megatron.plan.context_transport import ContextLinks, choose_context_transport
from lightning_megatron.plan.global_batch import GlobalBatch
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from lightning_megatron.strategy.private.loops import is_overridden, may_accumulate
from lightning_megatron.swap.decide.hugging_face_models import check_cut, known_configs
from lightning_megatron.swap.families import find_family


def check_sizes(
    module: LightningModule,
    options: StrategyOptions,
    layout: ParallelLayout,
    arguments: Mapping[str, Any],
) -> None:
    """Refuse sizes that cannot run, from what is known when the Trainer is called.

    Sizes of the model come from the module's ``config`` if that is a :class:`GPTConfig` or an
    :class:`EncoderConfig`, or from the folder that the module loads. Batch sizes come from the
    ``batch_size`` of a dataloader, or from the ``tokens_shape`` (samples, tokens per sample) and
    ``global_batch`` of a data module.

    Args:
        arguments: Arguments of ``fit``, ``validate``, ``test`` or ``predict``, by name.
    """
    check_optimization(module, layout.pp)
    is_fit = "train_dataloaders" in arguments
    if options.experts.rows is not None and is_fit and not module.automatic_optimization:
        raise UnsupportedError(
            "experts.rows needs automatic optimization: a step that needs more rows is run again, "
            "and the strategy cannot repeat the backward passes of user code. Use "
            "automatic_optimization=True, or experts.rows=None."
        )
    if options.experts.overlap and is_fit and not module.automatic_optimization:
        raise UnsupportedError(
            "experts.overlap needs automatic optimization, because user code runs the backward "
            "passes of manual optimization one after the other. Use automatic_optimization=True, "
            "or experts.overlap=False."
        )
    data, batch_size, seq_length = data_of(arguments)
    if getattr(data, "documents", "joined") != "joined" and seq_length is not None:
        # Rows of documents are padded to a length that the ranks divide.
        shards = layout.tp if options.shards_sequence else 1
        seq_length += -seq_length % context_multiple(layout.cp, shards)
    for config in configs_of(module, options, layout):
        if config is getattr(module, "config", None):
            config.check_layout(layout, options.shards_sequence, seq_length)
        else:
            # The replacement of a model pads sequences that are not divisible among its ranks.
            config.check_layout(layout)
            if seq_length is not None:
                config.check_seq_length(seq_length)
        check_places(config, options)
        check_context_transport(config, options, layout)
        if options.products is not None:
            backend = options.linear.backend_of("products")
            check_fp8_config(config, options.products, layout.tp, backend)
    if not is_fit:
        return
    whole = getattr(data, "global_batch", None)
    if isinstance(whole, GlobalBatch):
        check_global_batch(whole, options, layout, may_accumulate(arguments["trainer"]))
    elif isinstance(batch_size, int) and module.automatic_optimization:
        check_batch_size(batch_size, options, layout)


def data_of(arguments: Mapping[str, Any]) -> tuple[Any, int | None, int | None]:
    """Return the data module of a run, samples of a batch and tokens of a sample, where known."""
    loader = arguments.get("train_dataloaders")
    data = loader if isinstance(loader, LightningDataModule) else arguments.get("datamodule")
    unknown = getattr(loader, "batch_size", None), None
    return data, *getattr(data, "tokens_shape", unknown)


def shape_of_batches(
    arguments: Mapping[str, Any], layout: ParallelLayout
) -> tuple[int | None, int | None]:
    """Return samples and tokens per sample of a data-parallel rank's batches, None if unknown.

    Args:
        arguments: Arguments of ``fit``, ``validate``, ``test`` or ``predict``, by name.
    """
    data, batch_size, seq_length = data_of(arguments)
    whole = getattr(data, "global_batch", None)
    if isinstance(whole, GlobalBatch):
        batch_size = max(whole.size // layout.dp, 1)
    return batch_size, seq_length


def configs_of(
    module: LightningModule, options: StrategyOptions, layout: ParallelLayout
) -> Sequence[ModelConfig]:
    """Return the configurations of the module's models, without those that are not yet known."""
    plan = options.tensor_parallel_plan
    config = getattr(module, "config", None)
    if isinstance(config, GPTConfig | EncoderConfig):
        return [config]
    if isinstance(module, HuggingFaceCausalLM) and not plan:
        family = find_family(module.architecture or "")
        if family is None and layout.cp > 1:
            raise UnsupportedError(
                f"cp ({layout.cp}) above 1 needs a model of a supported family, because the "
                f"attention of {module.architecture} needs whole sequences. Use cp=1, or tp and pp."
            )
        return [] if family is None else [family.config(module.config.to_dict())]
    # A module with configure_model may build its models there, once groups exist.
    if is_overridden("configure_model", module):
        return ()
    if layout.cp > 1:
        return check_cut(module, layout.cp, plan)
    return () if options.products is None else known_configs(module, plan)


def check_places(config: ModelConfig, options: StrategyOptions) -> None:
    """Refuse clones of experts with biases, more places than other ranks have experts, and
    attention that Transformer Engine does not compute.
    """
    found = {
        "attention sinks": getattr(config, "attention_sinks", False),
        "ALiBi": getattr(config, "position", None) == "alibi",
    }
    for what, has in found.items():
        if has and options.linear.backend_of("attention") == "te":
            raise UnsupportedError(
                f"linear.parts ('attention') with backend 'te' cannot compute {what}, which the "
                "model has. Leave attention out of linear.parts."
            )
    if options.clones is not None and config.experts is not None:
        config.experts.check_clones()
        options.clones.check(config.experts.num_experts, options.ep)


def check_context_transport(
    config: ModelConfig, options: StrategyOptions, layout: ParallelLayout
) -> None:
    """Refuse a transport over cp that the attention of a model cannot use."""
    if layout.cp == 1:
        return
    heads = config.num_heads // layout.tp
    kv_heads = heads
    if isinstance(config, GPTConfig):
        kv_heads = max(1, config.kv_heads // layout.tp)
    links = ContextLinks(options.context.transport)
    choose_context_transport(links, layout.cp, heads, kv_heads, config.attention_dropout)


def check_hosts(options: StrategyOptions, layout: ParallelLayout, ranks_per_host: int) -> None:
    """Refuse to share memory among tensor-parallel ranks of several hosts.

    Args:
        ranks_per_host: Number of processes on every host (ranks).
    """
    if not options.linear.overlap:
        return
    for ranks in layout.groups("tp"):
        if len({rank // ranks_per_host for rank in ranks}) > 1:
            raise ParallelPlanError(
                "with linear.overlap the tensor-parallel ranks must be on one host: with "
                f"{ranks_per_host} ranks on a host, tp ({layout.tp}) and job.order "
                f"{options.job.order!r}, ranks {ranks} are not. These ranks read each other's "
                f"memory. Use a tp that divides {ranks_per_host} and a job.order that begins with "
                "tp, or leave linear.overlap out."
            )


def check_optimization(module: LightningModule, pp: int) -> None:
    """Refuse manual optimization of a model in several stages.

    Args:
        pp: Number of pipeline stages (stages).
    """
    if pp > 1 and not module.automatic_optimization:
        raise UnsupportedError(
            f"manual optimization cannot be used with pp ({pp}) above 1, because the schedule runs "
            "backward passes between forward passes. Use automatic optimization, or pp=1."
        )


def check_batch_size(batch_size: int, options: StrategyOptions, layout: ParallelLayout) -> None:
    """Refuse a batch that cannot be cut into equal microbatches, or into too few for the schedule.

    Args:
        batch_size: Size of a full batch of one data-parallel rank (samples).
    """
    rule = options.microbatches(layout)
    size = options.microbatch_size
    if isinstance(size, int) and batch_size % size:
        legal = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        raise ParallelPlanError(
            f"batch_size ({batch_size}) of the training dataloader must be a multiple of "
            f"microbatch_size ({size}), because a step is cut into equal microbatches; only the "
            "last batch of an epoch may be smaller. Use a microbatch_size of "
            f"{', '.join(map(str, legal))}, or a batch_size of {-(-batch_size // size) * size}."
        )
    rule.check(batch_size)


def check_global_batch(
    batch: GlobalBatch, options: StrategyOptions, layout: ParallelLayout, accumulates: bool
) -> None:
    """Refuse a global batch that this layout cannot divide among ranks and into microbatches."""
    batch.check_accumulation(accumulates)
    size = options.microbatch_size
    batch.check(layout.dp, size if isinstance(size, int) else 1)
    needs_size = layout.pp > 1 or options.cuda_graphs is not None
    if batch.ramp_up is not None and needs_size and not isinstance(size, int):
        raise ParallelPlanError(
            f"ramp_up with pp ({layout.pp}) above 1 or cuda_graphs needs a microbatch_size: it is "
            f"{size!r}, so microbatches would grow with the batch. Use a number of samples that "
            f"divides {gcd(*batch.sizes) // layout.dp}."
        )
    for size_of_batch in batch.sizes:
        check_batch_size(size_of_batch // layout.dp, options, layout)


def check_last_batch(num_samples: int, options: StrategyOptions, layout: ParallelLayout) -> None:
    """Refuse, before the epoch, a smaller last batch that the schedule cannot run.

    Args:
        num_samples: Size of the last batch of one data-parallel rank, or 0 if there is none
            (samples).
    """
    if not num_samples:
        return
    rule = options.microbatches(layout)
    try:
        rule.check(num_samples)
    except ParallelPlanError as error:
        raise ParallelPlanError(
            f"the last batch of an epoch must also fit the schedule: it has {num_samples} samples, "
            f"which are {rule.count_for(num_samples)} microbatches. Use drop_last=True in the "
            f"training dataloader. {error}"
        ) from error
