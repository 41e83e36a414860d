"""Tests that experts train on several GPUs as on one, in all layouts and by all transports."""

from __future__ import annotations

from typing import Any

from tests.gpu.ranks import on_one_to_four_gpus
from tests.gpu.test_gpu_layouts import compare, on_gpu
from tests.worlds.test_experts import KINDS

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "experts again": {"recompute": "experts"}},
    2: {
        "ep2": {"ep": 2},
        "ep2, all-to-all": {"ep": 2, "expert_transport": "all_to_all"},
        "ep2, one-sided": {"ep": 2, "expert_transport": "one_sided"},
        "tp2 +sp, ep2": {"tp": 2, "ep": 2, "etp": 1},
        "tp2, etp2": {"tp": 2, "sequence_parallel": False},
        "pp2": {"pp": 2},
        "pp2 zb-v": {"pp": 2, "vpp": 2, "schedule": "zb-v"},
    },
    4: {
        "ep4": {"ep": 4},
        "ep4, all-to-all": {"ep": 4, "expert_transport": "all_to_all"},
        "ep4, one-sided": {"ep": 4, "expert_transport": "one_sided"},
        "ep2 edp2": {"ep": 2},
        "tp2 +sp, ep2": {"tp": 2, "ep": 2, "etp": 1},
        "tp2, etp2 ep2": {"tp": 2, "ep": 2, "sequence_parallel": False},
        "tp2 pp2 +sp, ep2": {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
    },
}
#: The reference jobs; only the strategy updates the router's bias and the shares of the last step.
TWINS = {
    "experts": on_gpu(KINDS["plain"]),
    "experts, whole step": on_gpu(KINDS["whole step"], {}),
}


@on_one_to_four_gpus
def test_experts_in_all_layouts_match_one_gpu(size):
    compare(size, TWINS, LAYOUTS[size])
