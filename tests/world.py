"""Run a function on several gloo processes of this machine and bring their results and errors back."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(seconds=240)


def run_world(fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Call ``fn(rank, size, *args)`` on ``size`` processes joined by gloo and list what they return, by rank.

    ``fn`` must be a function of a module. The first rank that raises ends the others, and its traceback is raised here.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=_enter, args=(fn, rank, size, store, results, args), daemon=True)
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
    found: dict[int, Any] = {}
    while len(found) < size:
        while results.empty():
            dead = [p.exitcode for p in processes if p.exitcode not in (None, 0)]
            if dead and results.empty():
                raise RuntimeError(f"a rank died with exit code {dead[0]} and left no traceback.")
            processes[0].join(0.02)
        rank, error, value = results.get()
        if error is not None:
            raise AssertionError(f"rank {rank} failed:\n{error}")
        found[rank] = value
    return [found[rank] for rank in range(size)]


def _enter(fn: Callable[..., Any], rank: int, size: int, store: str, results: Any, args: tuple[Any, ...]) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=_TIMEOUT)
        value = fn(rank, size, *args)
        results.put((rank, None, value))
    except BaseException:
        # Whatever ended this rank must reach the parent, or the test would wait for it.
        results.put((rank, traceback.format_exc(), None))
        raise SystemExit(1) from None
    # Leaving before the others are done would reset their connections.
    dist.barrier()
    dist.destroy_process_group()
