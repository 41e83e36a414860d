"""The command ``clean``: remove broken, short and repeated documents from JSON lines."""

from __future__ import annotations

from pathlib import Path

from jsonargparse.typing import PositiveInt

from lightning_megatron.data.worker_pool import default_workers
from lightning_megatron.tasks import corpus
from lightning_megatron.tasks.corpus import CleaningOptions

EXAMPLES = """examples:
  lightning-megatron clean raw/*.jsonl clean.jsonl.gz --report report.json
  lightning-megatron clean raw.jsonl clean.jsonl --tests wiki.test.jsonl --jaccard 0.8"""


def clean(
    inputs: tuple[str, ...],
    output: str,
    options: CleaningOptions,
    report: Path | None = None,
    workers: PositiveInt | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> None:
    """Repair the text of JSON lines; remove short documents, duplicates and those of test sets.

    Other keys and the order do not change.

    Args:
        inputs: Files, directories or globs of JSON lines.
        output: File of JSON lines (.jsonl, .jsonl.gz).
        report: JSON file of counts, clusters and overlap.
        workers: Processes; by default one for each core.
        overwrite: Replace existing outputs.
        progress: Show progress bars.
    """
    done = corpus.clean(
        inputs,
        output,
        options,
        report_path=None if report is None else str(report),
        workers=workers or default_workers(),
        progress=progress,
        overwrite=overwrite,
    )
    print(
        f"{output}: {done.kept:,} of {done.read:,} documents kept, {done.fixed:,} of them with "
        f"repaired text; removed: {done.broken:,} broken, {done.short:,} short, {done.test:,} like "
        f"test documents, {done.duplicate:,} duplicates in {done.clusters:,} clusters"
    )
    for overlap in done.overlaps:
        print(
            f"{overlap.test}: {overlap.share:.1%} of {overlap.eight_grams:,} 8-grams occur in the "
            "kept documents"
        )


COMMAND = clean
