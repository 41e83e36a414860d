"""Conversations and preference pairs have the tokens and labels of transformers' chat templates."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron import ChatDataModule
from lightning_megatron.data import chat_template
from lightning_megatron.data.preference_datamodule import PreferenceDataModule
from lightning_megatron.errors import (
    CorruptDataError,
    MissingExtraError,
    ParallelPlanError,
    UnsupportedError,
)
from tests.chat_folder import MARKED, PLAIN, conversations, preferences, turn, write_lines
from tests.data.recorder import Watcher, check_resumes, make_trainer, run
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
    template = None if is_marked else plain

    def make_data() -> ChatDataModule:
        return ChatDataModule(
            path, model, seq_length=LENGTH, packing=packing, chat_template=template, seed=3
        )

    data = make_data()
    data.setup("fit")
    actual = documents_of(data)
    assert sorted(actual) == expected_of(model, rows)
    assert (len(data.training_samples(None)) < 20) is packing
    assert documents_of(make_data()) == actual, "a second module reads what the first has stored"


@pytest.mark.parametrize("is_marked", [True, False])
def test_only_the_completion_of_a_pair_has_labels(tmp_path, model, plain, is_marked):
    def documents(row: dict[str, Any]) -> list[Document]:
        path = write_lines(tmp_path / "a.jsonl", [row])
        template = None if is_marked else plain
        return documents_of(ChatDataModule(path, model, chat_template=template, seq_length=LENGTH))

    pair = documents({"prompt": "why", "completion": "so"})
    assert pair == [tokens_and_labels(model, [QUESTION, ANSWER])]
    tokens, labels = tokens_and_labels(model, [QUESTION, ANSWER] * 2)
    first = len(tokens_and_labels(model, [QUESTION, ANSWER])[0])
    pair = documents({"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]})
    assert pair == [(tokens, [-100] * first + labels[first:])]


def test_context_windows_hold_complete_conversations_with_their_labels(tmp_path, model):
    rows, windows = conversations(20), 4
    path = write_lines(tmp_path / "rows.jsonl", rows)
    data = ChatDataModule(path, model, seq_length=248, seed=3, context_windows=windows)
    data.setup("fit")
    samples = data.training_samples(None)
    batches = data.loader_of(samples, [[]]).batches
    length, actual = 248 // windows, []
    for row in range(len(samples)):
        batch = {name: values[0].tolist() for name, values in batches[[row]].items()}
        tokens, labels = samples[row].tolist(), [-100, *batch["labels"]]
        longest = max(samples.lengths(row))  # of conversations and gaps
        group = length * next(n for n in (1, 2, 4) if longest <= n * length + (n == windows))
        start = 0
        for size in samples.lengths(row):
            part = slice(start, start + size)
            num_inputs = min(size, len(tokens) - 1 - start)  # the last token is a label
            if tokens[start] == -1:
                assert set(tokens[part]) == {-1}
                assert set(labels[start + 1 : start + size]) <= {-100}
                assert not any(batch["tokens"][part])
            else:
                actual.append((tokens[part], labels[part]))
                positions = batch["position_ids"][start : start + num_inputs]
                assert positions == list(range(num_inputs))
                # The conversation lies in one group of windows, which has the size that the
                # longest conversation of the row needs.
                assert start // group == (start + num_inputs - 1) // group
            start += size
    assert sorted(actual) == expected_of(model, rows)
    other = ChatDataModule(path, model, seq_length=248, seed=3)
    other.setup("fit")
    assert other.training_samples(None).order_key != samples.order_key


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

    def make_data(length_multiple: int | None) -> PreferenceDataModule:
        return PreferenceDataModule(
            path, model, seq_length=LENGTH, batch_size=3, length_multiple=length_multiple,
            chat_template=None if is_marked else plain,
        )  # fmt: skip

    data = make_data(8)
    data.setup("fit")
    batches = list(data.each_pair_once("train"))
    for batch in batches:
        assert batch["tokens"].shape[2] == -(-check_pairs(batch, model, rows) // 8) * 8
    assert torch.cat([batch["pairs"] for batch in batches]).tolist() == list(range(14))
    samples = data.training_samples(28)
    numbers = [samples.pair(at) for at in range(28)]
    assert sorted(numbers[:14]) == sorted(numbers[14:]) == list(range(14))
    assert numbers[:14] != numbers[14:]
    assert numbers[:5] == [data.training_samples(5).pair(at) for at in range(5)]
    batch = next(iter(make_data(None).each_pair_once("train")))
    assert batch["tokens"].shape == (3, 2, LENGTH)
    check_pairs(batch, model, rows)


def test_warnings_count_truncated_and_omitted_rows(tmp_path, model):
    def check(make: Callable[..., Any], rows: list[Any], counts: tuple[int, int, int]) -> Any:
        path = write_lines(tmp_path / "rows.jsonl", rows)
        read, cut, omitted = counts
        first, second, third = (
            make(path, model, seq_length=99, **options)
            for options in ({}, {"too_long": "leave_out"}, {"too_long": "refuse"})
        )
        phrase = rf"{read} read, {cut} cut after 100 tokens .*, {omitted} left out"
        with pytest.warns(UserWarning, match=phrase):
            first.setup("fit")
        with pytest.warns(UserWarning, match=rf"{read} read, 0 cut .*, {cut + omitted} left out"):
            second.setup("fit")
        with pytest.raises(CorruptDataError, match=r"rows.jsonl:2 has \d+ tokens"):
            third.setup("fit")
        return first, second

    long = [turn("user", "x" * 30), turn("assistant", "y" * 100)]
    lost = [turn("user", "x" * 300), ANSWER]
    rows = [{"messages": messages} for messages in ([QUESTION, ANSWER], long, lost)]
    data, left_out = check(ChatDataModule, rows, (3, 1, 1))
    tokens, labels = tokens_and_labels(model, long)
    assert (tokens[:100], labels[:100]) in documents_of(data)
    assert documents_of(left_out) == [tokens_and_labels(model, [QUESTION, ANSWER])]
    pairs = [
        PAIR,
        {**PAIR, "chosen": [turn("assistant", "y" * 100)]},
        {**PAIR, "prompt": "x" * 300},
        # The two answers differ only after the cut.
        {"prompt": "why", "chosen": "z" * 200 + "a", "rejected": "z" * 200 + "b"},
    ]
    data, left_out = check(PreferenceDataModule, pairs, (4, 1, 2))
    batch = data.each_pair_once("train").batches[[0, 1]]
    tokens, labels = side_of(model, pairs[1], "chosen")
    assert batch["tokens"][1, 0].tolist() == tokens[:99]
    assert batch["labels"][1, 0].tolist() == labels[1:100]
    assert len(left_out.encoded("train")) == 1


def test_bad_rows_are_named_by_file_and_line(tmp_path, model):
    good, robot = {"messages": [QUESTION, ANSWER]}, turn("robot", "hi")
    bad_chats: list[tuple[Any, str]] = [
        ({"messages": [robot, ANSWER]}, "message 1: the role must be"),
        ({"messages": [QUESTION]}, "no message of the role assistant"),
        ({"messages": [QUESTION, turn("assistant", " ")]}, "answer without text"),
        ({"messages": [{"role": "user"}, ANSWER]}, "must have a text"),
        ({"messages": "why"}, "must be a non-empty list"),
        ({"messages": ["why"]}, "must be an object"),
        ({"prompt": "why"}, "either messages or both"),
        ({**good, "prompt": "a", "completion": "b"}, "either messages"),
        ({**good, "tools": "a"}, "tools must be a list"),
        (7, "must hold a JSON object"),
    ]
    both = {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, NO]}
    bad_pairs: list[tuple[Any, str]] = [
        ({"prompt": "why", "chosen": "so"}, "must have chosen and rejected"),
        ({"chosen": "why so", "rejected": "why no"}, "chosen must be a list of messages if"),
        ({**PAIR, "chosen": [robot]}, "chosen, message 1: the role must be"),
        ({**PAIR, "rejected": " "}, "rejected, message 1 is an answer without text"),
        ({**PAIR, "prompt": 7}, "prompt must be a non-empty list"),
        ({**PAIR, "rejected": "so"}, "chosen and rejected must differ"),
        ({**both, "rejected": both["chosen"]}, "must differ"),
        ({**both, "rejected": [turn("user", "how"), NO]}, "must begin with the same prompt"),
        (
            {"chosen": [QUESTION, ANSWER, QUESTION], "rejected": [QUESTION, ANSWER, NO]},
            "chosen has no message of the role assistant after the prompt",
        ),
        ({**both, "rejected": [QUESTION, ANSWER, NO]}, "chosen has no message"),
        ({**PAIR, "tools": "a"}, "tools must be a list"),
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
Error = type[Exception]
TEMPLATES: list[tuple[type, bytes, Error, str]] = [
    (ChatDataModule, RAISES, CorruptDataError, r"rows\.jsonl:1 is rejected by .* no"),
    (
        ChatDataModule,
        b"xy{% generation %}{% endgeneration %}hello",
        CorruptDataError,
        "an answer with at least one token",
    ),
    (
        ChatDataModule,
        b"{{ messages | length }}",
        UnsupportedError,
        r"rows\.jsonl:1: the first 1 messages must",
    ),
    (PreferenceDataModule, RAISES, CorruptDataError, r"rows\.jsonl:1 is rejected by .* no"),
    (PreferenceDataModule, CONSTANT, CorruptDataError, r"makes the same \d+ tokens"),
    (PreferenceDataModule, b"{{ 'a' * 9999999 }}", CorruptDataError, r"at most \d+ are expected"),
    (PreferenceDataModule, ENDLESS, CorruptDataError, "still computes"),
    (
        PreferenceDataModule,
        b"{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        CorruptDataError,
        r"rows\.jsonl:1 is rejected",
    ),
    (PreferenceDataModule, b"\xff", CorruptDataError, r"x\.jinja: byte \d+ is not UTF-8"),
]


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
    pairs = write_lines(tmp_path / "pairs.jsonl", preferences(2))
    for make, rows in ((ChatDataModule, path), (PreferenceDataModule, pairs)):
        with pytest.raises(UnsupportedError, match="must have one chat template"):
            make(rows, str(tmp_path / "untemplated")).setup("fit")
    with pytest.raises(UnsupportedError, match="names none"):
        ChatDataModule(str(tmp_path / "none.jsonl"), model)
    with pytest.raises(UnsupportedError, match="local folder with tokenizer.json"):
        ChatDataModule(path, str(tmp_path)).setup("fit")
    with pytest.raises(UnsupportedError, match="packing=False"):
        ChatDataModule(path, model, packing=False, balance_attention=True)
    with pytest.raises(UnsupportedError, match=r"context_windows \(4\) .* packing=False"):
        ChatDataModule(path, model, packing=False, context_windows=4)
    with pytest.raises(ParallelPlanError, match=r"context_windows \(3\) must be a power of two"):
        ChatDataModule(path, model, context_windows=3)
    with pytest.raises(ParallelPlanError, match="length_multiple must be a whole number"):
        PreferenceDataModule(pairs, model, length_multiple=0)


@pytest.mark.extras
def test_parquet_has_the_rows_of_json_lines(tmp_path, model):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def write(name: str, rows: list[dict[str, Any]]) -> str:
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
        return str(tmp_path / name)

    rows, pairs = conversations(9), [as_messages(row) for row in preferences(5)]
    data = ChatDataModule(write("rows.parquet", rows), model, seq_length=LENGTH)
    assert sorted(documents_of(data)) == expected_of(model, rows)
    bad = ChatDataModule(write("bad.parquet", [*rows, {"messages": [QUESTION]}]), model)
    with pytest.raises(CorruptDataError, match=r"bad\.parquet, row 10 has no message"):
        bad.setup("fit")
    preferred = PreferenceDataModule(write("pairs.parquet", pairs), model, seq_length=LENGTH)
    check_pairs(preferred.each_pair_once("train").batches[list(range(5))], model, pairs)


@pytest.mark.extras
def test_a_folder_of_datasets_has_the_rows_of_json_lines(tmp_path, model):
    datasets = pytest.importorskip("datasets")
    rows = conversations(9)
    pairs = [{"prompt": "why", "completion": "so"}]
    splits = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(pairs)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set", num_shards={"train": 3, "test": 1})
    train_path, val_path = str(tmp_path / "set" / "train"), str(tmp_path / "set" / "test")
    data = ChatDataModule(train_path, model, val=val_path, seq_length=LENGTH)
    data.setup("fit")
    expected = expected_of(model, rows)
    assert sorted(documents_of(data)) == expected
    assert data.encoded("val").num_read == 1
    # Files and folders mix, and globs find folders.
    lines = write_lines(tmp_path / "rows.jsonl", rows)
    mixed = ChatDataModule([lines, str(tmp_path / "set" / "tr*")], model, seq_length=LENGTH)
    assert sorted(documents_of(mixed)) == sorted(2 * expected)
    with pytest.raises(UnsupportedError, match=r"splits \['test', 'train'\].* such as .*set/test"):
        ChatDataModule(str(tmp_path / "set"), model)
    path = tmp_path / "bad"
    datasets.Dataset.from_list([*rows[:3], {"messages": [QUESTION]}]).save_to_disk(path)
    with pytest.raises(CorruptDataError, match="bad, row 4 has no message of the role assistant"):
        ChatDataModule(str(path), model).setup("fit")
    arrow = next(path.glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:40])
    for _ in range(2):
        with pytest.raises(CorruptDataError, match="bad cannot be read as a folder of datasets"):
            ChatDataModule(str(path), model).setup("fit")
        arrow.unlink(missing_ok=True)


def test_a_folder_of_datasets_needs_its_extra(tmp_path, model, monkeypatch):
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"lightning-megatron\[datasets\]"):
        ChatDataModule(str(tmp_path), model).setup("fit")


def test_named_sets_have_a_loader_each(tmp_path, model):
    rows = conversations(12)
    val = {
        "short": write_lines(tmp_path / "a.jsonl", rows[:3]),
        "long": [write_lines(tmp_path / name, rows[3:7]) for name in ("b.jsonl", "c.jsonl")],
    }
    path = write_lines(tmp_path / "rows.jsonl", rows)
    data = ChatDataModule(path, model, val, seq_length=LENGTH, packing=False)
    data.setup("fit")
    assert data.set_names == {"val": ("short", "long"), "test": ()}
    assert [len(loader) for loader in data.val_dataloader()] == [3, 8]
    assert data.test_dataloader() == []
    actual = sorted(batch["tokens"][0].tolist() for batch in data.val_dataloader()[0])
    expected = [tokens[:-1] for tokens, _ in expected_of(model, rows[:3])]
    assert [row[: len(tokens)] for row, tokens in zip(actual, expected, strict=True)] == expected
    with pytest.raises(UnsupportedError, match="val must give each set a name and at least one"):
        ChatDataModule(path, model, val={"": "x"})


class PairRecorder(Watcher):
    """Module that records the numbers of pairs."""

    def names_of(self, batch: dict[str, torch.Tensor]) -> list[Any]:
        return batch["pairs"].tolist()


@pytest.mark.parametrize("limits", [{"max_steps": 9, "max_epochs": -1}, {"max_epochs": 2}])
@pytest.mark.parametrize("make", [ChatDataModule, PreferenceDataModule])
def test_a_killed_run_continues_with_the_next_row(tmp_path, model, make, limits):
    is_chat = make is ChatDataModule
    rows = conversations(40) if is_chat else preferences(14)
    path = write_lines(tmp_path / "rows.jsonl", rows)

    def trained(*callbacks: Any, ckpt_path: Path | None = None) -> list[list[Any]]:
        data = make(path, model, seq_length=LENGTH, global_batch_size=3)
        trainer = make_trainer(tmp_path, *callbacks, **limits)
        return run(Watcher() if is_chat else PairRecorder(), data, trainer, ckpt_path)

    assert len(check_resumes(trained, tmp_path, 2, 5)) >= 6
