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


class _Types(dict):
    """Mapping of types of torch to names, in place of the mapping of the library."""

    def __missing__(self, dtype: torch.dtype) -> str:
        return f"type of {dtype}"


@contextmanager
def installed(available: tuple[bool, str] = (True, "")) -> Iterator[ModuleType]:
    """Replace Transformer Engine by the stand-in, whose answer it is whether a chip has products."""
    names = ("", ".pytorch", ".pytorch.cpp_extensions", ".pytorch.constants")
    fakes = {f"transformer_engine{name}": ModuleType(f"transformer_engine{name}") for name in names}
    fakes["transformer_engine_torch"] = library = ModuleType("transformer_engine_torch")
    engine = fakes["transformer_engine.pytorch"]
    for question in ("is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available"):
        setattr(engine, question, lambda return_reason: available)
    engine.prepare_for_saving = lambda *tensors: ([*tensors], [None] * len(tensors))
    engine.restore_from_saved = lambda forms, tensors: tensors
    engine.Float8Quantizer = object
    fakes["transformer_engine.pytorch.cpp_extensions"].general_gemm = general_gemm
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
