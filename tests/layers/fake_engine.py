"""A stand-in for the parts of Transformer Engine that this package calls, without casts to 8 bits;
tests on GPUs check the numbers of the library itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.layers.noted_casts import spread


def general_gemm(
    left: Tensor, right: Tensor, out_dtype: torch.dtype, layout: str, grad: bool, out: Tensor | None,
    accumulate: bool, alpha: float, use_split_accumulator: bool,
) -> tuple[Tensor, None, None, None]:  # fmt: skip
    """Multiply as cuBLAS does, which stores matrices column by column."""
    assert grad == (layout != "TN")
    factors = {"TN": (right, left.t()), "NN": (right, left), "NT": (right.t(), left)}[layout]
    product = (alpha * (factors[0] @ factors[1])).to(out_dtype)
    if out is None:
        return product, None, None, None
    assert out.dtype == out_dtype
    out.copy_(out + product if accumulate else product)
    return out, None, None, None


def rmsnorm_fwd(
    rows: Tensor, weight: Tensor, eps: float, out: None, quantizer: None, dtype: Any, margin: int,
    adds_one: bool,
) -> tuple[Tensor, None, Tensor]:  # fmt: skip
    """Return the norm and the tensors that the backward pass needs."""
    assert dtype == f"type of {rows.dtype}"
    inverse_std = (rows.square().mean(-1) + eps).rsqrt()
    return rows * inverse_std[:, None] * (weight + adds_one), None, inverse_std


def rmsnorm_bwd(
    grad: Tensor, rows: Tensor, inverse_std: Tensor, weight: Tensor, margin: int, adds_one: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the weight."""
    normal, scaled = rows * inverse_std[:, None], grad * (weight + adds_one)
    part = scaled - normal * (scaled * normal).mean(-1, keepdim=True)
    return inverse_std[:, None] * part, (grad * normal).sum(0)


def layernorm_fwd(
    rows: Tensor, weight: Tensor, bias: Tensor, eps: float, out: None, quantizer: None, dtype: Any, margin: int,
    adds_one: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the norm and the tensors that the backward pass needs."""
    assert dtype == f"type of {rows.dtype}"
    inverse_std = (rows.var(-1, correction=0) + eps).rsqrt()
    return (
        F.layer_norm(rows, weight.shape, weight + adds_one, bias, eps),
        rows.mean(-1),
        inverse_std,
    )


def layernorm_bwd(
    grad: Tensor, rows: Tensor, mean: Tensor, inverse_std: Tensor, weight: Tensor, margin: int,
    adds_one: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the rows, the weight and the bias."""
    centred = rows - mean[:, None]
    rows_gradient, weight_gradient = rmsnorm_bwd(
        grad, centred, inverse_std, weight, margin, adds_one
    )
    return rows_gradient - rows_gradient.mean(-1, keepdim=True), weight_gradient, grad.sum(0)


def general_grouped_gemm(
    A: list[Tensor], B: list[Tensor], out: list[Tensor], quantization_params: list[None],
    out_dtype: torch.dtype, layout: str = "TN", m_splits: list[int] | None = None, gelu: bool = False,
    grad: bool = False, accumulate: bool = False, bias: None = None, use_bias: bool = False,
    use_split_accumulator: bool = False, D_dtype: None = None, single_output: bool = False,
) -> None:  # fmt: skip
    """Multiply the matrices of each group."""
    assert len(A) == len(B) == len(quantization_params)
    assert m_splits is not None
    results = list(out[0][: sum(m_splits)].split(m_splits)) if single_output else out
    for left, right, result in zip(A, B, results, strict=True):
        general_gemm(left, right, out_dtype, layout, grad, result, accumulate, 1.0, False)


class DotProductAttention:
    """Attention with the arguments that this package gives, by a mask of all pairs of tokens."""

    def __init__(
        self, num_attention_heads: int, kv_channels: tuple[int, int], num_gqa_groups: int,
        attention_dropout: float = 0.0, softmax_scale: float | None = None,
    ) -> None:  # fmt: skip
        assert attention_dropout == 0.0
        self.sizes = num_attention_heads, num_gqa_groups, kv_channels[0]
        self.scale = softmax_scale

    def __call__(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: None = None,
        qkv_format: str = "sbhd", cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None, max_seqlen_q: int = 0, max_seqlen_kv: int = 0,
        attn_mask_type: str = "causal", window_size: tuple[int, int] = (-1, 0), softcap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        assert (query_layer.shape[-2], key_layer.shape[-2], query_layer.shape[-1]) == self.sizes
        assert (softcap, "causal" in attn_mask_type) == (0.0, window_size[1] == 0)
        assert ("padding" in attn_mask_type) == (qkv_format == "thd")
        rows = [query_layer, key_layer, value_layer]
        lengths = [len(query_layer)]
        if qkv_format == "thd":
            assert cu_seqlens_q is not None
            assert cu_seqlens_q is cu_seqlens_kv
            lengths = cu_seqlens_q.diff().tolist()
            assert max(lengths) <= max_seqlen_q == max_seqlen_kv
            rows = [tensor[:, None] for tensor in rows]
        parts = []
        for query, key, value in zip(*(tensor.split(lengths) for tensor in rows), strict=True):
            distance = torch.arange(len(query))[:, None] - torch.arange(len(key))
            left, right = window_size
            seen = (distance <= left) | torch.tensor(left < 0)
            seen &= (-distance <= right) | torch.tensor(right < 0)
            heads_first = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            mixed = F.scaled_dot_product_attention(
                *heads_first, attn_mask=seen, scale=self.scale, enable_gqa=True
            )
            parts.append(mixed.permute(2, 0, 1, 3).flatten(2))
        joined = torch.cat(parts)
        return joined[:, 0] if qkv_format == "thd" else joined


class _Types(dict):
    """Mapping of types of torch to names, in place of the mapping of the library."""

    def __missing__(self, dtype: torch.dtype) -> str:
        return f"type of {dtype}"


@contextmanager
def installed(available: tuple[bool, str] = (True, "")) -> Iterator[ModuleType]:
    """Replace Transformer Engine by the stand-in, whose answer it is whether a chip has products."""
    attention = ".pytorch.attention.dot_product_attention.dot_product_attention"
    names = ("", ".pytorch", ".pytorch.cpp_extensions", ".pytorch.constants", attention)
    fakes = {f"transformer_engine{name}": ModuleType(f"transformer_engine{name}") for name in names}
    fakes["transformer_engine_torch"] = library = ModuleType("transformer_engine_torch")
    engine = fakes["transformer_engine.pytorch"]
    for question in ("is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available"):
        setattr(engine, question, lambda return_reason: available)
    engine.prepare_for_saving = lambda *tensors: ([*tensors], [None] * len(tensors))
    engine.restore_from_saved = lambda forms, tensors: tensors
    engine.Float8Quantizer = object
    fakes["transformer_engine.pytorch.cpp_extensions"].general_gemm = general_gemm
    fakes["transformer_engine.pytorch.cpp_extensions"].general_grouped_gemm = general_grouped_gemm
    fakes[f"transformer_engine{attention}"].DotProductAttention = DotProductAttention
    fakes[f"transformer_engine{attention}"]._attention_backends = {
        "use_flash_attention": False, "use_fused_attention": True, "use_unfused_attention": False
    }  # fmt: skip
    fakes["transformer_engine.pytorch.constants"].TE_DType = _Types()
    for function in (rmsnorm_fwd, rmsnorm_bwd, layernorm_fwd, layernorm_bwd):
        setattr(library, function.__name__, function)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in fakes.items():
            patch.setitem(sys.modules, name, module)
        yield engine


def output_and_gradients(module: Any, hidden: Tensor, seed: int) -> list[Tensor]:
    """Return the output and all gradients of a layer."""
    hidden = hidden.clone().requires_grad_()
    for parameter in module.parameters():
        parameter.grad = None
    output = module(hidden)
    output.backward(spread(*output.shape, seed=seed))
    assert hidden.grad is not None
    return [output.detach(), hidden.grad, *(parameter.grad for parameter in module.parameters())]
