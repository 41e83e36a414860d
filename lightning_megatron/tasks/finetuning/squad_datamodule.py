"""Data module of SQuAD 1.1 and 2.0."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from lightning_megatron.building_blocks import Count, Range, coerced_arguments
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.tasks.finetuning.datamodule import TaskDataModule, present
from lightning_megatron.tasks.finetuning.rows import joined
from lightning_megatron.tasks.finetuning.span_scores import SpanScores, WindowPlaces
from lightning_megatron.tasks.finetuning.squad import SquadQuestion, SquadVersion, read_squad
from lightning_megatron.tasks.finetuning.tokens import PairTokenizer


class SquadDataModule(TaskDataModule):
    """Batches of SQuAD: questions, each followed by a window of its context.

    A context that is too long is divided into windows that share ``doc_stride`` tokens. If a window
    does not contain the whole answer, its labels are its first token. Results are
    ``val_exact_match`` and ``val_f1``, between 0 and 1; :class:`SpanScores` lists further ones of
    version 2.0.

    Args:
        version: ``1.1``, or ``2.0`` with questions that have no answer.
        folder: Folder with ``train-v1.1.json`` and ``dev-v1.1.json``, or ``v2.0``.
        tokenizer: Folder of the tokenizer of a BERT or RoBERTa, or its name on the Hub.
        test: File of a test set, which SQuAD itself does not publish; None means no test set.
        seq_length: Length of a window with its question and special tokens (tokens).
        doc_stride: Overlap of successive windows in the context, as in transformers (tokens).
        question_length: Maximum length of a question, which is cut at its end (tokens).
        num_best: Number of best spans of each window that are considered.
        answer_length: Maximum length of a predicted answer (tokens).
        threshold: The prediction for a question of version 2.0 is no answer if the no-answer score
            exceeds the score of the best span by more than this.
        options: Arguments of ``TaskDataModule``: ``batch_size``, ``global_batch_size``,
            ``ramp_up``, ``num_workers``, ``seed``, ``train_samples``, ``cache_dir``,
            ``pin_memory``.

    Raises:
        ParallelPlanError: If a value has another type or is out of its range, or a window has no
            room for new tokens of its context.
        UnsupportedError: If files are missing, or settings conflict.
        CorruptDataError: If a file is damaged (in ``setup``); the message names file and question.
        MissingExtraError: If transformers is not installed.
    """

    num_labels = 2
    further_arrays = ("question", "offsets", "contexts")

    def __init__(
        self,
        version: SquadVersion,
        folder: str,
        tokenizer: str,
        test: str | None = None,
        seq_length: Count = 384,
        doc_stride: Annotated[int, Range(minimum=0)] = 128,
        question_length: Count = 64,
        num_best: Count = 20,
        answer_length: Count = 30,
        threshold: float = 0.0,
        **options: Any,
    ) -> None:
        arguments = coerced_arguments(SquadDataModule.__init__, locals())
        super().__init__(arguments["tokenizer"], seq_length=arguments["seq_length"], **options)
        self.version: SquadVersion = arguments["version"]
        self.doc_stride: int = arguments["doc_stride"]
        self.question_length: int = arguments["question_length"]
        self.num_best: int = arguments["num_best"]
        self.answer_length: int = arguments["answer_length"]
        self.threshold: float = arguments["threshold"]
        # Pairs have at least three special tokens; the tokenizer is not read yet.
        self._check_room(num_special=3)
        root = Path(arguments["folder"])
        self.files = {
            "train": [root / f"train-v{self.version}.json"],
            "val": [root / f"dev-v{self.version}.json"],
        }
        if arguments["test"]:
            self.files["test"] = [Path(arguments["test"])]
        present("files of SQuAD", (path for paths in self.files.values() for path in paths))
        self._places: dict[str, WindowPlaces] = {}
        self._questions: dict[str, list[SquadQuestion]] = {}

    @override
    def settings(self) -> dict[str, object]:
        return {
            "version": self.version,
            "doc_stride": self.doc_stride,
            "question_length": self.question_length,
        }

    @override
    def encode(self, part: str) -> dict[str, npt.NDArray]:
        self._check_room(self.tokenizer.num_separators)
        return encoded_windows(
            self.questions(part),
            self.tokenizer,
            self.seq_length,
            self.doc_stride,
            self.question_length,
        )

    @override
    def keep(self, part: str, arrays: dict[str, npt.NDArray]) -> None:
        self._places[part] = WindowPlaces(**arrays)

    def questions(self, part: str) -> list[SquadQuestion]:
        """Return the questions of a part.

        Args:
            part: ``train``, ``val`` or ``test``.

        Raises:
            CorruptDataError: If the file is damaged; the message names file and question.
        """
        if part not in self._questions:
            questions = [
                question for path in self.files[part] for question in read_squad(path, self.version)
            ]
            if part == "train":
                return questions  # Only evaluation needs the texts later.
            self._questions[part] = questions
        return self._questions[part]

    @override
    def new_scores(self, part: str) -> SpanScores:
        rows = self.encoded(part)
        return SpanScores(
            rows,
            self._places[part],
            self.questions(part),
            may_lack=self.version == "2.0",
            num_best=self.num_best,
            answer_length=self.answer_length,
            threshold=self.threshold,
        )

    def _check_room(self, num_special: int) -> None:
        room = self.seq_length - self.question_length - num_special
        if self.doc_stride >= room:
            raise ParallelPlanError(
                f"doc_stride ({self.doc_stride}) must be below seq_length - question_length - "
                f"{num_special} ({room}), because a window of the context after its question and "
                f"{num_special} special tokens must have new tokens. Use a smaller doc_stride or a "
                "larger seq_length."
            )


def encoded_windows(
    questions: list[SquadQuestion],
    tokenizer: PairTokenizer,
    seq_length: int,
    doc_stride: int,
    question_length: int,
) -> dict[str, npt.NDArray]:
    """Encode questions in windows; return their arrays and the arrays of :class:`WindowPlaces`.

    Args:
        seq_length: Maximum length of a window (tokens).
        doc_stride: Overlap of successive windows (tokens).
        question_length: Maximum length of a question (tokens).
    """
    # Some questions begin with many spaces, which would change where a pair is truncated.
    texts, num_cut = tokenizer.short(
        [question.text.lstrip() for question in questions], question_length
    )
    encoding = tokenizer.windows(
        texts, [question.context for question in questions], seq_length, doc_stride
    )
    owners = encoding["overflow_to_sample_mapping"]
    contexts = [_context(encoding.sequence_ids(window)) for window in range(len(owners))]
    labels = [
        _label(questions[owner], context, np.array(offsets))
        for owner, context, offsets in zip(
            owners, contexts, encoding["offset_mapping"], strict=True
        )
    ]
    arrays = joined(
        encoding["input_ids"], encoding["token_type_ids"], labels, [0] * len(labels), (0, num_cut)
    )
    offsets = [np.array(window, np.int32) for window in encoding["offset_mapping"]]
    return arrays | {
        "question": np.array(owners, np.int64),
        "offsets": np.concatenate(offsets),
        "contexts": np.array(
            [(context.start, context.stop) for context in contexts], np.int32
        ).reshape(-1, 2),
    }


def _context(sequences: Sequence[int | None]) -> range:
    """Return the start and end (exclusive) of a window's context, from the text of each token."""
    length = sequences.count(1)
    first = sequences.index(1) if length else 0
    return range(first, first + length)


def _label(question: SquadQuestion, context: range, offsets: npt.NDArray) -> tuple[int, int]:
    """Return the answer's first and last token, or the window's first token for a cut answer."""
    if question.start < 0:
        return 0, 0
    start = question.start
    stop = start + len(question.answers[0])
    begins = offsets[context.start : context.stop, 0]
    ends = offsets[context.start : context.stop, 1]
    if not len(context) or begins[0] > start or ends[-1] < stop:
        return 0, 0
    # Several tokens with equal offsets can be bytes of one character; an answer includes them all.
    begin = begins[np.searchsorted(begins, start, side="right") - 1]
    end = ends[np.searchsorted(ends, stop, side="left")]
    # A token that is only a space may have an empty range of characters.
    [first, *_] = np.nonzero((begins == begin) & (ends > begin))[0]
    last = np.searchsorted(ends, end, side="right") - 1
    return context[int(first)], context[int(last)]
