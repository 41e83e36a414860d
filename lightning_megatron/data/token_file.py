"""Reader and writer of Megatron's token files; ``token_index.py`` describes the format."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_megatron.data.description import (
    CorpusDescription,
    description_path,
    read_description,
    write_description,
)
from lightning_megatron.data.index_cache import crc32_of
from lightning_megatron.data.token_index import (
    REMEDY,
    TOKEN_DTYPES,
    bin_path,
    check_index,
    idx_path,
    map_file,
    read_index,
    smallest_dtype,
    write_index,
)
from lightning_megatron.data.tokenizer import Tokenizer
from lightning_megatron.disk_sync import sync_file, sync_folder
from lightning_megatron.errors import CorruptDataError


class TokenFile:
    """Memory-mapped corpus of token ids.

    The index has an entry for each sequence. A document consists of one or more sequences.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
        check: Whether to compare the files with their checksums, which reads the whole corpus.
            Files written by Megatron-Core have no checksums and pass.

    Raises:
        CorruptDataError: If the files are missing, truncated, damaged or do not belong together.
    """

    def __init__(self, prefix: str | os.PathLike[str], check: bool = True) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype, self.lengths, self.offsets, self.document_index = read_index(idx_path(prefix))
        check_index(self.prefix, self.dtype, self.lengths, self.offsets, self.document_index)
        self.tokens = map_file(bin_path(prefix), self.dtype)
        self.description: CorpusDescription | None = read_description(self.prefix)
        self._check_counts()
        if check:
            self.check_checksums()

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[type[TokenFile], tuple[str, bool]]:
        # A data worker maps the files itself instead of unpickling their contents. This process
        # has already compared the checksums.
        return TokenFile, (self.prefix, False)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the corpus."""
        return int(self.starts[-1])

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.document_index) - 1

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Position of each sequence's first token, followed by the total number of tokens."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths, dtype=np.int64)])

    @cached_property
    def document_starts(self) -> npt.NDArray[np.int64]:
        """Position of each non-empty document's first token, followed by the number of tokens."""
        rises = np.diff(self.document_index, prepend=-1) > 0
        return self.starts[self.document_index[rises]]

    @cached_property
    def index_sha256(self) -> str:
        """SHA-256 of the index file, which has the lengths of all sequences and documents."""
        with open(idx_path(self.prefix), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def get(
        self, index: int, offset: int = 0, length: int | None = None
    ) -> npt.NDArray[np.generic]:
        """Return tokens of one sequence.

        Args:
            offset: Position of the first token in the sequence.
            length: Number of tokens; None returns all tokens from ``offset`` on.

        Raises:
            IndexError: If the sequence does not have these tokens.
            CorruptDataError: If a token id is negative.
        """
        size = int(self.lengths[index])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(
                f"sequence {index} of {self.prefix} has {size} tokens: "
                f"[{offset}:{offset + length}] is out of range."
            )
        start = int(self.starts[index]) + offset
        tokens = np.array(self.tokens[start : start + length])
        if self.dtype.kind == "i" and tokens.min(initial=0) < 0:
            raise CorruptDataError(
                f"token ids must not be negative: sequence {index} of {self.prefix} holds "
                f"{tokens.min()}, read as {self.dtype}. {REMEDY}"
            )
        return tokens

    def sample(
        self, index: int, start: int, stop: int, vocab_size: int | None
    ) -> npt.NDArray[np.int64]:
        """Return the tokens of a sample, after a check that they are in the vocabulary.

        Args:
            index: Number of the sample, for errors.
            start: Index of its first token.
            stop: Index of the token after its last one.
            vocab_size: Size of the vocabulary; None accepts all non-negative ids.

        Raises:
            CorruptDataError: If an id is negative, or not below the vocabulary size.
        """
        tokens = self.tokens[start:stop].astype(np.int64)
        low = int(tokens.min())
        high = int(tokens.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            raise CorruptDataError(
                f"token ids must be in the vocabulary of {vocab_size} tokens: sample {index} of "
                f"{self.prefix} holds {low} to {high}. The corpus was written with another "
                "tokenizer. Use that tokenizer."
            )
        return tokens

    def __getitem__(self, index: int) -> npt.NDArray[np.generic]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {self.prefix}, which has {len(self)} sequences.")
        return self.get(index % len(self))

    def check_checksums(self) -> None:
        """Compare the files with the checksums in their description; files without checksums pass.

        Raises:
            CorruptDataError: If a file does not match its checksum.
        """
        recorded = self.description
        if recorded is None or recorded.fields_crc32 is None:
            return
        checksums = (
            recorded.checksum_of_fields(),
            self.index_sha256,
            crc32_of(bin_path(self.prefix)),
        )
        expected = (recorded.fields_crc32, recorded.idx_sha256, recorded.bin_crc32)
        paths = (description_path(self.prefix), idx_path(self.prefix), bin_path(self.prefix))
        for path, actual, written in zip(paths, checksums, expected, strict=True):
            if actual != written:
                raise CorruptDataError(
                    f"{path} has changed: its checksum must be {written}, as in {paths[0].name}, "
                    f"and is {actual}. Copy {self.prefix}.bin, .idx and .json again, or run "
                    "`lightning-megatron preprocess` again."
                )

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Check that the corpus was written with a tokenizer, if it records one.

        Args:
            tokenizer: Tokenizer of the run.

        Raises:
            CorruptDataError: If the corpus was written with another tokenizer.
        """
        recorded = self.description
        fingerprint = None if recorded is None else recorded.tokenizer_fingerprint
        if recorded is None or fingerprint is None or fingerprint == tokenizer.fingerprint:
            return
        raise CorruptDataError(
            "the tokenizer of a run must be the one with which the corpus was written, because "
            f"token ids mean other text in another one: {self.prefix} was written with "
            f"{recorded.tokenizer!r} ({fingerprint[:12]}) but {tokenizer.name!r} "
            f"({tokenizer.fingerprint[:12]}) was given. Use tokenizer {recorded.tokenizer!r} or "
            "write the corpus again with `lightning-megatron preprocess`."
        )

    def _check_counts(self) -> None:
        recorded = self.description
        if recorded is None:
            return
        for name, number in (
            ("num_documents", self.num_documents),
            ("num_tokens", self.num_tokens),
        ):
            expected = getattr(recorded, name)
            if expected != number:
                raise CorruptDataError(
                    f"{description_path(self.prefix)} has {name} {expected}, but "
                    f"{idx_path(self.prefix).name} has {number}: they do not belong together. Copy "
                    f"{self.prefix}.bin, .idx and .json again."
                )


class TokenFileWriter:
    """Context manager that writes a corpus and publishes it only when it is complete.

    The files are written under temporary names in the same directory. Leaving the context without
    an error renames ``.bin``, then the description, and ``.idx`` last. Readers need the index, so
    they never see a partial corpus.

    Args:
        prefix: Path without ``.bin`` and ``.idx``; its directory is created.
        vocab_size: Size of the vocabulary, which selects the token type unless ``dtype`` is given;
            None uses that of the tokenizer.
        tokenizer: Tokenizer to record in the description ``PREFIX.json``; None records none.
        dtype: Token type on disk; None selects it by the vocabulary size.

    Raises:
        CorruptDataError: If the token type is not supported, or the tokenizer has invalid fields.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        vocab_size: int | None = None,
        tokenizer: Tokenizer | None = None,
        dtype: npt.DTypeLike | None = None,
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.tokenizer = tokenizer
        self.vocab_size = (
            tokenizer.vocab_size if tokenizer is not None and vocab_size is None else vocab_size
        )
        chosen = (
            smallest_dtype(self.vocab_size) if dtype is None else np.dtype(dtype).newbyteorder("<")
        )
        if chosen not in TOKEN_DTYPES.values():
            raise CorruptDataError(
                f"token files hold tokens of a type in {[str(d) for d in TOKEN_DTYPES.values()]}: "
                f"{chosen} was given."
            )
        self.dtype = chosen
        self.num_bytes = 0
        self._lengths: list[int] = []
        self._documents: list[int] = [0]
        self._crc32 = 0
        # Validate the description of the tokenizer now, instead of after hours of tokenization.
        self._describe("0" * 64).check(f"the description of {self.prefix}")

    def __enter__(self) -> TokenFileWriter:
        bin_path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._partial(bin_path(self.prefix)), "wb")  # noqa: SIM115 (closed in __exit__)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                sync_file(self._file)
                self._file.close()
                self._publish()
        finally:
            self._file.close()
            for path in (bin_path(self.prefix), idx_path(self.prefix)):
                self._partial(path).unlink(missing_ok=True)

    @property
    def num_tokens(self) -> int:
        """Number of tokens written."""
        return sum(self._lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents written, empty ones included."""
        return len(self._documents) - 1

    def add_document(
        self, tokens: npt.ArrayLike, num_bytes: int = 0, lengths: Sequence[int] | None = None
    ) -> None:
        """Append one document.

        Args:
            tokens: Token ids; an empty document has no sequence.
            num_bytes: Size of the text in UTF-8, to compute bits per byte (bytes).
            lengths: Number of tokens of each sequence; None makes one sequence.

        Raises:
            CorruptDataError: If a token does not fit the token type or the vocabulary, or the
                lengths do not sum to the number of tokens.
        """
        array = np.asarray(tokens)
        pieces = [size for size in ([array.size] if lengths is None else lengths) if size]
        if sum(pieces) != array.size or min(pieces, default=0) < 0:
            raise CorruptDataError(
                f"lengths must not be negative and must sum to the {array.size} tokens: "
                f"{pieces[:20]} sum to {sum(pieces)}."
            )
        if max(pieces, default=0) >= 2**31:
            raise CorruptDataError(
                f"a sequence must have at most 2^31 - 1 tokens: document {self.num_documents} has "
                f"one of {max(pieces)}. Divide the document into sequences with `lengths`."
            )
        if array.size:
            self._check_range(array)
            content = array.astype(self.dtype, copy=False).tobytes(order="C")
            self._crc32 = zlib.crc32(content, self._crc32)
            self._file.write(content)
        self._lengths.extend(pieces)
        self._documents.append(len(self._lengths))
        self.num_bytes += num_bytes

    def _check_range(self, array: npt.NDArray[np.generic]) -> None:
        if array.dtype.kind not in "iu":
            raise CorruptDataError(
                f"token ids must be whole numbers: document {self.num_documents} has ids of type "
                f"{array.dtype}."
            )
        low = 0
        high = int(np.iinfo(self.dtype).max)
        if self.vocab_size is not None:
            high = min(high, self.vocab_size - 1)
        if int(array.min()) < low or int(array.max()) > high:
            raise CorruptDataError(
                f"token ids must be in [{low}, {high}] ({self.dtype}, vocabulary "
                f"{self.vocab_size}): document {self.num_documents} holds {int(array.min())} to "
                f"{int(array.max())}. Use the vocabulary size of the tokenizer, or a wider dtype."
            )

    def _partial(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{os.getpid()}.partial")

    def _publish(self) -> None:
        final_bin = bin_path(self.prefix)
        final_idx = idx_path(self.prefix)
        with open(self._partial(final_idx), "wb") as file:
            write_index(file, self.dtype, self._lengths, self._documents)
            sync_file(file)
        with open(self._partial(final_idx), "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        # Remove an older index first, so that no reader combines it with the new tokens.
        final_idx.unlink(missing_ok=True)
        os.replace(self._partial(final_bin), final_bin)
        write_description(self.prefix, self._describe(sha256))
        os.replace(self._partial(final_idx), final_idx)
        sync_folder(final_idx.parent)

    def _describe(self, idx_sha256: str) -> CorpusDescription:
        fields: dict[str, Any] = dict.fromkeys(
            ("tokenizer", "tokenizer_fingerprint", "vocab_size", "eod")
        )
        if self.tokenizer is not None:
            # The name may be a path, and paths may contain bytes that are not valid UTF-8.
            fields["tokenizer"] = self.tokenizer.name.encode("utf-8", "backslashreplace").decode()
            fields["tokenizer_fingerprint"] = self.tokenizer.fingerprint
            fields["vocab_size"] = int(self.tokenizer.vocab_size)
            eod = self.tokenizer.eod
            fields["eod"] = None if eod is None else int(eod)
        return CorpusDescription(
            **fields,
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            bin_crc32=f"{self._crc32:08x}",
            idx_sha256=idx_sha256,
        )
