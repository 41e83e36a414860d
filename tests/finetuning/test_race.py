"""Files of RACE become four sequences for each question, as transformers' tokenizer makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron import RaceDataModule
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.finetuning.race import race_files, read_race
from tests.finetuning.folders import TOKENIZERS, save_tokenizer, write_race

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Rows of ")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_options_equal_the_rows_of_transformers(tmp_path: Path, kind: str) -> None:
    write_race(tmp_path)
    tokenizer = TOKENIZERS[kind](tmp_path / "tokenizer")
    data = RaceDataModule(str(tmp_path), str(tokenizer), seq_length=24)
    data.setup("validate")
    batch = data.val_dataloader().batches[[*range(12), -1]]
    assert batch["tokens"].shape == (13, 4, 24)
    files = race_files(tmp_path / "dev" / group for group in ("middle", "high"))
    questions = [
        question for path in files for question in read_race(path, path.parent.name == "high")
    ]
    assert "_" not in questions[0].texts[0]
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    expected = reference(
        [text for question in questions for text in question.texts],
        [question.passage for question in questions for _ in range(4)],
        truncation="only_second", max_length=24, padding="max_length", return_tensors="pt",
        return_token_type_ids=True,
    )  # fmt: skip
    assert torch.equal(batch["tokens"][:12].flatten(0, 1), expected["input_ids"])
    assert torch.equal(batch["token_types"][:12].flatten(0, 1), expected["token_type_ids"])
    assert torch.equal(batch["valid"][:12].flatten(0, 1).long(), expected["attention_mask"])
    assert torch.equal(batch["lengths"], batch["valid"].sum(-1))
    assert batch["labels"].tolist() == [*(question.label for question in questions), -100]
    assert batch["row"].tolist() == [*range(12), -1]
    assert data.encoded("val").groups.tolist() == [0] * 6 + [1] * 6


def test_truncated_questions_are_reported(tmp_path: Path) -> None:
    write_race(tmp_path)
    folder = str(save_tokenizer(tmp_path / "tokenizer"))
    data = RaceDataModule(str(tmp_path), folder, question_length=2, seq_length=64)
    with pytest.warns(
        UserWarning, match=r"12 read, 0 malformed rows left out, \d\d texts truncated"
    ):
        data.setup("validate")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"answers": ["A", "E", "B"]}, "question 2 must have an answer of A, B, C, D: it has 'E'"),
        ({"answers": ["A"]}, "must have as many questions as options and answers: it has 3, 3, 1"),
        ({"options": [["a"] * 4, ["a"] * 3, ["a"] * 4]}, "question 2 must have 4 texts as options"),
        ({"article": ""}, "must have a text as article"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    write_race(tmp_path)
    path = tmp_path / "dev" / "high" / "0.txt"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CorruptDataError) as error:
        read_race(path, 1)
    assert str(path) in str(error.value)
    assert fault in str(error.value)


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="must have files such as train/middle/1.txt"):
        RaceDataModule(str(tmp_path), str(save_tokenizer(tmp_path / "tokenizer")))
