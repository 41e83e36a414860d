"""Choice of the backend of grouped products: the bundled kernels, torch's kernel or a loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.kernels.cuda import (
    default_cache,
    find_library,
    read_sources,
    reason_against_library,
)
from lightning_megatron.kernels.cuda.library import load_library, reason_not_runnable
from lightning_megatron.plan.grouped_gemm import MAX_GROUPS, reason_against_fusion
from lightning_megatron.shapes import Float

_log = logging.getLogger(__name__)
_ALIGNMENT = 16  # Row size of all operands must be a multiple, for both kernels (bytes).

BackendName = Literal["bundled", "grouped_mm", "loop", "te"]


@dataclass(frozen=True)
class BackendChoice:
    """Backend of grouped products, with the reason for its choice.

    ``bundled`` is the extension that ``lightning-megatron kernels`` builds, and ``grouped_mm`` is
    torch's kernel. Both read the ends on the device. ``loop`` runs one product per group, and
    copies the ends to the host.
    """

    backend: BackendName
    reason: str


@cache
def choose_backend(
    device: torch.device, dtype: torch.dtype, num_groups: int, in_features: int, out_features: int
) -> BackendChoice:
    """Choose the backend of grouped products of one size, and log the choice once."""
    choice = _choose(device, dtype, num_groups, in_features, out_features)
    _log.info("grouped products by %s: %s", choice.backend, choice.reason)
    return choice


@cache
def reason_against_swiglu(
    device: torch.device, dtype: torch.dtype, num_groups: int, in_features: int, out_features: int
) -> str | None:
    """Return why SwiGLU is not fused into grouped products of one size, or None; log it once."""
    backend = choose_backend(device, dtype, num_groups, in_features, out_features).backend
    reason: str | None = f"the product is by {backend}"
    if backend == "bundled":
        reason = reason_against_fusion(out_features, in_features)
    where = "in the product's kernel" if reason is None else f"apart: {reason}"
    _log.info("SwiGLU of experts %s", where)
    return reason


@dataclass(frozen=True)
class LayerBackends:
    """Backends of the two grouped products of a layer's experts; None chooses one at each call."""

    first: BackendName | None
    down: BackendName | None
    fuses_swiglu: bool


def choose_layer_backends(
    device: torch.device,
    dtype: torch.dtype,
    first: Sequence[Float[Tensor, "_ hidden"]],
    down: Sequence[Float[Tensor, "hidden ffn"]],
    *,
    can_fuse: bool,
) -> LayerBackends:
    """Choose the backends of a layer's experts, which may be able to fuse SwiGLU."""
    sizes = [(len(weights), weights[0].shape[1], weights[0].shape[0]) for weights in (first, down)]
    names = [choose_backend(device, dtype, *size).backend for size in sizes]
    fuses = can_fuse and reason_against_swiglu(device, dtype, *sizes[0]) is None
    return LayerBackends(names[0], names[1], fuses)


def _choose(
    device: torch.device, dtype: torch.dtype, num_groups: int, in_features: int, out_features: int
) -> BackendChoice:
    if device.type != "cuda":
        return BackendChoice("loop", f"{device.type}: the host has the group sizes already")
    no_kernel = _reason_against_kernel(dtype, in_features, out_features)
    if no_kernel is not None:
        return BackendChoice("loop", no_kernel)
    not_bundled = _reason_against_bundled(device, num_groups)
    if not_bundled is None:
        return BackendChoice(
            "bundled", "bfloat16 on a GPU of compute capability 9.0: the bundled kernels"
        )
    not_torchs = _reason_against_torch(device)
    if not_torchs is None:
        return BackendChoice(
            "grouped_mm", f"torch's grouped product, not the bundled kernels: {not_bundled}"
        )
    return BackendChoice("loop", f"{not_torchs}; bundled kernels: {not_bundled}")


def _reason_against_kernel(dtype: torch.dtype, in_features: int, out_features: int) -> str | None:
    if dtype != torch.bfloat16:
        return f"{dtype}: the kernels on a GPU are made for bfloat16"
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        if size * dtype.itemsize % _ALIGNMENT:
            return f"{name} ({size}) must make rows of whole 16 bytes for the kernels on a GPU"
    return None


def _reason_against_bundled(device: torch.device, num_groups: int) -> str | None:
    if num_groups > MAX_GROUPS:
        return f"{num_groups} groups are more than {MAX_GROUPS}"
    return (
        reason_not_runnable(torch.cuda.current_device() if device.index is None else device.index)
        or _load()
    )


def _reason_against_torch(device: torch.device) -> str | None:
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        return (
            "torch's grouped product needs compute capability 9.0, not "
            f"{capability[0]}.{capability[1]}"
        )
    return None


@cache
def _load() -> str | None:
    """Load the library once per process; return why it cannot be used, or None if it is loaded."""
    cache = default_cache()
    sources = read_sources()
    library = find_library(cache, sources)
    if library is None:
        return reason_against_library(cache, sources)
    try:
        load_library(library.path)
    except UnsupportedError as error:
        return str(error)
    return None
