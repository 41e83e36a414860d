"""Parameters without a gradient in a step, on all ranks or on some."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.training.main_parameters import MainParameters

logger = logging.getLogger(__name__)

_NUM_SHOWN = 5


class UnusedParameters:
    """Tracking of parameters that no rank uses, so that optimizers skip them.

    Optimizers in a single process skip them, too. A parameter is dormant while no data-parallel
    rank has ever had a gradient for it. Other parameters without a gradient on this rank contribute
    zeros in that step, and are logged once.

    Args:
        main: Parameters of this rank.
    """

    def __init__(self, main: MainParameters) -> None:
        self._main = main
        self._without_gradient: set[str] = set()
        self._compared: set[str] = set()
        self._dormant: set[str] = set()
        self._logged: set[str] = set()
        self._has_warned_of_zero_grad = False

    def note(self, name: str) -> None:
        """Record that this rank has no gradient for a parameter in this step."""
        self._without_gradient.add(name)

    def find_dormant(self, names: Sequence[str]) -> set[str]:
        """Return the dormant parameters among these, the same on all data-parallel ranks.

        Communication: one all-reduce of flags over the data axis on the CPU, if any of them is new
        or dormant; one more over the ranks with the same experts, if there are any.
        """
        tied = {name for pair in self._main.ties or () for name in pair}
        undecided = (set(names) - self._compared | self._dormant) - tied
        if not undecided.isdisjoint(names):
            compared = [name for name in names if name in undecided]
            mesh = self._main.mesh
            unused = set()
            for is_expert, axis in ((False, mesh.data_cpu), (True, mesh.edp_cpu)):
                kind_names = [
                    name for name in compared if self._main.spec(name).is_expert == is_expert
                ]
                flags = torch.tensor([int(name in self._without_gradient) for name in kind_names])
                if kind_names:
                    all_reduce_(flags, axis, "min")
                unused |= {
                    name for name, flag in zip(kind_names, flags.tolist(), strict=True) if flag
                }
            self._warn(
                unused - self._dormant,
                "have no gradient on any rank, and keep their values until they have one",
            )
            self._dormant = (self._dormant - set(compared)) | unused
            self._compared.update(compared)
        filled = [
            name for name in names if name in self._without_gradient and name not in self._dormant
        ]
        self._warn(filled, "have no gradient on this rank, which uses zeros instead")
        self._without_gradient.difference_update(names)
        return self._dormant

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

    def _warn(self, names: Iterable[str], what: str) -> None:
        new = [name for name in names if name not in self._logged]
        if new:
            self._logged.update(new)
            shown = ", ".join(new[:_NUM_SHOWN]) + (", ..." if len(new) > _NUM_SHOWN else "")
            logger.warning("%d parameter(s) %s: %s.", len(new), what, shown)
