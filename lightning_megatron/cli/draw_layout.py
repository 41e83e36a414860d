"""Rank map of a layout: nodes are boxes, ranks are squares, and each group has a colour."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path
from types import ModuleType
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
FEW_COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#ee8866",
    "#bbbbbb",
)


@dataclass(frozen=True)
class Panel:
    """Panel of the picture with the groups of one axis."""

    axis: str
    groups: list[list[int]]

    @property
    def title(self) -> str:
        """Return the panel's heading, such as "tp: 4 groups of 4"."""
        plural = "group" if len(self.groups) == 1 else "groups"
        return f"{self.axis}: {len(self.groups)} {plural} of {len(self.groups[0])}"

    def note(self, gpus_per_node: int) -> str:
        """Return a note on the number of groups that stay inside a node."""
        # The ranks of a group are in ascending order.
        inside = sum(
            group[0] // gpus_per_node == group[-1] // gpus_per_node for group in self.groups
        )
        if inside == len(self.groups):
            return "inside a node"
        return f"{inside} inside a node, the others across" if inside else "across nodes"


@dataclass(frozen=True)
class NodeMap:
    """Coordinates of nodes and ranks in a panel, in inches from its upper left corner."""

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
        down = ceil(self.gpus_per_node / self.squares_across)
        across = self.squares_across
        width = across * SQUARE + (across - 1) * GAP + 2 * NODE_PADDING
        return width, down * SQUARE + (down - 1) * GAP + NODE_TITLE + NODE_PADDING

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the panel, without its title."""
        width, height = self.node_size
        across = self.nodes_across
        down = ceil(len(self.nodes) / across)
        return across * width + (across - 1) * NODE_GAP, down * height + (down - 1) * NODE_GAP

    def node_corner(self, node: int) -> tuple[float, float]:
        """Return the upper left corner of a node's box."""
        row, column = divmod(node - self.nodes[0], self.nodes_across)
        width, height = self.node_size
        return column * (width + NODE_GAP), row * (height + NODE_GAP)

    def rank_corner(self, rank: int) -> tuple[float, float]:
        """Return the upper left corner of a rank's square."""
        node, slot = divmod(rank, self.gpus_per_node)
        row, column = divmod(slot, self.squares_across)
        left, top = self.node_corner(node)
        return left + NODE_PADDING + column * (SQUARE + GAP), top + NODE_TITLE + row * (
            SQUARE + GAP
        )


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
    patches = import_extra("matplotlib.patches", "plot")
    node_map = NodeMap(
        layout.world_size,
        layout.rank_offset,
        min(gpus_per_node, layout.world_size + layout.rank_offset),
    )
    rows = _panel_rows(layout, experts)
    panel_width, panel_height = node_map.size
    panel_width = max(panel_width, 2.0)
    columns = max(len(panels) for _, panels in rows)
    row_height = GRID_TITLE + PANEL_TITLE + panel_height
    width = max(2 * MARGIN + columns * panel_width + (columns - 1) * PANEL_GAP, 6.4)
    height = HEADER + len(rows) * row_height + (len(rows) - 1) * GRID_GAP + MARGIN
    figure = figures.Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    _draw_header(axes, layout)
    for row, (title, panels) in enumerate(rows):
        top = HEADER + row * (row_height + GRID_GAP)
        axes.text(MARGIN, top + 0.2, title, size=12, weight="bold", color=INK, va="center")
        for column, panel in enumerate(panels):
            left = MARGIN + column * (panel_width + PANEL_GAP)
            axes.text(left, top + GRID_TITLE + 0.07, panel.title, size=10.5, color=INK, va="center")
            note = panel.note(gpus_per_node)
            axes.text(left, top + GRID_TITLE + 0.27, note, size=8.5, color=SOFT_INK, va="center")
            _draw_panel(axes, patches, panel, node_map, left, top + GRID_TITLE + PANEL_TITLE)
    figure.savefig(path, dpi=min(150.0, MAX_PIXELS / max(width, height)))


def _panel_rows(layout: ParallelLayout, experts: bool) -> list[tuple[str, list[Panel]]]:
    def row(title: str, groups: dict[str, list[list[int]]]) -> tuple[str, list[Panel]]:
        sizes = " x ".join(f"{axis} {len(members[0])}" for axis, members in groups.items())
        panels = [Panel(axis, members) for axis, members in groups.items() if len(members[0]) > 1]
        return f"{title}: {sizes}", panels or [
            Panel(axis, members) for axis, members in groups.items()
        ][:1]

    rows = [row("Dense grid", {axis: layout.groups(axis) for axis in ("tp", "cp", "dp", "pp")})]
    if experts:
        rows.append(
            row(
                "Expert grid",
                {axis: layout.expert_groups(axis) for axis in ("etp", "ep", "edp", "pp")},
            )
        )
    return rows


def _draw_header(axes: Any, layout: ParallelLayout) -> None:
    title = f"{layout.world_size} ranks, order {layout.order}"
    axes.text(MARGIN, 0.33, title, size=14, weight="bold", color=INK, va="center")
    note = "One colour, one group. In a square: the rank, and below it its group."
    axes.text(MARGIN, 0.62, note, size=9.5, color=SOFT_INK, va="center")


def _draw_panel(
    axes: Any, patches: ModuleType, panel: Panel, node_map: NodeMap, left: float, top: float
) -> None:
    width, height = node_map.node_size
    for node in node_map.nodes:
        x, y = node_map.node_corner(node)
        corner = (left + x, top + y)
        style = "round,pad=0,rounding_size=0.08"
        axes.add_patch(
            patches.FancyBboxPatch(
                corner, width, height, boxstyle=style, facecolor=NODE_FILL, edgecolor=NODE_EDGE
            )
        )
        axes.text(
            left + x + NODE_PADDING,
            top + y + 0.13,
            f"node {node}",
            size=7.5,
            color=SOFT_INK,
            va="center",
        )
    colours = _colours(len(panel.groups))
    for index, group in enumerate(panel.groups):
        ink = ink_on(colours[index])
        for rank in group:
            x, y = node_map.rank_corner(rank)
            corner = (left + x, top + y)
            style = "round,pad=0,rounding_size=0.05"
            axes.add_patch(
                patches.FancyBboxPatch(
                    corner, SQUARE, SQUARE, boxstyle=style, facecolor=colours[index], linewidth=0
                )
            )
            middle = left + x + SQUARE / 2
            axes.text(
                middle,
                top + y + 0.18,
                str(rank),
                size=9.5,
                weight="bold",
                color=ink,
                ha="center",
                va="center",
            )
            axes.text(
                middle, top + y + 0.35, str(index), size=6.5, color=ink, ha="center", va="center"
            )


def _colours(number: int) -> list[str]:
    if number <= len(FEW_COLOURS):
        return list(FEW_COLOURS[:number])
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
