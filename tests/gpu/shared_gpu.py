"""Share one GPU among all ranks of a test, where a machine has fewer GPUs than ranks.

With the environment variable SHARED_GPU=1 all ranks compute on the first GPU. Their collectives go
through the host; puts into each other's memory, kernels and replayed graphs run as on several GPUs.
Captured collectives and NCCL itself are not available.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from typing import Any

import pytest
import torch

#: Number of ranks that may share the GPU.
MOST_RANKS = 4
#: Time after which a process prints its stack, for the log of ranks that wait for each other (s).
_TIMEOUT = 75.0
_VARIABLES = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def is_shared() -> bool:
    """Return whether all ranks use the first GPU."""
    return os.environ.get("SHARED_GPU") == "1" and torch.cuda.is_available()


def num_ranks_at_most() -> int:
    """Return the largest number of ranks that can have a GPU."""
    return MOST_RANKS if is_shared() else torch.cuda.device_count()


def gpu_of(rank: int) -> torch.device:
    """Return the GPU of a rank."""
    return torch.device("cuda", 0 if is_shared() else rank)


def require_gpus(size: int, *, needs_nccl: str = "") -> None:
    """Skip a test unless each of its ranks can have a GPU.

    Args:
        size: Number of ranks.
        needs_nccl: Reason why the ranks cannot share a GPU; empty if they can.
    """
    if num_ranks_at_most() < size:
        pytest.skip(f"needs {size} GPUs, found {torch.cuda.device_count()}")
    if needs_nccl and is_shared():
        pytest.skip(f"needs a GPU for each rank, because {needs_nccl}")


def share(size: int) -> None:
    """Make this process, one of the ranks, use the first GPU in place of the GPU of its rank.

    Args:
        size: Number of ranks.
    """
    from lightning.fabric.accelerators import cuda as fabric
    from lightning.pytorch.accelerators import cuda as pytorch

    from tests.gpu.staged_collectives import StagedCollectives

    os.environ.update(_VARIABLES)
    timer = threading.Timer(_TIMEOUT, print_stack, [threading.main_thread().ident])
    timer.daemon = True
    timer.start()
    accelerators: tuple[Any, ...] = (fabric.CUDAAccelerator, pytorch.CUDAAccelerator)
    for accelerator in accelerators:
        accelerator.get_parallel_devices = staticmethod(
            lambda devices: [torch.device("cuda", 0)] * len(devices)
        )
    fabric.num_cuda_devices = lambda: size
    StagedCollectives().install()


def print_stack(thread: int) -> None:
    """Print the stack of a thread.

    faulthandler is not used: it reads the frames of running threads, which can end the process.
    """
    frame = sys._current_frames().get(thread)
    if frame is not None:
        text = "".join(traceback.format_stack(frame))
        print(f"after {_TIMEOUT:.0f} s process {os.getpid()} is at:\n{text}", file=sys.stderr)
