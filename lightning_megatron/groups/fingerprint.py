"""Compare what every rank believes before any rank computes."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_megatron.errors import RankMismatchError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects


def check_same_everywhere(world: MeshAxis, fields: Mapping[str, str | int | float | None]) -> None:
    """Compare named values over all ranks of ``world``.

    Args:
        world: An axis with all ranks, on CPU.
        fields: Values that must be equal everywhere, by name.

    Raises:
        RankMismatchError: On every rank, naming the ranks and fields that differ from the majority.

    Communication: one gather of objects over ``world``.
    """
    everyone = all_gather_objects(dict(fields), world)
    names = list(dict.fromkeys(name for one in everyone for name in one))
    complaints = []
    for name in names:
        values = [repr(one[name]) if name in one else "missing" for one in everyone]
        # The majority is taken as right; with a tie, rank 0 is.
        expected = max(dict.fromkeys(values), key=values.count)
        complaints += [
            f"rank {world.ranks[position]} has {name}={value}, the others {expected}"
            for position, value in enumerate(values)
            if value != expected
        ]
    if complaints:
        shown = "; ".join(complaints[:8]) + (f"; and {len(complaints) - 8} more" if len(complaints) > 8 else "")
        raise RankMismatchError(
            f"all ranks must be started with the same configuration, versions and data: {shown}. A job whose ranks "
            "disagree hangs or trains something else. Start every rank with the same command, environment and files."
        )
