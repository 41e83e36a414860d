"""Pretended devices: tensors without elements that claim to be on a GPU or a CPU.

Layers choose their kernels by the device of their tensors, and kernels decide what a step keeps. A
pretended device lets them choose as on the real one. Operators compute shapes alone, kernels of
Triton are not launched, and neither the GPU nor Triton need exist.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial, wraps
from importlib import import_module
from itertools import accumulate
from threading import get_ident
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._device import _device_constructors
from typing_extensions import override

import lightning_megatron.kernels
from lightning_megatron.experts.compute import backends, choose_backend
from lightning_megatron.experts.transport.transit import RowCounts
from lightning_megatron.groups.lone_mesh import functions_of_groups
from lightning_megatron.layers.attention import flex
from lightning_megatron.layers.fused import choose_kernels
from lightning_megatron.memory.live_memory import LiveMemory
from lightning_megatron.models.shape_inference import ShapeInference
from lightning_megatron.plan.grouped_gemm import workspace_bytes
from lightning_megatron.swap.weights import load

#: Streaming multiprocessors of an H100 or H200.
_NUM_SMS = 132
#: Index of the pretended GPU, so that no choice for a real one is remembered.
_INDEX = 127
_META = torch.device("meta")
#: Operators whose results, where the host reads one as a condition, tell of a fault: that any value
#: is wrong, or that one is not itself (NaN). What other operators tell of is taken as true.
_OF_FAULTS = torch.ops.aten.any, torch.ops.aten.ne, torch.ops.aten.isinf, torch.ops.aten.isnan
#: Operators whose result is a condition.
_COMPARISONS = torch.ops.aten.equal, torch.ops.aten.allclose
_UNLIKELY = "is_unlikely"
_KERNELS = "lightning_megatron.kernels.triton"
_TRITON = (
    "triton",
    "triton.language",
    "triton.language.extra",
    "triton.language.extra.cuda",
    "triton.runtime",
)
#: Functions that make a tensor on the device of another one unless they are given a device.
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_METHODS = ("to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")


def pretended(kind: str) -> torch.device:
    """Return the device of a kind, "cpu" or "cuda", that :class:`PretendedDevice` stands for."""
    return torch.device(kind, _INDEX) if kind == "cuda" else torch.device(kind)


class PretendedDevice(LiveMemory):
    """Run the code inside the context on tensors without elements, as if they were on a device.

    Args:
        kind: "cpu", or "cuda" for a GPU of compute capability 9.0 with the bundled kernels.
        expert_rows: Rows that this rank sends to experts in a microbatch, and gets from others
            where the host reads their number, if they are spread evenly (rows).
        etp: Ranks whose rows the experts of this rank gather.
    """

    def __init__(self, kind: str, expert_rows: int = 0, etp: int = 1) -> None:
        super().__init__(512 if kind == "cuda" else 1, counts_meta=True)
        self._thread = 0
        self.device = pretended(kind)
        self._expert_rows = expert_rows
        self._gathered_rows = expert_rows * etp
        self._depth = 0
        self._stack = ExitStack()

    @override
    def __enter__(self) -> PretendedDevice:
        self._thread = get_ident()
        kind = self.device.type
        with ExitStack() as stack:
            self._patch_tensors(stack)
            self._patch_groups(stack)
            self._put(stack, F, "scaled_dot_product_attention", partial(_attended, kind))
            if kind == "cuda":
                self._patch_gpu(stack)
            super().__enter__()
            self._stack = stack.pop_all()
        return self

    @override
    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._stack.close()

    @override
    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(kwargs.get("out"), Tensor):
            # Some operators that write into a given tensor compute no shapes.
            return kwargs["out"]
        # The shapes of some operators are computed in Python, which must see the real device.
        self._depth += 1
        try:
            read = _read(function, *args)
            if read is not None:
                return read
            result = function(*args, **kwargs)
        finally:
            self._depth -= 1
        if function.overloadpacket in _OF_FAULTS:
            setattr(result, _UNLIKELY, True)
        return result

    @contextmanager
    def with_values(self) -> Iterator[None]:
        """Let tensors without elements deny that they have none, while a module is sharded."""
        is_meta: Any = vars(torch._C.TensorBase)["is_meta"].__get__
        claim = property(lambda tensor: is_meta(tensor) and not self._is_here)
        with ExitStack() as stack:
            stack.enter_context(patch.object(Tensor, "is_meta", claim, create=True))
            # Other threads copy values, for which the tensors have no elements.
            self._put(stack, load, "copy_all", partial(_answer, None))
            yield

    def launched(self, name: str, tensors: Iterable[Any]) -> None:
        """Note that a kernel, which is no operator of torch, would be launched here."""

    def _launching(self, kernel: _Kernel, grid: Any) -> Callable[..., None]:
        """Return what launches a kernel of Triton."""
        return lambda *tensors, **more: self.launched(
            kernel.fn.__name__, (*tensors, *more.values())
        )

    @property
    def _is_here(self) -> bool:
        """Return whether the caller is the code that runs on the pretended device."""
        return get_ident() == self._thread and not self._depth

    def _put(self, stack: ExitStack, owner: Any, name: str, own: Callable[..., Any]) -> None:
        """Replace a function for the code that runs on the device; other threads keep theirs."""
        original = getattr(owner, name)

        @wraps(own)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (own if self._is_here else original)(*args, **kwargs)

        stack.enter_context(patch.object(owner, name, chosen))

    def _patch_tensors(self, stack: ExitStack) -> None:
        """Let tensors claim the device and an address, and let new ones have no elements."""
        device_of = torch._C.TensorBase.device.__get__

        def device(tensor: Tensor) -> torch.device:
            # Subclasses, such as placeholders of other stages, would look for the name of a getter.
            with torch._C.DisableTorchFunctionSubclass():
                real: torch.device = device_of(tensor)
            return self.device if real == _META and self._is_here else real

        def is_cuda(tensor: Tensor) -> bool:
            return device(tensor).type == "cuda"

        for claim in (device, is_cuda):
            stack.enter_context(patch.object(Tensor, claim.__name__, property(claim), create=True))
        # Code compares the addresses of parts of one memory, which has none without elements.
        self._put(stack, torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata << 40)
        self._put(stack, Tensor, "data_ptr", _address_of)
        stack.enter_context(patch.object(torch, "Generator", _Generator))
        constructors: Any = _device_constructors()
        for function in constructors:
            made = getattr(torch, function.__name__, None)
            if made is not None and made is function:
                self._put(stack, torch, function.__name__, self._without_elements(made))
        for owner, names in ((torch, _LIKE), (Tensor, _METHODS)):
            for name in names:
                moved = self._without_elements(getattr(owner, name), always=False)
                self._put(stack, owner, name, moved)
        for name in ("cuda", "cpu"):
            self._put(stack, Tensor, name, lambda tensor, *_, **__: tensor.to(_META))

    def _without_elements(
        self, function: Callable[..., Any], *, always: bool = True
    ) -> Callable[..., Any]:
        """Return a function that makes its tensors without elements, at least on a given device."""

        def made(*args: Any, **kwargs: Any) -> Any:
            args = tuple(_META if isinstance(one, torch.device) else one for one in args)
            device = kwargs.get("device")
            if always or device is not None:
                kwargs["device"] = _META
            is_on_host = device is not None and torch.device(device).type != self.device.type
            kwargs.pop("pin_memory", None)
            with self.on_host() if is_on_host else nullcontext():
                return function(*args, **kwargs)

        return made

    def _uncounted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose tensors do not count, because it only finds out shapes."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self.is_counting = False
            try:
                return function(*args, **kwargs)
            finally:
                self.is_counting = True

        return called

    def _patch_groups(self, stack: ExitStack) -> None:
        """Leave out collectives, and answer reads of row counts by even shares."""

        def totals(counts: RowCounts) -> tuple[list[int], list[int]]:
            shares = _even(self._expert_rows, counts.totals.shape[1])
            return shares, shares

        def groups(ends: Tensor) -> list[slice]:
            bounds = list(accumulate(_even(self._gathered_rows, ends.shape[0]), initial=0))
            return list(map(slice, bounds, bounds[1:]))

        self._put(stack, RowCounts, "read", totals)
        self._put(stack, ShapeInference, "of_call", self._uncounted(ShapeInference.of_call))
        self._put(stack, backends, "_groups", groups)
        for owner, name, answer in functions_of_groups(self.device):
            self._put(stack, owner, name, answer)

    def _patch_gpu(self, stack: ExitStack) -> None:
        """Let code find a GPU of compute capability 9.0 with fused and bundled kernels."""
        answers = {
            "get_device_capability": (9, 0),
            "current_device": _INDEX,
            "is_available": True,
            "is_current_stream_capturing": False,
            "synchronize": None,
            "current_stream": _Stream(),
            "stream": nullcontext(),
        }
        for name, answer in answers.items():
            self._put(stack, torch.cuda, name, partial(_answer, answer))
        self._put(stack, torch.cuda, "Stream", _Stream)
        choice = choose_kernels.KernelChoice(_kernels_without_launches(), "the device is pretended")
        self._put(stack, choose_kernels, "_choose", partial(_answer, choice))
        self._put(stack, choose_backend, "_reason_against_bundled", partial(_answer, None))
        self._put(stack, F, "dropout", _dropped)
        self._put(stack, flex, "_called", _attended_by_flex)
        self._put(stack, backends, "launch", partial(_launch, self))
        self._put(stack, backends, "launch_swiglu", partial(_launch_swiglu, self))
        self._put(stack, _Kernel, "__getitem__", self._launching)


def _read(function: Any, tensor: Any = None, *_: Any) -> bool | float | None:
    """Return what the host reads of a tensor without elements; None for other operators.

    Numbers such as a loss are read for logs. Whole numbers may be sizes of a step, and are refused.
    """
    if function.overloadpacket in _COMPARISONS and tensor.is_meta:
        return True
    if function is torch.ops.aten._local_scalar_dense.default and tensor.is_meta:
        if tensor.dtype == torch.bool:
            return not hasattr(tensor, _UNLIKELY)
        return 1.0 if tensor.is_floating_point() else None
    return None


def _answer(answer: Any, *_: Any, **__: Any) -> Any:
    return answer


def _address_of(tensor: Tensor) -> int:
    # The memory itself, not that of a copy that a subclass would return.
    with torch._C.DisableTorchFunctionSubclass():
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return tensor.untyped_storage().data_ptr() + offset


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


def _launch(
    here: PretendedDevice,
    product: Any,
    result: Tensor,
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Allocate the workspace of a grouped product."""
    here.launched(f"grouped {product}", (result, a, b, ends))
    torch.empty(workspace_bytes(ends.shape[0], _NUM_SMS), dtype=torch.uint8)
    return result


def _launch_swiglu(
    here: PretendedDevice,
    result: Tensor,
    kept: Any,
    rows: Tensor,
    stack: Tensor,
    scales: Tensor,
    ends: Tensor,
    *_: Any,
) -> None:
    """Allocate the workspace of a grouped product that is fused with SwiGLU."""
    here.launched("grouped forward_swiglu", (result, rows, stack, ends, kept))
    torch.empty(workspace_bytes(ends.shape[0], _NUM_SMS), dtype=torch.uint8)


class _Generator(torch.Generator):
    """Generator on the host, for which a build of torch needs no other device."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls)


class _Stream(SimpleNamespace):
    """Stream, or event, on which nothing runs."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Stream()


def _attended(
    kind: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **groups: Any,
) -> Tensor:
    """Attention of torch on a kind of device, by the kernel that it chooses there."""
    kernels: Any = torch.ops.aten
    if kind == "cpu" and dropout_p:
        kernel = kernels._scaled_dot_product_attention_math
        groups["scale"] = scale
        results = kernel(query, key, value, attn_mask, dropout_p, is_causal, **groups)
    elif kind == "cpu":
        kernel = kernels._scaled_dot_product_flash_attention_for_cpu
        results = kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    else:
        name = "cudnn" if attn_mask is None and query.dtype.itemsize == 2 else "efficient"
        kernel = getattr(kernels, f"_scaled_dot_product_{name}_attention")
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        results = kernel(query, key, value, attn_mask, True, **options)
    result: Tensor = results[0]
    return result


def _dropped(
    values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Dropout of torch on a GPU, which keeps a byte for each element."""
    result: Tensor = torch.ops.aten.native_dropout(values, p, training)[0]
    return result if training and p else values


def _attended_by_flex(
    query: Tensor, key: Tensor, value: Tensor, *_: Any, return_aux: Any = None
) -> Any:
    """Attention by FlexAttention, which keeps what flash attention keeps."""
    rows = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
    result, log_sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*rows)
    return result if return_aux is None else (result, SimpleNamespace(lse=log_sums))


# ---- kernels of Triton


@cache
def _kernels_without_launches() -> ModuleType:
    """Import the fused kernels with a Triton that compiles nothing, apart from real ones.

    Their functions allocate their results and launch nothing.
    """
    # The package keeps its real kernels, if it has loaded them.
    with patch.dict(sys.modules), patch.dict(vars(lightning_megatron.kernels)):
        for name in [name for name in sys.modules if name.startswith(_KERNELS)]:
            del sys.modules[name]
        for name in _TRITON:
            sys.modules[name] = _Stub(name)
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, sys.modules[name])
        return import_module(_KERNELS)


class _Kernel:
    """Kernel that no launch runs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: None


@dataclass(frozen=True)
class _Constant:
    """Constant of a kernel."""

    value: Any


class _Stub(ModuleType):
    """Module of Triton: decorators return kernels that no launch runs, all else is unused."""

    __path__: list[str] = []
    tensor = Tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "constexpr":
            return _Constant
        return _decorate


def _decorate(function: Any = None, *_: Any, **__: Any) -> Any:
    """Return a kernel of a function; without a function, the decorator itself."""
    return _Kernel(function) if callable(function) else _decorate
