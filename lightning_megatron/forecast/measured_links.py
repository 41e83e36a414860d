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
#: Size of the collectives beside products: a bucket of gradients (bytes); their number, and
#: products for each of them.
_BESIDE = 160_000_000
_STARTS = 30
_PRODUCTS = 2


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

    def beside(self, level: str) -> dict[str, float]:
        """Measure what collectives add to the time of products beside them, by kind.

        As in a backward pass, a collective starts every few products, and the products do not wait
        for it. The result is the added time over that of the collectives alone.
        """
        group, _ = self._groups[level]
        m, n, k = self._sizes.product
        x = torch.randn(m, k, device=self._device, dtype=torch.bfloat16)
        weight = torch.randn(k, n, device=self._device, dtype=torch.bfloat16)
        product = partial(torch.mm, x, weight)
        prices = {}
        for kind in KINDS[:3]:
            run = trial_collective(kind, _BESIDE, self._device, group)
            own = self._watch.repeated(run, _STARTS)
            both = partial(self._together, run, product)
            both()
            alone = self._watch.repeated(product, 2 * _STARTS * _PRODUCTS)
            added = self._watch.repeated(both, 2) / _STARTS - _PRODUCTS * alone
            prices[kind] = max(0.0, added / own)
        return prices

    def _together(self, run: Callable[..., Any], product: Callable[[], Any]) -> None:
        works = []
        for _ in range(_STARTS):
            works.append(run(async_op=True))
            for _ in range(_PRODUCTS):
                product()
        for work in works:
            work.wait()
