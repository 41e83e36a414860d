"""Tokenizers have the published ids, restore texts, and have different fingerprints."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data import installed
from lightning_megatron.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    vocab_size_of,
)
from lightning_megatron.errors import CorruptDataError, MissingExtraError, UnsupportedError
from tests.corpora import GPT2_BPE, MINILM, need


@settings(deadline=None)
@given(text=st.text())
def test_the_byte_tokenizer_restores_every_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens == list(text.encode())
    assert tokenizer.decode([*tokens, 256]) == text


def test_the_byte_tokenizer_has_257_tokens_of_which_the_last_ends_a_document() -> None:
    tokenizer = load_tokenizer("bytes")
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == ("bytes", 257, 256)


def test_gpt2_gives_the_published_ids() -> None:
    need(GPT2_BPE)
    tokenizer = load_tokenizer("gpt2")
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
    assert tokenizer.encode("Hello world") == [15496, 995]
    text = "Ünïcode, two  spaces, \n\n and 世界 \t end. "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_directory_with_vocabulary_and_merges_is_the_same_tokenizer() -> None:
    by_name, by_path = (
        load_tokenizer("gpt2") if need(GPT2_BPE) else None,
        load_tokenizer(need(GPT2_BPE)),
    )
    assert by_name is not None
    assert by_path.fingerprint == by_name.fingerprint
    assert by_path.encode("Fellow citizens") == by_name.encode("Fellow citizens")


def write_word_tokenizer(path: Path, words: list[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="pip install tokenizers")
    model = tokenizers.models.WordLevel(
        {word: i for i, word in enumerate(words)}, unk_token="[UNK]"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(path))


def test_a_tokenizer_json_is_read_by_file_and_by_directory_without_its_truncation(
    tmp_path: Path,
) -> None:
    write_word_tokenizer(tmp_path / "tokenizer.json", ["[UNK]", "a", "b", "</s>"])
    by_file, by_directory = load_tokenizer(tmp_path / "tokenizer.json"), load_tokenizer(tmp_path)
    assert by_file.encode("a b c a b") == by_directory.encode("a b c a b") == [1, 2, 0, 1, 2]
    assert (by_file.vocab_size, by_file.eod) == (4, 3)
    assert by_file.fingerprint == by_directory.fingerprint


def test_different_tokenizers_have_different_fingerprints(tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path / "one.json", ["[UNK]", "a", "b"])
    write_word_tokenizer(tmp_path / "two.json", ["[UNK]", "b", "a"])
    fingerprints = {
        load_tokenizer(tmp_path / name).fingerprint for name in ("one.json", "two.json")
    }
    assert len(fingerprints | {ByteTokenizer.fingerprint}) == 3


def test_the_end_of_document_token_can_be_chosen_by_name(tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path / "t.json", ["[UNK]", "a", "STOP"])
    assert load_tokenizer(tmp_path / "t.json").eod is None
    assert load_tokenizer(tmp_path / "t.json", eod="STOP").eod == 2
    with pytest.raises(UnsupportedError, match="'HALT' is not in the vocabulary"):
        load_tokenizer(tmp_path / "t.json", eod="HALT")


def test_no_special_tokens_are_added_to_text() -> None:
    directory = need(MINILM)
    tokenizer = load_tokenizer(directory / "tokenizer.json")
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    assert tokenizer.encode("hello world") == [vocabulary["hello"], vocabulary["world"]]


def test_the_error_for_an_unknown_tokenizer_lists_the_known_names(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"Use 'bytes', 'gpt2', 'bert', 'speeches-wordpiece', the path of a tokenizer\.json",
    ):
        load_tokenizer(tmp_path)


def test_a_missing_package_is_named_with_its_extra() -> None:
    with pytest.raises(MissingExtraError, match=r'pip install "lightning-megatron\[text\]"'):
        installed.locate_installed("no-such-distribution", "x", extra="text")


def test_ids_may_have_gaps_but_none_is_far_beyond_the_number_of_tokens() -> None:
    assert vocab_size_of([0, 7], "x") == 8
    assert vocab_size_of(range(10, 300_000), "x") == 300_000
    for ids in ([], [0, 10**9], [*range(1000), 200_000]):
        with pytest.raises(CorruptDataError, match=r"x has (no|\d+) tokens"):
            vocab_size_of(ids, "x")


def test_damaged_tokenizer_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    write_word_tokenizer(path, ["[UNK]", "a", "b", "</s>"])
    content = path.read_bytes()
    expected = load_tokenizer(path).encode("a b c")
    chance = random.Random(2)
    damages = [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff" * 9,
        content[:-9],
        b"[" * 10**5,
        content.replace(b'"b"', b'"a"'),
    ]
    for _ in range(60):
        position = chance.randrange(len(content))
        damages += [
            content[:position],
            content[:position] + chance.randbytes(3) + content[position + 3 :],
        ]
    refused = 0
    for damaged in damages:
        path.write_bytes(damaged)
        try:
            assert len(load_tokenizer(path).encode("a b c")) == len(expected)
        except CorruptDataError as error:
            refused += "tokenizer.json" in str(
                error
            ) and "Copy the files of the tokenizer again" in str(error)
    assert refused > 100


@pytest.mark.parametrize(
    ("vocab", "merges"),
    [
        ("", "#version: 0.2\n"),
        ("[]", "#version: 0.2\n"),
        ("{}", "#version: 0.2\n"),
        ('{"a": -1}', "#version: 0.2\n"),
        ('{"a": 1.5}', "#version: 0.2\n"),
        ('{"a": 0, "a": 1}', "#version: 0.2\n"),
        ('{"a": 0}', "#version: 0.2\na b c\n"),
        ('{"a": 0}', "#version: 0.2\na b\n"),
    ],
)
def test_a_damaged_vocabulary_or_merges_are_refused(
    tmp_path: Path, vocab: str, merges: str
) -> None:
    pytest.importorskip("tokenizers", reason="pip install tokenizers")
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(CorruptDataError, match=r"tokenizer"):
        load_tokenizer(tmp_path)
