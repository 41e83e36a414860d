"""Times of single calls on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Calls of each variant that warm up and are not measured.
WARMUP = 3
#: Cycles of the GPU in a millisecond.
CYCLES = 1_900_000


def device_time(call: Callable[[], Any], head_start: int = 4_000_000) -> float:
    """Return the device time of one call with a cold cache (µs).

    Args:
        call: Function to time.
        head_start: Time for the host to queue the call before the device starts (cycles).
    """
    torch.empty(2**28, dtype=torch.int8, device="cuda").zero_()
    torch.cuda.synchronize()
    # The host queues the whole call while the device sleeps, so that launches are not measured.
    torch.cuda._sleep(head_start)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end)


def median_times(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    timer: Callable[[Callable[[], Any]], float] = device_time,
) -> dict[str, float]:
    """Return the median times of several variants, which run in turn.

    All variants therefore run at the same temperature of the GPU.

    Args:
        calls: Variants by name.
        rounds: Number of measured calls of each variant.
        timer: Function that measures one call.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARMUP + rounds):
        for name, call in calls.items():
            samples[name].append(timer(call))
    return {name: statistics.median(times[WARMUP:]) for name, times in samples.items()}


def burst(
    variants: Mapping[str, Callable[[], Any]], guess: float, rounds: int
) -> dict[str, list[float]]:
    """Return the times of single calls of alternating variants (ms).

    Args:
        variants: Functions to time.
        guess: Approximate time of a call (ms); the GPU idles longer than this before each call.
        rounds: Calls of each variant.
    """
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
        name: [] for name in variants
    }
    gap = int(CYCLES * min(8.0, max(0.8, 1.6 * guess)))
    for call in variants.values():
        call()
    torch.cuda._sleep(60 * CYCLES)
    for number in range(rounds):
        for name in variants if number % 2 else reversed(list(variants)):
            torch.cuda._sleep(gap)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            variants[name]()
            stop.record()
            pairs[name].append((start, stop))
    torch.cuda.synchronize()
    times = {}
    for name, events in pairs.items():
        times[name] = [start.elapsed_time(stop) for start, stop in events]
    return times


def host_time(call: Callable[[], Any]) -> float:
    """Return the time that the host needs to queue one call (µs)."""
    torch.cuda.synchronize()
    torch.cuda._sleep(40_000_000)
    start = time.perf_counter()
    for _ in range(10):
        call()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e5 * seconds
