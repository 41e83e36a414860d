"""Optimizer step in one kernel: clip, update moments and main parameters, and round them."""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.layers.fused.choose_kernels import choose_kernels, warn_of_slow_path
from lightning_megatron.optimizer.flat_buffer import same_objects
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.shapes import Float

logger = logging.getLogger(__name__)

#: Function that updates slices of one group in place, with the arguments of ``kernels.AdamKernel``.
Kernel = Callable[..., None]
# Rows of 12 float32 numbers have equal alignment, so that one compiled kernel can read all groups.
_COLUMNS = 12
_MOMENTS = ("exp_avg", "exp_avg_sq")
_Row = tuple[nn.Parameter, Tensor, Tensor, Tensor, Tensor, Tensor | None]
#: Piece of the step, group, dtypes of the gradients and of the half-precision views.
_CallKey = tuple[int, int, torch.dtype, torch.dtype | None]
#: Size of a piece of a step: about half a millisecond of an H200 (elements).
_PIECE = 64_000_000


class GroupNumbers:
    """Device table with one row of numbers for each group of an optimizer.

    A captured update reads the table at each replay, so that learning rates and other settings may
    change between steps. The table keeps its address while the number of groups does not change.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._values: list[tuple[float, ...]] = []
        self._table = torch.empty(0, _COLUMNS, device=device)
        #: Row of each group.
        self.rows: tuple[Float[Tensor, "12"], ...] = ()

    def fill(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Write the numbers of the groups in one copy, for which the host does not wait."""
        values = list(map(numbers_of, groups))
        if values == self._values:
            return
        if len(values) != len(self._values):
            self._table = torch.empty(len(values), _COLUMNS, device=self._device)
            self.rows = self._table.unbind()
        self._values = values
        # torch reuses pinned memory only after copies from it are complete, so a later step cannot
        # overwrite numbers that are still being copied.
        host = torch.tensor(values, dtype=torch.float32, pin_memory=self._device.type == "cuda")
        self._table.copy_(host, non_blocking=True)


def numbers_of(group: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the numbers that an Adam step of a group reads, in the order of its kernel.

    They are the learning rate; the logarithms of both decay rates of moments (betas), each as a sum
    of two float32 numbers; the first beta and 1 minus it; the second beta and 1 minus it; eps; the
    factor of the weight decay; 0.
    """
    lr = float(group["lr"])
    beta1, beta2 = map(float, group["betas"])
    decay = float(group["weight_decay"])
    return (
        lr,
        *_two_floats(_log(beta1)),
        *_two_floats(_log(beta2)),
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        float(group["eps"]),
        lr * decay if group["decoupled_weight_decay"] else decay,
        0.0,
    )


def _log(beta: float) -> float:
    # The logarithm of 0 is replaced by a number whose exponential is 0 in float64.
    return math.log(beta) if beta > 0.0 else -1e30


def _two_floats(value: float) -> tuple[float, float]:
    """Split a float64 number into a sum of two float32 numbers, the type of the table."""
    high = struct.unpack("f", struct.pack("f", value))[0]
    return high, value - high


@dataclass(frozen=True)
class KernelCall:
    """Call of the kernel for the slices of one group that have the same dtypes.

    Args:
        columns: Parameters, gradients, both moments, steps and half-precision views of the slices.
        numbers: Row of the group in the table of numbers.
    """

    kernel: Kernel
    columns: tuple[tuple[Any, ...], ...]
    numbers: Float[Tensor, "12"]
    group: Mapping[str, Any]

    @property
    def form(self) -> tuple[bool, bool]:
        """Return whether there is weight decay, and whether it is decoupled.

        A decoupled decay shrinks the parameters (AdamW) instead of being added to the gradients
        (Adam).
        """
        return self.group["weight_decay"] != 0.0, bool(self.group["decoupled_weight_decay"])


@dataclass(frozen=True)
class UpdatePiece:
    """Part of a step: kernel calls that run before the calls of the next piece."""

    calls: Sequence[KernelCall]
    names: Sequence[str]

    @torch.no_grad()
    def run(self, coefficient: Float[Tensor, ""] | None) -> None:
        """Multiply gradients by the factor, update the slices and round them into parameters.

        A CUDA graph can capture this call after an uncaptured step with the same tensors.
        """
        factor = None if coefficient is None else coefficient.float()
        for call in self.calls:
            has_decay, is_decoupled = call.form
            call.kernel(
                *call.columns,
                factor,
                call.numbers,
                has_decay=has_decay,
                is_decoupled=is_decoupled,
            )


@dataclass(frozen=True, eq=False)
class FusedStep:
    """Step over all slices of an optimizer that have a gradient.

    It serves later steps while the tensors of the optimizer are the same objects, and its numbers
    are read anew.

    Args:
        pieces: Parts of the step, at least one, in the order in which the next forward pass reads
            the parameters.
        objects: Groups, tensors and states of the optimizer.
        is_static: Whether later steps can use the same tensors, because all gradients lie in the
            flat buffers. Keeping the step then costs no memory.
    """

    pieces: Sequence[UpdatePiece]
    objects: Sequence[object]
    is_static: bool

    @property
    def calls(self) -> Iterator[KernelCall]:
        """Return the calls of all pieces."""
        return (call for piece in self.pieces for call in piece.calls)

    @property
    def names(self) -> set[str]:
        """Return the names of the parameters whose slices are updated."""
        return {name for piece in self.pieces for name in piece.names}

    @property
    def form(self) -> Hashable:
        """Return the settings that a captured CUDA graph contains as constants, without tensors."""
        return tuple(call.form for call in self.calls)

    def addresses(self) -> Hashable:
        """Return the addresses of all tensors."""
        return tuple(
            tensor.data_ptr()
            for call in self.calls
            for column in (*call.columns, (call.numbers,))
            for tensor in column
            if tensor is not None
        )

    def end(self) -> None:
        """Set the gradients to None, so that the optimizer's own step finds nothing to update."""
        for call in self.calls:
            for parameter in call.columns[0]:
                parameter.grad = None


def _objects_of(optimizer: Optimizer) -> list[object]:
    objects: list[object] = []
    for group in optimizer.param_groups:
        objects += [group, *group["params"]]
        objects += [parameter.grad for parameter in group["params"]]
    objects += optimizer.state.values()
    objects += chain.from_iterable(map(dict.values, optimizer.state.values()))
    return objects


class FusedUpdate:
    """Fused update of slices for torch's Adam and AdamW with ``fused=True``.

    The optimizer's state keeps torch's layout, so that checkpoints, schedulers and later steps of
    torch continue from it. An update sets the gradients that it has used to None. The optimizer's
    ``step`` must still be called, because it runs hooks and schedulers count it, but it then has
    nothing to update.

    Args:
        moments_dtype: Dtype of both moments: float32, or bfloat16 for half of their memory.
    """

    def __init__(self, moments_dtype: torch.dtype = torch.float32) -> None:
        self.moments_dtype = moments_dtype
        self._kernels: WeakKeyDictionary[Optimizer, dict[_CallKey, Kernel]] = WeakKeyDictionary()
        self._steps: WeakKeyDictionary[Optimizer, FusedStep] = WeakKeyDictionary()
        self._numbers: WeakKeyDictionary[Optimizer, GroupNumbers] = WeakKeyDictionary()
        self._warned: set[str] = set()

    def serves(self, main: MainParameters, optimizer: Optimizer) -> bool:
        """Return whether the kernel can update all slices of an optimizer; warn once if not."""
        reason = self.reason_against(main, optimizer)
        if reason is not None and reason not in self._warned:
            self._warned.add(reason)
            self._log_reason(reason, main, optimizer)
        return reason is None

    @staticmethod
    def _log_reason(reason: str, main: MainParameters, optimizer: Optimizer) -> None:
        if main.mesh.device.type == "cuda" and type(optimizer) in (Adam, AdamW):
            warn_of_slow_path(
                f"Optimizer steps run without the fused kernel: {reason}. Use "
                f"torch.optim.{type(optimizer).__name__}(..., fused=True) in precision 32-true, "
                "bf16-mixed or 16-mixed."
            )
        else:
            logger.debug("Optimizer steps run in torch's optimizer: %s.", reason)

    def adopt(self, main: MainParameters, optimizers: Iterable[Optimizer]) -> None:
        """Let optimizers that the kernel serves take sums of gradients without a copy in float32.

        Raises:
            UnsupportedError: If moments are not float32 and torch's own step would update them.
        """
        for optimizer in optimizers:
            reason = self.reason_against(main, optimizer)
            if reason is None:
                main.take_sums(optimizer)
            elif self.moments_dtype != torch.float32:
                dtype = str(self.moments_dtype).removeprefix("torch.")
                raise UnsupportedError(
                    f"optimizer.moments_dtype ({dtype}) needs the fused kernel, because torch "
                    f"keeps moments in the type of the parameters: {reason}. Use "
                    "torch.optim.AdamW(..., fused=True) on a GPU in precision 32-true, bf16-mixed "
                    "or 16-mixed, or optimizer.moments_dtype='float32'."
                )

    def reason_against(self, main: MainParameters, optimizer: Optimizer) -> str | None:
        """Return why the kernel cannot update an optimizer's slices; None if it can."""
        if type(optimizer) not in (Adam, AdamW):
            return f"{type(optimizer).__name__} is not torch's AdamW or Adam"
        for number, group in enumerate(optimizer.param_groups):
            if group.get("fused") is not True:
                return f"group {number} of {type(optimizer).__name__} does not set fused=True"
            for name in ("amsgrad", "maximize", "differentiable", "capturable"):
                if group.get(name):
                    return f"group {number} of {type(optimizer).__name__} sets {name}=True"
            if isinstance(group["lr"], Tensor) or any(
                isinstance(beta, Tensor) for beta in group["betas"]
            ):
                return f"the learning rate or the betas of group {number} are tensors"
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                is_trained = parameter.requires_grad and parameter.numel()
                if is_trained and parameter.dtype != torch.float32:
                    dtype = str(parameter.dtype).removeprefix("torch.")
                    return f"the main parameter of {main.name_of(parameter)!r} is {dtype}"
        make, reason = _find_kernel(main.mesh.device)
        return reason if make is None else None

    @torch.no_grad()
    def begin(self, main: MainParameters, optimizer: Optimizer) -> FusedStep:
        """Prepare the step over every slice that has a gradient; :meth:`serves` must be true.

        :meth:`UpdatePiece.run` of each piece, :meth:`FusedStep.end` and the optimizer's own
        ``step`` must follow. The host does not wait for the device.
        """
        # The kernel writes rounded parameters in place, so the all-gathers of the previous step
        # must be complete.
        main.wait()
        numbers = self._numbers.setdefault(optimizer, GroupNumbers(main.mesh.device))
        numbers.fill(optimizer.param_groups)
        step = self._steps.get(optimizer)
        if step is None or not same_objects(_objects_of(optimizer), step.objects):
            step = self._make_step(main, optimizer, numbers)
            self._steps.pop(optimizer, None)
            if step.is_static:
                self._steps[optimizer] = step
        return step

    def _make_step(
        self, main: MainParameters, optimizer: Optimizer, numbers: GroupNumbers
    ) -> FusedStep:
        rows: dict[str, tuple[int, _Row]] = {}
        is_static = True
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or parameter.numel() == 0:
                    continue
                name = main.name_of(parameter)
                main_slice = main.slices[name]
                is_static &= gradient is main_slice.gradient
                state = self._state_of(optimizer, parameter)
                row = (
                    parameter,
                    gradient.contiguous(),
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    state["step"],
                    main_slice.half,
                )
                rows[name] = number, row
        rows_by_key: dict[_CallKey, list[_Row]] = {}
        names: dict[int, list[str]] = {}
        num_taken = 0
        for name in main.order.sorted(rows):
            number, row = rows[name]
            parameter, gradient, *_, half = row
            # A kernel call takes one dtype of gradients and one of half views; `serves` has
            # checked the dtype of main parameters.
            half_dtype = None if half is None else half.dtype
            piece = num_taken // _PIECE
            rows_by_key.setdefault((piece, number, gradient.dtype, half_dtype), []).append(row)
            names.setdefault(piece, []).append(name)
            num_taken += parameter.numel()
        calls: dict[int, list[KernelCall]] = {piece: [] for piece in names}
        for key, members in rows_by_key.items():
            piece, number, *_ = key
            columns = tuple(zip(*members, strict=True))
            kernel = self._kernel(main, optimizer, key)
            group = optimizer.param_groups[number]
            calls[piece].append(KernelCall(kernel, columns, numbers.rows[number], group))
        pieces = [UpdatePiece(calls[piece], names[piece]) for piece in names]
        # Clipping runs with the first piece, so a rank without slices needs a piece, too.
        return FusedStep(pieces or [UpdatePiece((), ())], _objects_of(optimizer), is_static)

    def _kernel(self, main: MainParameters, optimizer: Optimizer, key: _CallKey) -> Kernel:
        kernels = self._kernels.setdefault(optimizer, {})
        if key not in kernels:
            make, reason = _find_kernel(main.mesh.device)
            assert make is not None, f"steps begin for optimizers that are served: {reason}"
            kernels[key] = make()
        return kernels[key]

    def _state_of(self, optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return a parameter's optimizer state in the kernel's dtypes; initialize it if empty."""
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in _MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=self.moments_dtype)
        # A checkpoint, or torch's load_state_dict, may set other dtypes.
        step = state["step"]
        if step.dtype != torch.float32 or step.device != parameter.device:
            state["step"] = step.to(parameter.device, torch.float32)
        for name in _MOMENTS:
            moment = state[name]
            if moment.dtype != self.moments_dtype or not moment.is_contiguous():
                state[name] = moment.to(self.moments_dtype).contiguous()
        return state


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether ``step`` of an optimizer has hooks, which may change its parameters."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    global_names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    hooks = [getattr(optimizer, name, None) for name in names]
    hooks += [getattr(torch_optimizer, name, None) for name in global_names]
    return any(hooks)


def _find_kernel(device: torch.device) -> tuple[Callable[[], Kernel] | None, str]:
    if device.type != "cuda":
        return None, f"main parameters are on {device.type}, the kernel is for GPUs"
    choice = choose_kernels(device)
    return (None, choice.reason) if choice.kernels is None else (choice.kernels.AdamKernel, "")
