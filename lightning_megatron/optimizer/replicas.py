"""Comparison of replicated parameters, gradients and losses between ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from lightning_megatron.errors import ReplicaMismatchError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_
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

    Args:
        main: Parameters of this rank; their dtype with the lowest precision sets the tolerance.
        loss: Scalar loss of this rank.

    Raises:
        ReplicaMismatchError: On every rank of the axis, naming the values by rank.

    Communication: a gather of one number over tp, for which the host waits.
    """
    axis = main.mesh.tp
    dtypes = {main.parameter(name).dtype for name in main.names}
    spacing = max(
        (torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0
    )
    tolerance = min(_TOLERANCE, 10 * spacing**0.5)
    losses = all_gather_objects(float(loss), axis)
    has_same_form = all(
        math.isclose(value, losses[0], rel_tol=tolerance, abs_tol=tolerance / 10)
        for value in losses
    )
    # Another check raises an error for losses that are not finite, and names their rank.
    if has_same_form or not all(map(math.isfinite, losses)):
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

    Args:
        main: Parameters of this rank.

    Raises:
        ReplicaMismatchError: On every rank of the axis, naming parameters.

    Communication: a gather of numbers over pp on the CPU, if there are such parameters.
    """
    if not main.on_several_stages:
        return
    names = sorted(main.on_several_stages)
    held = [name for name in names if main.holds(name)]
    local_sums = [_bit_sums(main.parameter(name).detach()) for name in held]
    # One wait for the device, whatever the number of parameters.
    numbers = torch.stack(local_sums).tolist() if local_sums else []
    sums_by_stage = all_gather_objects(dict(zip(held, numbers, strict=True)), main.mesh.pp_cpu)
    sums_by_name: dict[str, list[list[int]]] = {name: [] for name in names}
    for found in sums_by_stage:
        for name, sums in found.items():
            sums_by_name[name].append(sums)
    wrong = [name for name, sums in sums_by_name.items() if not _are_equal(sums)]
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
        main: Parameters with finished gradients.
        whole: Names of the parameters that every rank of tp has whole.
        names: Names of the parameters whose gradients are finished.

    Raises:
        ReplicaMismatchError: On every rank of the axis, naming parameters, ranks and values.

    Communication: one all-reduce over tp, for which the host waits; a gather of values on failure.
    """
    axis = main.mesh.tp
    # Integers are not trained; their bits are compared over the data axis.
    whole = [
        name
        for name in whole
        if main.parameter(name).dtype.is_floating_point or main.parameter(name).is_complex()
    ]
    gradients = {name: _gradient(main, name) for name in whole if name in names}
    parameters = {name: main.parameter(name).detach() for name in whole}
    if not whole:
        return
    local_sums = torch.stack(
        [_float_sums(tensor) for tensor in (*gradients.values(), *parameters.values())]
    )
    # Replace values that are not finite: the difference of two infinities would be NaN.
    local_sums = local_sums.nan_to_num(nan=1e300, posinf=2e300, neginf=-2e300)
    highest, lowest = (
        all_reduce_(torch.stack([local_sums, -local_sums]), axis, "max").cpu().unbind()
    )
    apart = (highest + lowest)[:, :_NUM_SUMS].amax(1)
    norms = highest[:, _NUM_SUMS]
    rounding = {name: torch.finfo(main.parameter(name).dtype).eps ** 0.5 for name in whole}
    count = len(gradients)
    strange, noisy = _split_by_rounding(gradients, apart[:count], norms[:count], rounding)
    wrong = [("gradients", name) for name in strange if name not in noisy]
    strange, _ = _split_by_rounding(parameters, apart[count:], norms[count:], rounding)
    wrong += [("parameters", name) for name in strange if name not in noisy]
    if wrong:
        _refuse(
            wrong, {"gradients": gradients, "parameters": parameters}, axis, _REMEDY_FOR_GRADIENTS
        )


def _split_by_rounding(
    tensors: Mapping[str, Tensor], distances: Tensor, norms: Tensor, rounding: Mapping[str, float]
) -> tuple[list[str], set[str]]:
    """Return the tensors that differ by more than rounding, and those that may be only rounding.

    Args:
        tensors: Tensors of this rank, by name.
        distances: Distance of each tensor between the ranks.
        norms: Largest norm of each tensor.
        rounding: Relative rounding error of sums that cancel, by name.
    """
    num_elements = sum(tensor.numel() for tensor in tensors.values())
    typical = float(norms.square().sum() / max(1, num_elements)) ** 0.5
    strange = []
    noisy = set()
    for (name, tensor), distance, norm in zip(
        tensors.items(), distances.tolist(), norms.tolist(), strict=True
    ):
        floor = rounding[name] * typical * tensor.numel() ** 0.5
        if norm <= floor:
            noisy.add(name)
        if distance > min(_TOLERANCE, 10 * rounding[name]) * norm + floor:
            strange.append(name)
    return strange, noisy


def check_data_replicas(main: MainParameters) -> None:
    """Compare the parameters of ranks with the same part (dp, cp, expert copies) bit by bit.

    Each value was computed by one rank, or by all ranks from the same sum, so the bits must be
    equal.

    Raises:
        ReplicaMismatchError: On every rank of the axis, naming parameters, ranks and values.

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
    inside = set(names)
    buffers = [buffer for buffer in main.buffers if inside.issuperset(buffer.members)]
    buffered = {name for buffer in buffers for name in buffer.members}
    # A whole buffer needs only a few sums, regardless of its number of parameters.
    flat = [buffer.parameters for buffer in buffers]
    flat += [main.parameter(name) for name in names if name not in buffered]
    local_sums = torch.stack([_bit_sums(tensor.detach()) for tensor in flat])
    highest, lowest = all_reduce_(torch.stack([local_sums, -local_sums]), axis, "max").unbind()
    if not bool((highest + lowest).any()):
        return
    tensors = {name: main.parameter(name).detach() for name in names}
    sums_by_rank = all_gather_objects(
        [_bit_sums(tensor).tolist() for tensor in tensors.values()], axis
    )
    wrong = [
        ("parameters", name)
        for name, *sums in zip(names, *sums_by_rank, strict=True)
        if not _are_equal(sums)
    ]
    _refuse(wrong, {"parameters": tensors}, axis, _REMEDY_FOR_PARAMETERS)


def _are_equal(sums: Sequence[Sequence[int]]) -> bool:
    return all(other == sums[0] for other in sums)


def _gradient(main: MainParameters, name: str) -> Tensor:
    main_slice = main.slices.get(name)
    if main_slice is None:
        return main.parameter(name).new_empty(0)
    return (
        torch.zeros_like(main_slice.main) if main_slice.main.grad is None else main_slice.main.grad
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


def _refuse(
    wrong: Sequence[tuple[str, str]],
    tensors: Mapping[str, Mapping[str, Tensor]],
    axis: MeshAxis,
    remedy: str,
) -> None:
    shown = wrong[:_NUM_SHOWN]
    norms = [float(torch.linalg.vector_norm(tensors[what][name].double())) for what, name in shown]
    norms_by_rank = all_gather_objects(norms, axis)
    differences = []
    for number, (what, name) in enumerate(shown):
        values = ", ".join(
            f"{rank_norms[number]:.9g} on rank {rank}"
            for rank, rank_norms in zip(axis.ranks, norms_by_rank, strict=True)
        )
        differences.append(f"the {what} {name!r} ({what.removesuffix('s')} norm {values})")
    more = f" and {len(wrong) - _NUM_SHOWN} more" if len(wrong) > _NUM_SHOWN else ""
    raise ReplicaMismatchError(
        f"the ranks of {axis.name} must hold equal copies of a parameter, and update them equally: "
        f"they differ in {'; '.join(differences)}{more}. {remedy}"
    )
