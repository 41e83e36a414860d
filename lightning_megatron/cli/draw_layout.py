"""Rank map of a layout: nodes are boxes, ranks are squares, and each group has a colour."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from functools import partial
from math import ceil, sqrt
from pathlib import Path
from typing import Any

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.plan.layout import ParallelLayout

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
#: Default number of ranks per node.
GPUS_PER_NODE = 8
#: Limit of the picture's longer side; it bounds memory for layouts of thousands of ranks.
MAX_PIXELS = 16000

# Lengths in inches.
SQUARE = 0.46
GAP = 0.06
NODE_PADDING = 0.1
NODE_TITLE = 0.24
NODE_GAP = 0.16
GRID_GAP = 0.3
PANEL_TITLE = 0.42
PANEL_GAP = 0.45
GRID_TITLE = 0.44
MARGIN = 0.35
HEADER = 0.86

INK = "#1f2933"
SOFT_INK = "#616e7c"
NODE_FILL = "#f5f7fa"
NODE_EDGE = "#cbd2d9"
FEW_COLOURS = "#4477aa #ee6677 #228833 #ccbb44 #66ccee #aa3377 #ee8866 #bbbbbb".split()


@dataclass(frozen=True)
class NodeMap:
    """Coordinates of nodes and ranks in a panel, in inches."""

    num_ranks: int
    rank_offset: int
    gpus_per_node: int

    @property
    def nodes(self) -> list[int]:
        """Indices of the nodes with at least one rank of the layout."""
        last = self.rank_offset + self.num_ranks - 1
        return list(range(self.rank_offset // self.gpus_per_node, last // self.gpus_per_node + 1))

    @property
    def squares_across(self) -> int:
        """Number of squares in a row of a node's box."""
        return self.gpus_per_node if self.gpus_per_node <= 4 else ceil(sqrt(2 * self.gpus_per_node))

    @property
    def nodes_across(self) -> int:
        """Number of nodes in a row, chosen so that the panel is about square."""
        width, height = self.node_size
        return max(1, min(len(self.nodes), round(sqrt(len(self.nodes) * height / width))))

    @property
    def node_size(self) -> tuple[float, float]:
        """Width and height of a node's box."""
        across = self.squares_across
        down = ceil(self.gpus_per_node / across)
        width = _length(across, SQUARE, GAP) + 2 * NODE_PADDING
        return width, _length(down, SQUARE, GAP) + NODE_TITLE + NODE_PADDING

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the panel, without its title."""
        width, height = self.node_size
        across = self.nodes_across
        down = ceil(len(self.nodes) / across)
        return _length(across, width, NODE_GAP), _length(down, height, NODE_GAP)

    def node_corner(self, node: int, left: float, top: float) -> tuple[float, float]:
        """Return the upper left corner of a node's box, in a panel with the given corner."""
        row, column = divmod(node - self.nodes[0], self.nodes_across)
        width, height = self.node_size
        return left + column * (width + NODE_GAP), top + row * (height + NODE_GAP)

    def rank_corner(self, rank: int, left: float, top: float) -> tuple[float, float]:
        """Return the upper left corner of a rank's square, in a panel with the given corner."""
        node, slot = divmod(rank, self.gpus_per_node)
        row, column = divmod(slot, self.squares_across)
        x, y = self.node_corner(node, left, top)
        pitch = SQUARE + GAP
        return x + NODE_PADDING + column * pitch, y + NODE_TITLE + row * pitch


def _length(number: int, each: float, gap: float) -> float:
    return number * each + (number - 1) * gap


def check_picture(path: Path) -> None:
    """Refuse a picture of an unknown format, or in a folder that does not exist."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise UnsupportedError(f"{str(path)!r} must end in {', '.join(PICTURE_SUFFIXES)}")
    if not path.parent.is_dir():
        raise UnsupportedError(f"folder {str(path.parent)!r} does not exist")


def draw_layout(
    layout: ParallelLayout,
    path: str | Path,
    gpus_per_node: int = GPUS_PER_NODE,
    experts: bool = False,
) -> None:
    """Draw the rank map of a layout into an image file.

    Each row of panels shows a grid, with one panel for each axis larger than 1. Ranks of the same
    colour form a group.

    Args:
        path: File to write; its suffix (.png, .svg, .pdf) selects the format.
        experts: Whether to draw the expert grid.
    """
    figures = import_extra("matplotlib.figure", "plot")
    last = layout.world_size + layout.rank_offset
    node_map = NodeMap(layout.world_size, layout.rank_offset, min(gpus_per_node, last))
    rows = {"Dense grid": {axis: layout.groups(axis) for axis in ("tp", "cp", "dp", "pp")}}
    if experts:
        axes_of_experts = ("etp", "ep", "edp", "pp")
        rows["Expert grid"] = {axis: layout.expert_groups(axis) for axis in axes_of_experts}
    panel_width, panel_height = node_map.size
    panel_width = max(panel_width, 2.0)
    columns = max(len(_panels(groups)) for groups in rows.values())
    row_height = GRID_TITLE + PANEL_TITLE + panel_height
    width = max(2 * MARGIN + _length(columns, panel_width, PANEL_GAP), 6.4)
    height = HEADER + _length(len(rows), row_height, GRID_GAP) + MARGIN
    figure = figures.Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    write = partial(axes.text, va="center")
    title = f"{layout.world_size} ranks, order {layout.order}"
    write(MARGIN, 0.33, title, size=14, weight="bold", color=INK)
    note = "One colour, one group. In a square: the rank, and below it its group."
    write(MARGIN, 0.62, note, size=9.5, color=SOFT_INK)
    for row, (title, groups) in enumerate(rows.items()):
        top = HEADER + row * (row_height + GRID_GAP)
        sizes = " x ".join(f"{axis} {len(members[0])}" for axis, members in groups.items())
        write(MARGIN, top + 0.2, f"{title}: {sizes}", size=12, weight="bold", color=INK)
        top += GRID_TITLE
        for column, (axis, members) in enumerate(_panels(groups).items()):
            left = MARGIN + column * (panel_width + PANEL_GAP)
            plural = "group" if len(members) == 1 else "groups"
            title = f"{axis}: {len(members)} {plural} of {len(members[0])}"
            write(left, top + 0.07, title, size=10.5, color=INK)
            note = _note(members, gpus_per_node)
            write(left, top + 0.27, note, size=8.5, color=SOFT_INK)
            _draw_panel(axes, members, node_map, left, top + PANEL_TITLE)
    figure.savefig(path, dpi=min(150.0, MAX_PIXELS / max(width, height)))


def _panels(groups: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """Return the axes larger than 1, or the first one if there are none."""
    large = {axis: members for axis, members in groups.items() if len(members[0]) > 1}
    return large or dict([*groups.items()][:1])


def _note(groups: list[list[int]], gpus_per_node: int) -> str:
    """Return how many groups stay inside a node."""
    inside = sum(is_in_a_node(group, gpus_per_node) for group in groups)
    if inside == len(groups):
        return "inside a node"
    return f"{inside} inside a node, the others across" if inside else "across nodes"


def is_in_a_node(group: list[int], gpus_per_node: int) -> bool:
    """Return whether all ranks of a group are on one node."""
    # The ranks of a group are in ascending order.
    return group[0] // gpus_per_node == group[-1] // gpus_per_node


def _draw_panel(
    axes: Any, groups: list[list[int]], node_map: NodeMap, left: float, top: float
) -> None:
    patches = import_extra("matplotlib.patches", "plot")

    def draw_box(x: float, y: float, size: tuple[float, float], radius: float, **look: Any) -> None:
        style = f"round,pad=0,rounding_size={radius}"
        axes.add_patch(patches.FancyBboxPatch((x, y), *size, boxstyle=style, **look))

    write = partial(axes.text, va="center")
    for node in node_map.nodes:
        x, y = node_map.node_corner(node, left, top)
        draw_box(x, y, node_map.node_size, 0.08, facecolor=NODE_FILL, edgecolor=NODE_EDGE)
        write(x + NODE_PADDING, y + 0.13, f"node {node}", size=7.5, color=SOFT_INK)
    for index, (group, colour) in enumerate(zip(groups, _colours(len(groups)), strict=True)):
        mark = partial(axes.text, va="center", ha="center", color=ink_on(colour))
        for rank in group:
            x, y = node_map.rank_corner(rank, left, top)
            draw_box(x, y, (SQUARE, SQUARE), 0.05, facecolor=colour, linewidth=0)
            mark(x + SQUARE / 2, y + 0.18, str(rank), size=9.5, weight="bold")
            mark(x + SQUARE / 2, y + 0.35, str(index), size=6.5)


def _colours(number: int) -> list[str]:
    if number <= len(FEW_COLOURS):
        return FEW_COLOURS[:number]
    # The hues divide the colour circle evenly; neighbouring colours also differ in lightness.
    colours = []
    for index in range(number):
        rgb = colorsys.hls_to_rgb(index / number, (0.42, 0.62, 0.78)[index % 3], 0.55)
        colours.append("#" + bytes(round(255 * part) for part in rgb).hex())
    return colours


def ink_on(colour: str) -> str:
    """Return the colour of text that is legible on a colour such as ``#4477aa``."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    # Weights of luma (ITU-R BT.601): green appears brighter than red, and red than blue.
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 135 else "white"
