"""The subcommand ``layout``: print, and optionally draw, the ranks of each process group."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Sequence

from lightning_megatron.cli.arguments import at_least_one, picture_file
from lightning_megatron.cli.draw_layout import GPUS_PER_NODE, draw_layout
from lightning_megatron.plan.layout import DEFAULT_ORDER, ParallelLayout
from lightning_megatron.plan.partition import LayerPartition

EXAMPLE = """example:
  lightning-megatron layout --world-size 16 --tp 4 --pp 2 --etp 1 --ep 4 --png map.png"""

DENSE_GROUPS = ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp")
EXPERT_GROUPS = ("etp", "ep", "edp")


def main(args: Sequence[str] | None = None) -> None:
    """Run the subcommand."""
    run_layout(layout_parser().parse_args(args))


def layout_parser() -> argparse.ArgumentParser:
    """Build the parser of the subcommand's options."""
    parser = argparse.ArgumentParser(
        prog="lightning-megatron layout",
        description="Print which ranks form which group, before any process starts.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--world-size", "--world_size", type=int, required=True, metavar="N", help="number of ranks"
    )
    add("--tp", type=int, default=1, metavar="N", help="tensor parallel size")
    add("--pp", type=int, default=1, metavar="N", help="pipeline stages")
    add("--cp", type=int, default=1, metavar="N", help="context parallel size")
    add("--vpp", type=int, default=1, metavar="N", help="chunks per pipeline stage")
    add(
        "--stage-layers",
        "--stage_layers",
        type=_stage_layers,
        metavar="LAYERS",
        help="layers of each virtual stage: numbers such as 4,5,5,2, or a string such as "
        "'Et*4|(t*5|)*2ttL'",
    )
    add("--ep", type=int, default=1, metavar="N", help="expert parallel size")
    add("--etp", type=int, metavar="N", help="tensor parallel size of each expert (default: tp)")
    add("--order", default=DEFAULT_ORDER, help="axes, fastest first (default: %(default)s)")
    add(
        "--rank-offset",
        "--rank_offset",
        type=int,
        default=0,
        metavar="N",
        help="global rank of the first rank",
    )
    add(
        "--gpus-per-node",
        "--gpus_per_node",
        type=at_least_one,
        metavar="N",
        help="mark groups that cross nodes",
    )
    add(
        "--png",
        type=picture_file,
        metavar="FILE",
        help="draw the rank map into this .png, .svg or .pdf file",
    )
    return parser


def run_layout(options: argparse.Namespace) -> None:
    """Print the layout of the given options, and draw it if ``--png`` names a file."""
    layout = ParallelLayout(
        options.world_size,
        tp=options.tp,
        pp=options.pp,
        cp=options.cp,
        ep=options.ep,
        etp=options.etp,
        vpp=options.vpp,
        order=options.order,
        rank_offset=options.rank_offset,
        stage_layers=options.stage_layers,
    )
    experts = layout.has_experts or options.etp is not None
    width = max(60, min(120, shutil.get_terminal_size((100, 24)).columns))
    print(
        describe_layout(layout, experts=experts, gpus_per_node=options.gpus_per_node, width=width)
    )
    if options.png is not None:
        gpus_per_node = options.gpus_per_node or GPUS_PER_NODE
        draw_layout(layout, options.png, gpus_per_node=gpus_per_node, experts=experts)
        print(f"\nrank map, nodes of {gpus_per_node}: {options.png}")


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
    lines = [_header(layout, experts)]
    if gpus_per_node is not None:
        num_nodes = len({rank // gpus_per_node for rank in _ranks(layout)})
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


def _header(layout: ParallelLayout, experts: bool) -> str:
    start = f"world size {layout.world_size} "
    lines = [f"{start}= tp {layout.tp} x cp {layout.cp} x dp {layout.dp} x pp {layout.pp}"]
    if experts:
        lines.append(
            f"{'':{len(start)}}= etp {layout.etp} x ep {layout.ep} x edp {layout.edp} x pp "
            f"{layout.pp}"
        )
    lines.append(f"order {layout.order}, fastest axis first")
    if layout.vpp > 1:
        lines.append(
            f"virtual stages: {layout.vpp} chunks on each of {layout.pp} stages = "
            f"{layout.vpp * layout.pp}"
        )
    if layout.stage_layers is not None:
        lines += ["", *_stage_lines(layout, LayerPartition(layout.stage_layers, ""))]
    return "\n".join(lines)


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
        inside = [gpus_per_node is None or _in_one_node(group, gpus_per_node) for group in groups]
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
    lines = textwrap.wrap(
        " ".join(words),
        width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _in_one_node(group: list[int], gpus_per_node: int) -> bool:
    return len({rank // gpus_per_node for rank in group}) == 1


def _ranks(layout: ParallelLayout) -> range:
    return range(layout.rank_offset, layout.rank_offset + layout.world_size)


def _stage_layers(text: str) -> list[int] | str:
    numbers = text.strip("[]").split(",")
    if all(number.strip().isdecimal() for number in numbers):
        return [int(number) for number in numbers]
    return text
