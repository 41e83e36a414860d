"""Checks of products in 8 bits against a run, before any process group exists."""

from __future__ import annotations

import torch
from torch import nn

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.layers.fp8.operand import has_products
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.user_code import is_compiled

#: Precisions that matrix products in 8 bits on a GPU support.
_PRECISIONS = ("bf16-mixed", "bf16-true")


def check_fp8(settings: FP8 | None, device: torch.device, precision: str) -> None:
    """Refuse products in 8 bits that the device or the precision does not support.

    Args:
        settings: Settings of the run; None without such products.
    """
    if settings is None:
        return
    if precision.startswith("16"):
        raise ParallelPlanError(
            f"fp8 ({settings.recipe}) cannot be used with precision {precision}, because its loss "
            "scale reacts to infinite gradients, which casts to 8 bits do not produce. Use "
            "bf16-mixed or bf16-true."
        )
    if not emulates(settings, device) and precision not in _PRECISIONS:
        raise ParallelPlanError(
            f"fp8 ({settings.recipe}) needs precision {' or '.join(_PRECISIONS)}: it is "
            f"{precision}. Products in 8 bits have results in bfloat16. Change the precision, or "
            "use fp8=None."
        )


def check_not_compiled(module: nn.Module, settings: FP8 | None) -> None:
    """Refuse compiled modules if weights are kept in 8 bits.

    Args:
        settings: Settings of the run; None without products in 8 bits.
    """
    if settings is None or settings.parameters is None:
        return
    for name, part in module.named_modules():
        if is_compiled(part):
            raise UnsupportedError(
                "fp8.parameters ('fp8') cannot be used with torch.compile, because compiled graphs "
                f"read the weights directly: {name or type(part).__name__} is compiled. Leave one "
                "of them out."
            )


def emulates(settings: FP8, device: torch.device) -> bool:
    """Return whether products are emulated: rounded to 8 bits, but multiplied in a wider type."""
    if has_products(device, settings.recipe == "blockwise"):
        return False
    if not settings.emulate:
        raise ParallelPlanError(
            f"fp8 ({settings.recipe}) needs a GPU with matrix products in 8 bits: {device} does "
            "not have them. tensorwise and rowwise need compute capability 8.9 (Ada, Hopper) or "
            "newer, blockwise needs 9.0 (Hopper). Use fp8.emulate to round to 8 bits and multiply "
            "in the precision of the device, which is slow, or fp8=None."
        )
    return True
