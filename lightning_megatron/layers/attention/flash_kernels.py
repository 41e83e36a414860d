"""Flash attention of torch, cuDNN and installed packages, with outputs and log-sum-exps."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megatron.shapes import Float, Int

#: Rows ``(B, S, H, D)``, or the tokens of all documents ``(tokens, H, D)``.
Rows = Tensor
Gradients = tuple[Tensor, Tensor, Tensor]


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

    def of_package(self) -> dict[str, Any]:
        """Return the arguments with the same names in flash attention 3 and 4.

        The upper bounds of lengths are given only with documents.
        """
        longest_query = None if self.query_borders is None else self.longest_query
        longest_key = None if self.key_borders is None else self.longest_key
        return {
            "cu_seqlens_q": self.query_borders,
            "cu_seqlens_k": self.key_borders,
            "max_seqlen_q": longest_query,
            "max_seqlen_k": longest_key,
            "softmax_scale": self.scale,
            "softcap": self.soft_cap,
        }


class FlashKernel(Protocol):
    """Interface of a package of flash attention."""

    @property
    def name(self) -> str:
        """Return the name for the table at fit start."""

    def forward(
        self, query: Rows, key: Rows, value: Rows, call: FlashCall
    ) -> tuple[Rows, Float[Tensor, "... heads _"]]:
        """Return the output and the log-sum-exps, ``(B, H, S)`` or ``(H, tokens)`` in float32."""

    def backward(
        self,
        grad_out: Rows,
        query: Rows,
        key: Rows,
        value: Rows,
        out: Rows,
        lse: Float[Tensor, "... heads _"],
        call: FlashCall,
    ) -> Gradients:
        """Return the gradients of queries, keys and values."""


class TorchFlash:
    """Flash attention 2, which torch contains; it does not bound scores."""

    name = "flash"

    def forward(
        self, query: Rows, key: Rows, value: Rows, call: FlashCall
    ) -> tuple[Rows, Float[Tensor, "... heads _"]]:
        return _torch_flash(query, key, value, call, dropout=0.0)

    def backward(
        self,
        grad_out: Rows,
        query: Rows,
        key: Rows,
        value: Rows,
        out: Rows,
        lse: Float[Tensor, "... heads _"],
        call: FlashCall,
    ) -> Gradients:
        without_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        gradients: Gradients = torch.ops.aten._flash_attention_backward(
            grad_out,
            query,
            key,
            value,
            out,
            lse,
            call.query_borders,
            call.key_borders,
            call.longest_query,
            call.longest_key,
            0.0,
            call.causal,
            without_dropout,
            torch.empty(0, device=query.device),
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


def _torch_flash(
    query: Rows, key: Rows, value: Rows, call: FlashCall, dropout: float
) -> tuple[Rows, Float[Tensor, "... heads _"]]:
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

    def forward(
        self, query: Rows, key: Rows, value: Rows, call: FlashCall
    ) -> tuple[Rows, Float[Tensor, "... heads _"]]:
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *heads_first, None, True, 0.0, call.causal, False, scale=call.scale
        )
        return out.transpose(1, 2), lse.view(out.shape[:3])

    def backward(
        self,
        grad_out: Rows,
        query: Rows,
        key: Rows,
        value: Rows,
        out: Rows,
        lse: Float[Tensor, "... heads _"],
        call: FlashCall,
    ) -> Gradients:
        without_dropout = torch.zeros((), dtype=torch.int64, device=query.device)
        heads_first = (tensor.transpose(1, 2) for tensor in (grad_out, query, key, value, out))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *heads_first,
            lse.unsqueeze(-1),
            without_dropout,
            without_dropout,
            None,
            None,
            None,
            query.shape[1],
            key.shape[1],
            0.0,
            call.causal,
            scale=call.scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


@dataclass(frozen=True)
class FlashAttention3:
    """Flash attention 3 for Hopper, the module ``flash_attn_interface``."""

    module: ModuleType
    name = "flash attention 3"

    def forward(
        self, query: Rows, key: Rows, value: Rows, call: FlashCall
    ) -> tuple[Rows, Float[Tensor, "... heads _"]]:
        out, lse, *_ = self.module._flash_attn_forward(
            query,
            key,
            value,
            **call.of_package(),
            causal=call.causal,
            window_size_left=call.left,
            window_size_right=call.right,
        )
        return out, lse

    def backward(
        self,
        grad_out: Rows,
        query: Rows,
        key: Rows,
        value: Rows,
        out: Rows,
        lse: Float[Tensor, "... heads _"],
        call: FlashCall,
    ) -> Gradients:
        like = torch.contiguous_format
        dq, dk, dv = (
            torch.empty_like(tensor, memory_format=like) for tensor in (query, key, value)
        )
        self.module._flash_attn_backward(
            grad_out,
            query,
            key,
            value,
            out,
            lse,
            dq=dq,
            dk=dk,
            dv=dv,
            **call.of_package(),
            is_causal=call.causal,
            window_size_left=call.left,
            window_size_right=call.right,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


@dataclass(frozen=True)
class FlashAttention4:
    """Flash attention 4 for Hopper and newer, the module ``flash_attn.cute.interface``."""

    module: ModuleType
    name = "flash attention 4"

    def forward(
        self, query: Rows, key: Rows, value: Rows, call: FlashCall
    ) -> tuple[Rows, Float[Tensor, "... heads _"]]:
        out, lse, *_ = self.module._flash_attn_fwd(
            query,
            key,
            value,
            **call.of_package(),
            causal=call.causal,
            window_size_left=_bound(call.left),
            window_size_right=_bound(call.right),
            return_lse=True,
        )
        return out, lse

    def backward(
        self,
        grad_out: Rows,
        query: Rows,
        key: Rows,
        value: Rows,
        out: Rows,
        lse: Float[Tensor, "... heads _"],
        call: FlashCall,
    ) -> Gradients:
        dq, dk, dv = self.module._flash_attn_bwd(
            query,
            key,
            value,
            out,
            grad_out,
            lse,
            **call.of_package(),
            causal=call.causal,
            window_size_left=_bound(call.left),
            window_size_right=_bound(call.right),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


def _bound(distance: int) -> int | None:
    return None if distance < 0 else distance
