"""Explanation of shape errors in unsharded modules that receive sharded features."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from torch import Tensor, nn

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.swap.whole_features import cut_layers

_MODULE_CALL = nn.Module._call_impl.__code__
_SHAPE_ERROR = re.compile(
    r"size|shape|dimension|split|must match|out of (range|bounds)|mat1|expected", re.IGNORECASE
)
#: Largest number of layers that a note names.
_NUM_SHOWN = 6
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


@contextmanager
def name_unsharded_modules(root: nn.Module, mesh: ParallelMesh) -> Iterator[None]:
    """Name the unsharded module in torch's shape errors, if it received sharded features.

    A shape error or a failed assertion in the user's own code gets a note that names the layers
    whose features are cut.
    """
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        reason = _reason(error, root, mesh.tp.size)
        if reason is None:
            _add_note(error, root, mesh.tp.size)
            raise
        raise ParallelPlanError(reason) from error


def _reason(error: Exception, root: nn.Module, tp: int) -> str | None:
    frame = _innermost_call(error.__traceback__)
    if tp == 1 or frame is None:
        return None
    module: nn.Module = frame.f_locals["self"]
    example = _sharded_and_full_size(module, frame.f_locals.get("args", ()), tp)
    name = next((name for name, candidate in root.named_modules() if candidate is module), None)
    if name is not None and isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
        return _reason_of_layer(module, name, frame.f_locals.get("args", ()), tp)
    if example is None or name is None:
        return None
    (part, whole, key) = example
    kind = type(module).__name__
    return (
        f"a module between layers that are cut over tp ({tp}) must have parameters for this rank's "
        f"part of the features: {name!r} ({kind}) gets {part} of {whole} features, but its {key} "
        "is for all of them, because the plan cuts a layer before it and not this module. "
        f"{_remedy(module, name)} Or give the layer before it the kind 'column_gather' in "
        "tensor_parallel_plan."
    )


def _reason_of_layer(module: nn.Module, name: str, args: tuple[object, ...], tp: int) -> str | None:
    """Return why the input size of a sharded layer is wrong; None if it may be right."""
    width = args[0].shape[-1] if args and isinstance(args[0], Tensor) and args[0].dim() else 0
    whole = int(module.in_features)  # type: ignore[arg-type]
    rule = f"layers that are cut over tp ({tp}) must follow each other as 'column' and 'row'"
    if isinstance(module, RowParallelLinear) and not module.split_input and width == whole:
        return (
            f"{rule}: {name!r} ('row') gets all {whole} features, but needs this rank's "
            f"{whole // tp}. Use {{{name!r}: 'row_split'}} in tensor_parallel_plan, or give the "
            "layer before it the kind 'column'. If it already has this kind, take sizes from the "
            "tensors in the code between the two."
        )
    if isinstance(module, RowParallelLinear) and module.split_input and width * tp == whole:
        return (
            f"{rule}: {name!r} ('row_split') gets this rank's {width} features, but splits all "
            f"{whole} itself. Use {{{name!r}: 'row'}} in tensor_parallel_plan, or the kind "
            "'column_gather' for the layer before it."
        )
    if isinstance(module, ColumnParallelLinear) and width * tp == whole:
        return (
            f"{rule}: {name!r} ('column') gets this rank's {width} features, but needs all "
            f"{whole}. Give the layer before it the kind 'column_gather' in tensor_parallel_plan, "
            f"or {name!r} the kind 'row'."
        )
    return None


def _add_note(error: Exception, root: nn.Module, tp: int) -> None:
    """Add the names of layers with sharded features to an error that may concern them."""
    layers = (
        [layer for layer in cut_layers(root) if layer.kind in ("column", "row")] if tp > 1 else []
    )
    # An assertion of sizes often has no message.
    may_concern_sizes = isinstance(error, AssertionError) or _SHAPE_ERROR.search(str(error))
    if not layers or not may_concern_sizes:
        return
    shown = ", ".join(f"{layer.name!r} ('{layer.kind}')" for layer in layers[:_NUM_SHOWN])
    error.add_note(
        f"The plan cuts features over tp ({tp}): code between a 'column' and the next 'row' layer "
        f"gets 1/{tp} of them. These layers are cut: "
        f"{shown}{', ...' if len(layers) > _NUM_SHOWN else ''}. If sizes do not fit for this "
        "reason, take sizes from the tensors (x.shape[-1], or -1 for the number of heads), or give "
        "the layers around the code the kinds 'column_gather' and 'row_split', or 'replicate', in "
        "tensor_parallel_plan."
    )


def _remedy(module: nn.Module, name: str) -> str:
    if isinstance(module, nn.Linear):
        return f"Use {{{name!r}: 'row'}}, which sums over the parts."
    if isinstance(module, _NORMS):
        return "It computes over all features and cannot be cut: move it after the 'row' layer."
    return f"Use {{{name!r}: 'features'}}, which cuts parameters that have a row for every feature."


def _innermost_call(trace: TracebackType | None) -> FrameType | None:
    """Return the frame of the innermost module call before an error."""
    innermost = None
    while trace is not None:
        if trace.tb_frame.f_code is _MODULE_CALL:
            innermost = trace.tb_frame
        trace = trace.tb_next
    return innermost


def _sharded_and_full_size(
    module: nn.Module, args: tuple[object, ...], tp: int
) -> tuple[int, int, str] | None:
    """Return sharded and full feature size, and the parameter's name, if an input is a shard."""
    # Features are usually the last dimension, so sizes are tried from the last to the first.
    inputs = [size for value in args if isinstance(value, Tensor) for size in reversed(value.shape)]
    for part in inputs:
        for key, parameter in module.named_parameters(recurse=False):
            whole = part * tp
            if (
                shard_spec_of(parameter).is_whole
                and whole in parameter.shape
                and whole not in inputs
            ):
                return part, whole, key
    return None
