"""Invented measurements of a chip with round numbers."""

from __future__ import annotations

from typing import Any

from lightning_megatron.forecast.chip_speeds import ChipSpeeds

#: Speeds of products and of memory, and what a kernel takes at least.
PEAK, MEMORY, LATENCY = 500e12, 4e12, 2e-6
_SIZES = ((1024, 1024, 1024), (4096, 4096, 4096), (4096, 14336, 4096))
_KINDS = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5, "all_to_all": 0.5}


def content(**changes: Any) -> dict[str, Any]:
    """Return the content of a file of speeds, with other values of its top level."""
    products = [[m, n, k, LATENCY + 2 * m * n * k / PEAK] for m, n, k in _SIZES]
    calls = {
        "products": products,
        "sums of products": products,
        "8-bit products": [[m, n, k, LATENCY + m * n * k / PEAK] for m, n, k in _SIZES],
        "attention": [
            [1, 32, 8, 4096, 128, 4 * 32 * 4096**2 * 64 / PEAK, 10 * 32 * 4096**2 * 64 / PEAK]
        ],
        "passes": [[size, LATENCY + size / MEMORY] for size in (2**16, 2**24, 2**30)],
        "grouped products": [[8, 1024, 4096, 4096, *3 * [16 * 1024 * 4096**2 / PEAK]]],
        "optimizer": [[2**24, 30 * 2**24 / MEMORY], [2**29, 30 * 2**29 / MEMORY]],
        "launches": {"operator": 5e-6, "graph": 6e-6},
    }
    links: dict[str, Any] = {
        f"node {kind}": [[2, size, 1e-5 + share * size / 300e9] for size in (2**16, 2**28)]
        for kind, share in {**_KINDS, "transfer": 1.0}.items()
    }
    links["node beside"] = dict.fromkeys(_KINDS, 0.25)
    models = {"model small": {"host": [0.003, 0.006]}}
    own = {"format": 1, "gpu": "round", "calls": calls, "links": links, "models": models}
    return {**own, "failures": {}, **changes}


def round_speeds(network: float = 50e9, **changes: Any) -> ChipSpeeds:
    """Return the speeds of the invented chip."""
    return ChipSpeeds(content(**changes), "round.json", network)
