"""View of equally spaced tensors of a storage as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_megatron.shapes import Shaped


def stacked_view(tensors: Sequence[Shaped[Tensor, "..."]]) -> Shaped[Tensor, "experts ..."] | None:
    """Return tensors as one view of their memory; None if they are not equally spaced in order.

    Every matrix product of experts calls this function, so it is cheap and caches nothing. Memory
    within the storage of the first tensor belongs to that storage, because storages do not overlap.

    Shapes: tensors ``(*shape)``; output ``(number of tensors, *shape)``.
    """
    first = tensors[0]
    num_tensors = len(tensors)
    if num_tensors == 1:
        return first.unsqueeze(0)
    addresses = [tensor.data_ptr() for tensor in tensors]
    start = addresses[0]
    step = addresses[1] - start
    stop = start + step * num_tensors
    if step <= 0 or step % first.element_size() or addresses != list(range(start, stop, step)):
        return None
    # ``list.count`` is faster than a Python loop: there may be hundreds of tensors.
    shape = first.shape
    strides = first.stride()
    dtype = first.dtype
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
