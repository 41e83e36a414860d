"""Warning about user code that takes the number of processes for the number of data ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.user_code import Line

#: Packages that ask for the number of processes and mean it.
_LIBRARIES = frozenset(
    """
    lightning lightning_fabric lightning_utilities lightning_megatron torch
    torchmetrics transformers peft datasets accelerate
    """.split()
)


class WorldNotice:
    """Warning, once in a run, that the ranks of a model replica read the same data."""

    def __init__(self) -> None:
        self._is_given = False

    def note(self, frame: FrameType | None, layout_of: Callable[[], ParallelLayout]) -> None:
        """Warn of a read of the number of processes by user code.

        Args:
            frame: Frame that reads it, or a property of Lightning that this frame reads.
            layout_of: Function that returns the sizes of the axes, which Lightning may not know
                when it reads the number itself.
        """
        while frame is not None and frame.f_code.co_name == "world_size":
            frame = frame.f_back
        if self._is_given or frame is None or _package_of(frame) in _LIBRARIES:
            return
        layout = layout_of()
        if layout.dp == layout.world_size:
            return
        self._is_given = True
        line = Line.of(frame)
        rank_zero_warn(
            f"{line.place} reads the number of processes, {layout.world_size}, in "
            f"{line.text!r}. The number of data-parallel ranks, which "
            f"read different data, is {layout.dp}: {layout.world_size // layout.dp} processes "
            "(tp x pp x cp) share each batch. A learning rate or a number of samples that is "
            "scaled by the number of processes is too large by this factor. Use "
            "trainer.strategy.data_parallel_size, and self.all_gather or trainer.strategy.reduce "
            "in the place of collectives of torch.distributed."
        )


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
