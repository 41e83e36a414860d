"""Checks of the options that shard activations along the sequence."""

from __future__ import annotations

from lightning_megatron.errors import ParallelPlanError


def check_sequence_parallel(
    tp: int, sequence_parallel: bool | None, shards_sequence: bool, overlap_tensor_parallel: bool
) -> None:
    """Refuse sequence parallelism, or its overlap with products, without ranks that share it.

    Args:
        tp: Tensor-parallel size.
        sequence_parallel: Value of the option.
        shards_sequence: Whether activations are sharded, with the default filled in.
        overlap_tensor_parallel: Value of the option.

    Raises:
        ParallelPlanError: If ``sequence_parallel`` is set and tp is 1, or if
            ``overlap_tensor_parallel`` is set and activations are not sharded.
    """
    if sequence_parallel and tp == 1:
        raise ParallelPlanError(
            "sequence_parallel (True) needs tp above 1, because the ranks of tp divide the "
            "sequence. Use tp of 2 or more, or leave sequence_parallel out."
        )
    if overlap_tensor_parallel and not shards_sequence:
        raise ParallelPlanError(
            f"overlap_tensor_parallel needs tp above 1 and sequence_parallel: tp is {tp}, "
            f"sequence_parallel {shards_sequence}. It overlaps matrix products with the "
            "communication of sequence_parallel. Use tp of 2 or more with sequence_parallel, or "
            "leave overlap_tensor_parallel out."
        )
