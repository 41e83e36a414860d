"""Attention of Hugging Face models on packed documents by the flash attention that torch contains.

Without a dense mask, transformers computes packed documents only through other packages, such as
flash-attn. :func:`register` adds torch's ``varlen_attn``, a build of flash attention 2, as the
implementation ``torch_varlen``. As for ``flash_attention_2``, the caller of the model
passes the boundaries of the documents; :func:`packed_inputs` returns these arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

#: Kinds of attention and their names in transformers: torch with a dense mask, torch's flash
#: attention, and package flash-attn. The name of torch's flash attention must not contain "flash",
#: because transformers would then require a package.
ATTENTIONS = {
    "sdpa": "sdpa",
    "torch_flash": "torch_varlen",
    "flash_attention_2": "flash_attention_2",
}
#: Arguments of some models that change the attention; ``varlen_attn`` has no such parameters.
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


def choose_attention(requested: str, device: torch.device) -> str:
    """Return the name of the attention for packed documents on a device.

    Args:
        requested: One of ``ATTENTIONS``, or ``auto`` for the fastest one: package flash-attn if it
            is installed, else torch's flash attention on a GPU, else the dense mask.
        device: Device of the model.
    """
    from transformers.utils import is_flash_attn_2_available

    if requested != "auto":
        return requested
    if device.type != "cuda":
        return "sdpa"
    return "flash_attention_2" if is_flash_attn_2_available() else "torch_flash"


def register() -> None:
    """Register torch's flash attention with transformers; only rows with padding get a mask."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    name = ATTENTIONS["torch_flash"]
    AttentionInterface.register(name, attention_by(varlen_attn))
    AttentionMaskInterface.register(name, flash_attention_mask)


def attention_by(product: Callable[..., Any]) -> Callable[..., tuple[Tensor, None]]:
    """Return an attention function of transformers for the documents of one row.

    The function takes queries ``(1, H, T, D)``, keys and values ``(1, H_kv, T, D)``, and returns
    ``(1, T, H, D)``. Each token attends to the tokens of its document up to its own position.

    Args:
        product: ``varlen_attn``, or a function with its parameters.
    """
    # Since torch 2.12, enable_gqa must be set if there are fewer key/value heads than query heads.
    # torch 2.11 has no such parameter, and its kernel accepts fewer key/value heads.
    has_parameter = "enable_gqa" in inspect.signature(product).parameters
    options: dict[str, Any] = {"enable_gqa": True} if has_parameter else {}

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        scaling: float | None = None,
        dropout: float = 0.0,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        unsupported = {
            name: arguments[name] for name in _UNSUPPORTED if arguments.get(name) is not None
        }
        if attention_mask is not None or dropout or unsupported or len(query) != 1:
            mask = "no mask" if attention_mask is None else "a mask"
            raise ValueError(
                "torch_flash computes causal attention inside the documents of one row: this call "
                f"has {len(query)} rows, dropout {dropout}, {mask} and "
                f"{unsupported or 'no further arguments'}. varlen_attn supports one row of "
                "documents and nothing else. "
                'Use one row without padding and dropout, or attention "sdpa".'
            )
        tokens = [rows[0].transpose(0, 1) for rows in (query, key, value)]
        output = product(
            *tokens,
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=(-1, 0),
            **options,
        )
        return output[None], None

    return attend


def packed_inputs(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Return the arguments that describe the documents of a row to a model of transformers.

    The arguments equal those from ``DataCollatorWithFlattening``. transformers derives the dense
    mask from the positions.

    Args:
        lengths: Lengths of the documents (tokens).
        device: Device of the model.
    """
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    return {
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None].to(device),
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": longest,
        "max_length_k": longest,
    }
