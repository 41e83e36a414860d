"""Flash attention of torch, cuDNN and installed packages, and the choice among them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_megatron.shapes import Float, Int

#: Rows ``(B, S, H, D)``, or the tokens of all documents ``(tokens, H, D)``.
Rows = Tensor
#: Queries, keys and values, or their gradients.
Triple = tuple[Rows, Rows, Rows]
#: The output and the log-sum-exps, ``(B, H, S)`` or ``(H, tokens)`` in float32.
Result = tuple[Rows, Float[Tensor, "... heads _"]]

#: Compute capabilities of Hopper, of data center GPUs of Blackwell, and largest heads of flash
#: attention 4 on the latter (elements).
_HOPPER = 9
_BLACKWELL = (10, 11)
_BLACKWELL_HEAD_DIM = 128
#: Largest heads whose gradients cuDNN computes on Hopper (elements).
_CUDNN_HEAD_DIM = 128


@dataclass(frozen=True, eq=False)
class FlashCall:
    """Arguments of a flash attention kernel besides queries, keys and values.

    Args:
        query_borders: Cumulative lengths of the documents of the queries; None means rows (tokens).
        key_borders: Cumulative lengths of the documents of the keys; None means rows (tokens).
        longest_query: Upper bound of the queries of a document (tokens).
        causal: Whether a query, counted from the end of its document, attends to no later key.
        left: Number of keys before its own place that a query attends to; -1 means all (tokens).
        right: The same for keys after its own place.
        soft_cap: Bound of the scores; 0 means none.
    """

    query_borders: Int[Tensor, " borders"] | None
    key_borders: Int[Tensor, " borders"] | None
    longest_query: int
    longest_key: int
    causal: bool
    left: int
    right: int
    scale: float
    soft_cap: float = 0.0

    def is_plain(self, queries: int, keys: int) -> bool:
        """Return whether the call is plain attention over whole rows, causal or to all keys."""
        if self.query_borders is not None or self.key_borders is not None or self.soft_cap:
            return False
        if self.causal:
            return self.left < 0 and queries == keys
        return self.left < 0 and self.right < 0

    def of_package(self, all_keys: int | None) -> dict[str, Any]:
        """Return the arguments with the same names in flash attention 3 and 4.

        The upper bounds of lengths are given only with documents. ``all_keys`` stands for a window
        without a bound.
        """
        longest_query = None if self.query_borders is None else self.longest_query
        longest_key = None if self.key_borders is None else self.longest_key
        left, right = (all_keys if bound < 0 else bound for bound in (self.left, self.right))
        return {
            "cu_seqlens_q": self.query_borders,
            "cu_seqlens_k": self.key_borders,
            "max_seqlen_q": longest_query,
            "max_seqlen_k": longest_key,
            "softmax_scale": self.scale,
            "softcap": self.soft_cap,
            "window_size_left": left,
            "window_size_right": right,
        }


class TorchFlash:
    """Flash attention 2, which torch contains."""

    name = "flash"
    bounds_scores = False

    def forward(self, query: Rows, key: Rows, value: Rows, call: FlashCall) -> Result:
        return _torch_flash(query, key, value, call, dropout=0.0)

    def backward(self, grad_out: Rows, inputs: Triple, result: Result, call: FlashCall) -> Triple:
        device = grad_out.device
        without_dropout = torch.zeros(2, dtype=torch.uint64, device=device)
        gradients: Triple = torch.ops.aten._flash_attention_backward(
            grad_out,
            *inputs,
            *result,
            call.query_borders,
            call.key_borders,
            call.longest_query,
            call.longest_key,
            0.0,
            call.causal,
            without_dropout,
            torch.empty(0, device=device),
            scale=call.scale,
            window_size_left=call.left,
            window_size_right=call.right,
        )
        return gradients


def attend_with_dropout(
    query: Rows, key: Rows, value: Rows, call: FlashCall, dropout: float
) -> Rows:
    """Compute attention with dropped weights by the flash attention of torch, differentiably.

    Flash attention 3 and 4 drop no weights. The mask comes from torch's generator of the device;
    scores are not bounded.
    """
    return _torch_flash(query, key, value, call, dropout)[0]


def _torch_flash(query: Rows, key: Rows, value: Rows, call: FlashCall, dropout: float) -> Result:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        call.query_borders,
        call.key_borders,
        call.longest_query,
        call.longest_key,
        dropout,
        call.causal,
        False,
        scale=call.scale,
        window_size_left=call.left,
        window_size_right=call.right,
    )
    return out, lse


class TorchCudnn:
    """Flash attention of cuDNN, which torch contains; it computes plain rows (no documents)."""

    name = "cuDNN"
    bounds_scores = False

    def forward(self, query: Rows, key: Rows, value: Rows, call: FlashCall) -> Result:
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *heads_first, None, True, 0.0, call.causal, False, scale=call.scale
        )
        return out.transpose(1, 2), lse.view(out.shape[:3])

    def backward(self, grad_out: Rows, inputs: Triple, result: Result, call: FlashCall) -> Triple:
        out, lse = result
        without_dropout = torch.zeros((), dtype=torch.int64, device=grad_out.device)
        heads_first = (tensor.transpose(1, 2) for tensor in (grad_out, *inputs, out))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *heads_first,
            lse.unsqueeze(-1),
            without_dropout,
            without_dropout,
            None,
            None,
            None,
            inputs[0].shape[1],
            inputs[1].shape[1],
            0.0,
            call.causal,
            scale=call.scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


_COMMON_ARGUMENTS = ("cu_seqlens_q", "max_seqlen_k", "softmax_scale", "softcap", "window_size_left")


@dataclass(frozen=True)
class FlashAttention3:
    """Flash attention 3 for Hopper, the module ``flash_attn_interface``."""

    module: ModuleType
    name = "flash attention 3"
    bounds_scores = True
    module_name = "flash_attn_interface"
    #: Functions that are called, each with the arguments that it must have.
    functions = (
        ("_flash_attn_forward", (*_COMMON_ARGUMENTS, "causal")),
        ("_flash_attn_backward", (*_COMMON_ARGUMENTS, "is_causal", "dq", "deterministic")),
    )

    @staticmethod
    def obstacle(capability: int, head_dim: int) -> str | None:
        """Return why a GPU of a compute capability cannot use the package; None if it can."""
        return None if capability == _HOPPER else "is for compute capability 9.0"

    def forward(self, query: Rows, key: Rows, value: Rows, call: FlashCall) -> Result:
        out, lse, *_ = self.module._flash_attn_forward(
            query, key, value, causal=call.causal, **call.of_package(-1)
        )
        return out, lse

    def backward(self, grad_out: Rows, inputs: Triple, result: Result, call: FlashCall) -> Triple:
        like = torch.contiguous_format
        dq, dk, dv = (torch.empty_like(tensor, memory_format=like) for tensor in inputs)
        self.module._flash_attn_backward(
            grad_out,
            *inputs,
            *result,
            dq=dq,
            dk=dk,
            dv=dv,
            is_causal=call.causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **call.of_package(-1),
        )
        return dq, dk, dv


@dataclass(frozen=True)
class FlashAttention4:
    """Flash attention 4 for Hopper and newer, the module ``flash_attn.cute.interface``."""

    module: ModuleType
    name = "flash attention 4"
    bounds_scores = True
    module_name = "flash_attn.cute.interface"
    functions = (
        ("_flash_attn_fwd", (*_COMMON_ARGUMENTS, "causal", "return_lse")),
        ("_flash_attn_bwd", (*_COMMON_ARGUMENTS, "causal", "deterministic")),
    )

    @staticmethod
    def obstacle(capability: int, head_dim: int) -> str | None:
        """Return why a GPU of a compute capability cannot use the package; None if it can."""
        if capability == _HOPPER:
            return None
        if capability not in _BLACKWELL:
            return "is for compute capability 9.0, 10.x and 11.0"
        if head_dim > _BLACKWELL_HEAD_DIM:
            return f"has heads of at most {_BLACKWELL_HEAD_DIM} elements there"
        return None

    def forward(self, query: Rows, key: Rows, value: Rows, call: FlashCall) -> Result:
        out, lse, *_ = self.module._flash_attn_fwd(
            query, key, value, causal=call.causal, return_lse=True, **call.of_package(None)
        )
        return out, lse

    def backward(self, grad_out: Rows, inputs: Triple, result: Result, call: FlashCall) -> Triple:
        out, lse = result
        dq, dk, dv = self.module._flash_attn_bwd(
            *inputs,
            out,
            grad_out,
            lse,
            causal=call.causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **call.of_package(None),
        )
        return dq, dk, dv


FlashKernel: TypeAlias = TorchFlash | TorchCudnn | FlashAttention3 | FlashAttention4
#: Packages that may be installed, in the order of preference.
PACKAGES = (FlashAttention3, FlashAttention4)


@dataclass(frozen=True)
class FlashChoice:
    """Kernel of flash attention, and the reason for the choice."""

    kernel: FlashKernel
    reason: str


#: Inside ``torch.compile`` no package is imported; the compiler supports torch's kernel.
_TRACED = FlashChoice(TorchFlash(), "torch's, which torch.compile knows")


def choose_flash(device: torch.device, head_dim: int, plain: bool = False) -> FlashChoice:
    """Choose the package of flash attention for a GPU: the fastest one that is installed.

    Flash attention 3 is compiled for Hopper. Flash attention 4 compiles its kernels at the first
    call, for Hopper and newer GPUs. Torch contains flash attention 2, and cuDNN, which is faster on
    Hopper and newer GPUs, but computes only plain rows and no deterministic gradients.

    Args:
        plain: Whether rows have no documents, windows or soft caps and, if attention is causal, as
            many keys as queries.
    """
    if torch.compiler.is_compiling():
        return _TRACED
    plain = plain and not torch.are_deterministic_algorithms_enabled()
    return _choose(torch.cuda.get_device_capability(device), head_dim, plain)


@cache
def _choose(capability: tuple[int, int], head_dim: int, plain: bool) -> FlashChoice:
    obstacles = []
    for package in PACKAGES:
        obstacle = package.obstacle(capability[0], head_dim)
        if obstacle is None:
            module, obstacle = loaded(package)
            if module is not None:
                return FlashChoice(package(module), f"{package.name} is installed")
        obstacles.append(f"{package.name} {obstacle}")
    missing = ", ".join(obstacles)
    if plain and capability[0] >= _HOPPER and head_dim <= _CUDNN_HEAD_DIM:
        return FlashChoice(TorchCudnn(), f"cuDNN's for plain rows, because {missing}")
    return FlashChoice(TorchFlash(), f"torch's, because {missing}")


@cache
def loaded(package: type[Any]) -> tuple[ModuleType | None, str | None]:
    """Return the module of one of ``PACKAGES``, or the reason why it cannot be used."""
    try:
        module = import_module(package.module_name)
    except (ImportError, OSError) as error:
        missing_module = error.name if isinstance(error, ModuleNotFoundError) else None
        if package.module_name.startswith(missing_module or "?"):
            return None, "is not installed"
        return None, f"cannot be imported ({error})"
    for function, arguments in package.functions:
        known = _arguments(getattr(module, function, None))
        missing = [argument for argument in arguments if argument not in known]
        if missing:
            return None, f"has another interface ({function} without {missing[0]})"
    return module, None


def _arguments(function: Any) -> tuple[str, ...]:
    if function is None:
        return ()
    # An operator of torch.library keeps the Python function that it was made from.
    return tuple(inspect.signature(getattr(function, "_init_fn", function)).parameters)
