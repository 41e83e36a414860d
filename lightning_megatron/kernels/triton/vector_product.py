"""Product of a weight and one vector, at the speed at which memory delivers the weight."""

from __future__ import annotations

import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lightning_megatron.kernels.triton.launch import (
    ceil_div,
    early_start,
    on_device_of,
    power_of_two,
)
from lightning_megatron.kernels.triton.token_sums import region_of, send_words, sequence_number
from lightning_megatron.kernels.triton.two_halves import pack_halves
from lightning_megatron.shapes import Float, Int

#: Elements of the weight that a program reads at once, and how many of them are of one row.
#: Programs are small, so that all multiprocessors read even a weight of a few MB.
_BLOCK = 4096
_BLOCK_IN = 2048
_WARPS = 4
#: Widest input of which a program has several rows.
_WIDE = 16384
#: Widest input of products whose programs have pairs of rows.
MAX_PAIRED_WIDTH = _WIDE


def multiply_vector(
    vector: Float[Tensor, "in_features"],
    weight: Float[Tensor, "out_features in_features"],
    bias: Float[Tensor, "out_features"] | None,
    *,
    is_stored: bool = True,
) -> Float[Tensor, "out_features"]:
    """Return the product of a contiguous weight and vector, plus a bias if any, rounded once.

    Equal to ``linear(vector, weight, bias)``, summed in float32. There is no gradient.

    Args:
        is_stored: Whether the weight is stored, and not computed by the previous kernel. In a
            captured pass, the kernel then reads it before the previous kernel has ended.
    """
    result = vector.new_empty(weight.shape[0])
    _launch(vector, weight, bias, result, is_stored=is_stored)
    return result


def multiply_vector_swiglu(
    vector: Float[Tensor, "in_features"],
    weight: Float[Tensor, "gate_up in_features"],
) -> Float[Tensor, "gate_up//2"]:
    """Return the SwiGLU of the product of a stored weight and a vector, both contiguous.

    Equal to ``apply_swiglu(linear(vector, weight))``; the product is rounded before the activation.
    The weight has all gates, then the features that they multiply; the vector has at most
    ``MAX_PAIRED_WIDTH`` elements. There is no gradient.
    """
    result = vector.new_empty(weight.shape[0] // 2)
    _launch(vector, weight, None, result, is_gated=True)
    return result


def send_vector_product(
    vector: Float[Tensor, "in_features"],
    weight: Float[Tensor, "out_features in_features"],
    pointers: Int[Tensor, "ranks"],
    rank: int,
    number: int,
) -> None:
    """Send the product of a stored weight and a vector to all ranks, rounded once.

    ``add_norm_sums`` with the same number receives the products of all ranks and adds them; see
    ``token_sums`` for the regions. The vector has a half type and at most ``MAX_PAIRED_WIDTH``
    elements, the weight an even number of rows; both are contiguous.
    """
    _launch(vector, weight, None, vector, pointers=pointers, rank=rank, number=number)


def _launch(
    vector: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    result: Tensor,
    *,
    is_stored: bool = True,
    is_gated: bool = False,
    pointers: Tensor | None = None,
    rank: int = 0,
    number: int = 0,
) -> None:
    num_out, num_in = weight.shape
    block_in = min(_BLOCK_IN, power_of_two(num_in))
    # A program holds its part of the weight in registers. Other sizes of programs were slower in
    # captured passes, and so were programs that loop over rows with two tiles in flight.
    block_out = _BLOCK // block_in if num_in <= _WIDE else 1
    num_results = num_out // 2 if is_gated else num_out
    num_ranks = 0 if pointers is None else pointers.shape[0]
    seq_length = 1 if is_stored else None
    with on_device_of(vector):
        _multiply[(ceil_div(num_out, block_out),)](
            vector, weight, bias, result, pointers, rank, number, num_results, NUM_IN=num_in,
            IS_GATED=is_gated, NUM_RANKS=num_ranks, SLOT=power_of_two(num_out // 2),
            BLOCK_OUT=block_out, BLOCK_IN=block_in, num_warps=_WARPS, **early_start(seq_length),
        )  # fmt: skip


@triton.jit(do_not_specialize=["number"])
def _multiply(
    vector: tl.tensor, weight: tl.tensor, bias: tl.tensor, result: tl.tensor, pointers: tl.tensor,
    rank: tl.tensor, number: tl.tensor, num_results: tl.tensor, NUM_IN: tl.constexpr,
    IS_GATED: tl.constexpr, NUM_RANKS: tl.constexpr, SLOT: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    program = tl.program_id(0)
    outs = program * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    if IS_GATED:
        # Each gate is followed by the feature that it multiplies.
        has_row = outs < 2 * num_results
        outs = outs // 2 + outs % 2 * num_results
    else:
        has_row = outs < num_results
    lanes = tl.arange(0, BLOCK_IN)
    rows = weight + outs.to(tl.int64)[:, None] * NUM_IN
    # A stored weight does not depend on the previous kernel, so all of its reads are in flight
    # before this kernel waits for the vector.
    parts = ()
    for start in tl.static_range(0, NUM_IN, BLOCK_IN):
        columns = start + lanes
        inside = columns < NUM_IN
        # A weight is read once in a pass, and must not replace other data in the cache.
        part = tl.load(
            rows + columns[None, :], mask=has_row[:, None] & inside[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        parts = parts + (part,)  # type: ignore[assignment]
    if NUM_RANKS > 0:
        regions = ()
        for peer in tl.static_range(NUM_RANKS):
            regions = regions + (region_of(pointers, peer),)  # type: ignore[assignment]
        sequence = sequence_number(region_of(pointers, rank), number)
    if EARLY:
        gdc_wait()
    total = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for index in tl.static_range(0, triton.cdiv(NUM_IN, BLOCK_IN)):
        columns = index * BLOCK_IN + lanes
        values = tl.load(vector + columns, mask=columns < NUM_IN, other=0.0)
        total += parts[index].to(tl.float32) * values.to(tl.float32)[None, :]
    sums = tl.sum(total, 1)
    if bias is not None:
        sums += tl.load(bias + outs, mask=has_row, other=0.0).to(tl.float32)
    rounded = sums.to(result.dtype.element_ty)
    if IS_GATED or NUM_RANKS > 0:
        first, second = tl.split(tl.reshape(rounded, [BLOCK_OUT // 2, 2]))
        pairs = program * (BLOCK_OUT // 2) + tl.arange(0, BLOCK_OUT // 2)
        if IS_GATED:
            gate = first.to(tl.float32)
            activated = gate / (1.0 + tl.exp(-gate)) * second.to(tl.float32)
            inside = pairs < num_results
            tl.store(result + pairs, activated.to(result.dtype.element_ty), mask=inside)
        else:
            inside = 2 * pairs < num_results
            words = pack_halves(first, second)
            send_words(words, pairs, inside, regions, sequence, rank, NUM_RANKS, SLOT)
    else:
        tl.store(result + outs, rounded, mask=has_row)
