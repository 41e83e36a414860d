"""Row ranges of a full tensor that tensor-parallel ranks own, and boxes that cover a flat range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.settings import divisors, join_or


@dataclass(frozen=True)
class ShardRange:
    """Rows [start, stop) of a full tensor, with the index of this copy of them.

    Args:
        stop: Index after the last row; equal to ``start`` for an empty range.
        copy: Index of this copy of the rows. Norms count copy 0, and checkpoints save it.
    """

    start: int
    stop: int
    copy: int = 0

    @property
    def size(self) -> int:
        """Return the number of rows."""
        return self.stop - self.start


def padded_vocab_size(vocab_size: int, tp: int, multiple: int = 128) -> int:
    """Return the vocabulary size rounded up to a multiple of ``multiple`` x tp.

    All ranks then have the same number of rows. The result equals Megatron-Core's
    ``vocab_size_with_padding``.

    Args:
        multiple: The number of rows per rank is a multiple of this (128 keeps matrix products
            aligned).
    """
    step = multiple * tp
    return -(-vocab_size // step) * step


def even_range(
    size: int, parts: int, index: int, what: str = "size", axis: str = "tp"
) -> ShardRange:
    """Return the range of part ``index`` of a dimension that is divided into equal parts.

    Raises:
        ParallelPlanError: If the size is not a multiple of the number of parts.
    """
    if size % parts:
        raise ParallelPlanError(
            f"{what} ({size}) must be a multiple of {axis} ({parts}), because each rank holds an "
            f"equal part. Use {axis} of {join_or(divisors(size))}."
        )
    part = size // parts
    return ShardRange(index * part, (index + 1) * part)


def uneven_range(size: int, parts: int, index: int) -> ShardRange:
    """Return the range of part ``index`` of a dimension whose parts differ by at most one row."""
    return ShardRange(size * index // parts, size * (index + 1) // parts)


def full_range(size: int, copy: int = 0) -> ShardRange:
    """Return the full range of a dimension that is not sharded, as copy ``copy``."""
    return ShardRange(0, size, copy)


def attention_ranges(
    num_heads: int, num_kv_heads: int, head_dim: int, tp: int, index: int
) -> tuple[ShardRange, ShardRange, ShardRange]:
    """Return the rows of the full fused [Q; K; V] weight on one tensor-parallel rank.

    Each rank has whole heads. If tp exceeds the number of key/value heads, tp / num_kv_heads
    neighbouring ranks have copies of the same key/value head, which their query heads share.

    Shapes: the full weight has (num_heads + 2 num_kv_heads) x head_dim rows.

    Returns:
        The ranges of Q, K and V.

    Raises:
        ParallelPlanError: If the heads cannot be divided among the ranks.
    """
    _check_heads(num_heads, num_kv_heads, tp)
    query = num_heads // tp * head_dim
    sharers = max(1, tp // num_kv_heads)
    group, copy = divmod(index, sharers)
    key = max(1, num_kv_heads // tp) * head_dim
    key_start = num_heads * head_dim
    value_start = key_start + num_kv_heads * head_dim
    return (
        ShardRange(index * query, (index + 1) * query),
        ShardRange(key_start + group * key, key_start + (group + 1) * key, copy),
        ShardRange(value_start + group * key, value_start + (group + 1) * key, copy),
    )


def gated_ranges(ffn: int, tp: int, index: int) -> tuple[ShardRange, ShardRange]:
    """Return the rows of the full fused [gate; up] weight on one tensor-parallel rank.

    Shapes: the full weight has 2 ffn rows.

    Raises:
        ParallelPlanError: If tp does not divide ffn.
    """
    gate = even_range(ffn, tp, index, what="ffn_hidden_size")
    return gate, ShardRange(ffn + gate.start, ffn + gate.stop)


def vocab_range(vocab_size: int, tp: int, index: int, multiple: int = 128) -> ShardRange:
    """Return the vocabulary rows on one tensor-parallel rank, without padding.

    The rank's remaining rows, up to padded_vocab_size / tp, are padding. The range is empty on a
    rank that has only padding.
    """
    part = padded_vocab_size(vocab_size, tp, multiple) // tp
    return ShardRange(min(index * part, vocab_size), min((index + 1) * part, vocab_size))


def _check_heads(num_heads: int, num_kv_heads: int, tp: int) -> None:
    if num_heads % num_kv_heads:
        raise ParallelPlanError(
            f"num_attention_heads ({num_heads}) must be a multiple of num_kv_heads "
            f"({num_kv_heads}), because each key/value head belongs to the same number of query "
            f"heads. Use num_kv_heads of {join_or(divisors(num_heads))}."
        )
    legal = [d for d in divisors(num_heads) if num_kv_heads % d == 0 or d % num_kv_heads == 0]
    if num_heads % tp:
        raise ParallelPlanError(
            f"num_attention_heads ({num_heads}) must be a multiple of tp ({tp}), because each rank "
            f"holds whole heads. Use tp of {join_or(legal)}."
        )
    if tp not in legal:
        raise ParallelPlanError(
            f"num_kv_heads ({num_kv_heads}) must be a multiple or a divisor of tp ({tp}), because "
            f"each rank holds the same number of whole key/value heads. Use tp of {join_or(legal)}."
        )


@dataclass(frozen=True)
class FlatBox:
    """Box of a tensor whose elements are contiguous in the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """Return the index after the last element in the flattened tensor."""
        return self.start + prod(self.sizes)


def flat_range_boxes(shape: Sequence[int], start: int, stop: int, base: int = 0) -> list[FlatBox]:
    """Split the range [start, stop) of a flattened tensor into the fewest boxes that cover it.

    A range consists of the end of a row, whole rows and the start of a row. The same holds within
    each row, so that there are at most 2 x dimensions - 1 boxes.

    Args:
        shape: Shape of the tensor, row-major; () for a scalar.
        start: First element of the range.
        stop: Index after its last element; equal to ``start`` for an empty range.
        base: Index of the tensor's first element in a flattened tensor that contains it.

    Returns:
        The boxes in flat order; an empty list for an empty range.
    """
    if start == stop:
        return []
    if not shape:
        return [FlatBox((), (), base)]
    row = prod(shape[1:])
    # Whole rows are those from `first` up to, but not including, `last`.
    first = -(-start // row)
    last = stop // row
    if first > last:  # the range lies inside one row
        return _within(shape, last, start - last * row, stop - last * row, base)
    boxes = []
    if start < first * row:
        boxes = _within(shape, first - 1, start - (first - 1) * row, row, base)
    if first < last:
        offsets = (first, *(0 for _ in shape[1:]))
        boxes.append(FlatBox(offsets, (last - first, *shape[1:]), base + first * row))
    return boxes + _within(shape, last, 0, stop - last * row, base)


def _within(shape: Sequence[int], index: int, start: int, stop: int, base: int) -> list[FlatBox]:
    inner = flat_range_boxes(shape[1:], start, stop, base + index * prod(shape[1:]))
    return [FlatBox((index, *box.offsets), (1, *box.sizes), box.start) for box in inner]
