"""Check of the user's own schedule at each number of microbatches that a training step has."""

from __future__ import annotations

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.fingerprint import check_same_everywhere
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.custom_order import CustomOrder, OrderOfPasses, digest_of

_REMEDY = "The function must return the same rows on every rank."


class CustomOrderCheck:
    """Check that the ranks of a model replica run the same legal schedule, before they compute.

    The rows of a file have been compared when the ranks joined the job. Those of a function are
    compared here, because a function may depend on what differs between ranks.

    Args:
        mesh: The groups of this rank.
        order: Named schedule, which needs no check, or the user's own order.
    """

    def __init__(self, mesh: ParallelMesh, order: OrderOfPasses) -> None:
        self._axis = mesh.model_cpu
        self._order = order
        self._checked_counts: set[int] = set()

    def check(self, num_microbatches: int) -> None:
        """Check the schedule of a step.

        Args:
            num_microbatches: Microbatches of the step, equal on the ranks of a model replica.

        Raises:
            ParallelPlanError: On all these ranks, if the order cannot run the microbatches.
            RankMismatchError: On all these ranks, if a function returns other rows on some.

        Communication: for a new number of microbatches of a function, one gather over tp x pp on
        the CPU.
        """
        if not isinstance(self._order, CustomOrder) or num_microbatches in self._checked_counts:
            return
        failure: ParallelPlanError | None = None
        try:
            rows = digest_of(self._order.build(num_microbatches))
        except ParallelPlanError as error:
            failure = error
            rows = str(error)
        if self._order.table is None:
            name = f"rows of {self._order.name} for {num_microbatches} microbatches"
            check_same_everywhere(self._axis, {name: rows}, _REMEDY)
        if failure is not None:
            raise failure
        self._checked_counts.add(num_microbatches)
