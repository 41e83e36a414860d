"""Samplers and seeds of dataloaders: equal within a data-parallel rank, different between them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial

import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_megatron.groups.random import derive_seed
from lightning_megatron.strategy.private import seed_worker


def needs_distributed_sampler(dataloader: DataLoader, num_data: int) -> bool:
    """Return whether Lightning should replace a dataloader's sampler by a distributed one.

    With one data rank only a loader that shuffles gets one, whose order follows from seed and epoch, so that all ranks
    and a resumed run agree on it. Any other order is the user's own, and stays as on one device.

    Args:
        dataloader: The user's dataloader.
        num_data: Ranks that read different data.
    """
    if num_data > 1:
        return True
    sampler = dataloader.sampler
    if type(sampler) is not RandomSampler or sampler.generator is not None or sampler.replacement:
        return False
    return sampler.num_samples == len(sampler.data_source)


def seed_dataloader(dataloader: object, seed: int, data_rank: int) -> object:
    """Seed a dataloader's generators and workers by the data-parallel rank alone.

    What the user has set stays. Without this, workers are seeded by the global rank and from the default generator,
    which pipeline stages use unequally: stages would see different batches.

    Args:
        dataloader: Anything that yields batches; only a torch DataLoader is changed.
        seed: Seed of the run, equal on all ranks.
        data_rank: Which part of the data this rank reads.
    """
    if not isinstance(dataloader, DataLoader):
        return dataloader
    sampler = dataloader.sampler
    if isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)) and sampler.generator is None:
        # The order of all samples, of which every data rank takes its part.
        sampler.generator = torch.Generator().manual_seed(derive_seed(seed, "sampler"))
    if dataloader.generator is None:
        dataloader.generator = torch.Generator().manual_seed(derive_seed(seed, "dataloader", data_rank))
    if dataloader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", 0)):
        dataloader.worker_init_fn = partial(seed_worker, rank=data_rank)
    if dataloader.num_workers > 0 and getattr(dataloader.worker_init_fn, "func", None) is not _start_worker:
        dataloader.worker_init_fn = partial(_start_worker, dataloader.worker_init_fn)
    return dataloader


def _start_worker(then: Callable[[int], None] | None, worker: int) -> None:
    survive_one_sigterm()
    if then is not None:
        then(worker)


def survive_one_sigterm() -> None:
    """Ignore the first SIGTERM in a dataloader worker; the second one ends it.

    A scheduler signals all processes of a job. Without its workers, the main process would not reach the batch before
    which it saves. A second signal comes from torch, if a worker does not end when it is asked to.
    """
    signal.signal(signal.SIGTERM, lambda signum, _: signal.signal(signum, signal.SIG_DFL))
