"""Run a function on several processes of this machine and bring their results and errors back."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.shared_gpu import gpu_of, is_shared, share

_TIMEOUT = timedelta(seconds=240)


def preloaded_context() -> ForkServerContext:
    """Return the context of processes that start with the slow imports done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def run_world(fn: Callable[..., Any], size: int, *args: Any, backend: str = "gloo") -> list[Any]:
    """Call ``fn(rank, size, *args)`` on ``size`` joined processes and list what they return, by
    rank.

    ``fn`` must be a function of a module. The first rank that raises ends the others, and its
    traceback is raised here. With ``nccl`` each process has the GPU of its rank, or all
    processes have the first GPU: see ``tests/gpu/shared_gpu.py``. The environment has the variables
    of a launcher, so that a Trainer in ``fn`` uses these processes.
    """
    context = preloaded_context()
    results: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        environment = dict(os.environ)
        processes = [
            context.Process(
                target=_enter, args=(rank, size, fn, store, backend, results, environment, args)
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(results, processes, size)
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
                process.join(10)


def _collect(results: Any, processes: list[Any], size: int) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < size:
        while results.empty():
            dead = [p.exitcode for p in processes if p.exitcode not in (None, 0)]
            if dead and results.empty():
                raise RuntimeError(f"a rank died with exit code {dead[0]} and left no traceback.")
            processes[0].join(0.02)
        rank, error, value = results.get()
        if error is not None:
            # The error is often only that another rank has ended.
            ends = [
                f"rank {n} exited with {p.exitcode}" for n, p in enumerate(processes) if p.exitcode
            ]
            raise AssertionError("\n".join([f"rank {rank} failed:", error, *ends]))
        values[rank] = pickle.loads(value)
    return [values[rank] for rank in range(size)]


def _enter(rank: int, size: int, *given: Any) -> None:
    fn, store, backend, results, variables, args = given
    launcher = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(size)}
    launcher |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.clear()
    os.environ.update(variables | launcher)
    torch.set_num_threads(1)
    device = gpu_of(rank) if backend == "nccl" else None
    try:
        if is_shared():
            share(size)
        if device is not None:
            torch.cuda.set_device(device)
        place: dict[str, Any] = {"rank": rank, "world_size": size, "device_id": device}
        dist.init_process_group(backend, init_method=f"file://{store}", timeout=_TIMEOUT, **place)
        value = fn(rank, size, *args)
        # By value: a tensor's shared memory would be gone with this process.
        results.put((rank, None, pickle.dumps(value)))
    except BaseException:
        # The parent must receive every error of this rank, or the test would wait for the rank.
        results.put((rank, traceback.format_exc(), None))
        raise SystemExit(1) from None
    # Leaving before the other ranks are done would reset their connections.
    dist.barrier()
    dist.destroy_process_group()
