"""Conversations and preference pairs have the tokens and labels of transformers' chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.errors import (
    CorruptDataError,
    ParallelPlanError,
    UnsupportedError,
)
from lightning_megatron.tasks.chat import ChatDataModule, chat_template
from lightning_megatron.tasks.preferences.preference_datamodule import PreferenceDataModule
from tests.chat_folder import MARKED, PLAIN, conversations, preferences, turn, write_lines
from tests.data.recorder import Watcher
from tests.preferences.parts import as_messages

transformers = pytest.importorskip("transformers")

LENGTH = 250
QUESTION, ANSWER, NO = turn("user", "why"), turn("assistant", "so"), turn("assistant", "no")
PAIR = {"prompt": "why", "chosen": "so", "rejected": "no"}
Document = tuple[list[int], list[int]]


@pytest.fixture
def plain(tmp_path: Path) -> str:
    """Write a template that does not mark answers."""
    (tmp_path / "plain.jinja").write_text(PLAIN)
    return str(tmp_path / "plain.jinja")


def tokens_and_labels(model: str, messages: list[dict[str, str]]) -> Document:
    """Return tokens and labels by the assistant mask of transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    encoded = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, chat_template=MARKED
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    return encoded["input_ids"], [token if is_assistant else -100 for token, is_assistant in pairs]


def expected_of(model: str, rows: list[dict[str, Any]]) -> list[Document]:
    return sorted(tokens_and_labels(model, row["messages"]) for row in rows)


def documents_of(data: ChatDataModule) -> list[Document]:
    """Return tokens and labels, both unshifted, of each conversation of an epoch."""
    samples = data.training_samples(None)
    batch = data.loader_of(samples, None).batches[list(range(len(samples)))]
    documents = []
    for row in range(len(samples)):
        window, sizes = samples[row].tolist(), samples.lengths(row)
        labels = [-100, *batch["labels"][row].tolist()]
        start = 0
        for size in sizes:
            documents.append((window[start : start + size], labels[start : start + size]))
            start += size
        assert set(labels[start:]) <= {-100}
        sizes[-1] -= 1
        if data.documents == "whole":
            positions = batch["position_ids"][row].tolist()
            assert positions[: sum(sizes)] == [at for size in sizes for at in range(size)]
            assert [size for size in batch["lengths"][row].tolist() if size] == sizes
        assert batch["tokens"][row, : len(window) - 1].tolist() == window[:-1]
    return documents


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("is_marked", [True, False])
def test_labels_match_the_assistant_mask_of_transformers(
    tmp_path, model, plain, is_marked, packing
):
    rows = conversations(20)
    path = write_lines(tmp_path / "rows.jsonl", rows)
    options = {"packing": packing, "chat_template": None if is_marked else plain, "seed": 3}
    data, again = (ChatDataModule(path, model, seq_length=LENGTH, **options) for _ in range(2))
    data.setup("fit")
    actual = documents_of(data)
    assert sorted(actual) == expected_of(model, rows)
    assert (len(data.training_samples(None)) < 20) is packing
    assert documents_of(again) == actual, "a second module reads what the first has stored"


@pytest.mark.parametrize("is_marked", [True, False])
def test_only_the_completion_of_a_pair_has_labels(tmp_path, model, plain, is_marked):
    options = {"chat_template": None if is_marked else plain, "seq_length": LENGTH}
    once, twice = (tokens_and_labels(model, [QUESTION, ANSWER] * n) for n in (1, 2))
    first = len(once[0])
    for row, expected in (
        ({"prompt": "why", "completion": "so"}, once),
        (
            {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]},
            (twice[0], [-100] * first + twice[1][first:]),
        ),
    ):
        path = write_lines(tmp_path / "a.jsonl", [row])
        assert documents_of(ChatDataModule(path, model, **options)) == [expected]


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


def test_warnings_count_truncated_and_omitted_rows(tmp_path, model):
    def check(make: Callable[..., Any], rows: list[Any], counts: tuple[int, int, int]) -> Any:
        path = write_lines(tmp_path / "rows.jsonl", rows)
        read, cut, omitted = counts
        first, second, third = (
            make(path, model, seq_length=99, too_long=choice)
            for choice in ("cut", "leave_out", "refuse")
        )
        phrase = rf"{read} \w+ read, {cut} cut after 100 tokens .*, {omitted} left out"
        with pytest.warns(UserWarning, match=phrase):
            first.setup("fit")
        with pytest.warns(
            UserWarning, match=rf"{read} \w+ read, 0 cut .*, {cut + omitted} left out"
        ):
            second.setup("fit")
        with pytest.raises(CorruptDataError, match=r"rows.jsonl:2 has \d+ tokens"):
            third.setup("fit")
        return first, second

    short, lost = [QUESTION, ANSWER], [turn("user", "x" * 300), ANSWER]
    long = [turn("user", "x" * 30), turn("assistant", "y" * 100)]
    rows = [{"messages": messages} for messages in (short, long, lost)]
    data, left_out = check(ChatDataModule, rows, (3, 1, 1))
    tokens, labels = tokens_and_labels(model, long)
    assert (tokens[:100], labels[:100]) in documents_of(data)
    assert documents_of(left_out) == [tokens_and_labels(model, short)]
    alike = {"prompt": "why", "chosen": "z" * 200 + "a", "rejected": "z" * 200 + "b"}
    pairs = [PAIR, {**PAIR, "chosen": [long[1]]}, {**PAIR, "prompt": "x" * 300}, alike]
    data, left_out = check(PreferenceDataModule, pairs, (4, 1, 2))
    batch = data.each_pair_once("train").batches[[0, 1]]
    tokens, labels = side_of(model, pairs[1], "chosen")
    assert batch["tokens"][1, 0].tolist() == tokens[:99]
    assert batch["labels"][1, 0].tolist() == labels[1:100]
    assert len(left_out.encoded("train")) == 1


def test_files_without_a_usable_row_are_refused_from_the_cache_too(tmp_path, model, monkeypatch):
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": [turn("user", "x" * 300), ANSWER]}])
    for _ in range(2):
        with pytest.raises(CorruptDataError, match="1 were read, and 1 left out as too long"):
            ChatDataModule(path, model, seq_length=99).setup("fit")
        # The first module has written the rows that remain, which are none.
        monkeypatch.setattr(ChatDataModule.encoder_class, "encode_row", None)


def test_bad_rows_are_named_by_file_and_line(tmp_path, model):
    good, robot = {"messages": [QUESTION, ANSWER]}, turn("robot", "hi")
    bad_chats = [
        ({"messages": [robot, ANSWER]}, "message 1: the role must be"),
        ({"messages": [QUESTION]}, "no message of the role assistant"),
        ({"messages": [QUESTION, turn("assistant", " ")]}, "answer without text"),
        ({"messages": [{"role": "user"}, ANSWER]}, "must have a text"),
        ({"messages": "why"}, "must be a non-empty list"),
        ({"messages": ["why"]}, "message 1 must be an object with role and content"),
        ({"prompt": "why"}, "either messages or both"),
        ({**good, "tools": "a"}, "tools must be a list"),
        (7, "must hold a JSON object"),
    ]
    both = {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, NO]}
    bad_pairs = [
        ({"prompt": "why", "chosen": "so"}, "must have chosen and rejected"),
        ({"chosen": "why so", "rejected": "why no"}, "chosen must be a list of messages if"),
        ({**PAIR, "chosen": [robot]}, "chosen, message 1: the role must be"),
        ({**PAIR, "rejected": " "}, "rejected, message 1 is an answer without text"),
        ({**PAIR, "rejected": "so"}, "chosen and rejected must differ"),
        ({**both, "rejected": [turn("user", "how"), NO]}, "must begin with the same prompt"),
        ({**both, "rejected": [QUESTION, ANSWER, NO]}, "chosen has no message"),
    ]
    for make, rows, table in (
        (ChatDataModule, conversations(2), bad_chats),
        (PreferenceDataModule, preferences(2), bad_pairs),
    ):
        for bad, reason in table:
            path = write_lines(tmp_path / "rows.jsonl", [*rows, bad])
            with pytest.raises(CorruptDataError, match=rf"rows\.jsonl:3.*{reason}"):
                make(path, model).setup("fit")
    (tmp_path / "rows.jsonl").write_text(f'{json.dumps(good)}\n\n{{"messages": [\n')
    with pytest.raises(CorruptDataError, match=r"rows\.jsonl:3 is not valid JSON"):
        ChatDataModule(str(tmp_path), model).setup("fit")


ENDLESS = b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
RAISES = b"{{ raise_exception('no') }}"
CONSTANT = PLAIN.replace("message['content']", "'x'").encode()
TEMPLATES = [
    (ChatDataModule, RAISES, CorruptDataError, r"rows\.jsonl:1 is rejected by .* no"),
    (ChatDataModule, b"xy{% generation %}{% endgeneration %}hello", CorruptDataError, "with at least one token"),
    (ChatDataModule, b"{{ messages | length }}", UnsupportedError, r"rows\.jsonl:1: the first 1 messages must"),
    (PreferenceDataModule, CONSTANT, CorruptDataError, r"makes the same \d+ tokens"),
    (PreferenceDataModule, b"{{ 'a' * 9999999 }}", CorruptDataError, r"at most \d+ are expected"),
    (PreferenceDataModule, ENDLESS, CorruptDataError, "still computes"),
    (PreferenceDataModule, b"\xff", CorruptDataError, r"x\.jinja: byte \d+ is not UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(TEMPLATES)))
def test_templates_without_tokens_or_without_end_are_refused(tmp_path, model, monkeypatch, number):
    monkeypatch.setattr(chat_template, "_MOST_SECONDS", 1.0)
    make, content, error, reason = TEMPLATES[number]
    is_pair = make is PreferenceDataModule
    rows = preferences(2) if is_pair else [{"messages": [QUESTION, ANSWER] * 2}]
    path, template = write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "x.jinja"
    begin = PLAIN.encode() if is_pair and content not in (RAISES, CONSTANT) else b""
    template.write_bytes(begin + content)
    with pytest.raises(error, match=reason):
        make(path, model, chat_template=str(template)).setup("fit")


def test_invalid_settings_and_models_are_refused(tmp_path, model):
    from tests.tiny_llama import save_tiny_llama

    save_tiny_llama(tmp_path / "untemplated")
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": [QUESTION, ANSWER]}])
    cases = [
        (lambda: ChatDataModule(path, str(tmp_path / "untemplated")).setup("fit"), "must have one chat template"),
        (lambda: ChatDataModule(str(tmp_path / "none.jsonl"), model), "names none"),
        (lambda: ChatDataModule(path, str(tmp_path)).setup("fit"), "local folder with tokenizer.json"),
        (lambda: ChatDataModule(path, model, packing=False, balance_attention=True), "packing=False"),
        (lambda: ChatDataModule(path, model, val={"": "x"}), "val must give each set a name and at least one"),
        (lambda: PreferenceDataModule(path, model, length_multiple=0), "length_multiple must be a whole number"),
    ]  # fmt: skip
    for call, message in cases:
        with pytest.raises((UnsupportedError, ParallelPlanError), match=message):
            call()


@pytest.mark.extras
def test_parquet_and_folders_of_datasets_have_the_rows_of_json_lines(tmp_path, model):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")

    def write(name: str, rows: list[dict[str, Any]]) -> str:
        if name.endswith("parquet"):
            parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
        else:
            datasets.Dataset.from_list(rows).save_to_disk(tmp_path / name, num_shards=2)
        return str(tmp_path / name)

    rows, pairs = conversations(9), [as_messages(row) for row in preferences(5)]
    bad = [*rows, {"messages": [QUESTION]}]
    for end, place in ((".parquet", r"bad\.parquet, row 10"), ("", "bad, row 10")):
        data = ChatDataModule(write(f"rows{end}", rows), model, seq_length=LENGTH)
        assert sorted(documents_of(data)) == expected_of(model, rows)
        with pytest.raises(CorruptDataError, match=f"{place} has no message of the role"):
            ChatDataModule(write(f"bad{end}", bad), model).setup("fit")
        preferred = PreferenceDataModule(write(f"pairs{end}", pairs), model, seq_length=LENGTH)
        check_pairs(preferred.each_pair_once("train").batches[list(range(5))], model, pairs)
    # Files and folders mix, and globs find folders.
    lines = write_lines(tmp_path / "rows.jsonl", rows)
    mixed = ChatDataModule([lines, str(tmp_path / "row[s]")], model, seq_length=LENGTH)
    assert sorted(documents_of(mixed)) == sorted(2 * expected_of(model, rows))
    arrow = next((tmp_path / "rows").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:40])
    with pytest.raises(CorruptDataError, match="rows cannot be read as a folder of datasets"):
        ChatDataModule(str(tmp_path / "rows"), model).setup("fit")


class PairRecorder(Watcher):
    """Module that records the numbers of pairs."""

    def names_of(self, batch: dict[str, torch.Tensor]) -> list[Any]:
        return batch["pairs"].tolist()
