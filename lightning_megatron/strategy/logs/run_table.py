"""Table of the choices of a fit with their reasons, and warnings for slow choices."""

from __future__ import annotations

import socket
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_megatron.errors import SpeedWarning
from lightning_megatron.experts.compute.choose_backend import choose_backend
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.groups.collectives import (
    all_gather_objects,
    all_reduce_,
    gather_objects,
    merge_objects,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import num_elements, shard_spec_of
from lightning_megatron.half_types import HALF_TYPES
from lightning_megatron.layers.attention.choose_core import choose_core, choose_part
from lightning_megatron.layers.context_parallel.attend_across import transport_of
from lightning_megatron.layers.fused.choose_kernels import choose_kernels
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.parameters.parameter_stack import ParameterStack
from lightning_megatron.layers.self_attention import Attention
from lightning_megatron.models.cut_blocks import CutBlocks
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.layered import LayeredModule
from lightning_megatron.models.stage import pipelined_modules
from lightning_megatron.models.staged_blocks import StagedBlocks
from lightning_megatron.plan.budget import GIB, StageMemory
from lightning_megatron.plan.columns import align_columns
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.grouped_gemm import MAX_GROUPS
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.shards import padded_vocab_size
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from lightning_megatron.user_code import is_compiled

#: Width of a line, and least width of the column of reasons (characters).
_WIDTH = 100
_MIN_REASON = 40
#: Replicas and stages that the picture of the layout shows.
_MOST_REPLICAS = 3
_MOST_STAGES = 10
_ASKED = "asked for (linear.parts)"


@dataclass(frozen=True)
class TableRow:
    """A row of the table.

    Args:
        subject: What is chosen, such as "attention".
        remedy: How to get a faster choice, as whole sentences; None if this one costs no speed.
    """

    subject: str
    value: str
    reason: str
    remedy: str | None = None


def show_choices(
    module: nn.Module,
    mesh: ParallelMesh,
    options: StrategyOptions,
    precision: MegatronPrecision,
    memory: Sequence[StageMemory],
    microbatches: str,
) -> None:
    """Show the choices of a fit on global rank 0, and warn of each choice that costs speed.

    The choices of all stages are shown, because some layers may be on later stages only.

    Args:
        memory: Estimate of each stage; empty without one, and on other ranks.
        microbatches: What the estimate is for, or why there is none.

    Communication: one gather over the pipeline, one of devices and a sum over all ranks, and that
        of the choice of a token transport, if the module has experts.
    """
    local_choices = _module_choices(
        module, mesh.device, precision.dtypes.parameters, options.clones
    )
    choices_by_stage = all_gather_objects(local_choices, mesh.pp_cpu)
    choices = [
        *_device_choices(mesh, _capacity_of(mesh.device)),
        *_layout_choices(module, mesh, options),
        _precision_choice(precision, mesh.device),
        *_cast_choices(module, options),
        # Layers of one kind have the same rows.
        *dict.fromkeys(choice for stage in choices_by_stage for choice in stage),
    ]
    picture = _memory_text(module, mesh, memory, microbatches)
    table = table_of(choices, "rank 0" if mesh.pp.size == 1 else "pipeline of rank 0")
    rank_zero_info(f"{table}\n\n{picture}\n")
    warn_of_slow(choices)


def show_memory(
    module: nn.Module, mesh: ParallelMesh, memory: Sequence[StageMemory], microbatches: str
) -> None:
    """Show the estimate of each stage, or why there is none; arguments as of ``show_choices``."""
    rank_zero_info(f"{_memory_text(module, mesh, memory, microbatches)}\n")


def _memory_text(
    module: nn.Module, mesh: ParallelMesh, memory: Sequence[StageMemory], microbatches: str
) -> str:
    if not memory:
        return f"memory of a step is not estimated: {microbatches}"
    capacity = _capacity_of(mesh.device)
    return picture_of(mesh.layout, _layers_of(module), memory, capacity, microbatches)


def _capacity_of(device: torch.device) -> int | None:
    """Return the memory of a GPU (bytes); None for a CPU."""
    if device.type != "cuda":
        return None
    total: int = torch.cuda.get_device_properties(device).total_memory
    return total


def table_of(choices: Sequence[TableRow], ranks: str = "rank 0") -> str:
    """Return the rows as text with aligned columns, in lines that a screen shows."""
    subjects = max(len(choice.subject) for choice in choices)
    values = max(len(choice.value) for choice in choices)
    lines = [f"Choices of this fit ({ranks}):"]
    for choice in choices:
        first = f"  {choice.subject:<{subjects}}  {choice.value:<{values}}  "
        width = max(_WIDTH - len(first), _MIN_REASON)
        lines.append(first + f"\n{'':{len(first)}}".join(textwrap.wrap(choice.reason, width)))
    return "\n".join(lines)


def picture_of(
    layout: ParallelLayout,
    layers: Sequence[str],
    memory: Sequence[StageMemory],
    capacity: int | None,
    microbatches: str,
) -> str:
    """Return a row for each stage: ranks of its replicas, layers, and its memory in the estimate.

    Args:
        layers: Layers of each stage, as text; empty if they are not known.
        memory: Estimate of each stage.
        capacity: Memory of a device; None for hosts (bytes).
        microbatches: What the estimate is for.
    """
    ranks: dict[tuple[int, int], str] = {}
    for group in layout.groups("tp-cp"):
        where = layout.coordinates(group[0])
        ranks[where["pp"], where["dp"]] = f"[{_span(group)}]"
    is_large = max(stage.peak for stage in memory) >= GIB
    scale = GIB if is_large else 2**20
    shown = range(min(layout.dp, _MOST_REPLICAS))
    more = ["..."] if layout.dp > len(shown) else []
    of = [] if capacity is None else [f"{capacity / scale:.1f}"]
    title = ["", *(f"replica {dp}" for dp in shown), *more, "layers"]
    rows = [[*title, "held", "in a step", "peak", *(["of"] if of else [])]]
    for number, stage in enumerate(memory):
        step = f"{(stage.peak - stage.static) / scale:.2f}" if stage.activations else "n/a"
        cells = [*(ranks[number, dp] for dp in shown), *more, *(layers[number : number + 1] or "?")]
        sizes = [f"{stage.static / scale:.2f}", step, f"{stage.peak / scale:.2f}"]
        rows.append([f"  stage {number}", *cells, *sizes, *of])
    if len(rows) > _MOST_STAGES:
        rows[_MOST_STAGES // 2 : -_MOST_STAGES // 2] = [["  ..."] + [""] * (len(rows[0]) - 1)]
    unit = "GiB" if is_large else "MiB"
    note = f"[ranks that share layers]; memory of a rank in {unit}, estimated: {microbatches}"
    return f"{align_columns(rows)}\n  {note}"


def _span(ranks: Sequence[int]) -> str:
    """Return ranks as a short text."""
    if len(ranks) < 3:
        return " ".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    return f"{ranks[0]}-{ranks[-1]}" if step == 1 else f"{ranks[0]} {ranks[1]} .. {ranks[-1]}"


def _layers_of(module: nn.Module) -> list[str]:
    """Return the layers of each stage as text; empty without a model that is cut."""
    for _, model in pipelined_modules(module):
        if isinstance(model, LayeredModule | CutBlocks):
            stages = model.partition.by_stage(model.mesh.layout.placement)
            return [" ".join(map(_layer_text, chunks)) for chunks in stages]
    return []


def _layer_text(layers: range) -> str:
    return "-".join(dict.fromkeys([str(layers[0]), str(layers[-1])])) if layers else "none"


def _device_choices(mesh: ParallelMesh, capacity: int | None) -> list[TableRow]:
    """Return a row for each kind of device, and one for the links of the axes, on rank 0.

    Communication: one gather on the first of all ranks, on the CPU.
    """
    is_gpu = mesh.device.type == "cuda"
    kind = torch.cuda.get_device_name(mesh.device) if is_gpu else "CPU"
    found = gather_objects((socket.gethostname(), kind, capacity), mesh.world_cpu)
    rows: list[TableRow] = []
    if not mesh.world_cpu.is_first:
        return rows
    for (kind, size), number in Counter(device[1:] for device in found).items():
        hosts = {device[0] for device in found if device[1:] == (kind, size)}
        where = f"on {len(hosts)} hosts" if len(hosts) > 1 else f"on host {min(hosts)}"
        each = "" if size is None else f", {size / GIB:.1f} GiB each"
        rows.append(TableRow("devices", f"{number} x {kind}", where + each))
    host_of = dict(zip(mesh.world_cpu.ranks, (device[0] for device in found), strict=True))
    axes: dict[bool, list[str]] = {True: [], False: []}
    for axis in ("tp", "cp", "dp", "pp"):
        hosts_of_groups = [set(map(host_of.get, group)) for group in mesh.layout.groups(axis)]
        if getattr(mesh.layout, axis) > 1:
            axes[max(map(len, hosts_of_groups)) > 1].append(axis)
    if len(found) > 1:
        value = f"{', '.join(axes[True])} between hosts" if axes[True] else "inside one host"
        inside = f"{', '.join(axes[False])} inside hosts; " if axes[True] and axes[False] else ""
        rows.append(TableRow("links", value, inside + _links_of(mesh.device)))
    return rows


def _links_of(device: torch.device) -> str:
    """Describe how a device reaches others of its host."""
    if device.type != "cuda":
        return "gloo"
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    reached = [index for index in others if torch.cuda.can_device_access_peer(device, index)]
    return f"NCCL; {device} reads the memory of {len(reached)} of {len(others)} GPUs beside it"


def warn_of_slow(choices: Iterable[TableRow]) -> None:
    """Warn on global rank 0 of the choices that have a remedy."""
    for choice in choices:
        if choice.remedy is not None:
            rank_zero_warn(
                f"{choice.subject} by {choice.value} is slow: {choice.reason}. {choice.remedy}",
                category=SpeedWarning,
            )


def whole_backward_choices(module: nn.Module) -> list[TableRow]:
    """Return a row for each list of blocks whose backward passes a schedule cannot split."""
    rows = []
    for name, blocks in pipelined_modules(module):
        whole_parts = []
        for part in blocks.modules():
            has_matrix = any(weight.dim() > 1 for weight in part.parameters(recurse=False))
            if has_matrix and not isinstance(part, (ColumnParallelLinear, RowParallelLinear)):
                whole_parts.append(type(part).__name__)
        if isinstance(blocks, StagedBlocks) and whole_parts:
            why = f"{whole_parts[0]} computes the gradients of its inputs and its weights at once"
            rows.append(TableRow(f"backward of {name}", "not split into halves", why))
    return rows


def _layout_choices(
    module: nn.Module, mesh: ParallelMesh, options: StrategyOptions
) -> list[TableRow]:
    layout = mesh.layout
    shown = [f"tp {layout.tp}", f"pp {layout.pp}", f"dp {layout.dp}"]
    if layout.cp > 1:
        shown.append(f"cp {layout.cp}")
    if layout.vpp > 1:
        shown.append(f"vpp {layout.vpp}")
    if layout.ep > 1 or layout.etp != layout.tp:
        shown += [f"ep {layout.ep}", f"etp {layout.etp}"]
    reason = "one process holds the whole model"
    if layout.world_size > 1:
        parts = f"{num_elements(module):,} of {_num_full_elements(module, mesh):,} parameters"
        count = layout.world_size // layout.dp
        replica = f"a model replica has {count} process{'es' if count > 1 else ''}"
        reason = f"{replica}; rank 0 holds {parts}"
    choices = [TableRow("layout", ", ".join(shown), reason)]
    if layout.tp > 1 and any(isinstance(part, LayeredModule) for part in module.modules()):
        why = "asked for"
        if options.sequence_parallel is None:
            why = "tp is above 1; sequence lengths must be multiples of tp"
        value = "on" if options.shards_sequence else "off"
        choices.append(TableRow("sequence parallel", value, why))
    for config in {part.config for part in module.modules() if isinstance(part, GPT)}:
        rows = padded_vocab_size(config.vocab_size, layout.tp, config.vocab_multiple)
        why = f"{rows:,} rows of embeddings, a multiple of {config.vocab_multiple} on each tp rank"
        choices.append(TableRow("vocabulary", f"{config.vocab_size:,} tokens", why))
    if layout.pp > 1:
        why = "asked for"
        if options.schedule is None:
            why = f"default for vpp {layout.vpp}"
        if options.schedule == "auto":
            why = "for the first steps, whose times decide the next schedule"
        custom = options.custom_order
        shown_schedule = options.schedule_name if custom is None else custom.name
        choices.append(TableRow("pipeline schedule", shown_schedule, why))
        if options.may_split_backward:
            choices += whole_backward_choices(module)
    for _, model in pipelined_modules(module):
        if layout.pp > 1 and isinstance(model, LayeredModule | CutBlocks):
            partition = model.partition
            choices.append(TableRow("layers of stages", str(partition), partition.reason))
    return choices


def _num_full_elements(module: nn.Module, mesh: ParallelMesh) -> int:
    """Count the parameters of the whole model, each once (elements).

    Communication: one sum over all ranks.
    """
    counted = sum(number for _, _, number in _counted_elements(module, mesh))
    return int(all_reduce_(torch.tensor(counted), mesh.world_cpu))


def count_elements(
    module: nn.Module, mesh: ParallelMesh, names: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """Count the parameters of the whole model in modules, and those of them that are trained.

    Args:
        names: Names of modules that this rank has; other ranks may have others.

    Returns:
        Elements in all and trained ones by name, those of the whole model by "".

    Communication: one gather of the counts over all ranks, on the CPU.
    """
    counts = dict.fromkeys(("", *names), (0, 0))
    for key, parameter, number in _counted_elements(module, mesh):
        trained = number * parameter.requires_grad
        for name in counts:
            if not name or key.startswith(f"{name}."):
                counts[name] = (counts[name][0] + number, counts[name][1] + trained)
    sums = merge_objects(counts, mesh.world_cpu, _added)
    return {name: sums[name] for name in counts}


def _added(ranks: Sequence[dict[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    sums: dict[str, tuple[int, int]] = {}
    for name, (number, trained) in chain.from_iterable(counts.items() for counts in ranks):
        before = sums.get(name, (0, 0))
        sums[name] = (before[0] + number, before[1] + trained)
    return sums


def _counted_elements(
    module: nn.Module, mesh: ParallelMesh
) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Yield the parameters of which this rank counts elements: name, parameter and their number."""
    on_one_stage = {
        id(parameter)
        for _, model in pipelined_modules(module)
        for parameter in model.stage_parameters()
    }
    for name, parameter in module.named_parameters():
        # Every stage has the parameters of a frozen model beside the one that is cut.
        if id(parameter) not in on_one_stage and not mesh.pp.is_first:
            continue
        spec = shard_spec_of(parameter, mesh.tp.rank)
        if spec.tied_to is None and mesh.replica_axis(spec.is_expert).is_first:
            yield name, parameter, sum(prod(box.sizes) for box in spec.boxes() if box.copy == 0)


def _precision_choice(precision: MegatronPrecision, device: torch.device) -> TableRow:
    dtypes = precision.dtypes
    reason = f"{_name(dtypes.parameters)} parameters, which the optimizer trains"
    if dtypes.main_parameters is not None:
        reason = (
            f"{_name(dtypes.parameters)} parameters and activations, "
            f"{_name(dtypes.main_parameters)} main parameters and gradients, no autocast"
        )
    if precision.precision == "bf16-mixed" and device.type == "cpu":
        reason += "; on CPUs Lightning replaces 16-mixed by it"
    return TableRow("precision", str(precision.precision), reason)


def _cast_choices(module: nn.Module, options: StrategyOptions) -> list[TableRow]:
    """Return rows about weights in 8 bits: their storage, or the number of casts."""
    settings = options.products
    casts_each = options.linear.backend_of("products") == "te"
    if settings is None or (casts_each and settings.parameters is None):
        return []
    is_manual = isinstance(module, LightningModule) and not module.automatic_optimization
    is_shared = not (is_manual or casts_each) and settings.shares_casts(2, options.graph_mode)
    several = "" if settings.shares_casts(1) else " of several microbatches"
    if settings.parameters is not None:
        copies = f"one for a batch{several}" if is_shared else "one for each product"
        reason = f"asked for (fp8.parameters); transposed copies: {copies}"
        return [TableRow("weights in 8 bits", "kept and gathered in 1 byte each", reason)]
    if is_shared:
        value = f"once per batch{several}"
        return [
            TableRow("casts of weights", value, "kept until its end, 2 bytes for each FP8 weight")
        ]
    reason = "asked for (cast_weights)"
    if is_manual:
        reason = "the module runs its own backward passes"
    elif settings.cast_weights is None:
        reason = "cuda_graphs captures microbatches one by one"
    return [TableRow("casts of weights", "for each product", reason)]


def _module_choices(
    module: nn.Module, device: torch.device, dtype: torch.dtype, clones: ExpertClones | None
) -> list[TableRow]:
    rows = [_kernel_choice(device, dtype)]
    for part in module.modules():
        if isinstance(part, Attention):
            rows.append(_attention_choice(part, device, dtype))
            if part.mesh.cp.size > 1:
                context = part.context
                rows.append(TableRow("context parallel", context.transport, context.reason))
        elif isinstance(part, MixtureOfExperts):
            rows += _product_choices(part, device, dtype)
            transport = part.transport_choice.transport
            rows.append(TableRow("expert transport", transport, part.transport_reason(dtype)))
            if clones is not None:
                value = f"at most {clones.places} per rank"
                rows.append(TableRow("clones of experts", value, clones.reason_on(device.type)))
    return rows


def _kernel_choice(device: torch.device, dtype: torch.dtype) -> TableRow:
    subject = "fused kernels"
    torch_operators = "operators of torch"
    if device.type != "cuda":
        return TableRow(subject, torch_operators, f"{device.type}: the Triton kernels need a GPU")
    if dtype not in HALF_TYPES:
        return TableRow(
            subject, torch_operators, f"{_name(dtype)}: the Triton kernels are for half types"
        )
    choice = choose_kernels(device)
    if choice.kernels is not None:
        return TableRow(subject, "Triton", choice.reason)
    remedy = (
        "The Triton kernels need an NVIDIA GPU of compute capability 8.0 or newer, and a CUDA "
        "build of torch, which includes Triton."
    )
    return TableRow(subject, torch_operators, choice.reason, remedy)


def _attention_choice(layer: Attention, device: torch.device, dtype: torch.dtype) -> TableRow:
    if layer.uses_engine:
        return TableRow("attention", "Transformer Engine", _ASKED)
    sizes = {"head_dim": layer.head_dim, "value_dim": layer.value_dim}
    choice = choose_core(device, dtype, layer.span, dropout=layer.dropout, **sizes)
    is_cut = layer.mesh.cp.size > 1
    if is_cut and transport_of(layer.span, layer.mesh, layer.context) != "all_to_all":
        choice = choose_part(device, dtype, layer.span, head_dim=layer.head_dim)
    window = layer.span.window
    subject = "attention" if window is None else f"attention in a window of {window}"
    return TableRow(subject, choice.name, choice.reason, choice.remedy)


def _product_choices(
    layer: MixtureOfExperts, device: torch.device, dtype: torch.dtype
) -> list[TableRow]:
    if layer.experts.uses_engine:
        return [TableRow("products of experts", "Transformer Engine", _ASKED)]
    choices = []
    for name in (layer.experts.first_name, "down"):
        weights = layer.experts.weights(name)
        out_features, in_features = weights[0].shape
        choice = choose_backend(device, dtype, len(weights), in_features, out_features)
        remedy = product_remedy(choice.backend, device, dtype, len(weights))
        choices.append(TableRow("products of experts", choice.backend, choice.reason, remedy))
    return choices


def product_remedy(
    backend: str, device: torch.device, dtype: torch.dtype, num_groups: int
) -> str | None:
    """Return advice for faster products of experts; None if the backend is the device's fastest."""
    if device.type != "cuda" or backend == "bundled":
        return None
    if backend == "loop" and dtype != torch.bfloat16:
        return (
            "In every layer the host waits for the number of rows of each expert, and launches a "
            "product for each. Use Trainer(precision='bf16-mixed')."
        )
    if torch.cuda.get_device_capability(device) != (9, 0):
        return None if backend == "grouped_mm" else "Use an H100 or H200, or fewer experts."
    if num_groups > MAX_GROUPS:
        return "Divide the experts over more ranks: raise ep."
    return (
        "Run `lightning-megatron kernels build` once; `lightning-megatron kernels show` says what "
        "is missing."
    )


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def note_compiled_blocks(module: nn.Module, mesh: ParallelMesh, options: StrategyOptions) -> None:
    """Log the compiled parts whose backward passes stay whole under a schedule that splits them.

    Global rank 0 logs them when training starts, because user code may compile blocks after the
    table of choices is shown. Other linear layers of compiled blocks run between compiled graphs,
    and their backward passes are split.

    Communication: one gather over the pipeline, if the schedule splits backward passes.
    """
    if mesh.pp.size == 1 or not options.may_split_backward:
        return
    local_names = list(dict.fromkeys(_whole_parts(module)))
    names = [name for stage in all_gather_objects(local_names, mesh.pp_cpu) for name in stage]
    if names:
        more = f" and {len(names) - 1} others" if len(names) > 1 else ""
        rank_zero_info(
            f"backward of {names[0]}{more}: not split into halves, because compiled experts and "
            "fused weights compute the gradients of their inputs and weights at once, unless they "
            "are recomputed"
        )


def _whole_parts(root: nn.Module) -> Iterator[str]:
    """Yield the names of experts and fused weights inside compiled modules."""
    for prefix, model in pipelined_modules(root):
        for name, part in model.named_modules(prefix=prefix):
            if is_compiled(part):
                for inner_name, inner_module in part.named_modules(prefix=name):
                    if isinstance(inner_module, (GroupedMLP, ParameterStack)):
                        yield inner_name
