"""What the rows of all data modules of conversations must keep: counts, places, templates and kinds of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.errors import CorruptDataError
from lightning_megatron.tasks.chat import chat_template
from tests.tasks.chat.chat_folder import turn, write_lines

#: Data module, given the path of the rows, the folder of the model and options.
Make = Callable[..., Any]
Table = list[tuple[Any, str]]
LENGTH = 250
QUESTION, ANSWER = turn("user", "why"), turn("assistant", "so")
LONG = [turn("user", "x" * 30), turn("assistant", "y" * 100)]


def check_counts(
    make: Make, model: str, path: Path, rows: list[Any], counts: tuple[int, int, int]
) -> tuple[Any, Any]:
    """Check the warnings about rows that are read, cut and left out, and return the module that cuts rows and
    the one that leaves them out.
    """
    write_lines(path, rows)
    read, cut, omitted = counts
    first, second, third = (
        make(str(path), model, seq_length=99, too_long=choice)
        for choice in ("cut", "leave_out", "refuse")
    )
    phrase = rf"{read} \w+ read, {cut} cut after 100 tokens .*, {omitted} left out"
    with pytest.warns(UserWarning, match=phrase):
        first.setup("fit")
    with pytest.warns(UserWarning, match=rf"{read} \w+ read, 0 cut .*, {cut + omitted} left out"):
        second.setup("fit")
    with pytest.raises(CorruptDataError, match=rf"{path.name}:2 has \d+ tokens"):
        third.setup("fit")
    return first, second


def check_bad_rows(make: Make, model: str, folder: Path, rows: list[Any], table: Table) -> None:
    """Check that the error about a bad row after two good ones names its place and the reason."""
    for bad, reason in table:
        path = write_lines(folder / "rows.jsonl", [*rows, bad])
        with pytest.raises(CorruptDataError, match=rf"rows\.jsonl:3.*{reason}"):
            make(path, model).setup("fit")


def check_template(make: Make, model: str, folder: Path, rows: list[Any], case: Any) -> None:
    """Check that a template is refused, given its content, the error and the reason."""
    content, error, reason = case
    path, template = write_lines(folder / "rows.jsonl", rows), folder / "x.jinja"
    template.write_bytes(content)
    data = make(path, model, chat_template=str(template))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "_MOST_SECONDS", 1.0)
        with pytest.raises(error, match=reason):
            data.setup("fit")


def write_table(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows as a Parquet file or, without that suffix, as a folder of datasets; return the path."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path, num_shards=2)
    return str(path)
