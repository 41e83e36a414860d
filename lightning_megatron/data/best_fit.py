"""Packing of items into rows by best fit."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

#: Room of one token takes no item.
_LEAST = 2


def best_fit(
    sizes: npt.NDArray[np.int64],
    capacity: int | npt.NDArray[np.int64],
    most_items: int | npt.NDArray[np.int64] | None = None,
) -> list[list[int]]:
    """Put items into rows, the largest first, each where the least room is left.

    Args:
        sizes: Size of each item, from 2 to the capacity (tokens).
        capacity: Size of a row, or for each item that of a row which it opens (tokens).
        most_items: Largest number of items of a row, or for each item that of a row which it
            opens; None sets no limit.

    Returns:
        Items of each row

    Source: Ding et al. 2024 (https://arxiv.org/abs/2404.10830).
    """
    rows: list[list[int]] = []
    #: Rows by the room that they have, and all rooms in their order.
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    rooms_of_new = np.broadcast_to(capacity, sizes.shape)
    most = np.broadcast_to(len(sizes) if most_items is None else most_items, sizes.shape)
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        at = bisect_left(rooms, size)
        if at == len(rooms):
            room = int(rooms_of_new[item])
            row = len(rows)
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        rows[row].append(item)
        if room - size >= _LEAST and len(rows[row]) < most[rows[row][0]]:
            if room - size not in with_room:
                with_room[room - size] = []
                insort(rooms, room - size)
            with_room[room - size].append(row)
    return rows
