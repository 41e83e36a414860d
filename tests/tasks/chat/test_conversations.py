"""Conversations have the tokens and labels of transformers' chat templates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_megatron.errors import (
    CorruptDataError,
    ParallelPlanError,
    UnsupportedError,
)
from lightning_megatron.tasks.chat import ChatDataModule
from lightning_megatron.tasks.chat.chat_template import read_template
from tests.tasks.chat.chat_folder import MARKED, conversations, turn, write_lines
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

transformers = pytest.importorskip("transformers")

Document = tuple[list[int], list[int]]


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


def test_warnings_count_truncated_and_omitted_rows(tmp_path, model):
    short, lost = [QUESTION, ANSWER], [turn("user", "x" * 300), ANSWER]
    rows = [{"messages": messages} for messages in (short, LONG, lost)]
    data, left_out = check_counts(ChatDataModule, model, tmp_path / "rows.jsonl", rows, (3, 1, 1))
    tokens, labels = tokens_and_labels(model, LONG)
    assert (tokens[:100], labels[:100]) in documents_of(data)
    assert documents_of(left_out) == [tokens_and_labels(model, short)]


def test_files_without_a_usable_row_are_refused_from_the_cache_too(tmp_path, model, monkeypatch):
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": [turn("user", "x" * 300), ANSWER]}])
    for _ in range(2):
        with pytest.raises(CorruptDataError, match="1 were read, and 1 left out as too long"):
            ChatDataModule(path, model, seq_length=99).setup("fit")
        # The first module has written the rows that remain, which are none.
        monkeypatch.setattr(ChatDataModule.encoder_class, "encode_row", None)


def test_bad_rows_are_named_by_file_and_line(tmp_path, model):
    good, robot = {"messages": [QUESTION, ANSWER]}, turn("robot", "hi")
    bad = [
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
    check_bad_rows(ChatDataModule, model, tmp_path, conversations(2), bad)
    (tmp_path / "rows.jsonl").write_text(f'{json.dumps(good)}\n\n{{"messages": [\n')
    with pytest.raises(CorruptDataError, match=r"rows\.jsonl:3 is not valid JSON"):
        ChatDataModule(str(tmp_path), model).setup("fit")


TEMPLATES = [
    (b"{{ raise_exception('no') }}", CorruptDataError, r"rows\.jsonl:1 is rejected by .* no"),
    (b"xy{% generation %}{% endgeneration %}hello", CorruptDataError, "with at least one token"),
    (b"{{ messages | length }}", UnsupportedError, r"rows\.jsonl:1: the first 1 messages must"),
    (
        b"{%- generation +%}\n{% break }",
        CorruptDataError,
        r"x\.jinja is not Jinja: .* in its line 2",
    ),
]


def test_a_template_with_marks_and_loop_controls_is_read_without_its_tokenizer(tmp_path):
    text = (
        "{% for m in messages %}{%- generation +%}{{ m }}{%+endgeneration-%}{% break %}{% endfor %}"
    )
    for name, content in {
        "tokenizer.json": "damaged",
        "tokenizer_config.json": json.dumps({"chat_template": text}),
    }.items():
        (tmp_path / name).write_text(content)
    assert read_template(str(tmp_path), None) == text
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert read_template(str(tmp_path), None) == "newer"


@pytest.mark.parametrize("number", range(len(TEMPLATES)))
def test_templates_without_tokens_or_without_marks_are_refused(tmp_path, model, number):
    rows = [{"messages": [QUESTION, ANSWER] * 2}]
    check_template(ChatDataModule, model, tmp_path, rows, TEMPLATES[number])


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
    ]  # fmt: skip
    for call, message in cases:
        with pytest.raises((UnsupportedError, ParallelPlanError), match=message):
            call()


@pytest.mark.extras
def test_parquet_and_folders_of_datasets_have_the_rows_of_json_lines(tmp_path, model):
    rows = conversations(9)
    bad = [*rows, {"messages": [QUESTION]}]
    for end, place in ((".parquet", r"bad\.parquet, row 10"), ("", "bad, row 10")):
        data = ChatDataModule(write_table(tmp_path / f"rows{end}", rows), model, seq_length=LENGTH)
        assert sorted(documents_of(data)) == expected_of(model, rows)
        with pytest.raises(CorruptDataError, match=f"{place} has no message of the role"):
            ChatDataModule(write_table(tmp_path / f"bad{end}", bad), model).setup("fit")
    # Files and folders mix, and globs find folders.
    lines = write_lines(tmp_path / "rows.jsonl", rows)
    mixed = ChatDataModule([lines, str(tmp_path / "row[s]")], model, seq_length=LENGTH)
    assert sorted(documents_of(mixed)) == sorted(2 * expected_of(model, rows))
    arrow = next((tmp_path / "rows").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:40])
    with pytest.raises(CorruptDataError, match="rows cannot be read as a folder of datasets"):
        ChatDataModule(str(tmp_path / "rows"), model).setup("fit")
