"""Copies of many small tensors with few kernel launches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


@torch.no_grad()
def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, with one kernel launch for each device and dtype.

    Args:
        tensors: Plain strided tensors.
    """
    copies = [torch.empty_like(tensor) for tensor in tensors]
    copy_all_(copies, tensors)
    return copies


@torch.no_grad()
def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into targets of equal shapes, with one launch for each device and dtype.

    Args:
        targets: Tensors that are written.
        sources: Tensors that are read, one for each target.
    """
    groups: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        group = groups.setdefault((target.device, target.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    for into, from_tensors in groups.values():
        torch._foreach_copy_(into, from_tensors)
