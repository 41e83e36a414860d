"""Best-fit packing of items into rows."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

#: Smallest size of an item (tokens).
_MIN_SIZE = 2


def best_fit(
    sizes: npt.NDArray[np.int64],
    capacity: int | npt.NDArray[np.int64],
    most_items: int | npt.NDArray[np.int64] | None = None,
) -> list[list[int]]:
    """Pack items into rows by best fit: the largest item first, into the fullest row that fits it.

    Args:
        sizes: Size of each item, from 2 to the capacity (tokens).
        capacity: Size of all rows, or for each item the size of a row that starts with this item
            (tokens).
        most_items: Largest number of items of all rows, or for each item that of a row that starts
            with this item; None sets no limit.

    Returns:
        Indices of the items of each row.

    Source: Ding et al. 2024 (https://arxiv.org/abs/2404.10830).
    """
    rows: list[list[int]] = []
    #: Open rows by their free space, and all amounts of free space in ascending order.
    by_space: dict[int, list[int]] = {}
    spaces: list[int] = []
    capacities = np.broadcast_to(capacity, sizes.shape)
    limits = np.broadcast_to(len(sizes) if most_items is None else most_items, sizes.shape)
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        index = bisect_left(spaces, size)
        if index == len(spaces):
            space = int(capacities[item])
            row = len(rows)
            rows.append([])
        else:
            space = spaces[index]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[index]
        rows[row].append(item)
        if space - size >= _MIN_SIZE and len(rows[row]) < limits[rows[row][0]]:
            if space - size not in by_space:
                by_space[space - size] = []
                insort(spaces, space - size)
            by_space[space - size].append(row)
    return rows
