"""Log record of a swap."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SwapRecord:
    """Replaced block, its replacement, and the number of elements on this rank.

    ``str(record)`` is one line for the log.

    Args:
        name: Dotted name of the block in the module.
        kind: Kind of the cut: a kind of the plan, or ``model`` for a GPT that was built whole.
        source: Class of the block before.
        target: Class of the block now.
        full_elements: Elements of its parameters before (elements).
        local_elements: Elements of its parameters on this rank now, without padding (elements).
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
