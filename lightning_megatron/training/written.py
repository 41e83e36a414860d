"""What user code writes into the model's parameters between steps, past the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.training.flat_buffer import FlatBuffer


class WrittenParameters:
    """Let weights that user code has written count in the next optimizer step, as on one device.

    torch counts operations in place on a parameter, but none that goes through ``parameter.data``. Whoever sees user
    code use that attribute says so by :meth:`note`, and the values of that parameter are compared with the main.

    Args:
        parameters: This rank's parameters by name.
        buffers: Where the trained ones lie; the list may grow.
        wait: Waits until all parameters are whole.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], buffers: Sequence[FlatBuffer], wait: Callable[[], None]
    ) -> None:
        self._parameters, self._buffers, self._wait = parameters, buffers, wait
        self._names_by_id = {id(parameter): name for name, parameter in parameters.items()}
        self._noted: set[str] = set()

    def note(self, parameter: nn.Parameter) -> None:
        """Note that user code holds the memory of a parameter now, or is about to replace it."""
        name = self._names_by_id.get(id(parameter))
        if name is not None:
            # A gather that is under way would overwrite what is written.
            self._wait()
            self._noted.add(name)

    def take_noted(self) -> None:
        """Take over what was written through ``parameter.data``, before the next forward pass."""
        if self._noted:
            self.take()

    def take(self, *, all_values: bool = False) -> None:
        """Take over what was written, before parameters are trained further.

        Memory that was put under a parameter is copied to its place in the flat buffer.

        Args:
            all_values: Compare all parameters, not only those that are known to be written.

        Raises:
            UnsupportedError: If a parameter has another shape than before, or the memory of another one.
        """
        noted = self._parameters.keys() if all_values else self._noted
        self._noted = set()
        moved = self._moved(noted)
        for buffer in self._buffers:
            buffer.bring_back([name for name in moved if name in buffer.members])
            buffer.take_written(noted)

    def take_in_place(self) -> None:
        """Take over what was written where parameters lie; memory that was put under them stays until the next step.

        User code may still hold the old memory, to put it back.
        """
        apart = {name for name in self._noted if self.is_apart(name)}
        for buffer in self._buffers:
            buffer.take_written(self._noted - apart)
        self._noted = apart

    def is_apart(self, name: str) -> bool:
        """Return whether user code has put other memory under a parameter."""
        return name in self._noted and bool(self._moved([name]))

    def _moved(self, names: Collection[str]) -> list[str]:
        """List the parameters that are not where the buffers have them.

        Raises:
            UnsupportedError: As :meth:`take`.
        """
        homes = {name: buffer for buffer in self._buffers for name in buffer.members}
        moved = [name for name in names if name in homes and not homes[name].has_in_place(name)]
        if not moved:
            return moved
        for name in moved:
            _check_shape(name, self._parameters[name], homes[name])
        holders: dict[int, str] = {}
        for name in (name for name in self._parameters if name in homes):
            place = self._parameters[name].data_ptr()
            other = holders.setdefault(place, name)
            if place and other != name:
                raise UnsupportedError(
                    f"parameters must keep memory of their own while they are trained: {other!r} and {name!r} share "
                    "theirs after an assignment to parameter.data. Each is trained with a gradient and a state of its "
                    "own. Copy values by parameter.data.copy_(other), or use one parameter in both places from the "
                    "beginning."
                )
        return moved


def _check_shape(name: str, parameter: nn.Parameter, buffer: FlatBuffer) -> None:
    shape = buffer.gradient_of(name).shape
    if parameter.shape != shape:
        raise UnsupportedError(
            f"parameters must keep their shapes during a fit: {name!r} was {tuple(shape)} and is "
            f"{tuple(parameter.shape)} after an assignment to parameter.data. Its gradient, its optimizer state and "
            "its part on other ranks have the old shape. Change shapes in configure_model or before the fit."
        )
