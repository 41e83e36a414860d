"""The table in `docs/experts.md` of what a layer with experts keeps for the backward pass."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from benchmarks.shapes import SHAPES
from lightning_megatron.memory.estimate import estimate_stage
from lightning_megatron.plan.budget import TrainingShape
from lightning_megatron.plan.layout import ParallelLayout
from tests.docs.blocks import DOCS

PAGE = DOCS / "experts.md"
TABLE = re.compile(r"(?<=<!-- kept bytes -->\n)(?:\|.*\n)+")
TOKENS = 4096


def kept_by_layer(expert_rows: float | None, recompute: Any) -> int:
    """Return the bytes per token that a layer of Qwen3-30B-A3B's shape keeps with ep 4."""
    step = TrainingShape(
        seq_length=TOKENS,
        expert_transport="one_sided",
        expert_rows=expert_rows,
        recompute=recompute,
    )
    kept = []
    for num_layers in (1, 2):
        config = replace(SHAPES["qwen3_48"], num_layers=num_layers)
        kept.append(estimate_stage(config, ParallelLayout(4, ep=4), step, 0).activations)
    return (kept[1] - kept[0]) // TOKENS


def table() -> str:
    """Return the table of the page, in bytes per token."""
    lines = [
        "| kept by a layer | worst routing | `experts.rows=1.25` | even routing |",
        "|---|---|---|---|",
    ]
    for recompute in ("none", "expert_inputs", "experts", "full"):
        cells = [f"{kept_by_layer(rows, recompute):,}" for rows in (None, 1.25, 1.0)]
        lines.append(f"| `recompute={recompute!r}` | {' | '.join(cells)} |".replace("'", '"'))
    return "\n".join(lines) + "\n"


def write() -> None:
    """Write the table of the page again."""
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
