"""Choice among the installed packages of flash attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from lightning_megatron.layers.attention.flash_kernels import (
    FlashAttention3,
    FlashAttention4,
    FlashKernel,
    TorchCudnn,
    TorchFlash,
)

#: Compute capabilities of Hopper, of data center GPUs of Blackwell, and largest heads of flash
#: attention 4 on the latter (elements).
_HOPPER = 9
_BLACKWELL = (10, 11)
_BLACKWELL_HEAD_DIM = 128
#: Largest heads whose gradients cuDNN computes on Hopper (elements).
_CUDNN_HEAD_DIM = 128


@dataclass(frozen=True)
class FlashChoice:
    """Package of flash attention, whether it supports soft caps, and the reason for the choice."""

    kernel: FlashKernel
    reason: str
    bounds_scores: bool


@dataclass(frozen=True)
class FlashPackage:
    """Package of flash attention that may be installed.

    Args:
        functions: Functions that are called, each with the arguments that it must have.
        obstacle: Function of the compute capability's first number and of the size of heads that
            returns why the package cannot be used, or None.
    """

    make: Callable[[ModuleType], FlashKernel]
    name: str
    module: str
    functions: tuple[tuple[str, tuple[str, ...]], ...]
    obstacle: Callable[[int, int], str | None]


def _obstacle_to_third(capability: int, head_dim: int) -> str | None:
    return None if capability == _HOPPER else "is for compute capability 9.0"


def _obstacle_to_fourth(capability: int, head_dim: int) -> str | None:
    if capability == _HOPPER:
        return None
    if capability not in _BLACKWELL:
        return "is for compute capability 9.0, 10.x and 11.0"
    if head_dim > _BLACKWELL_HEAD_DIM:
        return f"has heads of at most {_BLACKWELL_HEAD_DIM} elements there"
    return None


_COMMON_ARGUMENTS = ("cu_seqlens_q", "max_seqlen_k", "softmax_scale", "softcap", "window_size_left")
#: Packages in the order of preference.
PACKAGES = (
    FlashPackage(
        FlashAttention3,
        FlashAttention3.name,
        "flash_attn_interface",
        (
            ("_flash_attn_forward", (*_COMMON_ARGUMENTS, "causal")),
            ("_flash_attn_backward", (*_COMMON_ARGUMENTS, "is_causal", "dq", "deterministic")),
        ),
        _obstacle_to_third,
    ),
    FlashPackage(
        FlashAttention4,
        FlashAttention4.name,
        "flash_attn.cute.interface",
        (
            ("_flash_attn_fwd", (*_COMMON_ARGUMENTS, "causal", "return_lse")),
            ("_flash_attn_bwd", (*_COMMON_ARGUMENTS, "causal", "deterministic")),
        ),
        _obstacle_to_fourth,
    ),
)


#: Inside ``torch.compile`` no package is imported; the compiler supports torch's kernel.
_TRACED = FlashChoice(TorchFlash(), "torch's, which torch.compile knows", bounds_scores=False)


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
                why = f"{package.name} is installed"
                return FlashChoice(package.make(module), why, bounds_scores=True)
        obstacles.append(f"{package.name} {obstacle}")
    missing = ", ".join(obstacles)
    if plain and capability[0] >= _HOPPER and head_dim <= _CUDNN_HEAD_DIM:
        return FlashChoice(TorchCudnn(), f"cuDNN's for plain rows, because {missing}", False)
    return FlashChoice(TorchFlash(), f"torch's, because {missing}", False)


@cache
def loaded(package: FlashPackage) -> tuple[ModuleType | None, str | None]:
    """Return the module of a package, or the reason why it cannot be used."""
    try:
        module = import_module(package.module)
    except (ImportError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and package.module.startswith(error.name or "?"):
            return None, "is not installed"
        return None, f"cannot be imported ({error})"
    for function, arguments in package.functions:
        missing = [
            argument
            for argument in arguments
            if argument not in _arguments(getattr(module, function, None))
        ]
        if missing:
            return None, f"has another interface ({function} without {missing[0]})"
    return module, None


def _arguments(function: Any) -> tuple[str, ...]:
    if function is None:
        return ()
    # An operator of torch.library keeps the Python function that it was made from.
    return tuple(inspect.signature(getattr(function, "_init_fn", function)).parameters)
