"""Functions of torch that user code may call on a part of the features or heads, by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

_ARITHMETIC = "add sub mul div true_divide pow eq ne lt le gt ge and or xor mod floordiv".split()
#: Functions whose result at a place depends on the operands at this place alone.
ELEMENTWISE = frozenset(
    {
        f"{prefix}{name}{suffix}"
        for name in _ARITHMETIC
        for prefix, suffix in (("", ""), ("__", "__"), ("__r", "__"), ("__i", "__"))
    }
    | set(
        """
        __truediv__ __rtruediv__ __itruediv__ __neg__ __invert__ __abs__ neg rsub abs exp expm1 log
        log1p sqrt rsqrt square reciprocal sin cos tanh sigmoid erf sign floor round clamp clamp_min
        clamp_max clip minimum maximum where masked_fill lerp addcmul addcdiv
        logical_not logical_and logical_or isnan isinf isfinite nan_to_num
        gelu silu relu relu6 leaky_relu elu celu selu mish softplus softsign hardtanh
        hardswish hardsigmoid logsigmoid tanhshrink softshrink
        to type type_as float double half bfloat16 int long bool clone contiguous detach data
        real imag
        zeros_like ones_like empty_like full_like
        """.split()
    )
)  # fmt: skip
#: Special methods that write into their first operand.
IN_PLACE = frozenset({"__setitem__", *(f"__i{name}__" for name in (*_ARITHMETIC, "truediv"))})
#: Functions whose result is the same for a part and for the full tensor.
INVARIANT = frozenset(
    """
    dim ndimension is_floating_point is_complex get_device element_size is_contiguous __hash__
    requires_grad_ register_hook new_zeros new_ones new_empty new_full new_tensor
    """.split()
)
#: Functions that give sizes, which a shard has of the full tensor.
SIZES = frozenset("shape size numel nelement __len__".split())
#: Functions that give memory, which kernels outside of torch read without a call of torch.
ADDRESSES = frozenset("data_ptr untyped_storage storage __cuda_array_interface__".split())
#: Functions along dimensions, with the index of the argument that names these.
DIM_ARGUMENTS: Mapping[str, int] = {
    **dict.fromkeys("softmax log_softmax logsumexp cumsum sum mean amax amin max min".split(), 1),
    **dict.fromkeys("argmax argmin var std glu all any prod".split(), 1),
    **dict.fromkeys("norm vector_norm linalg_vector_norm normalize".split(), 2),
}
#: Functions that only move, add, remove or select dimensions.
VIEWS = frozenset(
    """
    transpose swapaxes swapdims permute movedim moveaxis unsqueeze squeeze unbind select mT T mH H
    adjoint __getitem__ narrow split split_with_sizes chunk tensor_split
    """.split()
)
#: Functions that divide or join dimensions.
RESHAPES = frozenset("view reshape flatten unflatten".split())
#: Maximum number of sections of a joined dimension.
_MAX_SECTIONS = 64


def answer_by_shape(
    name: str, shape: torch.Size, others: Sequence[Any], named: Mapping[str, Any]
) -> Any:
    """Return what one of :data:`SIZES` gives for a tensor of a shape.

    Args:
        others: Arguments after the tensor.
        named: Arguments by name.
    """
    if name == "shape":
        return shape
    if name == "size":
        dims = (*others, *named.values())
        return shape[dims[0]] if dims and dims[0] is not None else shape
    return shape[0] if name == "__len__" else prod(shape)


def reshaped_sections(
    old: Sequence[int], dim: int, sections: Sequence[int], new: Sequence[int], num_ranks: int
) -> tuple[int, tuple[int, ...]] | None:
    """Return the cut dimension after a reshape, with its sections; None if there is no such one.

    Each rank has an equal part of every section of the dimension ``dim`` of the old shape. If the
    part can be reshaped alone, the new dimension is cut in the same way.

    Args:
        old: Full shape before the reshape (elements).
        new: Full shape after the reshape (elements).
        num_ranks: Number of ranks that share the tensor.
    """
    if 0 in old:
        return None
    before = _products(old)
    after = _products(new)
    shared = sorted(set(before) & set(after))
    first = max(size for size in shared if size <= before[dim])
    last = min(size for size in shared if size >= before[dim + 1])
    # Dimensions of size 1 at the beginning belong to the dimensions before.
    start = max(index for index in range(dim + 1) if before[index] == first)
    stop = next(index for index in range(dim + 1, len(before)) if before[index] == last)
    num_outer = prod(old[start:dim])
    if num_outer * len(sections) > _MAX_SECTIONS:
        return None
    inner = prod(old[dim + 1 : stop])
    joined = [size * inner for size in sections] * num_outer
    lead = max(index for index, size in enumerate(after[:-1]) if size == first)
    rest = last // first // new[lead]
    if not any(size % (rest * num_ranks) for size in joined):
        return lead, tuple(size // rest for size in joined)
    is_by_section = len(set(joined)) == 1 and new[lead] == len(joined)
    if is_by_section and rest > 1:
        following = next(index for index in range(lead + 1, len(new)) if new[index] > 1)
        if new[following] % num_ranks == 0:
            return following, (new[following],)
    return None


def _products(shape: Sequence[int]) -> list[int]:
    """Return the number of elements before each dimension, from 1, and of all."""
    products = [1]
    for size in shape:
        products.append(products[-1] * size)
    return products
