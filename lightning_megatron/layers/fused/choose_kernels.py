"""Choice between the fused kernels and the operators of torch."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from lightning_megatron.errors import SpeedWarning
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.half_types import HALF_TYPES

_log = logging.getLogger(__name__)
_KERNELS = "lightning_megatron.kernels.triton"


@dataclass(frozen=True)
class KernelChoice:
    """The module ``kernels.triton``, or None for the operators of torch, and the reason for it."""

    kernels: ModuleType | None
    reason: str


def fused_kernels(tensor: Tensor) -> ModuleType | None:
    """Return the fused kernels if they support a tensor; None means the operators of torch."""
    return choose_kernels(tensor.device).kernels if is_served(tensor) else None


def is_served(tensor: Tensor) -> bool:
    """Return whether the fused kernels support a tensor: half types and integers on a GPU.

    Floating-point tensors are not supported under autocast, which chooses the dtype of every
    operator of torch. Inside ``torch.compile`` the compiler fuses the operators itself.
    """
    if torch.compiler.is_compiling() or not tensor.is_cuda:
        return False
    if tensor.is_floating_point():
        return tensor.dtype in HALF_TYPES and not torch.is_autocast_enabled("cuda")
    return True


@cache
def choose_kernels(device: torch.device) -> KernelChoice:
    """Choose the kernels for half types on a GPU, and log the choice once."""
    choice = _choose(torch.cuda.get_device_capability(device))
    _log.info("%s: %s", "fused kernels" if choice.kernels else "operators of torch", choice.reason)
    return choice


def reason_against_puts(axis: MeshAxis, device: torch.device) -> str | None:
    """Return why kernels cannot write into the memory of the other ranks; None if they can.

    All ranks of the axis get the same result.

    Communication: on GPUs, at the first call for an axis, its ranks exchange their results.
    """
    choice = choose_kernels(device) if device.type == "cuda" else None
    missing = None if choice is None or choice.kernels is not None else choice.reason
    return axis.peer_memory.reason_unavailable(axis.group, device, missing)


def _choose(capability: tuple[int, int]) -> KernelChoice:
    if torch.version.hip is not None:
        return KernelChoice(None, "the fused kernels were not tried on ROCm")
    if capability < (8, 0):
        return KernelChoice(
            None,
            f"compute capability {capability[0]}.{capability[1]} is below 8.0",
        )
    try:
        return KernelChoice(import_module(_KERNELS), "half type on a GPU, and Triton is installed")
    except ImportError as error:
        return KernelChoice(None, f"Triton cannot be imported ({error})")


@cache
def warn_of_slow_path(message: str) -> None:
    """Warn on global rank 0, once per process and message, of a path that costs speed."""
    if getattr(rank_zero_only, "rank", 0) == 0:
        warnings.warn(message, SpeedWarning, stacklevel=3)
