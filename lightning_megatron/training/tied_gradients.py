"""Sum of the gradients of tied embeddings over the first and the last stage."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.training.gradient_bucket import GradientBucket
from lightning_megatron.training.main_parameters import MainParameters


def add_ties_(
    main: MainParameters,
    buckets: Collection[GradientBucket],
    gradient_of: Callable[[str], Tensor],
    fill: Callable[[list[str]], None],
    *,
    own_bucket: bool,
) -> None:
    """Add the gradients of tied embeddings and of their copies on another stage, in place.

    A tied gradient that is alone in its bucket has the same layout on both stages, so each rank
    adds its part after the reduction over the data axis. Otherwise the whole gradients are added
    before that reduction.

    Args:
        main: Parameters of this rank.
        buckets: Buckets whose gradients are summed.
        gradient_of: Function from a name to the gradient of the whole local parameter.
        fill: Function that fills the gradients that have not arrived with zeros.
        own_bucket: Whether to add the gradients that are alone in their buckets, or the others.

    Communication: one all-reduce over the embedding axis for each tied embedding.
    """
    if not main.ties:
        return
    bucket_of = {name: bucket for bucket in buckets for name in bucket.names}
    for name in (name for pair in main.ties for name in pair):
        bucket = bucket_of.get(name)
        if bucket is None or (name in main.planner.ties_alone) != own_bucket:
            continue
        fill([name])
        all_reduce_(bucket.own_part if own_bucket else gradient_of(name), main.mesh.embedding)
