"""Picture of a scaling study: efficiencies of weak scaling, and speed-ups of strong scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_megatron.extras import import_extra

_WEAK = {"model": "model parallel", "model+data": "model and data parallel"}
_COLOURS = ("#4477aa", "#228833")


def draw_scaling(records: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draw weak scaling as bars, like figure 5 of the paper, and strong scaling as a line.

    Args:
        records: Records of the rows; rows without a result are left out.
        picture: File to write; its extension selects the format.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    figure = import_extra("matplotlib.figure", "plot").Figure(
        figsize=(9, 3.8), layout="constrained"
    )
    weak, strong = figure.subplots(1, 2)
    done = [record for record in records if record["efficiency"] is not None]
    bars = [(name, record) for name in _WEAK for record in done if record["study"] == name]
    for place, (name, record) in enumerate(bars):
        height = 100 * record["efficiency"]
        weak.bar(place, height, color=_COLOURS[list(_WEAK).index(name)])
        weak.text(place, height, f"{height:.0f} %", ha="center", va="bottom")
    weak.set_xticks(range(len(bars)), [str(record["devices"]) for _, record in bars])
    weak.set_xlabel("devices: " + ", then ".join(_WEAK.values()))
    weak.set_ylabel("efficiency of weak scaling (%)")
    points = [record for record in done if record["study"] == "strong"]
    devices = [record["devices"] for record in points]
    strong.plot(devices, [record["speedup"] for record in points], "o-", color=_COLOURS[0])
    strong.plot(devices, devices, ":", color="#616e7c", label="linear")
    strong.set_xlabel("devices")
    strong.set_ylabel("speed-up of strong scaling")
    strong.legend(frameon=False)
    figure.savefig(picture, dpi=150)
