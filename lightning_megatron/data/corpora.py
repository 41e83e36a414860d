"""Check corpora together: one tokenizer, and files as they were written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.data.checked_files import check_once
from lightning_megatron.data.description import description_path
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.token_index import bin_path, idx_path
from lightning_megatron.data.tokenizer import Tokenizer
from lightning_megatron.errors import CorruptDataError


def check_one_tokenizer(corpora: Sequence[TokenFile], tokenizer: Tokenizer | None) -> None:
    """Refuse corpora of several tokenizers, or of another than the one that is used.

    Raises:
        CorruptDataError: A corpus was written with another tokenizer.
    """
    fingerprints: dict[str, str] = {}
    for corpus in corpora:
        if tokenizer is not None:
            corpus.check_tokenizer(tokenizer)
        fingerprint = None if corpus.description is None else corpus.description.tokenizer_fingerprint
        if fingerprint is not None:
            fingerprints[fingerprint] = corpus.prefix
    if len(fingerprints) > 1:
        raise CorruptDataError(
            f"corpora that are mixed must share a tokenizer: {' and '.join(fingerprints.values())} do not. "
            f"Write them again with one tokenizer."
        )


def check_corpus_once(corpus: TokenFile, memory: Path, in_charge: bool) -> None:
    """Compare the files of a corpus with their checksums, unless they were found sound before.

    Args:
        corpus: A corpus without checksums passes.
        memory: Directory that remembers the result.
        in_charge: Whether this process reads the files where nothing can be remembered.

    Raises:
        CorruptDataError: A file is not as it was written.
    """
    if corpus.description is None or corpus.description.fields_crc32 is None:
        return
    files = [path(corpus.prefix) for path in (bin_path, idx_path, description_path)]
    check_once(memory, files, corpus.check_checksums, in_charge)
