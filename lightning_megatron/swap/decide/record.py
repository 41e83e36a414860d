"""Log record of a swap."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SwapRecord:
    """Replaced block, its replacement, and the number of elements on this rank.

    ``str(record)`` is one line for the log.

    Args:
        name: Dotted name of the block in the module.
        kind: Kind of the block in the plan, or ``model`` for a GPT that was built in full.
        source: Class of the replaced block.
        target: Class of the replacement.
        full_elements: Size of the replaced block's parameters (elements).
        local_elements: Size of the replacement's parameters on this rank, without padding
            (elements).
        note: Text for the user; empty if there is none.
    """

    name: str
    kind: str
    source: str
    target: str
    full_elements: int
    local_elements: int
    note: str = ""

    def __str__(self) -> str:
        sizes = f"{self.local_elements:,} of {self.full_elements:,} elements here"
        line = f"{self.name}: {self.source} -> {self.target} ({self.kind}, {sizes})"
        return f"{line}. {self.note}" if self.note else line
