"""Choice of the kernel of the attention core."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch.nn.attention import SDPBackend

from lightning_megatron.half_types import HALF_TYPES
from lightning_megatron.layers.attention.flash_kernels import TorchFlash, choose_flash
from lightning_megatron.layers.attention.operators import is_plain
from lightning_megatron.layers.attention.span import AttentionSpan

#: ``sdpa`` is torch's scaled_dot_product_attention, ``flash`` the flash attention that
#: ``layers.attention.flash_kernels`` finds, for documents, windows and sinks without a mask,
#: ``flex`` torch's FlexAttention, which compiles a kernel for the span, and ``operators`` the
#: formula in operators of torch.
Core = Literal["sdpa", "flash", "flex", "operators"]

_FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
_DROPS_BY_PLACE = "attention dropout: masks that no layout changes"
#: Largest size of a head for flash attention (elements).
_FLASH_HEAD_DIM = 256
#: Smallest size of a head for FlexAttention (elements).
_FLEX_HEAD_DIM = 16
#: Sizes of query and value heads that cuDNN takes although they differ (elements).
_CUDNN_DIMS = (192, 128)


class _Call(NamedTuple):
    """What the choice depends on."""

    device: torch.device
    dtype: torch.dtype
    span: AttentionSpan
    dropout: float
    head_dim: int


@dataclass(frozen=True)
class CoreChoice:
    """Kernel of the attention core, with the reason for the choice.

    Args:
        backends: Kernels of torch's scaled_dot_product_attention in the order in which torch tries
            them; an empty tuple leaves the choice to torch.
        needs_mask: Whether the span must be converted to a dense mask.
        expand_kv: Whether key/value heads must be repeated for every query head, because the
            kernels do not support grouped-query attention.
        remedy: Advice for a faster kernel, as whole sentences; None if this one costs no speed.
        pads_values: Whether smaller value heads must be padded to the size of key heads.
    """

    core: Core
    backends: tuple[SDPBackend, ...]
    needs_mask: bool
    expand_kv: bool
    reason: str
    remedy: str | None = None
    pads_values: bool = False
    package: str = ""

    @property
    def name(self) -> str:
        """Return the name of the kernels for the log."""
        if self.core != "sdpa":
            return {
                "flash": f"{self.package} without a mask",
                "flex": "FlexAttention",
                "operators": "operators of torch",
            }[self.core]
        kernels = [backend.name.removesuffix("_ATTENTION").lower() for backend in self.backends]
        return ", ".join(kernels) or "torch's choice"


def choose_core(
    device: torch.device,
    dtype: torch.dtype,
    span: AttentionSpan | None = None,
    seq_length: int | None = None,
    *,
    dropout: float = 0.0,
    head_dim: int = 128,
    value_dim: int | None = None,
) -> CoreChoice:
    """Choose the attention kernel for a device, a dtype and a span.

    Args:
        span: Description of the attention; None means causal attention over whole rows.
        seq_length: Length of the rows; None means longer than every window (tokens).
        value_dim: Size of a value head; None means ``head_dim`` (elements).
    """
    call = _Call(device, dtype, span or AttentionSpan(), dropout, head_dim)
    choice = _choose_kernel(call, 2**62 if seq_length is None else seq_length)
    if value_dim is None or _takes_values(choice, head_dim, value_dim):
        return choice
    why = f"{choice.reason}; values of {value_dim} elements are padded to {head_dim}"
    return replace(choice, pads_values=True, reason=why)


def choose_part(
    device: torch.device,
    dtype: torch.dtype,
    span: AttentionSpan,
    *,
    behind: int = 0,
    head_dim: int = 128,
) -> CoreChoice:
    """Choose the kernel of attention to a part of the keys, as context parallelism computes it.

    Args:
        behind: Number of tokens by which the last query follows the last key (tokens).
    """
    call = _Call(device, dtype, span, 0.0, head_dim)
    reason = _reason_against_flash(call)
    if behind < 0 or (span.window is not None and behind >= span.window):
        # The kernel takes a negative bound as no bound.
        reason = "flash attention lets the last query see a key"
    if reason is None:
        plain = is_plain(span, 2**62) and span.soft_cap is None and behind == 0
        flash = choose_flash(device, head_dim, plain)
        why = f"parts of the keys need the log-sum-exps that it returns; {flash.reason}"
        return CoreChoice("flash", (), False, False, why, package=flash.kernel.name)
    obstacle = _reason_against_flex(call)
    if obstacle is None:
        why = f"a kernel compiled for parts of the keys, because {reason}"
        return CoreChoice("flex", (), False, False, why)
    return _operators(device, f"parts of the keys: {obstacle}", plain=True)


def _takes_values(choice: CoreChoice, head_dim: int, value_dim: int) -> bool:
    """Return whether the chosen kernel takes value heads of another size than key heads."""
    if head_dim == value_dim or choice.core == "operators":
        return True
    first = choice.backends[0] if choice.backends else None
    if first == SDPBackend.CUDNN_ATTENTION:
        return (head_dim, value_dim) == _CUDNN_DIMS
    return choice.core == "sdpa" and first == SDPBackend.EFFICIENT_ATTENTION


def _choose_kernel(call: _Call, seq_length: int) -> CoreChoice:
    device = call.device
    span = call.span
    plain = is_plain(span, seq_length)
    if plain and not span.has_own_scores:
        return _default_core(call)
    reason = _reason_against_flash(call)
    if reason is None and call.dropout > 0.0:
        why = "documents need no mask; torch's, because other packages drop no weights"
        return CoreChoice("flash", (), False, False, why, package=TorchFlash.name)
    if reason is None:
        flash = choose_flash(device, call.head_dim)
        why = f"documents, windows and sinks need no mask; {flash.reason}"
        return CoreChoice("flash", (), False, False, why, package=flash.kernel.name)
    if device.type != "cuda" and call.dropout > 0.0:
        return _operators(device, _DROPS_BY_PLACE, plain)
    if not span.has_own_scores and span.prefix is None:
        return _masked(device, reason, span)
    obstacle = _reason_against_flex(call)
    if obstacle is None:
        return CoreChoice("flex", (), False, False, f"a kernel compiled for it, because {reason}")
    if span.soft_cap is not None:
        return _operators(device, f"soft caps: {obstacle}", plain)
    if span.slopes is not None:
        return _operators(device, f"ALiBi: {obstacle}", plain)
    if span.sinks is not None:
        return _operators(device, f"sinks: {obstacle}", plain)
    return _masked(device, f"{reason}, and {obstacle}", span)


def _default_core(call: _Call) -> CoreChoice:
    if call.device.type != "cuda" and call.dropout > 0.0:
        return _operators(call.device, _DROPS_BY_PLACE, plain=True)
    if call.device.type != "cuda":
        why = f"{call.device.type}: torch chooses among its own kernels"
        return CoreChoice("sdpa", (), False, False, why)
    if call.dtype not in HALF_TYPES:
        why = f"{call.dtype} has no flash kernel: memory-efficient attention"
        return CoreChoice("sdpa", _FUSED[1:], False, True, why)
    if call.dropout > 0.0:
        why = "attention dropout: flash attention draws its mask from torch's generator"
        return CoreChoice("sdpa", _FUSED, False, False, why)
    if torch.cuda.get_device_capability(call.device) >= (9, 0):
        why = "half type on compute capability >= 9.0: cuDNN"
        return CoreChoice("sdpa", (SDPBackend.CUDNN_ATTENTION, *_FUSED), False, False, why)
    why = "half type below compute capability 9.0: flash attention"
    return CoreChoice("sdpa", _FUSED, False, False, why)


def _reason_against_flash(call: _Call) -> str | None:
    """Return why flash attention without a mask cannot compute a span; None if it can."""
    span = call.span
    if span.slopes is not None:
        return "flash attention adds no biases of ALiBi to scores"
    if span.prefix is not None:
        return "a prefix needs a mask"
    # Torch's kernel drops weights within documents, but bounds no scores and has no sinks.
    drops = span.has_documents and span.soft_cap is None and span.sinks is None
    reason = _common_reason_against("variable-length attention", HALF_TYPES, call, drops=drops)
    if reason is not None:
        return reason
    if call.head_dim > _FLASH_HEAD_DIM or call.head_dim % 8:
        return (
            f"flash attention has heads of at most {_FLASH_HEAD_DIM} elements, a multiple of 8, "
            f"not {call.head_dim}"
        )
    bounds = span.soft_cap is None or choose_flash(call.device, call.head_dim).kernel.bounds_scores
    return None if bounds else "flash attention of torch does not bound scores"


def _reason_against_flex(call: _Call) -> str | None:
    """Return why FlexAttention cannot compute a span; None if it can."""
    dtypes = (*HALF_TYPES, torch.float32)
    reason = _common_reason_against("FlexAttention", dtypes, call, drops=False)
    if reason is None and call.head_dim < _FLEX_HEAD_DIM:
        return f"FlexAttention has heads of at least {_FLEX_HEAD_DIM} elements, not {call.head_dim}"
    return reason


def _common_reason_against(
    kernel: str, dtypes: Collection[torch.dtype], call: _Call, *, drops: bool
) -> str | None:
    """Return which common limit of both kernels excludes a span; None if there is none."""
    if call.span.mask is not None:
        return "a mask for each pair of tokens was given"
    if call.device.type != "cuda":
        return f"{kernel} does not train on {call.device.type}"
    if torch.version.hip is not None:
        return f"{kernel} was not tried on ROCm"
    if call.dtype not in dtypes:
        return f"{kernel} does not compute in {call.dtype}"
    if call.dropout > 0.0 and not drops:
        return f"{kernel} has no dropout"
    if torch.cuda.get_device_capability(call.device) < (8, 0):
        return f"{kernel} needs compute capability 8.0 or newer"
    return None


def _masked(device: torch.device, reason: str, span: AttentionSpan) -> CoreChoice:
    if device.type != "cuda":
        return CoreChoice("sdpa", (), True, False, f"a dense mask, because {reason}")
    remedy = None
    if span.mask is None and span.prefix is None:
        # Flash attention drops weights of documents, but not of windows over whole rows.
        undropped = "" if span.has_documents else "without attention dropout "
        remedy = (
            "Memory-efficient attention reads a mask with an entry for each pair of tokens. Use "
            f"Trainer(precision='bf16-mixed') {undropped}on a GPU of compute capability 8.0 or "
            "newer."
        )
    why = f"a dense mask on memory-efficient attention, because {reason}"
    return CoreChoice("sdpa", _FUSED[1:], True, True, why, remedy)


def _operators(device: torch.device, why: str, plain: bool) -> CoreChoice:
    remedy = None
    if device.type == "cuda":
        remedy = (
            "The scores of all pairs of tokens are stored. Use shorter sequences, or half types "
            "without attention dropout if the reason names them."
        )
    return CoreChoice("operators", (), not plain, True, why, remedy)
