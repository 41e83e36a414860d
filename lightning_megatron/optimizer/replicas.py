"""Comparison of replicated parameters, gradients and losses between ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_megatron.errors import ParallelPlanError, ReplicaMismatchError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import BoundaryGradients, all_gather_objects, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.stage import pipelined_modules
from lightning_megatron.models.staged_blocks import StagedBlocks
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.shapes import Float, Shaped

#: Number of sums that represent a tensor. Each sum adds every seventh element, because 7 divides no
#: common layer size.
_NUM_SUMS = 7
#: Number of elements that are added at a time, to bound the memory: a multiple of the number of
#: sums (elements).
_PIECE = _NUM_SUMS * 2**20
#: Relative distance of two gradients, or of parameters trained with them, that rounding does not
#: explain. Partial sums of one gradient differ by much more: by about their own size.
_TOLERANCE = 0.05
#: Number of parameters that an error names.
_NUM_SHOWN = 5
_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_REMEDY_FOR_GRADIENTS = (
    "The copies would diverge. If the parameter is used between a 'column' and a 'row' layer, each "
    "rank has a part of its gradient: give its module the kind 'partial' in tensor_parallel_plan, "
    "or the layers around it the kind 'replicate'. If your code writes into parameters or "
    "gradients, make the same change on every rank."
)
_REMEDY_FOR_PARAMETERS = (
    "The copies would diverge. A training step alone keeps them equal: look for code that writes "
    "into parameters on some ranks only, or with different values, and make the same change on "
    "every rank."
)
#: State of a gradient on this rank: ``whole`` if it is complete, ``part`` if it is this rank's part
#: of a sum or of the features, ``mixed`` if it is wrong because a layer takes a part for the whole,
#: ``unknown`` if a compiled region or the start of the graph hides its state.
Region = Literal["whole", "part", "mixed", "unknown"]


def replicated_over_tp(main: MainParameters) -> tuple[str, ...]:
    """List the parameters that every rank of tp has whole, except parameters of experts.

    The order is that of the model. The ranks must agree, because one rank may hold all rows of a
    small vocabulary.

    Communication: one gather of names over tp.
    """
    if main.mesh.tp.size == 1:
        return ()
    specs = {name: main.spec(name) for name in main.names}
    local_names = {name for name, spec in specs.items() if spec.is_whole and not spec.is_expert}
    shared = set.intersection(*all_gather_objects(local_names, main.mesh.tp))
    return tuple(name for name in main.names if name in shared)


def check_loss_replicas(main: MainParameters, loss: Float[Tensor, ""]) -> None:
    """Compare the loss over tp, whose ranks compute it from the same samples.

    The dtype with the lowest precision among the parameters sets the tolerance.

    Communication: a gather of one number over tp, for which the host waits.
    """
    axis = main.mesh.tp
    dtypes = {main.parameter(name).dtype for name in main.names}
    spacing = max(
        (torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0
    )
    tolerance = min(_TOLERANCE, 10 * spacing**0.5)
    losses = all_gather_objects(float(loss), axis)
    # Another check raises an error for losses that are not finite, and names their rank.
    if not all(map(math.isfinite, losses)) or all(
        math.isclose(value, losses[0], rel_tol=tolerance, abs_tol=tolerance / 10)
        for value in losses
    ):
        return
    values = ", ".join(
        f"{value:.9g} on rank {rank}" for rank, value in zip(axis.ranks, losses, strict=True)
    )
    raise ReplicaMismatchError(
        "the ranks of tp must compute the same loss, because they have the same samples: it is "
        f"{values}. If a term of the loss, such as a penalty, is computed between a 'column' and a "
        "'row' layer, each rank has its own features there: compute it after the 'row' layer, or "
        "give the layers around it the kinds 'column_gather' and 'row_split', or 'replicate', in "
        "tensor_parallel_plan. If the step draws random numbers, use the same seed on every rank."
    )


def check_frozen_copies(main: MainParameters) -> None:
    """Compare frozen parameters that several stages have, such as those of a teacher, over pp.

    Communication: a gather of numbers over pp on the CPU, if there are such parameters. The host
    waits once for the device, whatever their number.
    """
    if not main.on_several_stages:
        return
    names = sorted(main.on_several_stages)
    held = [name for name in names if main.holds(name)]
    sums = [_bit_sums(main.parameter(name)) for name in held]
    numbers = torch.stack(sums).tolist() if sums else []
    local_sums = dict(zip(held, map(tuple, numbers), strict=True))
    stages = all_gather_objects(local_sums, main.mesh.pp_cpu)
    wrong = []
    for name in names:
        sums_of_stages = {sums[name] for sums in stages if name in sums}
        if len(sums_of_stages) > 1:
            wrong.append(name)
    if wrong:
        raise ReplicaMismatchError(
            "a frozen model beside the one that is cut into stages must have the same weights on "
            f"all stages: {', '.join(map(repr, wrong[:_NUM_SHOWN]))} differ between the ranks of "
            "pp. Code that writes weights of the cut model into it, such as an exponential moving "
            "average, reaches only the blocks of its own stage. Write the same values on every "
            "rank, or use pp=1."
        )


def check_tensor_replicas(
    main: MainParameters, whole: Sequence[str], names: Collection[str]
) -> None:
    """Compare replicated parameters over tp, and their gradients before the optimizer step.

    Each rank computes both by itself. Kernels without a fixed order of summation may round
    differently on each rank, so the comparison has a tolerance: relative to the gradient, plus the
    rounding error of sums that cancel. A parameter whose gradient is only rounding error is
    skipped, because an optimizer that divides by the gradient's magnitude moves it at random.

    Args:
        whole: Names of the parameters that every rank of tp has whole.

    Communication: one all-reduce over tp, for which the host waits; a gather of values on failure.
    """
    # Integers are not trained; their bits are compared over the data axis.
    whole = [
        name
        for name in whole
        if main.parameter(name).dtype.is_floating_point or main.parameter(name).is_complex()
    ]
    gradients = {name: _gradient(main, name) for name in whole if name in names}
    parameters = {name: main.parameter(name).detach() for name in whole}
    strange, noisy = _differing(main, gradients)
    wrong = {("gradients", name): gradients[name] for name in strange if name not in noisy}
    strange, _ = _differing(main, parameters)
    wrong |= {("parameters", name): parameters[name] for name in strange if name not in noisy}
    _refuse(wrong, main.mesh.tp, _REMEDY_FOR_GRADIENTS)


def _differing(main: MainParameters, tensors: Mapping[str, Tensor]) -> tuple[list[str], set[str]]:
    """Return the tensors that differ over tp by more than rounding, and those that may be only
    rounding.
    """
    strange: list[str] = []
    noisy: set[str] = set()
    if not tensors:
        return strange, noisy
    local_sums = torch.stack(list(map(_float_sums, tensors.values())))
    # Replace values that are not finite: the difference of two infinities would be NaN.
    local_sums = local_sums.nan_to_num(nan=1e300, posinf=2e300, neginf=-2e300)
    highest, apart = _spread(local_sums, main.mesh.tp)
    distances = apart.cpu()[:, :_NUM_SUMS].amax(1)
    norms = highest.cpu()[:, _NUM_SUMS]
    num_elements = sum(tensor.numel() for tensor in tensors.values())
    typical = float(norms.square().sum() / max(1, num_elements)) ** 0.5
    for (name, tensor), distance, norm in zip(
        tensors.items(), distances.tolist(), norms.tolist(), strict=True
    ):
        # The relative rounding error of sums that cancel.
        rounding = torch.finfo(main.parameter(name).dtype).eps ** 0.5
        floor = rounding * typical * tensor.numel() ** 0.5
        if norm <= floor:
            noisy.add(name)
        if distance > min(_TOLERANCE, 10 * rounding) * norm + floor:
            strange.append(name)
    return strange, noisy


def _spread(sums: Tensor, axis: MeshAxis) -> tuple[Tensor, Tensor]:
    """Return the largest of each rank's sums, and the distance between largest and smallest."""
    highest, lowest = all_reduce_(torch.stack([sums, -sums]), axis, "max").unbind()
    return highest, highest + lowest


def check_data_replicas(main: MainParameters) -> None:
    """Compare the parameters of ranks with the same part (dp, cp, expert copies) bit by bit.

    Each value was computed by one rank, or by all ranks from the same sum, so the bits must be
    equal.

    Communication: one all-reduce over the data axis, one over that of experts, and one over the
    embedding axis where an embedding is tied, for which the host waits; a gather of values on
    failure.
    """
    mesh = main.mesh
    tied = {name for pair in main.ties or () for name in pair}
    for axis, is_compared in (
        (mesh.data, lambda name: not main.spec(name).is_expert),
        (mesh.edp, lambda name: main.spec(name).is_expert),
        (mesh.embedding, lambda name: name in tied),
    ):
        names = [name for name in main.names if is_compared(name)] if axis.size > 1 else []
        if names:
            _check_bits(main, names, axis)


def _check_bits(main: MainParameters, names: Sequence[str], axis: MeshAxis) -> None:
    local_sums = torch.stack([_bit_sums(main.parameter(name)) for name in names])
    _, apart = _spread(local_sums, axis)
    are_wrong = apart.any(1).tolist()
    wrong = {
        ("parameters", name): main.parameter(name).detach()
        for name, is_wrong in zip(names, are_wrong, strict=True)
        if is_wrong
    }
    _refuse(wrong, axis, _REMEDY_FOR_PARAMETERS)


def _gradient(main: MainParameters, name: str) -> Tensor:
    main_slice = main.slices.get(name)
    if main_slice is None:
        return main.parameter(name).new_empty(0)
    shown = main_slice.main.grad
    return (
        torch.zeros_like(main_slice.main, dtype=main_slice.shown_dtype) if shown is None else shown
    )


def _float_sums(tensor: Shaped[Tensor, "..."]) -> Float[Tensor, "8"]:
    """Return sums and the norm of a tensor, for a comparison with tolerance.

    Random errors change a sum by about the norm of the error, so sums are compared relative to the
    norm.
    """
    flat = _numbers_of(tensor)
    norm = torch.linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
    return torch.cat([_sums(flat, torch.float64), norm.double().reshape(1)])


def _bit_sums(tensor: Tensor) -> Tensor:
    flat = _numbers_of(tensor)
    return _sums(flat.view(_INTEGER_DTYPES[flat.element_size()]), torch.int64)


def _numbers_of(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def _sums(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the elements that are ``_NUM_SUMS`` apart."""
    sums = flat.new_zeros(_NUM_SUMS, dtype=dtype)
    # A sum in a wider dtype may cast all its elements first, so pieces bound the memory.
    for piece in flat.split(_PIECE):
        num_rows = piece.numel() // _NUM_SUMS
        rest = piece[num_rows * _NUM_SUMS :]
        sums += piece[: num_rows * _NUM_SUMS].view(num_rows, _NUM_SUMS).sum(0, dtype=dtype)
        sums[: rest.numel()] += rest
    return sums


def _refuse(wrong: Mapping[tuple[str, str], Tensor], axis: MeshAxis, remedy: str) -> None:
    """Raise an error that names tensors by kind and name, if there are any."""
    if not wrong:
        return
    shown = list(wrong.items())[:_NUM_SHOWN]
    norms = [float(torch.linalg.vector_norm(tensor.double())) for _, tensor in shown]
    norms_by_rank = all_gather_objects(norms, axis)
    differences = []
    for ((what, name), _), *values_by_rank in zip(shown, *norms_by_rank, strict=True):
        values = ", ".join(
            f"{value:.9g} on rank {rank}"
            for rank, value in zip(axis.ranks, values_by_rank, strict=True)
        )
        differences.append(f"the {what} {name!r} ({what.removesuffix('s')} norm {values})")
    more = f" and {len(wrong) - _NUM_SHOWN} more" if len(wrong) > _NUM_SHOWN else ""
    raise ReplicaMismatchError(
        f"the ranks of {axis.name} must hold equal copies of a parameter, and update them equally: "
        f"they differ in {'; '.join(differences)}{more}. {remedy}"
    )


class PartialGradientSearch:
    """Search for unsharded parameters whose gradients are partial sums over the tensor axis.

    A parameter that is used between a ``column`` and a ``row`` layer (a norm of heads, a PReLU)
    gets gradients only from the features of its rank. The autograd graph reveals such uses: the
    layers of this package declare which of their gradients are partial, and the nodes between two
    layers do not change that. Parameters of this package's models are skipped, because their shard
    specs declare partial gradients.
    """

    def __init__(self, module: nn.Module, mesh: ParallelMesh, whole: Collection[str]) -> None:
        self._mesh = mesh
        self._replicated = frozenset(whole)
        models = [model for _, model in pipelined_modules(module)]
        model_parameter_ids = {
            id(parameter)
            for model in models
            if not isinstance(model, StagedBlocks)
            for parameter in model.parameters()
        }
        # Only parameters outside of the package's own models need the walk over the graph.
        self._names: Mapping[int, str] = (
            {
                id(parameter): name
                for name, parameter in module.named_parameters()
                if id(parameter) not in model_parameter_ids
            }
            if mesh.tp.size > 1
            else {}
        )
        #: Names of the unsharded parameters that got partial gradients.
        self.partial_names: set[str] = set()

    def inspect(self, node: Any, is_loss: bool = True) -> None:
        """Examine the graph that a backward pass is about to run through.

        Args:
            node: Root of the graph: the node of the loss, or of the tensor that a pipeline stage
                sends; None if there is no graph.
        """
        if not self._names or node is None:
            return
        start: Region = "unknown" if not is_loss and self._mesh.sequence_parallel else "whole"
        for parameter, regions in _leaves(node, start).values():
            name = self._names.get(id(parameter))
            if name is not None and "unknown" not in regions:
                self._classify(name, parameter, regions)

    def _classify(self, name: str, parameter: Tensor, regions: set[Region]) -> None:
        spec = shard_spec_of(parameter)
        is_whole = name in self._replicated or (spec.is_expert and (spec.is_whole or spec.over_ep))
        if "mixed" in regions or (is_whole and len(regions) > 1):
            raise ParallelPlanError(
                "all values between a 'column' and a 'row' layer must come from 'column' layers: a "
                f"value computed from {name!r} is used there directly, so the gradient of {name!r} "
                "mixes complete values with this rank's parts, and neither a sum over tp nor the "
                "gradient itself is correct. Pass this value through the 'column' layer, or give "
                "the layers around it the kind 'replicate' in tensor_parallel_plan."
            )
        if not is_whole:
            if "whole" in regions:
                raise ParallelPlanError(
                    f"a parameter that is cut over tp must be used only by its own layer: {name!r} "
                    f"is read by other code, which gets this rank's part, {tuple(parameter.shape)} "
                    f"of {spec.full_shape}. Leave the parameter out of such code, or give its "
                    "layer the kind 'replicate' in tensor_parallel_plan."
                )
        elif spec.partial and "part" not in regions:
            raise ParallelPlanError(
                "the kind 'partial' is for parameters between a 'column' and a 'row' layer: "
                f"{name!r} is used on all features, so its gradient would be counted once for each "
                "rank of tp. Leave its module out of tensor_parallel_plan."
            )
        elif not spec.partial and "part" in regions:
            self.partial_names.add(name)


def _leaves(root: Any, start: Region) -> dict[int, tuple[Tensor, set[Region]]]:
    """Return the parameters that a graph reaches, each with the states of its gradients."""
    leaves: dict[int, tuple[Tensor, set[Region]]] = {}
    visited: set[tuple[Any, Region]] = set()
    waiting: list[tuple[Any, Region]] = [(root, start)]
    while waiting:
        node, region = waiting.pop()
        if (node, region) in visited:
            continue
        visited.add((node, region))
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.setdefault(id(leaf), (leaf, set()))[1].add(region)
            continue
        children = [child for child, _ in node.next_functions]
        regions = _regions_of_inputs(node, region, len(children))
        waiting += [
            (child, child_region)
            for child, child_region in zip(children, regions, strict=False)
            if child is not None
        ]
    return leaves


def _regions_of_inputs(node: Any, region: Region, count: int) -> list[Region]:
    function = getattr(type(node), "_forward_cls", None)
    describe = getattr(function, "border", None)
    border: BoundaryGradients | None = None if describe is None else describe(node)
    if border is None:
        # A compiled region is one opaque node, so its uses are not known.
        return ["unknown" if "Compiled" in type(node).__name__ else region] * count
    if region == "part" and not border.takes_parts:
        return ["mixed"] * count
    return ["part" if is_part else "whole" for is_part in border.gives_parts[:count]]
