"""Megatron's ``.idx`` format: the length and offset of each sequence of a token file.

An ``.idx`` file is little-endian and unaligned. Its header has the magic (9 bytes), version u64 =
1, dtype code u8, number of sequences u64, and number of document entries u64. After the header
follow i32 lengths, i64 byte offsets and i64 document entries (the first is 0, the last the number
of sequences), and in multimodal corpora one i8 mode per sequence. The ``.bin`` file contains only
the tokens.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from lightning_megatron.errors import CorruptDataError
from lightning_megatron.strict_json import read_first_bytes

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in enumerate(("u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"), start=1)
}
# The format also has two floating-point types, but token ids are integers.
TOKEN_DTYPES = {code: dtype for code, dtype in DTYPES.items() if dtype.kind in "iu"}
REMEDY = "Copy both files again, or run `lightning-megatron preprocess` again."


def smallest_dtype(vocab_size: int | None) -> np.dtype:
    """Return Megatron's token type: 16 bits below 65500 tokens, 32 bits otherwise.

    Args:
        vocab_size: Size of the vocabulary; None means unknown (tokens).
    """
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the tokens of a corpus."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the index of a corpus."""
    return Path(f"{os.fspath(prefix)}.idx")


def write_index(
    file: BinaryIO, dtype: np.dtype, lengths: Sequence[int], documents: Sequence[int]
) -> None:
    """Write the index of sequences that are stored without gaps.

    Args:
        documents: Index of the first sequence of each document, and the number of sequences.
    """
    code = next(code for code, token_dtype in DTYPES.items() if token_dtype == dtype)
    sizes = np.asarray(lengths, dtype="<i4")
    starts = np.cumsum(sizes, dtype=np.int64) - sizes
    file.write(HEADER.pack(MAGIC, 1, code, len(sizes), len(documents)))
    file.write(sizes.tobytes())
    file.write((starts * dtype.itemsize).astype("<i8").tobytes())
    file.write(np.asarray(documents, dtype="<i8").tobytes())


def read_index(
    path: Path,
) -> tuple[np.dtype, npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Memory-map an ``.idx`` file.

    Returns:
        Token type, lengths of sequences (tokens), offsets of sequences (bytes), document entries
        (sequences).
    """
    header, size = _header_and_size(path)
    if len(header) < HEADER.size:
        raise CorruptDataError(
            f"{path} is truncated: {len(header)} bytes found, but the header has {HEADER.size}. "
            f"{REMEDY}"
        )
    magic, version, code, num_sequences, num_entries = HEADER.unpack(header)
    if magic != MAGIC:
        raise CorruptDataError(
            f"{path} is not a token index: it starts with {magic!r}, not {MAGIC!r}. {REMEDY}"
        )
    if version != 1:
        raise CorruptDataError(
            f"{path} has version {version}; only version 1 can be read. {REMEDY}"
        )
    if code not in TOKEN_DTYPES:
        known = ", ".join(f"{code} ({dtype})" for code, dtype in TOKEN_DTYPES.items())
        raise CorruptDataError(
            f"{path} must have a token type of whole numbers, {known}: it has type {code}. {REMEDY}"
        )
    expected = HEADER.size + 12 * num_sequences + 8 * num_entries
    # Multimodal corpora append one byte per sequence, which is not needed for text.
    if size not in (expected, expected + num_sequences):
        state = "truncated" if size < expected else "too long"
        raise CorruptDataError(
            f"{path} is {state}: {expected} bytes expected for {num_sequences} sequences and "
            f"{num_entries} document entries, {size} found. {REMEDY}"
        )
    content = map_file(path, np.dtype(np.uint8))
    after = HEADER.size + 4 * num_sequences
    lengths = content[HEADER.size : after].view("<i4")
    offsets = content[after : after + 8 * num_sequences].view("<i8")
    documents = content[after + 8 * num_sequences : expected].view("<i8")
    return DTYPES[code], lengths, offsets, documents


def _header_and_size(path: Path) -> tuple[bytes, int]:
    try:
        return read_first_bytes(path, HEADER.size), path.stat().st_size
    except (ValueError, OSError) as error:
        # Python raises ValueError for a path with a null byte.
        reason = (
            error
            if isinstance(error, CorruptDataError)
            else f"{str(path)!r} cannot be read: {error}"
        )
        raise CorruptDataError(
            f"{str(reason).rstrip('.')}. A corpus is named by its path without .bin and .idx. An "
            "interrupted `lightning-megatron preprocess` leaves no .idx: run it again."
        ) from error


def check_index(
    prefix: str,
    dtype: np.dtype,
    lengths: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    documents: npt.NDArray[np.int64],
) -> None:
    """Check that an index is consistent, and matches the size of the ``.bin`` file.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
    """
    index = idx_path(prefix)
    if len(lengths) and int(lengths.min()) < 0:
        raise CorruptDataError(
            f"{index} is damaged: a sequence has {int(lengths.min())} tokens. {REMEDY}"
        )
    ends = np.cumsum(lengths, dtype=np.int64)
    wrong = np.flatnonzero((ends - lengths) * dtype.itemsize != offsets)
    if len(wrong):
        raise CorruptDataError(
            f"{index} is damaged: the offset of sequence {wrong[0]} does not match the lengths of "
            f"the sequences before it. {REMEDY}"
        )
    rises = len(documents) > 0 and documents[0] == 0 and bool((np.diff(documents) >= 0).all())
    if not rises or documents[-1] != len(lengths):
        last = documents[-1] if len(documents) else "nothing"
        raise CorruptDataError(
            f"{index} is damaged: document entries must rise from 0 to {len(lengths)} sequences, "
            f"but they end with {last}. {REMEDY}"
        )
    expected = int(ends[-1]) * dtype.itemsize if len(ends) else 0
    path = bin_path(prefix)
    try:
        state = path.stat()
    except OSError as error:
        raise CorruptDataError(
            f"{path} is missing: {index.name} describes {expected} bytes "
            f"({error.strerror or error}). {REMEDY}"
        ) from error
    if not stat.S_ISREG(state.st_mode):
        raise CorruptDataError(f"{path} is not a regular file. {REMEDY}")
    if state.st_size != expected:
        kind = "truncated" if state.st_size < expected else "too long"
        raise CorruptDataError(
            f"{path} is {kind}: {index.name} describes {expected} bytes, {state.st_size} found. "
            f"{REMEDY}"
        )


def check_header(prefix: str) -> None:
    """Check the header of an index and the size of its ``.bin`` file, without reading all of them.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
    """
    dtype, lengths, offsets, documents = read_index(idx_path(prefix))
    path = bin_path(prefix)
    expected = int(offsets[-1]) + int(lengths[-1]) * dtype.itemsize if len(lengths) else 0
    if not path.is_file() or path.stat().st_size != expected:
        # The whole index tells whether it or the other file is damaged.
        check_index(prefix, dtype, lengths, offsets, documents)


def map_file(path: Path, dtype: np.dtype) -> npt.NDArray:
    """Memory-map a whole file; return an empty array for an empty file, which numpy cannot map."""
    try:
        if path.stat().st_size == 0:
            return np.zeros(0, dtype=dtype)
        return np.memmap(path, dtype=dtype, mode="r")
    except (OSError, ValueError) as error:
        raise CorruptDataError(f"{path} cannot be read: {error}. {REMEDY}") from error
