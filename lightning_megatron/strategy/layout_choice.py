"""Choice of the layout and of options of a training: for ``layout="auto"``, and before a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.forecast.cluster import Cluster
from lightning_megatron.forecast.layout_plans import LayoutPlan, LayoutPlans, search_layouts
from lightning_megatron.forecast.search import Choice, SearchSpace
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.hugging_face_lm import HuggingFaceCausalLM
from lightning_megatron.plan.global_batch import GlobalBatch
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.recomputation import Recomputation
from lightning_megatron.strategy.checks.graph_checks import check_graphs
from lightning_megatron.strategy.memory_estimate import shape_before_run
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from lightning_megatron.strategy.options.sizes import (
    check_context_transport,
    check_hosts,
    check_places,
    configs_of,
    data_of,
)
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from lightning_megatron.strategy.private.loops import is_overridden
from lightning_megatron.strategy.process.ranks import RankStrategy
from lightning_megatron.swap.decide.hugging_face_models import known_configs

#: Options that a search chooses, with the value of each that leaves it the choice.
SEARCHED: Mapping[str, int | None] = {
    **dict.fromkeys(("tp", "pp", "vpp", "cp", "ep"), 1),
    **dict.fromkeys(("etp", "sequence_parallel", "schedule", "microbatch_size"), None),
    **dict.fromkeys(("recompute", "cuda_graphs", "fp8"), None),
}
_STRATEGY = "lightning_megatron.MegatronStrategy"


def choose_layout(strategy: RankStrategy, arguments: Mapping[str, Any]) -> StrategyOptions:
    """Return the options of a fit with the fastest layout that fits, and log it as YAML.

    All ranks find the same one, because a search depends on settings and the kind of GPU alone.

    Args:
        arguments: Arguments of ``fit``, by name.

    Raises:
        ParallelPlanError: If no layout is legal, or the speeds of the devices are not known.
        UnsupportedError: If sizes of model or batch are not known, or no layout fits.
    """
    module = strategy.lightning_module
    precision = strategy.precision_plugin
    assert module is not None, "the Trainer connects the module before anything else"
    assert isinstance(precision, MegatronPrecision), "the strategy has its own plugin"
    if "train_dataloaders" not in arguments:
        raise UnsupportedError(
            "layout='auto' chooses a layout for a training, and none has begun. Call fit first, or "
            "give tp, pp and the other sizes. Checkpoints load under any sizes."
        )
    data, _, seq_length = data_of(arguments)
    batch = getattr(data, "global_batch", None)
    if not isinstance(batch, GlobalBatch) or seq_length is None:
        raise UnsupportedError(
            "layout='auto' needs a data module with a global batch size, because batch_size is "
            "that of a data-parallel rank, whose number depends on the layout: the choice would "
            "change what is trained. Use global_batch_size in the data module, or give tp, pp and "
            "the other sizes."
        )
    options = strategy.options
    cluster = _cluster_of(strategy)
    config = config_of(module, options)
    kind = strategy.root_device.type
    space = space_of(config, module, options, precision, kind, cluster)
    plans = plans_of(space, batch, seq_length, options, cluster, kind)
    rank_zero_info(
        f"layout='auto' chose the first of {plans.num_choices:,} legal choices, by estimates:\n"
        f"{plans.table()}\nTo train with it again, write into the recipe:\n"
        f"{as_yaml(plans.best)}"
    )
    return with_choice(options, Choice(plans.best.layout, plans.best.training))


def config_of(module: LightningModule, options: StrategyOptions) -> GPTConfig:
    """Return the configuration of the only model of a module, before it is built.

    Raises:
        UnsupportedError: If it has none, or several.
    """
    configs = list(configs_of(module, options, ParallelLayout(1)))
    if not configs and not is_overridden("configure_model", module):
        configs = list(known_configs(module, options.tensor_parallel_plan))
    if len(configs) == 1 and isinstance(configs[0], GPTConfig):
        return configs[0]
    name = type(module).__name__
    raise UnsupportedError(
        f"the sizes of the model of {name} are not known before it is built: it has "
        f"{len(configs) or 'no'} configurations of models that can be estimated, and one is "
        "needed.\nUse CausalLM, HuggingFaceCausalLM, a module with a Hugging Face decoder of a "
        "supported family or with a GPTConfig as its attribute `config`, or give tp, pp and the "
        "other sizes. lightning_megatron.memory.estimate computes the memory of a layout."
    )


def space_of(
    config: GPTConfig,
    module: LightningModule | None,
    options: StrategyOptions,
    precision: MegatronPrecision,
    kind: str,
    cluster: Cluster,
    fp8: bool = False,
) -> SearchSpace:
    """Return what the options leave to a search, for a batch of one sample.

    Args:
        module: Module that will be trained; None if it is not known.
        kind: Kind of the devices, "cuda" or "cpu".
    """
    training = shape_before_run(options, precision, kind)
    if isinstance(module, HuggingFaceCausalLM) and module.lora is not None:
        # Of adapters, what they keep besides is left out.
        training = replace(training, gradient_bytes=0, main_bytes=0, state_bytes=0)
    captured = replace(options, cuda_graphs="segments")
    allows_graphs = kind == "cuda"
    try:
        check_graphs(captured, kind, str(precision.precision), module, None)
    except UnsupportedError:
        allows_graphs = False
    return SearchSpace(
        config=config,
        num_ranks=cluster.num_gpus,
        ranks_per_node=min(cluster.gpus_per_node, cluster.num_gpus),
        batch=GlobalBatch(1),
        training=training,
        given=_given(options),
        allows_fp8=fp8,
        allows_graphs=allows_graphs,
    )


def _given(options: StrategyOptions) -> dict[str, Any]:
    """Return the options that a search must keep."""
    given = {name: getattr(options, name) for name in SEARCHED}
    given = {name: value for name, value in given.items() if value != SEARCHED[name]}
    if "recompute" in given:
        given["recompute"] = Recomputation.of(options.recompute)
    if "schedule" in given:
        given["schedule"] = options.pass_order
    if options.custom_order is not None:
        given |= {"pp": options.pp, "vpp": options.vpp}
    fixed: dict[str, Any] = {
        "order": options.job.order,
        "stage_layers": options.pipeline.stage_layers,
        "microbatch_group_size": options.pipeline.microbatch_group_size,
    }
    return given | {name: value for name, value in fixed.items() if value is not None}


def plans_of(
    space: SearchSpace,
    batch: GlobalBatch,
    seq_length: int,
    options: StrategyOptions,
    cluster: Cluster,
    kind: str = "cuda",
    most: int = 10,
) -> LayoutPlans:
    """Search a space for a batch.

    Args:
        seq_length: Tokens of a sample; rows may have one more than the model reads.
        options: Options that the space was made of.
        kind: Kind of the devices, "cuda" or "cpu".
    """
    length = min(seq_length, space.config.max_seq_length)
    space = replace(space, batch=batch, training=replace(space.training, seq_length=length))
    check = check_of(space.config, options, space.ranks_per_node)
    return search_layouts(space, cluster, kind, check, most)


def check_of(
    config: GPTConfig, options: StrategyOptions, ranks_per_host: int
) -> Callable[[Choice], None]:
    """Return the check of a choice against the other options."""

    def check(choice: Choice) -> None:
        chosen = with_choice(options, choice)
        check_places(config, chosen)
        check_context_transport(config, chosen, choice.layout)
        check_hosts(chosen, choice.layout, ranks_per_host)

    return check


def with_choice(options: StrategyOptions, choice: Choice) -> StrategyOptions:
    """Return the options with those of a choice that were not given."""
    given = _given(options)
    chosen = {name: value for name, value in choice.options().items() if name not in given}
    return replace(options, **{"layout": None, **chosen})


def as_yaml(plan: LayoutPlan) -> str:
    """Return a plan as the part of a recipe that trains with it."""
    strategy = {"class_path": _STRATEGY, "init_args": plan.options}
    return str(yaml.safe_dump({"trainer": {"strategy": strategy}}, sort_keys=False))


def _cluster_of(strategy: RankStrategy) -> Cluster:
    """Return the description of the devices of a Trainer."""
    described = strategy.options.layout
    device = strategy.root_device
    gpu = "cpu"
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device).removeprefix("NVIDIA ").partition(" ")[0]
    sizes: dict[str, Any] = {
        "num_gpus": strategy.num_nodes * strategy.num_processes,
        "gpus_per_node": strategy.num_processes,
        "gpu": gpu,
    }
    return Cluster(**(sizes | (described if isinstance(described, dict) else {})))
