"""Schedules as CSV files: a row is a rank, a cell an action such as ``0F3``.

A cell names a virtual stage, a kind (F, B, I or W) and a microbatch, all counted from 0. Cells of a
row are in the order in which the rank runs them; empty cells and blank lines are ignored. The
virtual stages of the rows determine how chunks lie on the ranks.

The format is that of ``torch.distributed.pipelining`` for computations (its ``compute_only``). A
pair that torch overlaps, ``(0F3;7B1)OVERLAP_F_B``, is read as its two actions in order.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from operator import eq
from pathlib import Path
from typing import get_args

from lightning_megatron.errors import CorruptDataError, ParallelPlanError
from lightning_megatron.plan.actions import Action
from lightning_megatron.plan.custom_schedule import custom_schedule
from lightning_megatron.plan.placement import Placement, PlacementShape
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.plan.settings import shown
from lightning_megatron.strict_json import read_regular_file

MAX_CSV_BYTES = 1 << 23
"""Largest accepted file: about a million actions."""

_REMEDY = "Use comma-separated cells such as 0F0, one line for each rank."
_CELL = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def format_schedule(schedule: Schedule) -> str:
    """Return a schedule as CSV; ``parse_schedule`` returns its rows again."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for rank, row in enumerate(schedule.rows):
        writer.writerow(
            f"{schedule.virtual_stage(rank, action.chunk)}{action.kind}{action.microbatch}"
            for action in row
        )
    return text.getvalue()


def read_schedule(path: str | Path) -> Schedule:
    """Read a schedule from a CSV file and check it.

    Args:
        path: File of at most ``MAX_CSV_BYTES`` in UTF-8.

    Raises:
        CorruptDataError: If the file cannot be read, is too large, or is not valid CSV.
        ParallelPlanError: If it is not a legal schedule, as for ``parse_schedule``.
    """
    content = read_regular_file(Path(path), _REMEDY, MAX_CSV_BYTES)
    try:
        return parse_schedule(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise CorruptDataError(f"{path} is not a text file: {error.reason}. {_REMEDY}") from error


def parse_schedule(text: str, name: str) -> Schedule:
    """Return the schedule of a CSV text, checked.

    Its sizes follow from the text: pp is the number of rows, vpp that of virtual stages in a row,
    and a text without backwards is a schedule for validation alone.

    Args:
        text: Rows of cells.
        name: Name of the schedule, also in errors.

    Raises:
        CorruptDataError: If the text is not valid CSV.
        ParallelPlanError: If a cell is not an action, the virtual stages do not lie in a loop or a
            V, or the schedule is not legal, as for ``custom_schedule``.
    """
    try:
        table = [row for row in csv.reader(io.StringIO(text), strict=True) if row]
    except csv.Error as error:
        raise CorruptDataError(f"{name} is not valid CSV: {error}. {_REMEDY}") from error
    cells = []
    for rank, parts in enumerate(table):
        cells.append([_parsed(cell, name, rank) for part in parts for cell in _singles(part)])
    for rank, row in enumerate(cells):
        if not row:
            raise ParallelPlanError(
                f"{name} must give every rank at least one action: row {rank} of {len(cells)} has "
                f"none. {_REMEDY}"
            )
    if not cells:
        raise ParallelPlanError(f"{name} must have a row for each rank: it has none. {_REMEDY}")
    placement = _placement(cells, name)
    chunk_of = {
        virtual: placement.owner(virtual)[1] for virtual in range(placement.num_virtual_stages)
    }

    def row_of(rank: int, *sizes: int) -> list[Action]:
        return [
            Action(kind, chunk_of[virtual], microbatch)  # type: ignore[arg-type]
            for virtual, kind, microbatch in cells[rank]
        ]

    return custom_schedule(
        row_of,
        placement.num_stages,
        _num_microbatches(cells, name),
        placement.num_chunks,
        shape=placement.shape,
        forward_only=all(kind == "F" for row in cells for _, kind, _ in row),
        name=name,
    )


_Cell = tuple[int, str, int]


def _singles(part: str) -> list[str]:
    """Return the cells of a part between two commas: none, one, or the two of a pair."""
    pair = _PAIR.fullmatch(part.strip())
    cells = [part] if pair is None else pair.groups()
    return [cell.strip() for cell in cells if cell.strip()]


def _parsed(cell: str, name: str, rank: int) -> _Cell:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ParallelPlanError(
            f"{name}, row {rank}: a cell is a virtual stage, a kind (F, B, I or W) and a "
            f"microbatch, such as 0F3: it is {shown(cell)}. Use one cell for each computation, in "
            "order, and leave out transfers and torch's other actions, which are planned from the "
            "computations."
        )
    return int(match[1]), match[2], int(match[3])


def _placement(cells: Sequence[Sequence[_Cell]], name: str) -> Placement:
    """Find the placement of the virtual stages of the rows on the ranks."""
    stages = []
    for row in cells:
        stages.append(sorted({virtual for virtual, _, _ in row}))
    placements = [
        Placement(shape, len(cells), max(map(len, stages))) for shape in get_args(PlacementShape)
    ]
    # For each placement, the first rank whose virtual stages differ from those of the row.
    wrong = []
    for placement in placements:
        listed = [_stages_of(placement, rank) for rank in range(len(stages))]
        if listed == stages:
            return placement
        wrong.append(list(map(eq, listed, stages)).index(False))
    rank = max(wrong)
    loop, v = (_stages_of(placement, rank) for placement in placements)
    raise ParallelPlanError(
        f"{name}: virtual stages must lie on the {len(cells)} ranks in a loop or in a V, the same "
        f"number on each rank: row {rank} has {shown(stages[rank])}. Use {shown(loop)} in a loop, "
        f"or {shown(v)} in a V."
    )


def _stages_of(placement: Placement, rank: int) -> list[int]:
    chunks = range(placement.num_chunks)
    return [placement.virtual_stage(rank, chunk) for chunk in chunks]


def _num_microbatches(cells: Sequence[Sequence[_Cell]], name: str) -> int:
    highest = max(microbatch for row in cells for _, _, microbatch in row)
    present = {microbatch for row in cells for _, _, microbatch in row}
    if len(present) <= highest:
        missing = next(number for number in range(highest) if number not in present)
        raise ParallelPlanError(
            f"{name} must name every microbatch: it has microbatch {highest}, but no microbatch "
            f"{missing}. Use the numbers 0 to {len(present) - 1}."
        )
    return highest + 1
