"""Texts and pairs of texts have the tokens of transformers' tokenizers of BERT and RoBERTa."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.finetuning.tokens import PairTokenizer
from tests.finetuning.folders import save_byte_tokenizer, save_tokenizer

transformers = pytest.importorskip("transformers")
PAIRS = (["the cat sees", "a dog"], ["who runs", "the old house near the river"])


def test_a_tokenizer_json_without_a_class_name_is_read_by_its_kind(tmp_path: Path) -> None:
    named = PairTokenizer(str(save_byte_tokenizer(tmp_path / "named")))
    unnamed = PairTokenizer(str(save_byte_tokenizer(tmp_path / "unnamed", is_named=False)))
    actual = unnamed.pairs(*PAIRS, 32, "longest_first")
    assert actual == named.pairs(*PAIRS, 32, "longest_first")
    tokens, types, num_cut = actual
    # <s> a </s></s> b </s>
    assert [sequence[0] for sequence in tokens] == [0, 0]
    assert [sequence.count(2) for sequence in tokens] == [3, 3]
    assert tokens[1][3:5] == [2, 2]
    assert not any(map(any, types))
    assert num_cut == 0
    assert (named.num_separators, named.padding) == (4, 1)
    assert PairTokenizer(str(save_tokenizer(tmp_path / "bert"))).num_separators == 3


def test_a_first_text_must_leave_room_for_the_second(tmp_path: Path) -> None:
    for folder, special in (
        (save_tokenizer(tmp_path / "bert"), 3),
        (save_byte_tokenizer(tmp_path / "roberta"), 4),
    ):
        tokenizer = PairTokenizer(str(folder))
        [row], _, _ = tokenizer.pairs(["the cat"], ["a dog sees"], 3 + special, "only_second")
        assert len(row) == 3 + special
        with pytest.raises(CorruptDataError, match=f"has 2, and a pair has {special} special"):
            tokenizer.pairs(["the cat"], ["a dog sees"], 2 + special, "only_second")


def test_short_texts_end_with_complete_characters(tmp_path: Path) -> None:
    tokenizer = PairTokenizer(str(save_byte_tokenizer(tmp_path)))
    # The space and the three bytes of the sign are tokens.
    text = "the \u20ac cat"
    assert tokenizer.short([text], 1) == (["the"], 1)
    assert tokenizer.short([text], 4) == (["the "], 1)
    assert tokenizer.short([text], 5) == (["the \u20ac"], 1)
    assert tokenizer.short([text], 6) == ([text], 0)


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"tokenizer.json or vocab.txt: .* BERT or RoBERTa"):
        PairTokenizer(str(tmp_path))
    folder = save_byte_tokenizer(tmp_path / "damaged", is_named=False)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptDataError, match=r"tokenizer.json is not valid JSON"):
        PairTokenizer(str(folder))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {}}))
    with pytest.raises(CorruptDataError, match="no tokenizer that transformers can read"):
        PairTokenizer(str(folder))
