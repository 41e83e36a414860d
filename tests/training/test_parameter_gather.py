"""Updated parameters are whole when they are read, whoever reads them."""

from __future__ import annotations

import time

import torch
from torch import nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.training import DistributedOptimizerConfig, MainParameters
from tests.world import run_world


def test_what_no_module_waits_for_is_whole_when_publishing_returns() -> None:
    for seen in run_world(_publish_late, 2):
        assert seen == {"waiting": 1.0, "outside": 1.0}


def _publish_late(rank: int, size: int) -> dict[str, float]:
    mesh = ParallelMesh.create(ParallelLayout(size), device="cpu")
    waiting, outside = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
    named = {"outside.weight": outside.weight, "waiting.weight": waiting.weight}
    main = MainParameters(named, mesh, DistributedOptimizerConfig(bucket_size=6))
    main.attach(torch.optim.SGD(named.values(), lr=0.1))
    main.gather.wait_before([waiting], main.buffers)
    with torch.no_grad():
        for one in main.slices.values():
            one.main.fill_(1.0)
    # The parts of the last rank come late; who does not wait for them sees old values.
    time.sleep(0.5 * rank)
    main.publish(wait=False)
    least = {"outside": float(outside.weight.min())}
    waiting(torch.zeros(1, 2))
    least["waiting"] = float(waiting.weight.min())
    main.wait()
    return least
