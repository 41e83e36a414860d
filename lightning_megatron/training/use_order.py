"""Order in which the forward pass reads parameters."""

from __future__ import annotations

from collections.abc import Iterable


class UseOrder:
    """Positions of parameters in the order in which the forward pass reads them.

    Args:
        names: Names of all parameters of a rank, in the order of the model.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._position = {name: number for number, name in enumerate(names)}

    def first(self, names: Iterable[str]) -> int:
        """Return the position of the first of some parameters to be read.

        Raises:
            KeyError: If one of the names is unknown.
            ValueError: If there are no names.
        """
        return min(map(self._position.__getitem__, names))

    def sorted(self, names: Iterable[str]) -> list[str]:
        """Return names of parameters in the order of use.

        Raises:
            KeyError: If one of the names is unknown.
        """
        return sorted(names, key=self._position.__getitem__)
