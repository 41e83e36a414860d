"""Files and data module of MNLI and QQP, two tasks of GLUE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt
import torch
from typing_extensions import override

from lightning_megatron.building_blocks import coerced_arguments
from lightning_megatron.errors import CorruptDataError
from lightning_megatron.tasks.finetuning.datamodule import TaskDataModule, present
from lightning_megatron.tasks.finetuning.rows import joined
from lightning_megatron.tasks.finetuning.scores import ClassScores

GlueName = Literal["mnli", "qqp", "sst2"]
Malformed = Literal["refuse", "leave_out"]
_REMEDY = "Repair the line, or use malformed='leave_out'."


@dataclass(frozen=True)
class GlueTask:
    """Columns and files of a task of GLUE.

    Args:
        labels: Labels as they are written in the files, in the order of the class indices.
        has_f1: Whether to report the F1 of class 1.
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
    """Examples of a file."""

    texts: tuple[list[str], ...]
    labels: list[int]
    num_left_out: int


def read_glue(path: Path, task: GlueTask, malformed: Malformed = "refuse") -> GlueExamples:
    """Read a TSV file of GLUE, whose first line names its columns.

    Quotation marks have no special meaning, and every line is one example: the files contain texts
    with unpaired quotation marks.

    Args:
        malformed: Handling of lines with a wrong number of columns, an empty text or an unknown
            label: ``refuse`` raises, ``leave_out`` skips and counts them.
    """
    try:
        # str.splitlines would also split at other characters, which occur in the texts.
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
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
            f"{path} must have at least one example: it has none, and {num_left_out} malformed "
            "lines. Copy the file again."
        )
    return GlueExamples(texts, labels, num_left_out)


def _fault(fields: Sequence[str], columns: Sequence[str], task: GlueTask) -> str:
    """Return the fault of a line as the end of a sentence, or an empty string for a valid line."""
    if len(fields) != len(columns):
        return f"must have {len(columns)} columns: it has {len(fields)}"
    for name in task.texts:
        if not fields[columns.index(name)].strip():
            return f"must have a text in the column {name}: it is empty"
    label = fields[columns.index(task.label)]
    if label not in task.labels:
        return f"must have a label of {', '.join(task.labels)}: it has {label!r}"
    return ""


class GlueDataModule(TaskDataModule):
    """Batches of a GLUE task from the files of its folder.

    The two validation sets of MNLI are combined to one set with two groups, whose results are
    ``val_accuracy_matched`` and ``val_accuracy_mismatched``. QQP also reports ``val_f1``.

    Args:
        task: ``mnli``, ``qqp`` or ``sst2``.
        folder: Folder with the TSV files of the task, under their original names.
        tokenizer: Folder of the tokenizer of a BERT or RoBERTa, or its name on the Hub.
        test: Labelled files of a test set, which GLUE itself does not publish; None means no test
            set.
        malformed: Handling of malformed lines: ``refuse`` raises with the file and the line,
            ``leave_out`` leaves them out and reports their number at the start of a run.
        options: Arguments of ``TaskDataModule``: ``seq_length``, ``batch_size``,
            ``global_batch_size``, ``ramp_up``, ``num_workers``, ``seed``, ``train_samples``,
            ``cache_dir``, ``pin_memory``.

    Raises:
        ParallelPlanError: If a value has another type or is out of its range.
        UnsupportedError: If files are missing, or settings conflict.
        CorruptDataError: If a file is damaged (in ``setup``); the message names file and line.
        MissingExtraError: If transformers is not installed.
    """

    def __init__(
        self,
        task: GlueName,
        folder: str,
        tokenizer: str,
        test: list[str] | None = None,
        malformed: Malformed = "refuse",
        **options: Any,
    ) -> None:
        arguments = coerced_arguments(GlueDataModule.__init__, locals())
        super().__init__(arguments["tokenizer"], **options)
        self.task: GlueName = arguments["task"]
        self.malformed: Malformed = arguments["malformed"]
        columns = GLUE_TASKS[self.task]
        self.num_labels = len(columns.labels)
        root = Path(arguments["folder"])
        self.files = {
            "train": [root / columns.train],
            "val": [root / name for name in columns.validation.values()],
        }
        if arguments["test"]:
            self.files["test"] = list(map(Path, arguments["test"]))
        present("files of the task " + self.task, (p for f in self.files.values() for p in f))

    @override
    def settings(self) -> dict[str, object]:
        return {"task": self.task, "malformed": self.malformed}

    @override
    def encode(self, part: str) -> dict[str, npt.NDArray]:
        examples = self._read(part)
        sides: list[list[str]] = [[] for _ in examples[0].texts]
        labels: list[int] = []
        groups: list[int] = []
        for number, example in enumerate(examples):
            for side, texts in zip(sides, example.texts, strict=True):
                side += texts
            labels += example.labels
            groups += [number] * len(example.labels)
        second = sides[1] if len(sides) > 1 else None
        tokens, types, num_cut = self.tokenizer.pairs(
            sides[0], second, self.seq_length, "longest_first"
        )
        num_left_out = sum(example.num_left_out for example in examples)
        return joined(tokens, types, labels, groups, (num_left_out, num_cut))

    @override
    def new_scores(self, part: str) -> ClassScores:
        rows = self.encoded(part)
        names = (
            list(GLUE_TASKS[self.task].validation)
            if part == "val"
            else [path.stem for path in self.files[part]]
        )
        return ClassScores(
            torch.from_numpy(rows.labels.copy()),
            torch.from_numpy(rows.groups.copy()),
            names,
            GLUE_TASKS[self.task].has_f1,
        )

    def _read(self, part: str) -> Sequence[GlueExamples]:
        task = GLUE_TASKS[self.task]
        return [read_glue(path, task, self.malformed) for path in self.files[part]]
