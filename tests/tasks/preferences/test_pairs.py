"""Preference pairs have the tokens and labels of transformers' chat templates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.errors import CorruptDataError, ParallelPlanError
from lightning_megatron.tasks.preferences import PreferenceDataModule
from tests.data.recorder import Watcher
from tests.tasks.chat.chat_folder import PLAIN, preferences, turn, write_lines
from tests.tasks.chat.checks import (
    ANSWER,
    LENGTH,
    LONG,
    QUESTION,
    check_bad_rows,
    check_counts,
    check_template,
    write_table,
)
from tests.tasks.preferences.parts import as_messages

transformers = pytest.importorskip("transformers")

NO = turn("assistant", "no")
PAIR = {"prompt": "why", "chosen": "so", "rejected": "no"}
Document = tuple[list[int], list[int]]


def side_of(model: str, row: dict[str, Any], side: str) -> Document:
    """Return tokens and labels; the prompt and the header of the answer have no labels."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    messages = as_messages(row)

    def encoded(messages: list[dict[str, str]], **options: Any) -> list[int]:
        given = {"chat_template": PLAIN, "return_dict": True, **options}
        return tokenizer.apply_chat_template(messages, **given)["input_ids"]

    tokens = encoded(messages["prompt"] + messages[side])
    start = len(encoded(messages["prompt"], add_generation_prompt=True))
    return tokens, [-100] * start + tokens[start:]


def check_pairs(batch: dict[str, torch.Tensor], model: str, rows: list[dict[str, Any]]) -> int:
    """Check a batch of pairs, and return the length of its longest answer."""
    length, longest = batch["tokens"].shape[2], 0
    for at, pair in enumerate(batch["pairs"].tolist()):
        for side, name in enumerate(("chosen", "rejected")):
            tokens, labels = side_of(model, rows[pair], name)
            padding = length - len(tokens) + 1
            assert batch["tokens"][at, side].tolist() == tokens[:-1] + [0] * padding
            assert batch["labels"][at, side].tolist() == labels[1:] + [-100] * padding
            longest = max(longest, len(tokens) - 1)
    return longest


@pytest.mark.parametrize("is_marked", [True, False])
def test_tokens_and_labels_of_pairs_match_the_chat_template(tmp_path, model, plain, is_marked):
    rows = preferences(14)
    path = write_lines(tmp_path / "rows.jsonl", rows)
    options = {"seq_length": LENGTH, "batch_size": 3, "chat_template": None if is_marked else plain}
    data = PreferenceDataModule(path, model, length_multiple=8, **options)
    data.setup("fit")
    batches = list(data.each_pair_once("train"))
    for batch in batches:
        assert batch["tokens"].shape[2] == -(-check_pairs(batch, model, rows) // 8) * 8
    assert torch.cat([batch["pairs"] for batch in batches]).tolist() == list(range(14))
    numbers = [data.training_samples(28).pair(at) for at in range(28)]
    assert sorted(numbers[:14]) == sorted(numbers[14:]) == list(range(14))
    assert numbers[:14] != numbers[14:]
    assert numbers[:5] == [data.training_samples(5).pair(at) for at in range(5)]
    whole = PreferenceDataModule(path, model, length_multiple=None, **options)
    batch = next(iter(whole.each_pair_once("train")))
    assert batch["tokens"].shape == (3, 2, LENGTH)
    check_pairs(batch, model, rows)


def test_warnings_count_truncated_and_omitted_pairs(tmp_path, model):
    alike = {"prompt": "why", "chosen": "z" * 200 + "a", "rejected": "z" * 200 + "b"}
    rows = [PAIR, {**PAIR, "chosen": [LONG[1]]}, {**PAIR, "prompt": "x" * 300}, alike]
    path = tmp_path / "rows.jsonl"
    data, left_out = check_counts(PreferenceDataModule, model, path, rows, (4, 1, 2))
    batch = data.each_pair_once("train").batches[[0, 1]]
    tokens, labels = side_of(model, rows[1], "chosen")
    assert batch["tokens"][1, 0].tolist() == tokens[:99]
    assert batch["labels"][1, 0].tolist() == labels[1:100]
    assert len(left_out.encoded("train")) == 1


def test_bad_rows_are_named_by_file_and_line(tmp_path, model):
    both = {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, NO]}
    bad = [
        ({"prompt": "why", "chosen": "so"}, "must have chosen and rejected"),
        ({"chosen": "why so", "rejected": "why no"}, "chosen must be a list of messages if"),
        ({**PAIR, "chosen": [turn("robot", "hi")]}, "chosen, message 1: the role must be"),
        ({**PAIR, "rejected": " "}, "rejected, message 1 is an answer without text"),
        ({**PAIR, "rejected": "so"}, "chosen and rejected must differ"),
        ({**both, "rejected": [turn("user", "how"), NO]}, "must begin with the same prompt"),
        ({**both, "rejected": [QUESTION, ANSWER, NO]}, "chosen has no message"),
    ]
    check_bad_rows(PreferenceDataModule, model, tmp_path, preferences(2), bad)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = [
    (PLAIN.replace("message['content']", "'x'").encode(), r"makes the same \d+ tokens"),
    (PLAIN.encode() + b"{{ 'a' * 9999999 }}", r"at most \d+ are expected"),
    (PLAIN.encode() + ENDLESS.encode(), "still computes"),
    (PLAIN.encode() + b"\xff", r"x\.jinja: byte \d+ is not UTF-8"),
]


@pytest.mark.parametrize("number", range(len(TEMPLATES)))
def test_templates_of_equal_answers_or_without_end_are_refused(tmp_path, model, number):
    content, reason = TEMPLATES[number]
    case = (content, CorruptDataError, reason)
    check_template(PreferenceDataModule, model, tmp_path, preferences(2), case)


def test_an_invalid_multiple_of_lengths_is_refused(tmp_path, model):
    path = write_lines(tmp_path / "rows.jsonl", preferences(2))
    with pytest.raises(ParallelPlanError, match="length_multiple must be a whole number"):
        PreferenceDataModule(path, model, length_multiple=0)


@pytest.mark.extras
def test_parquet_and_folders_of_datasets_have_the_pairs_of_json_lines(tmp_path, model):
    pairs = [as_messages(row) for row in preferences(5)]
    for end in (".parquet", ""):
        path = write_table(tmp_path / f"pairs{end}", pairs)
        data = PreferenceDataModule(path, model, seq_length=LENGTH)
        check_pairs(data.each_pair_once("train").batches[list(range(5))], model, pairs)


class PairRecorder(Watcher):
    """Module that records the numbers of pairs."""

    def names_of(self, batch: dict[str, torch.Tensor]) -> list[Any]:
        return batch["pairs"].tolist()
