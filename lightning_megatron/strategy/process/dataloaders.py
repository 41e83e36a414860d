"""Samplers and seeds of dataloaders: equal within a data-parallel rank, different between them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_megatron.groups.random import derive_seed
from lightning_megatron.strategy.private.data_loading import seed_worker
from lightning_megatron.strategy.process.job_folder import remove_sockets

_POLL_SECONDS = 0.25


def needs_distributed_sampler(dataloader: DataLoader, num_data: int) -> bool:
    """Return whether Lightning should replace a dataloader's sampler by a distributed one.

    With one data rank, only a dataloader with plain shuffling needs one. The order of a distributed
    sampler depends only on seed and epoch, so that it is the same on all ranks and after a resume.
    Any other sampler is the user's choice and stays.

    Args:
        num_data: Number of ranks that read different data (ranks).
    """
    if num_data > 1:
        return True
    sampler = dataloader.sampler
    if type(sampler) is not RandomSampler or sampler.generator is not None or sampler.replacement:
        return False
    return sampler.num_samples == len(sampler.data_source)


def deals_in_turn(dataloader: object) -> bool:
    """Return whether the data ranks take the samples of a dataloader in turn.

    Args:
        dataloader: Dataloader after Lightning has replaced its sampler.
    """
    sampler = getattr(dataloader, "sampler", None)
    inner = getattr(getattr(dataloader, "batch_sampler", None), "sampler", None)
    return any(isinstance(each, DistributedSampler) for each in (sampler, inner))


def seed_dataloader(dataloader: object, seed: int, data_rank: int) -> object:
    """Seed a dataloader's generators and workers by the data-parallel rank only.

    Generators that the user has set stay. By default, workers are seeded from the global rank and
    the default generator, whose state differs between pipeline stages. The stages of a pipeline
    would then read different batches.

    Args:
        dataloader: Any iterable of batches; only a torch DataLoader is changed.
        data_rank: Index of this rank among the ranks that read different data.

    Returns:
        The dataloader.
    """
    if not isinstance(dataloader, DataLoader):
        return dataloader
    sampler = dataloader.sampler
    if (
        isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))
        and sampler.generator is None
    ):
        # The seed is equal on all data ranks, because each rank reads its part of one order.
        sampler.generator = torch.Generator().manual_seed(derive_seed(seed, "sampler"))
    if dataloader.generator is None:
        dataloader.generator = torch.Generator().manual_seed(
            derive_seed(seed, "dataloader", data_rank)
        )
    if dataloader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", 0)):
        dataloader.worker_init_fn = partial(seed_worker, rank=data_rank)
    if (
        dataloader.num_workers > 0
        and getattr(dataloader.worker_init_fn, "func", None) is not _start_worker
    ):
        dataloader.worker_init_fn = partial(_start_worker, dataloader.worker_init_fn)
    return dataloader


def _start_worker(init: Callable[[int], None] | None, worker: int) -> None:
    ignore_first_sigterm()
    threading.Thread(
        target=_end_after, args=(os.getppid(),), daemon=True, name="parent-watch"
    ).start()
    if init is not None:
        init(worker)


def _end_after(parent: int) -> None:
    """End this worker when its rank has ended; torch's own check waits for the current sample."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    remove_sockets()
    os._exit(1)


def ignore_first_sigterm() -> None:
    """Ignore the first SIGTERM in a dataloader worker; the second one ends it.

    A scheduler signals all processes of a job. The main process finishes the current batch and then
    saves a checkpoint, for which it still needs its workers. The second signal comes from torch, if
    a worker does not exit on request.
    """
    signal.signal(signal.SIGTERM, lambda signum, _: signal.signal(signum, signal.SIG_DFL))
