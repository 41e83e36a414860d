"""ChatDataModule has the tokens and labels of transformers' chat templates, and resumes runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron import ChatDataModule
from lightning_megatron.errors import (
    CorruptDataError,
    MissingExtraError,
    ParallelPlanError,
    UnsupportedError,
)
from tests.chat_folder import MARKED, PLAIN, conversations, save_chat_llama, turn, write_lines
from tests.data.recorder import Watcher, make_trainer, run
from tests.data.test_datamodule_resume import StopAfter

transformers = pytest.importorskip("transformers")

LENGTH = 250
QUESTION = turn("user", "why")
ANSWER = turn("assistant", "so")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "chat.jinja"
    path.write_text(PLAIN)
    return str(path)


def tokens_and_labels(folder: str, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Return tokens and labels by the assistant mask of transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, chat_template=MARKED
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    return encoded["input_ids"], [token if is_assistant else -100 for token, is_assistant in pairs]


def documents_of(data: ChatDataModule) -> list[tuple[list[int], list[int]]]:
    """Return tokens and labels, both unshifted, of each conversation of an epoch."""
    samples = data.training_samples(None)
    batch = data.loader_of(samples, None).batches[list(range(len(samples)))]  # type: ignore[arg-type]
    documents = []
    for row in range(len(samples)):
        window = samples[row].tolist()
        labels = [-100, *batch["labels"][row].tolist()]
        start = 0
        for size in samples.lengths(row):
            documents.append((window[start : start + size], labels[start : start + size]))
            start += size
        assert set(labels[start:]) <= {-100}
        sizes = samples.lengths(row)
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
    tmp_path: Path, folder: str, template: str, is_marked: bool, packing: bool
) -> None:
    rows = conversations(20)
    data = ChatDataModule(
        write_lines(tmp_path / "rows.jsonl", rows), folder, seq_length=LENGTH, packing=packing,
        chat_template=None if is_marked else template, seed=3,
    )  # fmt: skip
    data.setup("fit")
    actual = documents_of(data)
    assert sorted(actual) == sorted(tokens_and_labels(folder, row["messages"]) for row in rows)
    assert (len(data.training_samples(None)) < 20) is packing
    # A second module reads what the first has stored.
    stored = ChatDataModule(
        str(tmp_path), folder, seq_length=LENGTH, packing=packing, seed=3,
        chat_template=None if is_marked else template,
    )  # fmt: skip
    assert documents_of(stored) == actual


def test_context_windows_hold_complete_conversations_with_their_labels(
    tmp_path: Path, folder: str
) -> None:
    rows = conversations(20)
    path = write_lines(tmp_path / "rows.jsonl", rows)
    windows = 4
    data = ChatDataModule(path, folder, seq_length=248, seed=3, context_windows=windows)
    data.setup("fit")
    samples = data.training_samples(None)
    batches = data.loader_of(samples, [[]]).batches  # type: ignore[arg-type]
    window_length = 248 // windows
    actual = []
    for row in range(len(samples)):
        batch = batches[[row]]
        tokens, labels = samples[row].tolist(), [-100, *batch["labels"][0].tolist()]
        positions = batch["position_ids"][0].tolist()
        start = 0
        longest = max(samples.lengths(row))  # of conversations and gaps
        group_length = window_length * next(
            n for n in (1, 2, 4) if longest <= n * window_length + (n == windows)
        )
        for size in samples.lengths(row):
            conversation, conversation_labels = (
                tokens[start : start + size],
                labels[start : start + size],
            )
            num_inputs = min(size, len(tokens) - 1 - start)  # the last token is a label
            if conversation[0] == -1:
                assert set(conversation) == {-1}
                assert set(labels[start + 1 : start + size]) <= {-100}
                assert not any(batch["tokens"][0, start : start + size])
            else:
                actual.append((conversation, conversation_labels))
                assert positions[start : start + num_inputs] == list(range(num_inputs))
                # The conversation lies in one group of windows, which has the size that the
                # longest conversation of the row needs.
                assert start // group_length == (start + num_inputs - 1) // group_length
            start += size
    assert sorted(actual) == sorted(tokens_and_labels(folder, row["messages"]) for row in rows)
    plain = ChatDataModule(path, folder, seq_length=248, seed=3)
    plain.setup("fit")
    assert plain.training_samples(None).order_key != samples.order_key


@pytest.mark.parametrize("is_marked", [True, False])
def test_only_the_completion_of_a_pair_has_labels(
    tmp_path: Path, folder: str, template: str, is_marked: bool
) -> None:
    chosen = None if is_marked else template
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "why", "completion": "so"}])
    data = ChatDataModule(path, folder, chat_template=chosen, seq_length=LENGTH)
    assert documents_of(data) == [tokens_and_labels(folder, [QUESTION, ANSWER])]
    path = write_lines(
        tmp_path / "b.jsonl", [{"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]}]
    )
    data = ChatDataModule(path, folder, chat_template=chosen, seq_length=LENGTH)
    tokens, labels = tokens_and_labels(folder, [QUESTION, ANSWER, QUESTION, ANSWER])
    first = len(tokens_and_labels(folder, [QUESTION, ANSWER])[0])
    assert documents_of(data) == [(tokens, [-100] * first + labels[first:])]


def test_a_warning_counts_truncated_and_omitted_conversations(tmp_path: Path, folder: str) -> None:
    long = [turn("user", "x" * 30), turn("assistant", "y" * 100)]
    lost = [turn("user", "x" * 300), ANSWER]
    rows = [{"messages": messages} for messages in ([QUESTION, ANSWER], long, lost)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    data = ChatDataModule(path, folder, seq_length=99)
    with pytest.warns(UserWarning, match=r"3 read, 1 cut after 100 tokens .*, 1 left out"):
        data.setup("fit")
    tokens, labels = tokens_and_labels(folder, long)
    assert (tokens[:100], labels[:100]) in documents_of(data)
    data = ChatDataModule(path, folder, seq_length=99, too_long="leave_out")
    with pytest.warns(UserWarning, match=r"3 read, 0 cut .*, 2 left out"):
        data.setup("fit")
    assert documents_of(data) == [tokens_and_labels(folder, [QUESTION, ANSWER])]
    data = ChatDataModule(path, folder, seq_length=99, too_long="refuse")
    with pytest.raises(CorruptDataError, match=r"rows.jsonl:2 has \d+ tokens"):
        data.setup("fit")


BAD: dict[str, tuple[Any, str]] = {
    "role": ({"messages": [turn("robot", "hi"), ANSWER]}, "message 1: the role must be"),
    "no answer": ({"messages": [QUESTION]}, "no message of the role assistant"),
    "empty answer": ({"messages": [QUESTION, turn("assistant", " ")]}, "answer without text"),
    "no content": ({"messages": [{"role": "user"}, ANSWER]}, "must have a text"),
    "no list": ({"messages": "why"}, "must be a non-empty list"),
    "no message": ({"messages": ["why"]}, "must be an object"),
    "half": ({"prompt": "why"}, "either messages or both"),
    "both": ({"messages": [QUESTION, ANSWER], "prompt": "a", "completion": "b"}, "either messages"),
    "tools": ({"messages": [QUESTION, ANSWER], "tools": "a"}, "tools must be a list"),
    "number": (7, "must hold a JSON object"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named_by_file_and_line(tmp_path: Path, folder: str, name: str) -> None:
    bad, reason = BAD[name]
    path = write_lines(tmp_path / "rows.jsonl", [*conversations(2), bad])
    with pytest.raises(CorruptDataError, match=rf"rows\.jsonl:3.*{reason}"):
        ChatDataModule(path, folder).setup("fit")


def test_invalid_lines_templates_and_paths_raise(tmp_path: Path, folder: str) -> None:
    good = json.dumps({"messages": [QUESTION, ANSWER]})
    (tmp_path / "rows.jsonl").write_text(f'{good}\n\n{{"messages": [\n')
    with pytest.raises(CorruptDataError, match=r"rows\.jsonl:3 is not valid JSON"):
        ChatDataModule(str(tmp_path), folder).setup("fit")
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": [QUESTION, ANSWER] * 2}])
    for content, error, reason in (
        ("{{ raise_exception('no') }}", CorruptDataError, r"rows\.jsonl:1 is rejected by .* no"),
        (
            "xy{% generation %}{% endgeneration %}hello",
            CorruptDataError,
            "an answer with at least one token",
        ),
        ("{{ messages | length }}", UnsupportedError, r"rows\.jsonl:1: the first 1 messages must"),
    ):
        (tmp_path / "bad.jinja").write_text(content)
        with pytest.raises(error, match=reason):
            ChatDataModule(path, folder, chat_template=str(tmp_path / "bad.jinja")).setup("fit")
    with pytest.raises(UnsupportedError, match="names none"):
        ChatDataModule(str(tmp_path / "none.jsonl"), folder)
    with pytest.raises(UnsupportedError, match="local folder with tokenizer.json"):
        ChatDataModule(path, str(tmp_path)).setup("fit")
    with pytest.raises(UnsupportedError, match="packing=False"):
        ChatDataModule(path, folder, packing=False, balance_attention=True)
    with pytest.raises(UnsupportedError, match=r"context_windows \(4\) .* packing=False"):
        ChatDataModule(path, folder, packing=False, context_windows=4)
    with pytest.raises(ParallelPlanError, match=r"context_windows \(3\) must be a power of two"):
        ChatDataModule(path, folder, context_windows=3)


def test_a_folder_without_a_template_raises(tmp_path: Path) -> None:
    from tests.tiny_llama import save_tiny_llama

    save_tiny_llama(tmp_path / "model")
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": [QUESTION, ANSWER]}])
    with pytest.raises(UnsupportedError, match="must have one chat template"):
        ChatDataModule(path, str(tmp_path / "model")).setup("fit")


def test_parquet_has_the_rows_of_json_lines(tmp_path: Path, folder: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = conversations(9)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    data = ChatDataModule(str(tmp_path / "rows.parquet"), folder, seq_length=LENGTH)
    assert sorted(documents_of(data)) == sorted(
        tokens_and_labels(folder, row["messages"]) for row in rows
    )
    parquet.write_table(
        pyarrow.Table.from_pylist([*rows, {"messages": [QUESTION]}]), tmp_path / "bad.parquet"
    )
    with pytest.raises(CorruptDataError, match=r"bad\.parquet, row 10 has no message"):
        ChatDataModule(str(tmp_path / "bad.parquet"), folder).setup("fit")


def test_a_folder_of_datasets_has_the_rows_of_json_lines(tmp_path: Path, folder: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = conversations(9)
    pairs = [{"prompt": "why", "completion": "so"}]
    splits = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(pairs)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set", num_shards={"train": 3, "test": 1})
    train_path, val_path = str(tmp_path / "set" / "train"), str(tmp_path / "set" / "test")
    data = ChatDataModule(train_path, folder, val=val_path, seq_length=LENGTH)
    data.setup("fit")
    expected = sorted(tokens_and_labels(folder, row["messages"]) for row in rows)
    assert sorted(documents_of(data)) == expected
    assert data.encoded("val").num_read == 1
    # Files and folders mix, and globs find folders.
    lines = write_lines(tmp_path / "rows.jsonl", rows)
    mixed = ChatDataModule([lines, str(tmp_path / "set" / "tr*")], folder, seq_length=LENGTH)
    assert sorted(documents_of(mixed)) == sorted(2 * expected)
    with pytest.raises(UnsupportedError, match=r"splits \['test', 'train'\].* such as .*set/test"):
        ChatDataModule(str(tmp_path / "set"), folder)


def test_invalid_rows_and_damaged_files_of_a_datasets_folder_are_named(
    tmp_path: Path, folder: str
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [*conversations(3), {"messages": [QUESTION]}]
    path = tmp_path / "bad"
    datasets.Dataset.from_list(rows).save_to_disk(path)
    with pytest.raises(CorruptDataError, match="bad, row 4 has no message of the role assistant"):
        ChatDataModule(str(path), folder).setup("fit")
    arrow = next(path.glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:40])
    with pytest.raises(CorruptDataError, match="bad cannot be read as a folder of datasets"):
        ChatDataModule(str(path), folder).setup("fit")
    arrow.unlink()
    with pytest.raises(CorruptDataError, match="bad cannot be read as a folder of datasets"):
        ChatDataModule(str(path), folder).setup("fit")


def test_a_folder_of_datasets_needs_its_extra(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"lightning-megatron\[datasets\]"):
        ChatDataModule(str(tmp_path), folder).setup("fit")


def test_named_sets_have_a_loader_each(tmp_path: Path, folder: str) -> None:
    rows = conversations(12)
    val = {
        "short": write_lines(tmp_path / "a.jsonl", rows[:3]),
        "long": [write_lines(tmp_path / name, rows[3:7]) for name in ("b.jsonl", "c.jsonl")],
    }
    data = ChatDataModule(
        write_lines(tmp_path / "rows.jsonl", rows), folder, val, seq_length=LENGTH, packing=False
    )
    data.setup("fit")
    assert data.set_names == {"val": ("short", "long"), "test": ()}
    assert [len(loader) for loader in data.val_dataloader()] == [3, 8]
    assert data.test_dataloader() == []
    actual = sorted(batch["tokens"][0].tolist() for batch in data.val_dataloader()[0])
    expected = sorted(tokens_and_labels(folder, row["messages"])[0][:-1] for row in rows[:3])
    assert [row[: len(tokens)] for row, tokens in zip(actual, expected, strict=True)] == expected
    with pytest.raises(UnsupportedError, match="val must give each set a name and at least one"):
        ChatDataModule(str(tmp_path / "rows.jsonl"), folder, val={"": "x"})


@pytest.mark.parametrize("limits", [{"max_steps": 9, "max_epochs": -1}, {"max_epochs": 2}])
def test_a_killed_run_continues_with_the_next_row(
    tmp_path: Path, folder: str, limits: dict[str, int]
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", conversations(40))

    def make_data() -> ChatDataModule:
        return ChatDataModule(path, folder, seq_length=LENGTH, global_batch_size=3)

    def trained(*callbacks: Any, ckpt_path: Path | None = None) -> list[list[int]]:
        trainer = make_trainer(tmp_path, *callbacks, **limits)
        return run(Watcher(), make_data(), trainer, ckpt_path)

    uninterrupted = trained()
    assert len(uninterrupted) >= 6
    killed = tmp_path / "killed.ckpt"
    for stop in (2, 5):
        first = trained(StopAfter(stop, killed))
        assert first == uninterrupted[:stop]
        assert first + trained(ckpt_path=killed) == uninterrupted
