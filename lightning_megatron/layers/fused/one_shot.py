"""All-reduce of small tensors by one kernel, in a fraction of the time of NCCL."""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.peer_memory import PeerUse
from lightning_megatron.half_types import HALF_TYPES
from lightning_megatron.layers.fused.choose_kernels import choose_kernels, reason_against_puts
from lightning_megatron.shapes import Shaped

OneShotOp = Literal["sum", "max"]

_log = logging.getLogger(__name__)
#: Size of the largest tensor that the kernel reduces (bytes): 32 tokens of 4,096 numbers of 2
#: bytes. Every rank receives all values of all ranks, which costs more than a ring for larger ones.
MAX_BYTES = 2**18
_DTYPES = {"sum": (*HALF_TYPES, torch.float32), "max": (torch.int32,)}
#: Region of shared memory of each operation: sums are those of row-parallel layers, maxima those of
#: casts to 8 bits. Each region is used on one stream at a time, in the same order on all ranks.
_REGIONS: dict[OneShotOp, PeerUse] = {"sum": "sums", "max": "magnitudes"}


def one_shot_all_reduce_(
    x: Shaped[Tensor, "..."], axis: MeshAxis, op: OneShotOp
) -> Shaped[Tensor, "..."]:
    """Reduce ``x`` over the axis in place and return it, without autograd.

    Equal to ``all_reduce_``, except that sums of half types are rounded once. Ranks that can write
    into each other's memory reduce small tensors by one kernel, and other tensors as
    ``all_reduce_`` does. All ranks make the same choice.

    Communication: an all-reduce. The first call on a GPU also allocates shared memory, so it must
        not be in the capture of a CUDA graph.
    """
    if axis.group is None or not _is_small(x, op):
        return all_reduce_(x, axis, op)
    reason = reason_against_puts(axis, x.device)
    if reason is not None:
        _log_once(axis.name, reason)
        return all_reduce_(x, axis, op)
    kernels = choose_kernels(x.device).kernels
    assert kernels is not None, "there would be a reason against shared memory"
    size = kernels.one_shot_bytes(axis.size, MAX_BYTES)
    region = axis.peer_memory.reserve(axis.group, size, x.device, _REGIONS[op])
    axis.note("all_reduce")
    axis.launcher.run(lambda: kernels.reduce_one_shot_(x, region.pointers, axis.rank, op), x)
    return x


def _is_small(x: Tensor, op: OneShotOp) -> bool:
    """Return whether the kernel can reduce a tensor; the same on all ranks."""
    return (
        x.is_cuda
        and x.dtype in _DTYPES[op]
        and 0 < x.nbytes <= MAX_BYTES
        and x.nbytes % 4 == 0
        and x.storage_offset() * x.element_size() % 4 == 0
        and x.is_contiguous()
        and not torch.compiler.is_compiling()
    )


@cache
def _log_once(axis: str, reason: str) -> None:
    _log.info("small tensors are reduced over %s by NCCL, not by one kernel: %s", axis, reason)
