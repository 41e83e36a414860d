"""Operators of a microbatch, recorded while the model's code runs on a pretended device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_megatron.memory.pretended_device import PretendedDevice

OperatorKind = Literal["product", "attention", "grouped", "kernel", "pass", "collective", "free"]
#: Operators of torch that multiply matrices, with the positions of their factors.
_PRODUCTS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "baddbmm": 1}
#: Attention kernels, with the number of products of the size of the scores.
_ATTENTION = {
    "_scaled_dot_product_cudnn_attention": 2,
    "_scaled_dot_product_efficient_attention": 2,
    "_scaled_dot_product_flash_attention": 2,
    "_scaled_dot_product_flash_attention_for_cpu": 2,
    "_flash_attention_forward": 2,
    "_scaled_dot_product_cudnn_attention_backward": 5,
    "_scaled_dot_product_efficient_attention_backward": 5,
    "_scaled_dot_product_flash_attention_backward": 5,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 5,
    "_flash_attention_backward": 5,
}
#: Operators that allocate, or describe memory anew, and compute nothing.
_FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "detach",
    "lift_fresh",
    "set_",
    "resize_",
    "record_stream",
    "_reshape_alias",
}
#: Operators that read only as many rows of their first tensor as the result has.
_ROWS = {"embedding", "index_select", "gather", "index"}
#: Operators that write their first tensor without reading it.
_WRITES = {"copy_", "zero_", "fill_"}


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator, kernel or collective.

    Args:
        name: Name of the operator of torch, of the Triton kernel, or of the collective.
        sizes: Of a product (batch, rows, columns, summed); of attention (products of the size of
            the scores, batch x heads, queries, keys, size of a head, pairs of tokens); of a grouped
            product (groups, all rows, rows and columns of a weight).
        num_bytes: What it reads and writes; of a collective the whole tensor (bytes).
        dtype: Type of the factors of products.
        axis: Axis of a collective.
        number: Of a collective that runs beside others its number, which its wait has, too; 0 if
            the device waits for it at once.
    """

    name: str
    kind: OperatorKind
    sizes: tuple[int, ...] = ()
    num_bytes: int = 0
    dtype: torch.dtype | None = None
    axis: str = ""
    number: int = 0

    @property
    def flops(self) -> int:
        """Return the FLOPs of products and attention; 0 for others."""
        if self.kind == "product":
            batch, m, n, k = self.sizes
            return 2 * batch * m * n * k
        if self.kind == "attention":
            products, heads, _, _, head_dim, pairs = self.sizes
            return 2 * products * heads * pairs * head_dim
        if self.kind == "grouped":
            _, rows, n, k = self.sizes
            return 2 * rows * n * k
        return 0

    def grown(self, two: Operator, size: int) -> Operator:
        """Return the operator for a number of samples; this one is for one, the other for two."""
        pairs = zip((*self.sizes, self.num_bytes), (*two.sizes, two.num_bytes), strict=True)
        *sizes, num_bytes = (one + (size - 1) * (many - one) for one, many in pairs)
        return replace(two, sizes=tuple(sizes), num_bytes=num_bytes)


class RecordingDevice(PretendedDevice):
    """Pretended device that lists what would run on it."""

    def __init__(self, kind: str, expert_rows: int = 0, etp: int = 1) -> None:
        super().__init__(kind, expert_rows, etp)
        #: What ran since the list was emptied.
        self.operators: list[Operator] = []
        # Lengths of buffers that hold the rows of any routing, of which kernels read those of an
        # even one. They are known after a first microbatch.
        self._buffer_lengths: set[int] = set()

    @override
    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        results = super().run(function, args, kwargs)
        if not self._is_on_host:
            self.operators.append(_recorded(function, args, kwargs, results))
        return results

    @override
    def launched(self, name: str, tensors: Iterable[Any]) -> None:
        given = _tensors(tensors)
        kind, _, rest = name.partition(" ")
        num_bytes = sum(map(self._filled_size, given))
        if kind != "grouped":
            self.operators.append(Operator(name, "kernel", num_bytes=num_bytes))
            return
        result, a, b, ends = given[:4]
        self._buffer_lengths.add(a.shape[0])
        # Of a weight gradient the result has the size of the weights, else the second factor.
        weights = b if b.dim() == 3 else result
        _, n, k = weights.shape
        sizes = ends.shape[0], min(self._gathered_rows, a.shape[0]), n, k
        self.operators.append(Operator(rest, "grouped", sizes, num_bytes, a.dtype))

    def _filled_size(self, tensor: Tensor) -> int:
        """Return the size of the rows that an even routing fills, or of the whole tensor."""
        length = tensor.shape[0] if tensor.dim() else 0
        if length in self._buffer_lengths and length > self._gathered_rows:
            return _size(tensor) * self._gathered_rows // length
        return _size(tensor)

    def collected(self, kind: str, axis: str, number: int, written: Sequence[Tensor]) -> None:
        """Record a collective that the mesh leaves out."""
        num_bytes = sum(tensor.nbytes for tensor in written)
        collective = Operator(kind, "collective", (), num_bytes, None, axis, number)
        self.operators.append(collective)


def _recorded(function: Any, args: Any, kwargs: Any, results: Any) -> Operator:
    name = function.overloadpacket.__name__
    if function.is_view or name in _FREE:
        return Operator(name, "free")
    given = _tensors(args)
    made = _tensors([results])
    if "out" in kwargs:
        given = [*given, kwargs["out"]]
    num_bytes = sum(map(_size, given)) + sum(map(_size, made))
    if name in _PRODUCTS:
        left, right = given[_PRODUCTS[name] : _PRODUCTS[name] + 2]
        *batch, m, k = left.shape
        sizes = batch[0] if batch else 1, m, right.shape[-1], k
        if _PRODUCTS[name]:
            # The sum is written, and read unless its factor is 0.
            passes = 1 + (kwargs.get("beta", 1) != 0)
            num_bytes = _size(left) + _size(right) + passes * sum(map(_size, made))
        return Operator(name, "product", sizes, num_bytes, left.dtype)
    if name in _ATTENTION:
        return Operator(name, "attention", _sizes_of_attention(name, args), num_bytes)
    if name in _ROWS:
        num_bytes = 2 * sum(map(_size, made))
    elif name in _WRITES:
        num_bytes = sum(map(_size, given))
    elif name == "index_add_":
        num_bytes = 3 * _size(given[-1])
    return Operator(name, "pass", num_bytes=num_bytes)


def _sizes_of_attention(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    is_backward = name.endswith("_backward")
    query, key = args[int(is_backward) :][:2]
    # Flash attention has rows of tokens, the other kernels rows of heads.
    tokens, heads = (1, 2) if name.startswith("_flash") else (2, 1)
    queries = query.shape[tokens]
    keys = key.shape[tokens]
    # A causal query sees half of the keys on average.
    causal = any(argument is True for argument in args)
    pairs = queries * keys // 2 if causal else queries * keys
    batch_heads = query.shape[0] * query.shape[heads]
    return _ATTENTION[name], batch_heads, queries, keys, query.shape[-1], pairs


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor)]


def _size(tensor: Tensor) -> int:
    # An expanded tensor reads its memory once.
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
