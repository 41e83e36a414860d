"""Rows of folders that ``save_to_disk`` of the package datasets has written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.extras import import_extra

_STATE = "state.json"
_SPLITS = "dataset_dict.json"


def is_dataset_folder(path: Path) -> bool:
    """Return whether a path is a folder of one set.

    Args:
        path: Any path.

    Raises:
        UnsupportedError: If the folder has several splits, which ``DatasetDict`` has written.
    """
    if (path / _SPLITS).is_file():
        splits = sorted(one.parent.name for one in path.glob(f"*/{_STATE}"))
        raise UnsupportedError(
            f"conversations must be one set: the folder {path} has the splits {splits}. Give the "
            f"folder of one of them, such as {path / (splits or ['train'])[0]}."
        )
    return (path / _STATE).is_file()


def files_of(path: Path) -> list[Path]:
    """Return the files that a set consists of, in a fixed order: of a folder all in it.

    Args:
        path: File, or folder of a set.
    """
    return sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]


def dataset_rows(path: Path, skipped: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the fields of each row of a folder, in their order.

    Args:
        path: Folder that ``Dataset.save_to_disk`` has written.
        skipped: First rows that are left out (rows).

    Raises:
        CorruptDataError: If the folder cannot be read.
        MissingExtraError: If datasets is not installed.
    """
    datasets = import_extra("datasets", "datasets")
    try:
        # A format such as "torch" was saved with the set.
        found = datasets.load_from_disk(str(path)).with_format(None)
        # Arrow files are read by the page, so that a set may be larger than the memory.
        if skipped < len(found):
            yield from found.select(range(skipped, len(found)))
    # pyarrow and datasets raise these for files that are damaged or missing.
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise CorruptDataError(
            f"{path} cannot be read as a folder of datasets: {error}. Copy it again, or save it "
            "again by save_to_disk."
        ) from error
