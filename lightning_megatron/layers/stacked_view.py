"""Several tensors that lie at equal distances in one memory, as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def stacked_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors as one that shares their memory; None unless they lie in it at equal distances, in order.

    It is asked for in every product of experts, so nothing is looked at twice and nothing is kept: what is within the
    storage of the first one is a part of it, because no two storages share memory.

    Shapes: E of one shape; output ``(E, *shape)``.
    """
    first, num_tensors = tensors[0], len(tensors)
    if num_tensors == 1:
        return first.unsqueeze(0)
    places = [tensor.data_ptr() for tensor in tensors]
    start, step = places[0], places[1] - places[0]
    stop = start + step * num_tensors
    if step <= 0 or step % first.element_size() or places != list(range(start, stop, step)):
        return None
    # Lists are compared in one go: there may be hundreds of tensors.
    shape, strides, dtype = first.shape, first.stride(), first.dtype
    if (
        [tensor.shape for tensor in tensors].count(shape) != num_tensors
        or [tensor.stride() for tensor in tensors].count(strides) != num_tensors
        or [tensor.dtype for tensor in tensors].count(dtype) != num_tensors
    ):
        return None
    storage = first.untyped_storage()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if stop - step + extent * first.element_size() > storage.data_ptr() + storage.nbytes():
        return None
    return first.as_strided((num_tensors, *shape), (step // first.element_size(), *strides))
