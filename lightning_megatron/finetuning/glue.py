"""Examples of GLUE tasks from their TSV files, checked line by line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_megatron.errors import CorruptDataError
from lightning_megatron.strict_json import read_regular_file

GlueName = Literal["mnli", "qqp", "sst2"]
Malformed = Literal["refuse", "leave_out"]
#: Limit of a file's size; the largest one of GLUE has 80 megabytes (bytes).
_MOST_BYTES = 1 << 30
_REMEDY = "Repair the line, or use malformed='leave_out'."


@dataclass(frozen=True)
class GlueTask:
    """Columns and files of a task of GLUE.

    Args:
        texts: Columns of the one or two texts.
        label: Column of the label.
        labels: Labels as the files write them, in the order of their numbers.
        train: File of the training set.
        validation: Files of the validation sets by their names.
        has_f1: Whether the F1 of label 1 is a result.
    """

    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    train: str
    validation: dict[str, str]
    has_f1: bool = False


GLUE_TASKS: dict[GlueName, GlueTask] = {
    "mnli": GlueTask(
        ("sentence1", "sentence2"),
        "gold_label",
        ("contradiction", "entailment", "neutral"),
        "train.tsv",
        {"matched": "dev_matched.tsv", "mismatched": "dev_mismatched.tsv"},
    ),
    "qqp": GlueTask(
        ("question1", "question2"),
        "is_duplicate",
        ("0", "1"),
        "train.tsv",
        {"dev": "dev.tsv"},
        has_f1=True,
    ),
    "sst2": GlueTask(("sentence",), "label", ("0", "1"), "train.tsv", {"dev": "dev.tsv"}),
}


@dataclass(frozen=True)
class GlueExamples:
    """Examples of a file.

    Args:
        texts: Texts of each column, one list for each.
        labels: Number of the label of each example.
        num_left_out: Lines that were left out as malformed.
    """

    texts: tuple[list[str], ...]
    labels: list[int]
    num_left_out: int


def read_glue(path: Path, task: GlueTask, malformed: Malformed = "refuse") -> GlueExamples:
    """Read a TSV file of GLUE, whose first line names its columns.

    A quotation mark is a character like any other, and a line always ends an example: the files
    have texts with a single quotation mark.

    Args:
        path: File.
        task: Columns and labels.
        malformed: What happens to a line with another number of columns, an empty text or another
            label: ``refuse`` raises, ``leave_out`` counts it.

    Raises:
        CorruptDataError: If a column is missing, the file is not UTF-8 or has no example, or a line
            is malformed and to be refused; the message names the file and the line.
    """
    content = read_regular_file(path, "Copy the file of the task again.", _MOST_BYTES)
    try:
        # Not splitlines: texts contain characters that it takes for the end of a line.
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise CorruptDataError(
            f"{path} must be UTF-8: {error.reason} at byte {error.start}. Copy the file again."
        ) from error
    columns = lines[0].rstrip("\r").split("\t")
    missing = [name for name in (*task.texts, task.label) if name not in columns]
    if missing:
        raise CorruptDataError(
            f"{path}:1 must name the columns of the task: {', '.join(missing)} missing in "
            f"{columns}. A test set without labels cannot be scored. Use the file of GLUE."
        )
    places = [columns.index(name) for name in task.texts]
    texts: tuple[list[str], ...] = tuple([] for _ in places)
    labels: list[int] = []
    num_left_out = 0
    for number, line in enumerate(lines[1:], 2):
        if number == len(lines) and not line:
            continue
        fields = line.rstrip("\r").split("\t")
        fault = _fault(fields, columns, task)
        if fault and malformed == "refuse":
            raise CorruptDataError(f"{path}:{number} {fault}. {_REMEDY}")
        if fault:
            num_left_out += 1
            continue
        for side, place in zip(texts, places, strict=True):
            side.append(fields[place])
        labels.append(task.labels.index(fields[columns.index(task.label)]))
    if not labels:
        raise CorruptDataError(
            f"{path} must have an example: it has none, and {num_left_out} malformed lines. Copy "
            "the file again."
        )
    return GlueExamples(texts, labels, num_left_out)


def _fault(fields: Sequence[str], columns: Sequence[str], task: GlueTask) -> str:
    """Return what is wrong with a line, as the end of a sentence; empty if nothing is."""
    if len(fields) != len(columns):
        return f"must have {len(columns)} columns: it has {len(fields)}"
    for name in task.texts:
        if not fields[columns.index(name)].strip():
            return f"must have a text in the column {name}: it is empty"
    label = fields[columns.index(task.label)]
    if label not in task.labels:
        return f"must have a label of {', '.join(task.labels)}: it has {label!r}"
    return ""
