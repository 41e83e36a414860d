"""Published speeds of GPUs, and the part of them that a machine in order reaches."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Published figures of a GPU.

    Args:
        products: Dense products in bfloat16 (FLOP/s).
        memory: Reads and writes of its memory (bytes/s).
        links: All its NVLinks, in one direction (bytes/s).
    """

    products: float
    memory: float
    links: float


#: GPUs by the name that the driver gives them. NVIDIA's data sheets count products of sparse
#: matrices, twice the dense ones, for Hopper, and NVLinks in both directions:
#: H100 SXM and NVL: https://www.nvidia.com/en-us/data-center/h100/
#: H100 PCIe: https://resources.nvidia.com/en-us-tensor-core (H100 Tensor Core GPU Architecture)
#: H200 SXM and NVL: https://www.nvidia.com/en-us/data-center/h200/
#: A100: https://www.nvidia.com/en-us/data-center/a100/
CHIPS = {
    "H200": Chip(products=989e12, memory=4.8e12, links=450e9),
    "H200 NVL": Chip(products=835e12, memory=4.8e12, links=450e9),
    "H100 80GB HBM3": Chip(products=989e12, memory=3.35e12, links=450e9),
    "H100 NVL": Chip(products=835e12, memory=3.9e12, links=300e9),
    "H100 PCIe": Chip(products=756e12, memory=2.0e12, links=300e9),
    "A100-SXM4-80GB": Chip(products=312e12, memory=2.039e12, links=300e9),
    "A100-SXM4-40GB": Chip(products=312e12, memory=1.555e12, links=300e9),
    "A100 80GB PCIe": Chip(products=312e12, memory=1.935e12, links=300e9),
    "A100-PCIE-40GB": Chip(products=312e12, memory=1.555e12, links=300e9),
}
#: Bandwidth of one NVLink of these GPUs, in one direction (bytes/s).
NVLINK = 25e9


@dataclass(frozen=True)
class NormalShare:
    """Parts of the published speeds from which a measured one is normal.

    H200s in order measured 0.79 (products), 0.88 (copies), 0.87 (pairs) and 0.70 (all-reduce over
    two); cards with less power and cooling reach less. A GPU that is shared, throttled or badly
    linked loses more than is left to it here.
    """

    products: float = 0.55
    copies: float = 0.75
    pairs: float = 0.6
    all_reduce: float = 0.5


def known_chip(name: str) -> Chip | None:
    """Return the published figures of a GPU; None for one that is not known, or a slice of one.

    Args:
        name: Name that the driver gives it, such as ``"NVIDIA H100 80GB HBM3"``.
    """
    return CHIPS.get(name.removeprefix("NVIDIA "))


def link_speed(link: str) -> float:
    """Return the bandwidth of a link of Ampere or Hopper GPUs in one direction (bytes/s).

    Args:
        link: Link as ``nvidia-smi topo -m`` names it: NV18 is 18 NVLinks. Of others the speed is
            not known, and 0 is returned.
    """
    lanes = re.fullmatch(r"NV(\d+)", link)
    return int(lanes[1]) * NVLINK if lanes else 0.0
