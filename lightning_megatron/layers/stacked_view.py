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
    first = tensors[0]
    if len(tensors) == 1:
        return first.unsqueeze(0)
    shape, strides, dtype, itemsize = first.shape, first.stride(), first.dtype, first.element_size()
    start = first.data_ptr()
    step = tensors[1].data_ptr() - start
    stop = start + step * len(tensors)
    if step <= 0 or step % itemsize or [tensor.data_ptr() for tensor in tensors] != list(range(start, stop, step)):
        return None
    alike = all(tensor.shape == shape and tensor.stride() == strides and tensor.dtype is dtype for tensor in tensors)
    storage = first.untyped_storage()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if not alike or stop - step + extent * itemsize > storage.data_ptr() + storage.nbytes():
        return None
    return first.as_strided((len(tensors), *shape), (step // itemsize, *strides))
