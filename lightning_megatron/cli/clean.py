"""The subcommand ``clean``: remove broken, short and repeated documents from JSON lines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_megatron.data.worker_pool import default_workers
from lightning_megatron.tasks.corpus import CleaningOptions, clean


def main(args: Sequence[str]) -> None:
    """Run the subcommand."""
    arguments = clean_parser().parse_args(args)
    options = CleaningOptions(
        json_key=arguments.json_key,
        fix_text=arguments.fix_text,
        min_tokens=arguments.min_tokens,
        tokenizer=arguments.tokenizer,
        jaccard=None if arguments.keep_duplicates else arguments.jaccard,
        ngram=arguments.ngram,
        tests=tuple(arguments.test),
        test_jaccard=arguments.jaccard,
        skip_broken=arguments.skip_broken,
    )
    report = clean(
        arguments.inputs,
        arguments.output,
        options,
        report_path=arguments.report,
        workers=arguments.workers,
        progress=not arguments.no_progress,
        overwrite=arguments.overwrite,
    )
    print(
        f"{arguments.output}: {report.kept:,} of {report.read:,} documents kept, {report.fixed:,} "
        f"of them with repaired text; removed: {report.broken:,} broken, {report.short:,} short, "
        f"{report.test:,} like test documents, {report.duplicate:,} duplicates "
        f"in {report.clusters:,} clusters"
    )
    for overlap in report.overlaps:
        print(
            f"{overlap.test}: {overlap.share:.1%} of {overlap.eight_grams:,} 8-grams occur in the "
            "kept documents"
        )


def clean_parser() -> argparse.ArgumentParser:
    """Build the parser of the subcommand's options."""
    parser = argparse.ArgumentParser(
        prog="lightning-megatron clean",
        description="Repair the text of JSON lines, and remove short documents, near-duplicates "
        "and documents of test sets. Other keys and the order do not change.",
    )
    parser.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="files, directories or globs of JSON lines"
    )
    parser.add_argument("output", metavar="OUTPUT", help="file of JSON lines (.jsonl, .jsonl.gz)")
    parser.add_argument(
        "--report", metavar="FILE", help="JSON file of counts, clusters and overlap"
    )
    parser.add_argument("--json-key", default="text", help="key of the text (default: %(default)s)")
    parser.add_argument(
        "--fix-text",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="repair characters with ftfy (default: yes)",
    )
    parser.add_argument(
        "--min-tokens",
        type=int,
        default=128,
        help="minimum length of a document; 0 keeps all (default: %(default)s)",
    )
    parser.add_argument(
        "--tokenizer",
        default="words",
        help="unit of --min-tokens: words, or the tokens of bytes, gpt2 or a path as in preprocess "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--jaccard",
        type=float,
        default=0.7,
        help="minimum similarity of duplicates, above 0.5 (default: %(default)s)",
    )
    parser.add_argument(
        "--ngram", type=int, default=5, help="words of compared n-grams (default: %(default)s)"
    )
    parser.add_argument("--keep-duplicates", action="store_true", help="remove no duplicates")
    parser.add_argument(
        "--test",
        action="append",
        default=[],
        metavar="PATH",
        help="test set, JSON lines or plain text: documents that are similar to one of its "
        "documents are removed, and the overlap is reported; may be repeated",
    )
    parser.add_argument("--skip-broken", action="store_true", help="leave out invalid lines")
    parser.add_argument("--overwrite", action="store_true", help="replace existing outputs")
    parser.add_argument(
        "--workers", type=int, default=default_workers(), help="processes (default: %(default)s)"
    )
    parser.add_argument("--no-progress", action="store_true", help="show no progress bars")
    return parser
