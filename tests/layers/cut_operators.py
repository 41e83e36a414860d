"""CPU stand-ins for torch's 8-bit products, plain and overlapped with collectives: they compute in
float64, piece by piece, and check their arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from lightning_megatron.layers.linear import fp8_products


def multiply(
    left: Tensor, right: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype,
    use_fast_accum: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Stand in for ``torch._scaled_mm`` with one scale for each factor."""
    assert left.is_contiguous()
    assert right.t().is_contiguous(), "the chip reads the right factor by columns"
    assert scale_a.shape == scale_b.shape == (1,)
    product = (left.double() * scale_a.double()) @ (right.double() * scale_b.double())
    return product.to(out_dtype) if out is None else out.copy_(product)


def all_gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    pieces = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(pieces, tensor, group=group)
    return pieces


def gather_and_multiply(
    x: Tensor, matrices: list[Tensor], scale: Tensor, scales: list[Tensor], dim: int, name: str,
    biases: list[None], result_scales: list[None], dtypes: list[torch.dtype], fast: list[bool],
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Stand in for ``symm_mem.fused_all_gather_scaled_matmul``."""
    assert (dim, biases, result_scales) == (0, [None], [None])
    pieces = all_gathered(x.view(torch.uint8), _resolve_process_group(name))
    options: dict[str, Any] = {"out_dtype": dtypes[0], "use_fast_accum": fast[0]}
    products = [
        multiply(piece.view(x.dtype), matrices[0], scale, scales[0], **options) for piece in pieces
    ]
    return torch.cat(pieces).view(x.dtype), [torch.cat(products)]


def multiply_and_scatter(
    x: Tensor, matrix: Tensor, scale: Tensor, matrix_scale: Tensor, op: str, dim: int,
    reshaped_dim: int, name: str, shape: list[int], out_dtype: torch.dtype, use_fast_accum: bool,
) -> Tensor:  # fmt: skip
    """Stand in for ``symm_mem.fused_scaled_matmul_reduce_scatter``."""
    assert (op, dim, reshaped_dim) == ("sum", 0, 0)
    assert shape == [x.shape[0], matrix.shape[1]]
    group = _resolve_process_group(name)
    options: dict[str, Any] = {"out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
    pieces = x.chunk(group.size())
    products = torch.stack(
        [multiply(piece, matrix, scale, matrix_scale, **options) for piece in pieces]
    )
    return torch.stack([part[group.rank()] for part in all_gathered(products, group)]).sum(0)


@contextmanager
def cut_operators() -> Iterator[Counter[str]]:
    """Let 8-bit products overlap with collectives on the CPU by stand-ins; count the calls."""
    counts: Counter[str] = Counter()
    stand_ins: dict[str, Callable[..., Any]] = {
        "fused_all_gather_scaled_matmul": gather_and_multiply,
        "fused_scaled_matmul_reduce_scatter": multiply_and_scatter,
    }

    def counting(name: str) -> Callable[..., Any]:
        schema = getattr(torch.ops.symm_mem, name).default._schema
        argument_names = [argument.name for argument in schema.arguments]

        def run(*args: Any, **options: Any) -> Any:
            assert len(args) <= len(argument_names)
            assert set(options) <= set(argument_names[len(args) :]), "torch has other names"
            counts[name] += 1
            return stand_ins[name](*args, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in stand_ins:
            patch.setattr(torch.ops.symm_mem, name, counting(name))
        patch.setattr(torch, "_scaled_mm", multiply)
        overlaps = lambda x, dtype, axis: axis.overlaps_matmul  # noqa: E731
        patch.setattr(fp8_products, "overlaps_products", overlaps)
        yield counts
