"""The subcommand ``preprocess``: tokenize raw text into token files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_megatron.data.preprocess import EncodingOptions, preprocess
from lightning_megatron.data.speeches import PARTS, load_speeches, write_documents
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.data.worker_pool import default_workers


def main(args: Sequence[str]) -> None:
    """Run the subcommand."""
    run(preprocess_parser().parse_args(args))


def preprocess_parser() -> argparse.ArgumentParser:
    """Build the parser of the subcommand's options."""
    parser = argparse.ArgumentParser(
        prog="lightning-megatron preprocess",
        description="Tokenize JSON lines (.jsonl, .json, .ndjson) or plain text, packed (.gz) or "
        "not, into PREFIX.bin, "
        "PREFIX.idx (Megatron's format) and PREFIX.json (which tokenizer, how much text).",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="files, directories or globs, read sorted by name",
    )
    source.add_argument(
        "--speeches", choices=PARTS, help="the State of the Union corpus instead (extra `text`)"
    )
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="path without .bin and .idx"
    )
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        help="bytes, gpt2, bert, speeches-wordpiece, a tokenizer.json, a vocab.txt or a directory "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--json-key", default="text", help="key of the text in JSON lines (default: %(default)s)"
    )
    parser.add_argument(
        "--document",
        choices=("file", "line", "paragraph"),
        default="file",
        help="unit of plain text that is a document (default: %(default)s)",
    )
    parser.add_argument(
        "--split-sentences",
        action="store_true",
        help="make each English sentence a sequence of its document, as BERT's data needs",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the end-of-document token"
    )
    parser.add_argument(
        "--eod-token", metavar="TEXT", help="end-of-document token, if not one of the usual ones"
    )
    parser.add_argument(
        "--workers", type=int, default=default_workers(), help="processes (default: %(default)s)"
    )
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Write the token file, and print its numbers of documents and tokens."""
    if arguments.speeches:
        tokenizer = load_tokenizer(arguments.tokenizer, arguments.eod_token)
        texts = load_speeches(arguments.speeches)
        write_documents(arguments.output, texts, tokenizer, arguments.split_sentences)
        corpus = TokenFile(arguments.output)
        print(
            f"{arguments.output}: {corpus.num_documents:,} documents, {corpus.num_tokens:,} tokens"
        )
        return
    options = EncodingOptions(
        arguments.tokenizer,
        arguments.json_key,
        arguments.append_eod,
        arguments.eod_token,
        arguments.split_sentences,
    )
    report = preprocess(
        arguments.input,
        arguments.output,
        options,
        document=arguments.document,
        workers=arguments.workers,
        progress=not arguments.no_progress,
    )
    seconds = max(report.seconds, 1e-9)
    print(
        f"{arguments.output}: {report.num_documents:,} documents, {report.num_tokens:,} tokens "
        f"from {report.num_bytes / 1e6:,.1f} MB of text in {report.seconds:,.1f} s "
        f"({report.num_documents / seconds:,.0f} documents/s, "
        f"{report.num_bytes / seconds / 1e6:,.1f} MB/s)"
    )
