"""Parameters without a gradient in a step, on all ranks or on some."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.pending import Pending, start_all_reduce
from lightning_megatron.training.gradient_bucket import GradientBucket
from lightning_megatron.training.main_parameters import MainParameters

logger = logging.getLogger(__name__)

_NUM_SHOWN = 5


class UnusedParameters:
    """Tracking of the parameters that no rank uses in a step, so that optimizers skip them.

    Optimizers in a single process skip them, too. A parameter that another data-parallel rank uses
    contributes zeros on this rank. Each such parameter is logged once.

    Args:
        main: Parameters of this rank.
    """

    def __init__(self, main: MainParameters) -> None:
        self._main = main
        self._without_gradient: set[str] = set()
        self._with_zeros: set[str] = set()
        self._in_flight: list[Pending] = []
        self._logged: set[str] = set()
        self._has_warned_of_zero_grad = False

    def note(self, name: str) -> None:
        """Record that this rank has no gradient for a parameter in this step."""
        self._without_gradient.add(name)

    def note_zero_grad(self, names: Collection[str], with_zeros: Collection[str]) -> None:
        """Record a call of ``zero_grad``.

        Args:
            names: Names of the parameters whose gradients it has cleared.
            with_zeros: Names of those whose gradients are zeros from now on, instead of None.
                Optimizers do not skip them.
        """
        self._with_zeros.difference_update(names)
        self._with_zeros.update(with_zeros)

    def find(self, buckets: Iterable[GradientBucket], is_empty: Callable[[], bool]) -> set[str]:
        """Return the parameters that no rank uses in this step, the same on all ranks.

        Args:
            buckets: Buckets of the parameters.
            is_empty: Function that returns whether no rank had a token, so that backward passes
                of the loss were left out.

        Communication: one all-reduce of flags over the data axis on the CPU, and one over the ranks
        with the same experts, if there are any; one over the embedding axis for tied embeddings.
        Only ranks that do not use all of their parameters wait for the results.
        """
        for pending in self._in_flight:
            pending.wait()
        self._in_flight.clear()
        names: dict[bool, list[str]] = {False: [], True: []}
        for bucket in buckets:
            names[bucket.buffer.is_expert] += bucket.names
        missing = self._without_gradient.intersection(names[False] + names[True])
        self._without_gradient -= missing
        unused = missing - self._with_zeros
        if unused and is_empty():
            unused = set()
        mesh = self._main.mesh
        unused = self._agree(names[False], unused, mesh.data_cpu)
        unused = self._agree(names[True], unused, mesh.edp_cpu)
        # Each stage has one parameter of a pair. The order of the pairs is that of both stages.
        ties = [name for pair in self._main.ties or () for name in pair if name in names[False]]
        unused = self._agree(ties, unused, mesh.embedding_cpu)
        self._log(unused, "have no gradient on any rank, so that the optimizer skips them")
        self._log(missing - unused, "have no gradient on this rank, which uses zeros instead")
        return unused

    def _agree(self, names: Sequence[str], unused: set[str], axis: MeshAxis) -> set[str]:
        """Remove from ``unused`` those of the names that another rank of the axis uses."""
        if not names or axis.size == 1:
            return unused
        flags = torch.tensor([name in unused for name in names], dtype=torch.uint8)
        pending = start_all_reduce(flags, axis, "min")
        if unused.isdisjoint(names):
            # The result is known already: a rank without unused parameters only informs others.
            self._in_flight.append(pending)
            return unused
        pending.wait()
        used = {name for name, flag in zip(names, flags.tolist(), strict=True) if not flag}
        return unused - used

    def discard_without_zero_grad(self, name: str, finished: set[str]) -> None:
        """Warn once that gradients of an earlier step are discarded without ``zero_grad``."""
        if name in finished:
            finished.discard(name)
            if not self._has_warned_of_zero_grad:
                self._has_warned_of_zero_grad = True
                logger.warning(
                    "Gradients are not accumulated over optimizer steps: the gradient of %s was "
                    "set to zero after a step, although zero_grad() was not called.",
                    name,
                )

    def _log(self, names: set[str], what: str) -> None:
        new = sorted(names - self._logged)
        if new:
            self._logged.update(new)
            shown = ", ".join(new[:_NUM_SHOWN]) + (", ..." if len(new) > _NUM_SHOWN else "")
            logger.warning("%d parameter(s) %s: %s.", len(new), what, shown)
