"""Files and data module of RACE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from typing_extensions import override

from lightning_megatron.building_blocks import (
    Count,
    coerced_arguments,
    read_json,
)
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.tasks.finetuning.datamodule import TaskDataModule
from lightning_megatron.tasks.finetuning.rows import joined
from lightning_megatron.tasks.finetuning.scores import ClassScores

#: Letters by which the answers name the four options of a question.
LETTERS = "ABCD"
_MAX_FILE_BYTES = 1 << 24
_REMEDY = "Copy the file of RACE again, or remove it."


@dataclass(frozen=True)
class RaceQuestion:
    """Question on a passage."""

    passage: str
    texts: tuple[str, ...]
    label: int
    group: int


def race_files(folders: Iterable[Path]) -> list[Path]:
    """Return the files of folders, sorted by name within each folder.

    Args:
        folders: Folders of ``.txt`` files.
    """
    return [path for folder in folders for path in sorted(folder.glob("*.txt"))]


def read_race(path: Path, group: int) -> list[RaceQuestion]:
    """Read the questions of a file, which has one passage.

    An option replaces every ``_`` in its question, or follows a question without one, as in
    Megatron-LM.

    Args:
        path: File with one JSON object: ``article``, ``questions``, ``options`` and ``answers``.
    """
    content = read_json(path, _REMEDY, _MAX_FILE_BYTES)
    passage = content.get("article") if isinstance(content, dict) else None
    if not isinstance(passage, str) or not passage.strip():
        raise CorruptDataError(f"{path} must have a text as article. {_REMEDY}")
    lists = [content.get(name) for name in ("questions", "options", "answers")]
    if (
        not all(isinstance(entries, list) and entries for entries in lists)
        or len({*map(_size, lists)}) > 1
    ):
        raise CorruptDataError(
            f"{path} must have as many questions as options and answers: it has "
            f"{', '.join(str(_size(entries)) for entries in lists)}. {_REMEDY}"
        )
    columns: Any = lists
    return [
        _question(path, number, passage, group, *entry)
        for number, entry in enumerate(zip(*columns, strict=True), 1)
    ]


def _question(
    path: Path, number: int, passage: str, group: int, question: Any, options: Any, answer: Any
) -> RaceQuestion:
    place = f"{path}, question {number}"
    if not isinstance(question, str):
        raise CorruptDataError(f"{place} must be a text. {_REMEDY}")
    is_list = isinstance(options, list) and all(isinstance(option, str) for option in options)
    if not is_list or len(options) != len(LETTERS):
        raise CorruptDataError(f"{place} must have {len(LETTERS)} texts as options. {_REMEDY}")
    if not isinstance(answer, str) or len(answer) != 1 or answer not in LETTERS:
        raise CorruptDataError(
            f"{place} must have an answer of {', '.join(LETTERS)}: it has {answer!r}. {_REMEDY}"
        )
    texts = tuple(
        question.replace("_", option) if "_" in question else f"{question} {option}"
        for option in options
    )
    return RaceQuestion(passage, texts, LETTERS.index(answer), group)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (list, Mapping)) else 0


#: Folders of each part.
_FOLDERS = {"train": "train", "val": "dev", "test": "test"}
GROUPS = ("middle", "high")


class RaceDataModule(TaskDataModule):
    """Batches of RACE: four sequences per question, one for each option.

    A sequence is the question with an option, followed by the passage, which is cut at its end if
    it is too long. Results are ``val_accuracy``, ``val_accuracy_middle`` and ``val_accuracy_high``,
    and the same for the test set.

    Args:
        folder: Folder ``RACE`` with the subfolders ``train``, ``dev`` and ``test``, each with
            ``middle`` and ``high``.
        tokenizer: Folder of the tokenizer of a BERT or RoBERTa, or its name on the Hub.
        question_length: Maximum length of a question with its option, which is cut at its end
            (tokens).
        options: Arguments of ``TaskDataModule``: ``seq_length``, ``batch_size``,
            ``global_batch_size``, ``ramp_up``, ``num_workers``, ``seed``, ``train_samples``,
            ``cache_dir``, ``pin_memory``.

    Raises:
        ParallelPlanError: If a value has another type or is out of its range.
        UnsupportedError: If the folder has no such files, or settings conflict.
        CorruptDataError: If a file is damaged (in ``setup``); the message names file and question.
        MissingExtraError: If transformers is not installed.
    """

    num_labels = 1
    choices = len(LETTERS)

    def __init__(
        self, folder: str, tokenizer: str, question_length: Count = 128, **options: Any
    ) -> None:
        arguments = coerced_arguments(RaceDataModule.__init__, locals())
        super().__init__(arguments["tokenizer"], **options)
        root = Path(arguments["folder"])
        self.files = {}
        for part, name in _FOLDERS.items():
            paths = race_files(root / name / group for group in GROUPS)
            if paths:
                self.files[part] = paths
        self.question_length: int = arguments["question_length"]
        if not self.files:
            raise UnsupportedError(
                f"the folder of RACE must have files such as train/middle/1.txt: {folder!r} has "
                "none. Nothing is downloaded. Copy the data set there, or name its folder."
            )

    @override
    def settings(self) -> dict[str, object]:
        return {"question_length": self.question_length}

    @override
    def encode(self, part: str) -> dict[str, npt.NDArray]:
        questions: list[RaceQuestion] = [
            question
            for path in self.files[part]
            for question in read_race(path, GROUPS.index(path.parent.name))
        ]
        texts, num_short = self.tokenizer.short(
            [text for question in questions for text in question.texts], self.question_length
        )
        passages = [question.passage for question in questions for _ in LETTERS]
        tokens, types, num_cut = self.tokenizer.pairs(
            texts, passages, self.seq_length, "only_second"
        )
        labels = [question.label for question in questions]
        groups = [question.group for question in questions]
        return joined(tokens, types, labels, groups, (0, num_short + num_cut))

    @override
    def new_scores(self, part: str) -> ClassScores:
        rows = self.encoded(part)
        return ClassScores(
            torch.from_numpy(rows.labels.copy()), torch.from_numpy(rows.groups.copy()), GROUPS
        )
