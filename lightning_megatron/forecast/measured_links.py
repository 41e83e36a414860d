"""Measured times of collectives, alone and beside products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_megatron.forecast.measured_calls import Row, Stopwatch
from lightning_megatron.groups.loopback import trial_collective

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "transfer")
#: Size of the collectives beside products (bytes), and number of calls that are surely covered by
#: the others, of which there are so many times more.
_BESIDE = 2**28
_COVERED = 20
_COVERING = 4


@dataclass(frozen=True)
class LinkSizes:
    """Sizes of the measured collectives: of the whole tensors (bytes), and of a product beside."""

    whole: tuple[int, ...]
    product: tuple[int, int, int]


ON_GPU = LinkSizes(
    tuple(2**power for power in (13, 16, 18, 20, 22, 24, 26, 28, 29)), (4096, 4096, 14336)
)
ON_CPU = LinkSizes((2**12, 2**18), (128, 128, 128))


class LinkTimes:
    """Measurements of the collectives of some groups of ranks, which all make them together.

    Args:
        groups: Groups by level, "node" or "network", with their sizes.
    """

    def __init__(
        self, device: torch.device, sizes: LinkSizes, groups: Mapping[str, tuple[Any, int]]
    ) -> None:
        self._device = device
        self._sizes = sizes
        self._groups = groups
        self._watch = Stopwatch(device, 0.0)

    def parts(self) -> dict[str, Callable[[], Any]]:
        """Return the functions that measure, by the name of what they measure."""
        parts: dict[str, Callable[[], Any]] = {}
        for level in self._groups:
            for kind in KINDS:
                parts[f"{level} {kind}"] = partial(self.collective, level, kind)
            if self._device.type == "cuda":
                parts[f"{level} beside"] = partial(self.beside, level)
        return parts

    def collective(self, level: str, kind: str) -> list[Row]:
        """Measure a collective: number of ranks, bytes of the whole tensor, time."""
        group, size = self._groups[level]
        times = []
        for whole in self._sizes.whole:
            calls = max(3, min(20, 2**27 // whole))
            run = trial_collective(kind, whole, self._device, group)
            times.append([size, whole, self._watch.seconds_of(run, calls)])
        return times

    def beside(self, level: str) -> dict[str, dict[str, float]]:
        """Measure how much longer products and collectives take beside each other, by kind."""
        group, _ = self._groups[level]
        m, n, k = self._sizes.product
        x = torch.randn(m, k, device=self._device, dtype=torch.bfloat16)
        weight = torch.randn(k, n, device=self._device, dtype=torch.bfloat16)
        product = partial(torch.mm, x, weight)
        slower = {}
        for kind in KINDS[:3]:
            run = trial_collective(kind, _BESIDE, self._device, group)
            own = self._watch.repeated(run, _COVERED)
            alone = self._watch.repeated(product, 2 * _COVERED)
            products, _ = self._together(run, product, _COVERING * _COVERED, _COVERED)
            _, collectives = self._together(run, product, _COVERED, _COVERING * _COVERED)
            slower[kind] = {"product": products / alone, "collective": collectives / own}
        return slower

    def _together(
        self, run: Callable[..., Any], product: Callable[[], Any], runs: int, products: int
    ) -> tuple[float, float]:
        """Return the mean times of products and collectives that start together."""
        start, of_products, of_runs = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        aside = torch.cuda.Stream(self._device)
        torch.cuda.synchronize(self._device)
        start.record()
        works = [run(async_op=True) for _ in range(runs)]
        for _ in range(products):
            product()
        of_products.record()
        with torch.cuda.stream(aside):
            works[-1].wait()
            of_runs.record()
        torch.cuda.synchronize(self._device)
        ends = (of_products, products), (of_runs, runs)
        spans = (start.elapsed_time(end) / 1000 / count for end, count in ends)
        return next(spans), next(spans)
