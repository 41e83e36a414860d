"""Report of a cleaning: how many documents were removed and why, and how much tests overlap."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from lightning_megatron.corpus.clusters import Numbers
from lightning_megatron.corpus.examination import CleaningOptions
from lightning_megatron.corpus.held_out import Overlap
from lightning_megatron.corpus.spool import Spool


@dataclass(frozen=True)
class CleaningReport:
    """Numbers of documents: ``read`` is the sum of ``kept`` and those removed for each reason.

    Args:
        read: Lines that are not empty.
        kept: Documents that were written.
        fixed: Kept documents whose text was repaired.
        broken: Lines that are not valid.
        short: Documents with too few tokens.
        test: Documents that resemble a test document.
        duplicate: Documents that resemble an earlier document.
        clusters: Clusters of duplicates.
        overlaps: Overlap of each test set with the kept documents.
        broken_lines: The first errors of broken lines.
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
    """Yield the first document of each cluster of at least two, and the others, in order.

    Args:
        roots: First document of the cluster of each document.
    """
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
    """Write a report as JSON, a cluster and a match on one line each.

    Args:
        path: File.
        report: Numbers.
        options: Steps.
        spool: Places of the documents.
        roots: First document of the cluster of each document.
        matches: Test document that each document resembles, or -1.
        test_places: Place of each test document.
    """
    numbers = asdict(report)
    overlaps = [{**asdict(one), "share": one.share} for one in report.overlaps]
    reasons = {name: numbers[name] for name in ("broken", "short", "test", "duplicate")}
    head = {
        "options": asdict(options),
        **{name: numbers[name] for name in ("read", "kept", "fixed")},
        "removed": reasons,
        "broken_lines": report.broken_lines,
        "overlap": overlaps,
    }
    found = ((number, int(matches[number])) for number in np.flatnonzero(matches >= 0))
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(head, indent=1, ensure_ascii=False)[:-2])
        _write_list(
            file,
            "test_matches",
            ({"document": spool.place(int(n)), "test": test_places[test]} for n, test in found),
        )
        _write_list(
            file,
            "clusters",
            (
                {"kept": spool.place(first), "removed": [spool.place(one) for one in others]}
                for first, others in clusters_of(roots)
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
