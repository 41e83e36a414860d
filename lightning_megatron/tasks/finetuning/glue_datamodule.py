"""Data module of GLUE tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from typing_extensions import override

from lightning_megatron.building_blocks import coerced_arguments
from lightning_megatron.tasks.finetuning.datamodule import TaskDataModule, present
from lightning_megatron.tasks.finetuning.glue import (
    GLUE_TASKS,
    GlueExamples,
    GlueName,
    Malformed,
    read_glue,
)
from lightning_megatron.tasks.finetuning.rows import joined
from lightning_megatron.tasks.finetuning.scores import ClassScores


class GlueDataModule(TaskDataModule):
    """Batches of a GLUE task from the files of its folder.

    The two validation sets of MNLI are combined to one set with two groups, whose results are
    ``val_accuracy_matched`` and ``val_accuracy_mismatched``. QQP also reports ``val_f1``.

    Args:
        task: ``mnli``, ``qqp`` or ``sst2``.
        folder: Folder with the TSV files of the task, under their original names.
        tokenizer: Local folder of the tokenizer of a BERT or RoBERTa.
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
        self._files = {
            "train": [root / columns.train],
            "val": [root / name for name in columns.validation.values()],
            "test": list(map(Path, arguments["test"] or ())),
        }
        present("files of the task " + self.task, (p for f in self._files.values() for p in f))

    @override
    def files(self, part: str) -> list[Path]:
        return self._files[part]

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
            else [path.stem for path in self.files(part)]
        )
        return ClassScores(
            torch.from_numpy(rows.labels.copy()),
            torch.from_numpy(rows.groups.copy()),
            names,
            GLUE_TASKS[self.task].has_f1,
        )

    def _read(self, part: str) -> Sequence[GlueExamples]:
        task = GLUE_TASKS[self.task]
        return [read_glue(path, task, self.malformed) for path in self.files(part)]
