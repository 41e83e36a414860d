"""The command ``layout``: print, and optionally draw, the ranks of each process group."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from math import lcm
from pathlib import Path

from jsonargparse.typing import NonNegativeInt, PositiveInt

from lightning_megatron.cli.draw_layout import (
    GPUS_PER_NODE,
    check_picture,
    draw_layout,
    is_in_a_node,
)
from lightning_megatron.plan.layout import DEFAULT_ORDER, ParallelLayout
from lightning_megatron.plan.partition import LayerPartition

EXAMPLES = """example:
  lightning-megatron layout --world_size 16 --tp 4 --pp 2 --etp 1 --ep 4 --png map.png"""

DENSE_GROUPS = ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp")
EXPERT_GROUPS = ("etp", "ep", "edp")


def layout(
    world_size: PositiveInt | None = None,
    tp: PositiveInt = 1,
    pp: PositiveInt = 1,
    cp: PositiveInt = 1,
    vpp: PositiveInt = 1,
    ep: PositiveInt = 1,
    etp: PositiveInt | None = None,
    stage_layers: str | None = None,
    order: str = DEFAULT_ORDER,
    rank_offset: NonNegativeInt = 0,
    gpus_per_node: PositiveInt | None = None,
    png: Path | None = None,
) -> None:
    """Print which ranks form which group, before any process starts.

    Args:
        world_size: Number of ranks; by default the smallest for the other sizes.
        tp: Tensor parallel size.
        pp: Pipeline stages.
        cp: Context parallel size.
        vpp: Chunks per pipeline stage.
        ep: Expert parallel size.
        etp: Tensor parallel size of each expert; by default tp.
        stage_layers: Layers of each virtual stage: numbers such as 4,5,5,2, or a string such as
            'Et*4|(t*5|)*2ttL'.
        order: Axes, fastest first.
        rank_offset: Global rank of the first rank.
        gpus_per_node: Mark groups that cross nodes.
        png: Draw the rank map into this .png, .svg or .pdf file.
    """
    if png is not None:
        check_picture(png)
    if world_size is None:
        world_size = lcm(tp * cp, ep * (etp or tp)) * pp
    layers = None if stage_layers is None else _stage_layers(stage_layers)
    planned = ParallelLayout(
        world_size, tp, pp, cp, ep, etp, vpp, order, rank_offset=rank_offset, stage_layers=layers
    )
    experts = planned.has_experts or etp is not None
    width = max(60, min(120, shutil.get_terminal_size((100, 24)).columns))
    print(describe_layout(planned, experts=experts, gpus_per_node=gpus_per_node, width=width))
    if png is not None:
        draw_layout(planned, png, gpus_per_node=gpus_per_node or GPUS_PER_NODE, experts=experts)
        print(f"\nrank map, nodes of {gpus_per_node or GPUS_PER_NODE}: {png}")


COMMAND = layout


def describe_layout(
    layout: ParallelLayout,
    experts: bool = False,
    gpus_per_node: int | None = None,
    width: int = 100,
) -> str:
    """Return the text that the subcommand prints.

    Args:
        experts: Whether to show the expert grid.
        gpus_per_node: Ranks per node; if given, groups that cross nodes are marked.
    """
    lines = _header(layout, experts)
    if gpus_per_node is not None:
        ranks = range(layout.rank_offset, layout.rank_offset + layout.world_size)
        num_nodes = len({rank // gpus_per_node for rank in ranks})
        lines.append(
            f"nodes of {gpus_per_node} ranks: {num_nodes}; * marks a group that crosses nodes"
        )
    dense = [(name, layout.groups(name)) for name in DENSE_GROUPS]
    dense += [
        ("embedding", layout.embedding_groups()),
        ("position embedding", layout.position_embedding_groups()),
    ]
    lines += ["", *_table("dense grid", dense, gpus_per_node, width)]
    if experts:
        expert = [(name, layout.expert_groups(name)) for name in EXPERT_GROUPS]
        lines += ["", *_table("expert grid", expert, gpus_per_node, width)]
    return "\n".join(lines)


def _header(layout: ParallelLayout, experts: bool) -> list[str]:
    start = f"world size {layout.world_size} "
    lines = [f"{start}= tp {layout.tp} x cp {layout.cp} x dp {layout.dp} x pp {layout.pp}"]
    if experts:
        lines.append(
            f"{'':{len(start)}}= etp {layout.etp} x ep {layout.ep} x edp {layout.edp} "
            f"x pp {layout.pp}"
        )
    lines.append(f"order {layout.order}, fastest axis first")
    if layout.vpp > 1:
        lines.append(
            f"virtual stages: {layout.vpp} chunks on each of {layout.pp} stages = "
            f"{layout.vpp * layout.pp}"
        )
    if layout.stage_layers is not None:
        lines += ["", *_stage_lines(layout, LayerPartition(layout.stage_layers, ""))]
    return lines


def _stage_lines(layout: ParallelLayout, partition: LayerPartition) -> list[str]:
    last = layout.placement.num_virtual_stages - 1
    margin = len(f"stage {layout.pp - 1}") + 2
    lines = [f"layers of each virtual stage: {partition}"]
    for stage in range(layout.pp):
        chunks = []
        for chunk in range(layout.vpp):
            number = layout.placement.virtual_stage(stage, chunk)
            layers = partition.ranges[number]
            parts = ["embedding"] if number == 0 else []
            parts += [_span(layers)] if layers else []
            parts += ["head"] if number == last else []
            chunks.append(", ".join(parts))
        lines.append(f"stage {stage}".ljust(margin) + "; ".join(chunks))
    return lines


def _span(layers: range) -> str:
    if len(layers) == 1:
        return f"layer {layers.start}"
    return f"layers {layers.start} to {layers.stop - 1}"


def _table(
    title: str, rows: Iterable[tuple[str, list[list[int]]]], gpus_per_node: int | None, width: int
) -> list[str]:
    columns = ["groups", "size", *(["in a node"] if gpus_per_node else []), "ranks"]
    margin = max(len("position embedding"), len(title)) + 2
    lines = [title.ljust(margin) + "  ".join(columns)]
    lines.append("-" * width)
    for name, groups in rows:
        cells = [str(len(groups)).rjust(len("groups")), str(len(groups[0])).rjust(len("size"))]
        inside = [gpus_per_node is None or is_in_a_node(group, gpus_per_node) for group in groups]
        if gpus_per_node:
            cells.append(_share(inside).ljust(len("in a node")))
        start = name.ljust(margin) + "  ".join(cells) + "  "
        words = [
            _bracketed(group, stays, width - len(start))
            for group, stays in zip(groups, inside, strict=True)
        ]
        lines += _wrapped(start, words, width)
    return lines


def _share(inside: list[bool]) -> str:
    if all(inside):
        return "all"
    return f"{sum(inside)} of {len(inside)}" if any(inside) else "none"


def _bracketed(group: list[int], stays: bool, room: int) -> str:
    # Non-breaking spaces keep a group on one line if the line is long enough for it.
    text = "[" + " ".join(map(str, group)) + "]" + ("" if stays else "*")
    return text.replace(" ", "\N{NO-BREAK SPACE}") if len(text) <= room else text


def _wrapped(start: str, words: list[str], width: int) -> list[str]:
    wrapper = textwrap.TextWrapper(width, start, " " * len(start), break_long_words=False)
    wrapper.break_on_hyphens = False
    lines = wrapper.wrap(" ".join(words))
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _stage_layers(text: str) -> list[int] | str:
    numbers = text.strip("[]").split(",")
    if all(number.strip().isdecimal() for number in numbers):
        return [int(number) for number in numbers]
    return text
