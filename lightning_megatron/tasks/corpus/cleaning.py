"""Cleaning of JSON lines: the kept documents are written in the order of the input."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from lightning_megatron.building_blocks import TextFiles
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.tasks.corpus.clusters import Numbers, find_clusters, find_matches
from lightning_megatron.tasks.corpus.examination import (
    CleaningOptions,
    check_extras,
    examine,
    held_out_of,
)
from lightning_megatron.tasks.corpus.held_out import HeldOut, Overlap
from lightning_megatron.tasks.corpus.signatures import NUM_HASHES, least_equal, rows_of_bands
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


#: Maximum number of broken lines whose errors are reported.
MAX_BROKEN_LINES = 100


def clean(
    inputs: Sequence[str],
    output: str,
    options: CleaningOptions,
    report_path: str | None = None,
    workers: int = 1,
    progress: bool = True,
    overwrite: bool = False,
) -> CleaningReport:
    """Write the documents of ``inputs`` that pass all steps as JSON lines.

    All bytes of a line are kept except those of repaired text. The number of processes does not
    affect the result. Output and report appear only when they are complete.

    Args:
        output: File of JSON lines, compressed if it ends in .gz.
        report_path: File of the report in JSON; None writes no report.
        progress: Whether to show progress bars.
        overwrite: Whether an existing output or report is replaced.
    """
    files = TextFiles(inputs)
    targets = [Path(name) for name in (output, report_path) if name is not None]
    _check_files(files.paths, targets, overwrite)
    check_extras(options)
    for threshold in (options.jaccard, options.test_jaccard):
        if threshold is not None:
            least_equal(threshold)
    held_out = held_out_of(options.tests, options.json_key)
    folder = targets[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=f".{targets[0].name}.") as work,
        Spool(Path(work)) as spool,
    ):
        broken, short, errors = _examine_all(files, spool, options, workers, progress)
        spool.close()
        matches, roots = _matches_and_roots(spool, held_out, options, progress)
        kept = (matches < 0) & (roots == np.arange(len(roots)))
        report = _report_of(spool, held_out, matches, roots, broken, short, errors)
        written = Path(work) / targets[0].name
        _write_lines(written, spool.lines(kept))
        partial_report = Path(work) / "report"
        if report_path is not None:
            write_report(partial_report, report, options, spool, roots, matches, held_out.places)
            _publish(partial_report, targets[1])
        _publish(written, targets[0])
    return report


def _report_of(
    spool: Spool,
    held_out: HeldOut,
    matches: npt.NDArray[np.int64],
    roots: npt.NDArray[np.int64],
    broken: int,
    short: int,
    errors: Sequence[str],
) -> CleaningReport:
    """Count the documents that each step has removed, and the overlap with the test files."""
    duplicate = roots != np.arange(len(roots))
    kept = (matches < 0) & ~duplicate
    return CleaningReport(
        read=spool.num_documents + broken + short,
        kept=int(kept.sum()),
        fixed=spool.num_fixed(kept),
        broken=broken,
        short=short,
        test=int((matches >= 0).sum()),
        duplicate=int(duplicate.sum()),
        clusters=len(np.unique(roots[duplicate])),
        overlaps=tuple(held_out.overlaps(spool.grams_found(len(held_out.grams), kept))),
        broken_lines=tuple(errors),
    )


def _matches_and_roots(
    spool: Spool, held_out: HeldOut, options: CleaningOptions, progress: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the similar test document of each document, or -1, and the first of its cluster."""
    roots = np.arange(spool.num_documents, dtype=np.int64)
    matches = np.full(spool.num_documents, -1, dtype=np.int64)
    signatures = spool.signatures()
    if held_out.texts:
        tests = held_out.signatures(options.ngram)
        matches = find_matches(signatures, tests, options.test_jaccard)
    if options.jaccard is not None:
        bands = NUM_HASHES // rows_of_bands(options.jaccard)
        with tqdm(total=bands, unit="band", disable=not progress, desc="duplicates") as bar:
            roots = find_clusters(signatures, matches < 0, options.jaccard, bar.update)
    return matches, roots


def _examine_all(
    files: TextFiles, spool: Spool, options: CleaningOptions, workers: int, progress: bool
) -> tuple[int, int, list[str]]:
    """Fill the spool, and return the numbers of broken and short documents and the first errors."""
    broken = 0
    short = 0
    errors: list[str] = []
    size = files.num_bytes
    with tqdm(total=size, unit="B", unit_scale=True, disable=not progress, desc="read") as bar:
        for examined in files.map_chunks(partial(examine, options=options), "line", workers):
            spool.add(examined)
            broken += len(examined.broken)
            short += examined.short
            errors += examined.broken[: MAX_BROKEN_LINES - len(errors)]
            bar.update(examined.num_bytes)
    return broken, short, errors


def _is_json_lines(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith((".jsonl", ".json", ".ndjson"))


def _check_files(paths: list[Path], targets: list[Path], overwrite: bool) -> None:
    for path in paths:
        if not _is_json_lines(path):
            raise UnsupportedError(
                f"the name of {path} is not that of a file of JSON lines. Inputs must end in "
                ".jsonl, .json or .ndjson (or these with .gz), with one object on each line."
            )
    if not _is_json_lines(targets[0]):
        raise UnsupportedError(
            f"the output {targets[0]} must end in .jsonl, .json or .ndjson (or these with .gz)."
        )
    inputs = {path.resolve() for path in paths}
    if len({target.resolve() for target in targets}) < len(targets):
        raise UnsupportedError(f"{targets[0]} cannot be both output and report. Name another file.")
    for target in targets:
        if target.resolve() in inputs:
            raise UnsupportedError(f"{target} is also an input. Name another file.")
        if target.exists() and not overwrite:
            raise UnsupportedError(
                f"{target} exists already. Name another file, or replace it with --overwrite."
            )


def _write_lines(path: Path, lines: Iterable[bytes]) -> None:
    with open(path, "wb") as file:
        if path.suffix == ".gz":
            # Without name and time in its header, equal documents give equal files.
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                packed.writelines(lines)
        else:
            file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def _publish(written: Path, target: Path) -> None:
    """Move a complete file to its final name, which may be on another disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if written.stat().st_dev != target.parent.stat().st_dev:
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(written, temporary)
        written = temporary
    os.replace(written, target)
