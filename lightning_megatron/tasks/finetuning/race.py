"""Questions of RACE from its folders of JSON files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_megatron.building_blocks import parse_object, read_regular_file
from lightning_megatron.errors import CorruptDataError

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
    content = parse_object(read_regular_file(path, _REMEDY, _MAX_FILE_BYTES), str(path), _REMEDY)
    passage = content.get("article")
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
