"""Names of layouts: ``single``, or tp, pp and dp with sizes, such as ``tp2_pp2`` and ``dp4``."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Sizes of a layout.

    Args:
        name: Name of the layout.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        dp: Data-parallel size.
    """

    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp


def layout_of(name: str) -> Layout:
    """Return the layout with the name ``name``.

    Raises:
        ArgumentTypeError: If the name has another form.
    """
    parts: Sequence[str] = () if name == "single" else name.split("_")
    sizes = {part[:2]: int(part[2:]) for part in parts if re.fullmatch(r"(tp|pp|dp)[1-9]\d*", part)}
    if len(sizes) < len(parts):
        raise ArgumentTypeError(
            f"a layout must be single, or tp, pp and dp with sizes: {name!r} is not. Use tp2_pp2."
        )
    return Layout(name, **sizes)
