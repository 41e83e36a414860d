"""Log line about parts of compiled blocks whose backward passes a schedule cannot split."""

from __future__ import annotations

from collections.abc import Iterator

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameter_stack import ParameterStack
from lightning_megatron.layers.segments import is_compiled
from lightning_megatron.models.stage import pipelined_modules
from lightning_megatron.strategy.options.strategy_options import StrategyOptions


def note_compiled_blocks(module: nn.Module, mesh: ParallelMesh, options: StrategyOptions) -> None:
    """Log the compiled parts whose backward passes stay whole under a schedule that splits them.

    Global rank 0 logs them when training starts, because user code may compile blocks after the
    table of choices is shown. Other linear layers of compiled blocks run between compiled graphs,
    and their backward passes are split.

    Args:
        module: The sharded module.
        mesh: The groups of this rank.
        options: Options of the strategy.

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
