"""Checks of the kernels of single tokens against float64: SwiGLU, attention, sums over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.kernels import triton as kernels
from lightning_megatron.layers.attention.cached_attention import attend_by_mask
from lightning_megatron.layers.rotary import apply_rotary, position_tables

if TYPE_CHECKING:
    from tests.kernels.checks import Draw, Sizes

#: Results and inputs of products with SwiGLU.
GATED_SHAPES = ((1, 3), (5, 37), (7, 2049), (33, 1024))
#: Size of the residual stream, rows of a rank's table, and inputs of each rank in the order of sums.
WIDTH = 1096
ROWS = 5
SUMS = (40, 2049, 1, 333)
EPS = 1e-3


def check_gated_vector_products(draw: Draw, sizes: Sizes) -> None:
    from tests.kernels.checks import ROUNDOFF, check_rounded

    for num_results, num_in in GATED_SHAPES:
        vector = draw(num_in)
        weight = draw(2 * num_results, num_in, scale=num_in**-0.5)
        actual = kernels.multiply_vector_swiglu(vector, weight)
        gate, up = F.linear(vector.double(), weight.double()).chunk(2)
        # The product is rounded before the activation.
        noise = 4e-6 + 3 * ROUNDOFF[vector.dtype]
        check_rounded(actual, F.silu(gate) * up, f"{num_results, num_in}", noise=noise)


def check_rotated_attention(draw: Draw, sizes: Sizes) -> None:
    """Compare places at the start, at the end and past the end of a ring buffer, with and without
    norms of heads, and heads of which a part is rotated.
    """
    for slots, _, heads, kv_heads, head_dim in sizes.heads:
        # More slots than a program reads at once.
        for length in (slots, 150):
            for place in {0, length // 2, length - 1, length + 2}:
                for has_norm, interleaved in ((False, False), (True, True), (True, False)):
                    sizes_of_case = length, heads, kv_heads, head_dim
                    _check_rotated(draw, sizes_of_case, place, has_norm, interleaved)


def _check_rotated(
    draw: Draw, sizes: tuple[int, int, int, int], place: int, has_norm: bool, interleaved: bool
) -> None:
    from tests.kernels.checks import ROUNDOFF, check_rounded

    slots, heads, kv_heads, head_dim = sizes
    what = f"rotated attention {sizes}, place {place}, {has_norm, interleaved}"
    qkv = draw((heads + 2 * kv_heads) * head_dim)
    keys, values = (draw(1, kv_heads, slots, head_dim) for _ in range(2))
    # Slots behind the current token are still empty.
    keys[:, :, place + 1 :] = torch.nan
    values[:, :, place + 1 :] = torch.nan
    rotated = head_dim if has_norm != interleaved else max(head_dim // 4 * 2, 2)
    positions = torch.arange(place + 3, device=draw.device)[None]
    tables = position_tables(positions, rotated, dtype=draw.dtype)
    scales = (draw(head_dim), draw(head_dim)) if has_norm else None
    before = keys.double(), values.double()
    at = torch.tensor([place], device=draw.device)
    counters = torch.zeros(kv_heads, dtype=torch.int32, device=draw.device)
    actual = kernels.attend_rotated_token(
        qkv, tables, keys, values, at, counters, scale=head_dim**-0.5, scales=scales, eps=EPS,
        interleaved=interleaved,
    )  # fmt: skip
    assert not counters.any(), what
    parts = qkv.double().view(-1, head_dim).split([heads, kv_heads, kv_heads])
    turned = []
    for number, part in enumerate(parts[:2]):
        normed = F.rms_norm(part, (head_dim,), scales[number].double(), EPS) if scales else part
        angles = tables[0][place : place + 1].double(), tables[1][place : place + 1].double()
        turned.append(apply_rotary(normed[None, None], angles, interleaved)[0, 0])
    slot = place % slots
    check_rounded(keys[0, :, slot], turned[1], f"{what}: key")
    assert torch.equal(values[0, :, slot].double(), parts[2]), f"{what}: value"
    for tensor, new in zip(before, (keys[0, :, slot], parts[2]), strict=True):
        tensor[0, :, slot] = new
    query = turned[0].to(draw.dtype).double()[None, None]
    stored = [tensor.nan_to_num() for tensor in before]
    expected = attend_by_mask(query, *stored, at, None, head_dim**-0.5)
    # Queries and weights are rounded before they are multiplied.
    noise = 4e-6 + 4 * ROUNDOFF[draw.dtype]
    check_rounded(actual, expected[0, 0], what, noise=noise)


def check_token_sums(
    rank: int,
    size: int,
    pointers: Tensor,
    base: Tensor,
    dtype: torch.dtype,
    device: str | torch.device,
) -> None:
    """Compare sums of products that several ranks send, in several launches.

    Args:
        rank: Position of this rank.
        size: Number of ranks.
        pointers: Address of the region of every rank.
        base: First number in the region of this rank.
        dtype: Half type of the tensors.
        device: Device of the tensors.
    """
    from tests.kernels.checks import ROUNDOFF, Draw, check_rounded

    draws = [Draw(torch.device("cpu"), dtype) for _ in range(size)]
    for peer, draw in enumerate(draws):
        draw.generator.manual_seed(peer)
    shared = Draw(torch.device("cpu"), dtype)
    num_sums = len(SUMS) + 1
    for repeat in range(3):
        base.add_(num_sums)
        table, scale = shared(size * ROWS, WIDTH), shared(WIDTH)
        token = (7 * repeat + 2) % len(table)
        own = table.to(device)[rank * ROWS : (rank + 1) * ROWS]
        tokens = torch.tensor([[token]], device=device)
        kernels.send_token_vector(tokens, own, pointers, rank, 1)
        total, normed = kernels.add_norm_sums(None, scale.to(device), EPS, pointers, rank, 1)
        what = f"rank {rank} of {size}, {dtype}, repeat {repeat}"
        assert torch.equal(total.cpu(), table[token]), f"{what}: vector of a token"
        expected = F.rms_norm(table[token].double(), (WIDTH,), scale.double(), EPS)
        check_rounded(normed.cpu(), expected, f"{what}: normalised vector")
        for number, num_in in enumerate(SUMS, 2):
            vectors = [draw(num_in) for draw in draws]
            weights = [draw(WIDTH, num_in) for draw in draws]
            stream, scale = shared(WIDTH), shared(WIDTH)
            vector, weight = vectors[rank].to(device), weights[rank].to(device)
            kernels.send_vector_product(vector, weight, pointers, rank, number)
            total, normed = kernels.add_norm_sums(
                stream.to(device), scale.to(device), EPS, pointers, rank, number
            )
            parts = [
                F.linear(vector.double(), weight.double())
                for vector, weight in zip(vectors, weights, strict=True)
            ]
            # Each part is rounded before the sum, and the sum before the residual addition.
            noise = 4e-6 + 3 * ROUNDOFF[dtype]
            expected = stream.double() + sum(parts)
            check_rounded(total.cpu(), expected, f"{what}, sum {number}", noise=noise)
            expected = F.rms_norm(total.cpu().double(), (WIDTH,), scale.double(), EPS)
            check_rounded(normed.cpu(), expected, f"{what}, normalised sum {number}")
