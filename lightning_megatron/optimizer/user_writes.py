"""User writes to the model's parameters between steps, outside the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.optimizer.flat_buffer import FlatBuffer


class UserWrites:
    """Tracking of user writes, so that the next optimizer step starts from them.

    torch's version counter counts in-place operations on a parameter, but not those through
    ``parameter.data``. The code that detects access to that attribute calls :meth:`note`, and the
    values of that parameter are later compared with its main parameter.

    Args:
        parameters: Parameters of this rank by name.
        buffers: Flat buffers of the trained parameters; the list may grow.
        wait: Function that waits until all parameters are complete.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Sequence[FlatBuffer],
        wait: Callable[[], None],
    ) -> None:
        self._parameters = parameters
        self._buffers = buffers
        self._wait = wait
        self._names_by_id = {id(parameter): name for name, parameter in parameters.items()}
        self._noted: set[str] = set()

    def note(self, parameter: nn.Parameter) -> None:
        """Record that user code accesses or replaces the memory of a parameter."""
        name = self._names_by_id.get(id(parameter))
        if name is not None:
            # A pending gather would overwrite the written values.
            self._wait()
            self._noted.add(name)

    def adopt_noted(self) -> None:
        """Adopt values written through ``parameter.data``, before the next forward pass."""
        if self._noted:
            self.adopt()

    def adopt(self, *, all_values: bool = False) -> None:
        """Adopt written values before parameters are trained further.

        If user code replaced a parameter's memory, the values are copied to the parameter's place
        in the flat buffer.

        Args:
            all_values: Whether to compare all parameters, not only those known to be written.

        Raises:
            UnsupportedError: If a parameter has another shape than before, or shares the memory of
                another parameter.
        """
        noted = self._parameters.keys() if all_values else self._noted
        self._noted = set()
        moved = self._moved(noted)
        for buffer in self._buffers:
            buffer.restore_views([name for name in moved if name in buffer.members])
            buffer.adopt_user_writes(noted)

    def adopt_in_place(self) -> None:
        """Adopt values written in place; values in replaced memory are adopted at the next step.

        User code may still have a reference to the old memory and may restore it until then.
        """
        apart = {name for name in self._noted if self.has_replaced_memory(name)}
        for buffer in self._buffers:
            buffer.adopt_user_writes(self._noted - apart)
        self._noted = apart

    def has_replaced_memory(self, name: str) -> bool:
        """Return whether user code has replaced the memory of a parameter."""
        return name in self._noted and bool(self._moved([name]))

    def _moved(self, names: Collection[str]) -> list[str]:
        """List the parameters that are not views of their places in the buffers.

        Raises:
            UnsupportedError: As :meth:`adopt`.
        """
        homes = {name: buffer for buffer in self._buffers for name in buffer.members}
        moved = [name for name in names if name in homes and not homes[name].is_view(name)]
        if not moved:
            return moved
        for name in moved:
            _check_shape(name, self._parameters[name], homes[name])
        holders: dict[int, str] = {}
        for name in (name for name in self._parameters if name in homes):
            place = self._parameters[name].data_ptr()
            owner = holders.setdefault(place, name)
            if place and owner != name:
                raise UnsupportedError(
                    f"trained parameters must not share memory: {owner!r} and {name!r} share their "
                    "memory after an assignment to parameter.data. Each has its own gradient and "
                    "optimizer state. Copy values by parameter.data.copy_(other), or use one "
                    "parameter in both places from the beginning."
                )
        return moved


def _check_shape(name: str, parameter: nn.Parameter, buffer: FlatBuffer) -> None:
    shape = buffer.gradient_of(name).shape
    if parameter.shape != shape:
        raise UnsupportedError(
            f"parameters must keep their shapes during a fit: {name!r} was {tuple(shape)} and is "
            f"{tuple(parameter.shape)} after an assignment to parameter.data. Its gradient, its "
            "optimizer state and its part on other ranks have the old shape. Change shapes in "
            "configure_model or before the fit."
        )
