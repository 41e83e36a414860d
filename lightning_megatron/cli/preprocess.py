"""The command ``preprocess``: tokenize raw text into token files."""

from __future__ import annotations

from typing import Literal

from jsonargparse.typing import PositiveInt

from lightning_megatron.data.preprocess import EncodingOptions, write_token_file
from lightning_megatron.data.worker_pool import default_workers

EXAMPLES = """examples:
  lightning-megatron preprocess raw/*.jsonl data/text --tokenizer gpt2 --append_eod
  lightning-megatron preprocess books data/books --document paragraph"""


def preprocess(
    inputs: tuple[str, ...],
    output: str,
    options: EncodingOptions,
    document: Literal["file", "line", "paragraph"] = "file",
    workers: PositiveInt | None = None,
    progress: bool = True,
) -> None:
    """Tokenize JSON lines (.jsonl, .json, .ndjson), Parquet or plain text (.txt, .text, .md).

    Lines and text may be packed (.gz, .zst). Folders may be those of save_to_disk of datasets.
    It writes OUTPUT.bin, OUTPUT.idx (Megatron's format) and OUTPUT.json (which tokenizer, how much
    text).

    Args:
        inputs: Files, directories or globs, read sorted by name.
        output: Path without .bin and .idx.
        document: Unit of plain text that is a document.
        workers: Processes; by default one for each core.
        progress: Show a progress bar.
    """
    report = write_token_file(
        inputs,
        output,
        options,
        document=document,
        workers=workers or default_workers(),
        progress=progress,
    )
    seconds = max(report.seconds, 1e-9)
    print(
        f"{output}: {report.num_documents:,} documents, {report.num_tokens:,} tokens "
        f"from {report.num_bytes / 1e6:,.1f} MB of text in {report.seconds:,.1f} s "
        f"({report.num_documents / seconds:,.0f} documents/s, "
        f"{report.num_bytes / seconds / 1e6:,.1f} MB/s)"
    )
    if not options.split_sentences:
        print(
            "Train a GPT on it: lightning-megatron fit -c recipe:pretrain_text --data "
            f"TokenDataModule --data.train {output} --data.tokenizer {options.tokenizer}"
        )


COMMAND = preprocess
