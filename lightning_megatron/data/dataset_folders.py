"""Rows of folders written by ``save_to_disk`` of the package datasets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.extras import import_extra

_STATE = "state.json"
_SPLITS = "dataset_dict.json"


def is_dataset_folder(path: Path) -> bool:
    """Return whether a path is a folder written by ``Dataset.save_to_disk``.

    Args:
        path: Any path.

    Raises:
        UnsupportedError: If the folder was written by ``DatasetDict.save_to_disk`` and has splits.
    """
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

    Raises:
        CorruptDataError: If the folder cannot be read.
        MissingExtraError: If datasets is not installed.
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
