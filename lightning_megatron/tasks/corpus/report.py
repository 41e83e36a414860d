"""Report of a cleaning: removed documents by reason, clusters, and overlap with test sets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from lightning_megatron.tasks.corpus.clusters import Numbers
from lightning_megatron.tasks.corpus.examination import CleaningOptions
from lightning_megatron.tasks.corpus.held_out import Overlap
from lightning_megatron.tasks.corpus.spool import Spool


@dataclass(frozen=True)
class CleaningReport:
    """Numbers of documents: ``read`` is the sum of ``kept`` and of those removed for each reason.

    Args:
        test: Number of documents that are similar to a test document.
        duplicate: Number of documents in the cluster of an earlier document.
    """

    read: int
    kept: int
    fixed: int
    broken: int
    short: int
    test: int
    duplicate: int
    clusters: int
    overlaps: tuple[Overlap, ...]
    broken_lines: tuple[str, ...]


def clusters_of(roots: Numbers) -> Iterator[tuple[int, list[int]]]:
    """Yield the first document of each cluster of at least two, and the others, in order."""
    removed = np.flatnonzero(roots != np.arange(len(roots)))
    order = removed[np.argsort(roots[removed], kind="stable")]
    firsts, starts = np.unique(roots[order], return_index=True)
    for number, members in enumerate(np.split(order, starts[1:]) if len(firsts) else []):
        yield int(firsts[number]), members.tolist()


def write_report(
    path: Path,
    report: CleaningReport,
    options: CleaningOptions,
    spool: Spool,
    roots: Numbers,
    matches: Numbers,
    test_places: list[str],
) -> None:
    """Write a report as JSON, with one line per cluster and per match with a test document.

    Args:
        matches: For each document the test document that is similar to it, or -1.
    """
    numbers = asdict(report)
    overlaps = [{**asdict(overlap), "share": overlap.share} for overlap in report.overlaps]
    reasons = {name: numbers[name] for name in ("broken", "short", "test", "duplicate")}
    head = {
        "options": asdict(options),
        **{name: numbers[name] for name in ("read", "kept", "fixed")},
        "removed": reasons,
        "broken_lines": report.broken_lines,
        "overlap": overlaps,
    }
    matched = ((number, int(matches[number])) for number in np.flatnonzero(matches >= 0))
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(head, indent=1, ensure_ascii=False)[:-2])
        _write_list(
            file,
            "test_matches",
            ({"document": spool.place(int(n)), "test": test_places[test]} for n, test in matched),
        )
        _write_list(
            file,
            "clusters",
            (
                {"kept": spool.place(kept), "removed": list(map(spool.place, duplicates))}
                for kept, duplicates in clusters_of(roots)
            ),
        )
        file.write("\n}\n")


def _write_list(file: TextIO, name: str, entries: Iterator[object]) -> None:
    file.write(f",\n {json.dumps(name)}: [")
    separator = "\n  "
    for entry in entries:
        file.write(separator + json.dumps(entry, ensure_ascii=False))
        separator = ",\n  "
    file.write("\n ]")
