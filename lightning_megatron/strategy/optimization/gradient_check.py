"""Check for gradients that are not finite, before the reduction spreads them over the ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_megatron.errors import NonFiniteGradientError
from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.optimization.gradient_report import describe_nonfinite


def check_finite(gradients: Mapping[str, Tensor], mesh: ParallelMesh, step: int) -> None:
    """Refuse a gradient of any rank that is infinite or not a number.

    Args:
        gradients: Gradients of this rank by parameter name, before their reduction over the ranks.
        mesh: The groups of this rank.
        step: Index of the training batch (batches).

    Raises:
        NonFiniteGradientError: On every rank, naming parameters, ranks and the step.

    Communication: one all-reduce of a flag over the world, for which the host waits; a gather of
    names on failure.
    """
    flag = torch.zeros((), device=mesh.device)
    if gradients:
        # The largest magnitude is not finite if any element is not.
        largest = torch.stack(
            [norm.float() for norm in torch._foreach_norm(list(gradients.values()), float("inf"))]
        )
        flag = (~torch.isfinite(largest)).any().float()
    if not all_reduce_(flag, mesh.world, "max").item():
        return
    local_reports = [
        (mesh.rank, name, int(gradient.isnan().sum()), int(gradient.isinf().sum()))
        for name, gradient in gradients.items()
        if not gradient.isfinite().all()
    ]
    nonfinite = [
        report
        for rank_reports in all_gather_objects(local_reports, mesh.world_cpu)
        for report in rank_reports
    ]
    raise NonFiniteGradientError(describe_nonfinite(nonfinite, step))
