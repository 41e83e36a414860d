"""The picture `docs/trace.png` of a trace of all ranks: what runs when in one step.

    lightning-megatron profile --step 4 --count 1 -c recipe:gpt_speeches_cpu --data.batch_size 64 \\
        --trainer.strategy.schedule zb-h1
    python -m tests.docs.trace_picture runs/profile/trace_step4.json.gz
"""

from __future__ import annotations

import gzip
import json
import sys
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tests.docs.blocks import DOCS

#: Beginnings of the names of ranges, with colour, height and name in the legend.
KINDS = {
    "F chunk": ("#4c78a8", 0.8, "forward (F)"),
    "B chunk": ("#54a24b", 0.8, "backward (B)"),
    "I chunk": ("#54a24b", 0.8, "input half (I)"),
    "W chunk": ("#b6d7a8", 0.8, "weight half (W)"),
    "tp ": ("#f58518", 0.35, "tp collectives"),
    "wait for tp": ("#f58518", 0.35, "tp collectives"),
    "wait for pp": ("#e45756", 0.8, "waits for the other stage"),
    "optimizer update": ("#79706e", 0.8, "update"),
}


def draw(trace: str) -> None:
    """Draw the ranges of all ranks over time."""
    with gzip.open(trace) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    axes = Figure(figsize=(10, 0.7 + 0.55 * len(titles)), layout="constrained").subplots()
    labels: dict[str, Patch] = {}
    for start, (colour, height, label) in KINDS.items():
        for event in events:
            if event["name"].startswith(start) and event.get("cat") == "user_annotation":
                left, width = event["ts"] / 1e3, event["dur"] / 1e3
                axes.barh(event["pid"], width, height, left, color=colour)
                labels[label] = Patch(color=colour, label=label)
                if height > 0.5 and " chunk " in event["name"] and width > 4:
                    number = event["name"].rpartition(" ")[2]
                    place = (left + width / 2, event["pid"] + 0.28)
                    axes.text(*place, number, ha="center", va="center", fontsize=6, color="white")
    axes.set_yticks(list(titles), list(titles.values()))
    axes.invert_yaxis()
    axes.set_xlabel("ms since the beginning of the step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(handles=list(labels.values()), ncols=6, frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.22))  # fmt: skip
    axes.figure.savefig(DOCS / "trace.png", dpi=110)


if __name__ == "__main__":
    draw(sys.argv[1])
