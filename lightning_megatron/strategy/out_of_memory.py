"""What a rank reports when its memory is full: what it held, the estimate, and what would help."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.budget import GIB, StageMemory
from lightning_megatron.plan.columns import align_columns
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.recomputation import WHOLE, Recomputation
from lightning_megatron.strategy.memory_estimate import (
    STATIC_PARTS,
    MemoryCase,
    estimate_of,
    held_bytes,
)
from lightning_megatron.strategy.private.loops import batch_of
from lightning_megatron.strategy.run import Run

_NUM_TENSORS = 5
#: Fraction of the peak that an option must save to be listed.
_WORTH = 0.005
#: Fraction of the estimate by which tensors may exceed it before that is said.
_UNEXPLAINED = 0.1
#: Report of an error before the run exists.
BEFORE_RUN = (
    "the memory was full before training began, while the model, its gradients and main parameters "
    "were created. Build the model in configure_model, where every rank creates its shard alone, "
    "and raise tp or pp: see docs/out_of_memory.md."
)


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device by torch's allocator (bytes).

    Args:
        allocated: Memory of tensors.
        reserved: Memory that the allocator has taken from the device.
        free: Memory that no program has taken.
        total: Capacity.
    """

    allocated: int
    reserved: int
    free: int
    total: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a device; None on CPUs."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    return DeviceMemory(allocated, torch.cuda.memory_reserved(device), free, total)


def explain_out_of_memory(run: Run, optimizers: Sequence[Optimizer], error: BaseException) -> str:
    """Return the report of a rank whose memory is full.

    Args:
        optimizers: Optimizers of the run.
        error: Error of the allocator, whose frames still hold the tensors of the step.
    """
    batch = batch_of(error, run.module.trainer)
    estimate, reason = estimate_of(run, optimizers, batch)
    device = device_memory(run.mesh.device)
    held = held_bytes(run, optimizers)
    is_large = max(estimate.peak, device.total if device else 0) >= GIB
    unit = "GiB" if is_large else "MiB"
    scale = GIB if is_large else 2**20
    title = f"{unit} of rank {run.mesh.rank} (stage {run.mesh.pp.rank}, {run.mesh.device})"
    parts = [
        _held_table(title, estimate, held, device, scale),
        _tensor_table(f"largest tensors ({unit})", _known_tensors(run, optimizers, error), scale),
    ]
    if not reason:
        more = 0 if device is None else device.allocated - estimate.peak
        if more > _UNEXPLAINED * estimate.peak:
            parts.append(
                f"{more / scale:.2f} {unit} are more than the estimate: look for tensors that your "
                "code or a callback keeps from step to step."
            )
        parts.append(_savings_table(MemoryCase.of_batch(run, optimizers, batch), unit, scale))
    else:
        parts.append(f"A step has no estimate: {reason}")
        parts.append(_advice_by_share(held, device, unit, scale))
    if device is not None and device.reserved - device.allocated > device.total / 10:
        parts.append(
            "PYTORCH_ALLOC_CONF=expandable_segments:True lets the allocator use what it has "
            "reserved in pieces."
        )
    return "\n\n".join([*parts, "docs/out_of_memory.md has what each option costs."])


def _held_table(
    title: str,
    estimate: StageMemory,
    held: dict[str, int],
    device: DeviceMemory | None,
    scale: int,
) -> str:
    def size(value: int | None) -> str:
        return "n/a" if value is None else f"{value / scale:.2f}"

    is_whole = estimate.activations > 0
    rest = None if device is None else device.allocated - sum(held.values())
    rows = [(title, "estimate", "held")]
    rows += [
        (name.replace("_", " "), size(getattr(estimate, name)), size(held[name]))
        for name in STATIC_PARTS
    ]
    others = size(estimate.peak - estimate.static if is_whole else None)
    rows.append(("activations and all else", others, size(rest)))
    if device is not None:
        outside = device.total - device.free - device.reserved
        peak = size(estimate.peak if is_whole else None)
        rows += [
            ("together", peak, size(device.allocated)),
            ("reserved, but unused", "", size(device.reserved - device.allocated)),
            ("outside of torch's allocator", "", size(outside)),
            ("capacity", "", size(device.total)),
        ]
    return align_columns(rows)


def _tensor_table(title: str, tensors: Iterator[tuple[Tensor, str]], scale: int) -> str:
    """Return the largest tensors, each memory once under its first name."""
    found: dict[int, tuple[int, str]] = {}
    # Subclasses, such as weights that are kept in 8 bits, would answer for a copy.
    with torch._C.DisableTorchFunctionSubclass():
        for tensor, name in tensors:
            with suppress(RuntimeError, NotImplementedError):  # tensors without memory of their own
                storage = tensor.untyped_storage()
                shape = " x ".join(map(str, tensor.shape))
                dtype = str(tensor.dtype).removeprefix("torch.")
                found.setdefault(storage.data_ptr(), (storage.nbytes(), f"{name}: {dtype} {shape}"))
    found.pop(0, None)
    largest = sorted(found.values(), reverse=True)[:_NUM_TENSORS]
    lines = [f"  {size / scale:8.2f}  {text}" for size, text in largest]
    return "\n".join([title, *lines])


def _known_tensors(
    run: Run, optimizers: Sequence[Optimizer], error: BaseException
) -> Iterator[tuple[Tensor, str]]:
    """Yield the tensors that Python can reach on the run's device, with their names.

    What only the backward graph keeps has no Python object, and is in "activations and all else".
    """
    main = run.state.main
    for buffer in main.buffers:
        first, *others = buffer.members
        whose = f"of {first}" + (f" and {len(others)} others" if others else "")
        for part in ("parameters", "gradients", "main_parameters"):
            if (tensor := getattr(buffer, part)) is not None:
                yield tensor, f"{part.replace('_', ' ')} {whose}"
    names = {id(parameter): name for name, parameter in main.main_parameters.items()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter), "a parameter")
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield value, f"{key} of {name}"
    for name, tensor in (*run.module.named_parameters(), *run.module.named_buffers()):
        yield tensor, name
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        for name, value in frame.f_locals.items():
            if isinstance(value, Tensor):
                yield value, f"{name} of {frame.f_code.co_name}, line {line}"
    for value in gc.get_objects():
        # An attribute of a lazy object may import a module, so that the type is asked.
        if issubclass(type(value), Tensor) and value.device.type == run.mesh.device.type:
            yield value, f"a tensor{_origin_of(value)}"


def _origin_of(tensor: Tensor) -> str:
    """Return the operator that made a tensor, as words; nothing without or with an invalid one."""
    with suppress(RuntimeError):  # autograd refuses views whose base was written
        if tensor.grad_fn is not None:
            return f", made by {tensor.grad_fn.name()}"
    return ""


def _savings_table(case: MemoryCase, unit: str, scale: int) -> str:
    """Return the estimates of the fullest stage with other options, from cheap to costly."""
    now = _fullest(case)
    title = f"what would help ({unit} of the fullest stage, now {now / scale:.2f})"
    rows = [(title, "estimate", "saves")]
    for name, changed in (*_other_steps(case), *_other_layouts(case)):
        with suppress(ParallelPlanError, UnsupportedError):
            size = _fullest(changed)
            if now - size > _WORTH * now:
                rows.append((name, f"{size / scale:.2f}", f"{(now - size) / scale:.2f}"))
    return align_columns(rows)


def _fullest(case: MemoryCase) -> int:
    return max(stage.peak for stage in case.estimate())


def _other_steps(case: MemoryCase) -> Iterator[tuple[str, MemoryCase]]:
    """Yield options of the step that need less memory, with their names."""
    training = case.training
    changes: dict[str, dict[str, Any]] = {}
    if training.loss_chunk is None:
        changes["loss_chunk='auto'"] = {"loss_chunk": "auto"}
    if training.microbatch_size > 1:
        half = training.microbatch_size // 2
        number = -(-training.num_microbatches * training.microbatch_size // half)
        changes[f"microbatch_size={half}"] = {"microbatch_size": half, "num_microbatches": number}
    recomputation = Recomputation.of(training.recompute)
    if recomputation.layers is not None or not set(recomputation.parts) & set(WHOLE):
        changes |= {f"recompute={part!r}": {"recompute": part} for part in reversed(WHOLE)}
    if training.cuda_graphs is not None:
        changes["cuda_graphs=None"] = {"cuda_graphs": None}
    if not training.zero:
        changes["optimizer.zero=1"] = {"zero": 1}
    if training.main_bytes and training.gradient_bytes == 4:
        changes["optimizer.gradient_dtype='bfloat16'"] = {"gradient_bytes": 2}
    if training.fp8 is None and training.parameter_bytes == 2:
        fp8 = FP8("tensorwise", parameters="fp8")
        changes["fp8 (tensorwise, parameters='fp8')"] = {"fp8": fp8}
    for name, change in changes.items():
        with suppress(ParallelPlanError):
            yield name, replace(case, training=replace(training, **change))


def _other_layouts(case: MemoryCase) -> Iterator[tuple[str, MemoryCase]]:
    """Yield layouts with twice the size of an axis, for the same batch of all ranks."""
    layout = case.layout
    for axis in ("tp", "pp", "cp"):
        size = 2 * getattr(layout, axis)
        # Half of the replicas process twice the microbatches each; a single one needs more ranks.
        factor = 2 if layout.dp % 2 == 0 else 1
        world = layout.world_size * 2 // factor
        name = f"{axis}={size}" + (f" on {world} ranks" if factor == 1 else "")
        training = replace(
            case.training,
            num_microbatches=case.training.num_microbatches * factor,
            sequence_parallel=case.training.sequence_parallel or axis == "tp",
        )
        with suppress(ParallelPlanError, UnsupportedError):
            changed: dict[str, Any] = {axis: size, "world_size": world, "stage_layers": None}
            if axis == "tp" and layout.etp == layout.tp:
                changed["etp"] = size
            yield name, replace(case, layout=replace(layout, **changed), training=training)


def _advice_by_share(
    held: dict[str, int], device: DeviceMemory | None, unit: str, scale: int
) -> str:
    """Return what would help a module whose activations have no estimate, from what is held."""
    static = sum(held.values())
    rows = [(f"what would help, by what is held ({unit})", "saves")]
    rows.append(("twice the tp or pp", f"{static / 2 / scale:.2f}"))
    if device is not None:
        rest = (device.allocated - static) / 2 / scale
        rows.insert(1, ("half the samples of a microbatch", f"{rest:.2f}"))
    return align_columns(rows)
