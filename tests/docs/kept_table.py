"""The table in `docs/experts.md` of the tensors that experts keep for the backward pass."""

from __future__ import annotations

import re

from benchmarks.shapes import SHAPES
from lightning_megatron.plan.kept_activations import fused_activations
from lightning_megatron.plan.network_activations import (
    MicrobatchShape,
    MixtureActivations,
    mixture_activations,
)
from tests.docs.blocks import DOCS

PAGE = DOCS / "experts.md"
TABLE = re.compile(r"(?<=<!-- kept bytes -->\n)(?:\|.*\n)+")
#: Part, its name in the table, and the step that needs it.
PARTS = (
    ("inputs", "tokens sorted by expert", "weight gradients of the first product; received tokens are overwritten by the next layer"),
    ("products", "gate and up values", "backward pass of the activation, and recomputation of the input of the second product"),
    ("probabilities", "probability of each row", "backward pass of the activation"),
    ("maps", "maps between choices and rows", "return of gradients to tokens"),
    ("router", "logits and choices of the router", "gradients of the router"),
)  # fmt: skip


def kept_activations(expert_rows: float | None, sends_again: bool = False) -> MixtureActivations:
    """Return the bytes that a layer of Qwen3-30B-A3B's shape keeps for one sequence with ep 4."""
    shape = SHAPES["qwen3_48"].memory_shape()
    batch = MicrobatchShape(num_tokens=4096, ep=4, transport="one_sided", expert_rows=expert_rows)
    return mixture_activations(shape, fused_activations(shape), batch, sends_again)


def table() -> str:
    """Return the table of the page, in bytes per token."""
    lines = [
        "| kept by a layer | worst routing | `experts.rows=1.25` | even routing | needed for |",
        "|---|---|---|---|---|",
    ]
    limits = (None, 1.25, 1.0)
    costs = [kept_activations(rows) for rows in limits]
    for part, name, why in PARTS:
        cells = [f"{getattr(cost, part) // 4096:,}" for cost in costs]
        lines.append(f"| {name} | {' | '.join(cells)} | {why} |")
    for name, sends_again in (("total", False), ('with `recompute="expert_inputs"`', True)):
        totals = [f"{kept_activations(rows, sends_again).total // 4096:,}" for rows in limits]
        lines.append(f"| {name} | {' | '.join(totals)} | |")
    return "\n".join(lines) + "\n"


def write() -> None:
    """Write the table of the page again."""
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
