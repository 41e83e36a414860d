"""Files of raw text and of rows: where they are, and the pieces of those that consist of lines."""

from __future__ import annotations

import glob
import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.hub import hub_files

Document = Literal["file", "line", "paragraph"]
#: Form of a file: JSON lines, rows with fields, or the unit of plain text that is a document.
Kind = Literal["json", "row", "file", "line", "paragraph"]
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
ROW_SUFFIXES = (*JSON_SUFFIXES, ".parquet")
TEXT_SUFFIXES = (".txt", ".text", ".md")
#: Suffixes that follow those of lines and text in compressed files.
_PACKED = (".gz", ".zst")
#: Folder of a data module beside its files, which is no input.
_CACHE = "index_cache"
_STATE = "state.json"
_SPLITS = "dataset_dict.json"
_BLOCK = 1 << 20


class Piece(NamedTuple):
    """Line, paragraph or whole of a file.

    Args:
        line: Its first line, counted from 1.
        end_line: Its last line; 1 for a whole file.
        end: Offset behind it in the decompressed file (bytes).
    """

    line: int
    content: bytes
    end_line: int
    end: int


def find_files(
    inputs: Sequence[str | Path], noun: str, suffixes: Sequence[str], example: str = ""
) -> list[Path]:
    """Return the files that paths, folders, globs and the Hub name; each of them sorted by name.

    A folder that ``save_to_disk`` of datasets has written counts as one file. Other folders are
    read with their subfolders; files with other suffixes in them are no inputs.

    Args:
        noun: Plural noun for what the files hold, for errors.
        suffixes: Legal suffixes, without ``.gz`` or ``.zst``.
        example: Example of a line, for errors.

    Raises:
        UnsupportedError: If an input names no file, or one with another suffix.
    """
    found: list[Path] = []
    for entry in inputs:
        path = Path(entry)
        on_hub = hub_files(entry, suffixes)
        if on_hub is not None:
            files = on_hub
        elif path.is_dir():
            files = _files_below(path, suffixes)
        elif path.is_file():
            files = [path]
        else:
            matches = sorted(map(Path, glob.glob(str(entry), recursive=True)))
            files = [one for one in matches if one.is_file() or is_dataset_folder(one)]
        for file in files:
            _check_suffix(file, noun, suffixes)
        if not files:
            line = f" A line of a file is for example {example}." if example else ""
            raise UnsupportedError(
                f"{noun} must be files ({', '.join(suffixes)}; lines and text also with .gz or "
                ".zst), folders of them, folders written by save_to_disk of datasets, or globs: "
                f"{str(entry)!r} names none of these. Give such a path.{line}"
            )
        found += files
    return found


def _files_below(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    if is_dataset_folder(folder):
        return [folder]
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == _CACHE:
            continue
        if path.is_dir():
            files += _files_below(path, suffixes)
        # The description of a token file that `preprocess` has written ends in .json.
        elif plain_suffix(path) in suffixes and not path.with_suffix(".bin").is_file():
            files.append(path)
    return files


def _check_suffix(path: Path, noun: str, suffixes: Sequence[str]) -> None:
    if not path.is_dir() and plain_suffix(path) not in suffixes:
        raise UnsupportedError(
            f"the suffix of {path} does not say what the file holds: {noun} are read from files "
            f"with {', '.join(suffixes)} (lines and text also with .gz or .zst). Rename it, or "
            "convert it to one of these."
        )


def plain_suffix(path: Path) -> str:
    """Return the suffix of a file in small letters, without that of its compression."""
    suffix = path.suffix.lower()
    inner = path.with_suffix("").suffix.lower()
    return inner if suffix in _PACKED and inner != ".parquet" else suffix


def is_packed(path: Path) -> bool:
    """Return whether a file has an unknown number of bytes of lines or text."""
    return path.is_dir() or path.suffix.lower() in (*_PACKED, ".parquet")


def kind_of(path: Path, document: Document) -> Kind:
    """Return the form of a file.

    Args:
        document: Unit of plain text that is a document.
    """
    if path.is_dir() or path.suffix.lower() == ".parquet":
        return "row"
    return "json" if plain_suffix(path) in JSON_SUFFIXES else document


def is_dataset_folder(path: Path) -> bool:
    """Return whether a path is a folder written by ``Dataset.save_to_disk``."""
    if (path / _SPLITS).is_file():
        splits = sorted(state.parent.name for state in path.glob(f"*/{_STATE}"))
        raise UnsupportedError(
            f"a folder of datasets must be a single split: {path} has the splits {splits}. Give "
            f"the folder of one of them, such as {path / (splits or ['train'])[0]}."
        )
    return (path / _STATE).is_file()


def files_of(path: Path) -> list[Path]:
    """Return the files of a dataset folder, sorted by name, or a single file.

    Args:
        path: File, or folder written by ``save_to_disk``.
    """
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]


def sizes_of(path: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of a file, or of the files in a folder, to identify its rows.

    Args:
        path: File of rows, or folder of ``save_to_disk``.
    """
    return [(file.name, file.stat().st_size) for file in files_of(path)]


def read_pieces(path: Path, kind: Kind, offset: int = 0, number: int = 0) -> Iterator[Piece]:
    """Yield the lines, paragraphs or the whole of a file; empty lines are none.

    Args:
        path: File; ``.gz`` and ``.zst`` are decompressed.
        kind: Form of the file, which is no file of rows.
        offset: Offset of the first piece to read, in the decompressed file. A compressed file is
            decompressed from its beginning (bytes).
        number: Number of lines before it.

    Raises:
        CorruptDataError: If the file cannot be opened, or is a damaged compressed one.
        MissingExtraError: If pyarrow is not installed, for ``.zst``.
    """
    try:
        with _open(path) as file:
            if kind == "file":
                content = file.read()
                yield from [] if number else [Piece(1, content, 1, len(content))]
                return
            _skip(file, offset)
            yield from (_paragraphs if kind == "paragraph" else _lines)(file, offset, number)
    except (OSError, EOFError, zlib.error) as error:
        raise CorruptDataError(
            f"{path} cannot be read to its end: {error}. Copy it again."
        ) from error


def _lines(file: BinaryIO, offset: int, number: int) -> Iterator[Piece]:
    for line in file:
        number += 1
        offset += len(line)
        content = line.rstrip(b"\r\n")
        # Empty lines are not documents; an empty document is written as {"text": ""}.
        if content.strip():
            yield Piece(number, content, number, offset)


def _paragraphs(file: BinaryIO, offset: int, number: int) -> Iterator[Piece]:
    lines: list[bytes] = []
    for line in file:
        if line.strip():
            lines.append(line)
        elif lines:
            yield Piece(number - len(lines) + 1, b"".join(lines).rstrip(b"\r\n"), number, offset)
            lines = []
        number += 1
        offset += len(line)
    if lines:
        yield Piece(number - len(lines) + 1, b"".join(lines).rstrip(b"\r\n"), number, offset)


def _open(path: Path) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(path))
    if suffix == ".zst":
        pyarrow = import_extra("pyarrow", "parquet")
        return io.BufferedReader(pyarrow.input_stream(os.fspath(path), compression="zstd"))
    return open(path, "rb")


def _skip(file: BinaryIO, offset: int) -> None:
    if file.seekable():
        file.seek(offset)
        return
    while offset > 0:
        block = file.read(min(offset, _BLOCK))
        if not block:
            return
        offset -= len(block)
