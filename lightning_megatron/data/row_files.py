"""Rows of JSON lines, Parquet or folders of datasets, read from any position in a file."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_megatron.data.documents import read_lines
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.strict_json import parse_object

#: Last sentence of an error about a row of a file.
REMEDY = "Repair the row, or remove it."
#: Number of Parquet rows to decode at a time (rows).
_ROWS_PER_BATCH = 1024
_STATE = "state.json"
_SPLITS = "dataset_dict.json"
_JSON_LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
_SUFFIXES = (*_JSON_LINES, ".parquet")


class FilePosition(NamedTuple):
    """Position between two rows of a file.

    Args:
        number: Number of lines before it in JSON lines, or of rows in other files.
        offset: Decompressed bytes before it in JSON lines, at which a reader can continue; 0 in
            other files (bytes).
    """

    number: int = 0
    offset: int = 0


BEGINNING = FilePosition()


class FileRow(NamedTuple):
    """Row of a file, not yet parsed.

    Args:
        content: Line of JSON lines, or fields of a row of another file.
        end: Position after the row.
    """

    place: str
    content: bytes | Mapping[str, Any]
    end: FilePosition

    def fields(self) -> dict[str, Any]:
        """Return the fields that have a value.

        Raises:
            CorruptDataError: If a line is not a JSON object.
        """
        content = self.content
        if isinstance(content, bytes):
            content = parse_object(content, self.place, REMEDY)
        # Parquet has a value for every column and field; missing values are None.
        return {name: value for name, value in content.items() if value is not None}


def read_rows(path: Path, start: FilePosition = BEGINNING) -> Iterator[FileRow]:
    """Yield the rows of a file from a position on.

    Args:
        path: File of JSON lines (also ``.gz``) or Parquet, or folder of ``save_to_disk``.
    """
    if not path.is_dir() and path.suffix != ".parquet":
        for line, content, offset in read_lines(path, start.offset, start.number):
            yield FileRow(f"{path}:{line}", content, FilePosition(line, offset))
        return
    read = dataset_rows if path.is_dir() else _parquet_rows
    for number, row in enumerate(read(path, start.number), start.number + 1):
        yield FileRow(f"{path}, row {number}", row, FilePosition(number))


def find_row_files(paths: str | Sequence[str], plural: str, example: str) -> tuple[Path, ...]:
    """Return the files that paths, folders and globs name, sorted by name for each of them.

    A folder of ``save_to_disk`` counts as one file.

    Args:
        paths: Files, folders of files, folders of ``save_to_disk`` of datasets, or globs.
        plural: Noun for the rows of a file, for errors.
        example: Example of a line, for errors.

    Raises:
        UnsupportedError: If a path names no file of JSON lines or Parquet, or a dataset with
            several splits.
    """
    all_files: list[Path] = []
    for location in [paths] if isinstance(paths, str) else paths:
        names = (
            [str(path) for path in Path(location).glob("*")]
            if Path(location).is_dir()
            else [location]
        )
        if not os.path.exists(location):
            names = glob.glob(location, recursive=True)
        if is_dataset_folder(Path(location)):
            names = [location]
        files = sorted(Path(name) for name in names)
        files = [file for file in files if _is_row_file(file)]
        if not files:
            raise UnsupportedError(
                f"{plural} must be files ({', '.join(_SUFFIXES)}), folders of them, folders "
                f"written by save_to_disk of datasets, or globs: {location!r} names none of these. "
                f"Give such a path. A line of a file is for example {example}."
            )
        all_files.extend(files)
    return tuple(all_files)


def _is_row_file(path: Path) -> bool:
    return is_dataset_folder(path) or (path.is_file() and path.name.endswith(_SUFFIXES))


def sizes_of(path: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of a file, or of the files in a folder, to identify its rows.

    Args:
        path: File of rows, or folder of ``save_to_disk``.
    """
    return [(file.name, file.stat().st_size) for file in files_of(path)]


def _parquet_rows(path: Path, skipped: int) -> Iterator[Mapping[str, Any]]:
    parquet = import_extra("pyarrow.parquet", "parquet")
    try:
        with parquet.ParquetFile(path) as file:
            groups = list(range(file.num_row_groups))
            # Skip row groups before the first row without decoding them.
            while groups and file.metadata.row_group(groups[0]).num_rows <= skipped:
                skipped -= file.metadata.row_group(groups.pop(0)).num_rows
            # Older versions of pyarrow refuse an empty list.
            for batch in file.iter_batches(_ROWS_PER_BATCH, row_groups=groups) if groups else ():
                yield from batch.slice(skipped).to_pylist()
                skipped = max(skipped - len(batch), 0)
    # Errors of this package are subclasses of ValueError, and keep their messages.
    except (CorruptDataError, UnsupportedError):
        raise
    # pyarrow raises ValueError and OSError for damaged files.
    except (ValueError, OSError) as error:
        raise CorruptDataError(
            f"{path} cannot be read as Parquet: {error}. Copy it again."
        ) from error


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


def dataset_rows(path: Path, skipped: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the fields of each row of a folder, in order.

    Args:
        path: Folder that ``Dataset.save_to_disk`` has written.
        skipped: Number of rows to skip at the start (rows).
    """
    datasets = import_extra("datasets", "datasets")
    try:
        # The folder may record a format such as "torch".
        dataset = datasets.load_from_disk(str(path)).with_format(None)
        # Arrow files are memory-mapped, so a dataset may be larger than the memory.
        if skipped < len(dataset):
            yield from dataset.select(range(skipped, len(dataset)))
    # pyarrow and datasets raise these exceptions for damaged and missing files.
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise CorruptDataError(
            f"{path} cannot be read as a folder of datasets: {error}. Copy it again, or save it "
            "again by save_to_disk."
        ) from error
