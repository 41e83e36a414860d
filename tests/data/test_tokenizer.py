"""Tokenizers have the published ids and restore texts; texts are cut into complete sentences."""

from __future__ import annotations

import json
import multiprocessing
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.cli.command import run_command
from lightning_megatron.cli.preprocess import COMMAND
from lightning_megatron.data import speeches
from lightning_megatron.data.checked_files import locate_installed
from lightning_megatron.data.encoded_document import split_sentences
from lightning_megatron.data.speeches import load_speeches, prepare_speeches
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    vocab_size_of,
)
from lightning_megatron.errors import CorruptDataError, MissingExtraError, UnsupportedError
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
    # A vocabulary with capitals keeps the capitals of the text.
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Word", "word", "##s", "É", "E"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    texts = [
        "Élan vital — naïve 世界, unaffable [MASK] words\u2028of U.S. law.",
        "",
        "a" * 120 + " end",
    ]
    for folder, is_lower, more in ((directory, True, [named]), (tmp_path, False, [])):
        path = str(folder / "vocab.txt")
        reference = transformers.BertTokenizerFast(path, do_lower_case=is_lower)
        for text in [*texts, "Words word É e", "WORD Word."]:
            expected = reference(text, add_special_tokens=False)["input_ids"]
            assert all(each.encode(text) == expected for each in (load_tokenizer(path), *more))
    assert (named.name, named.vocab_size) == ("bert", 30522)
    assert load_tokenizer(directory / "vocab.txt").fingerprint == named.fingerprint


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
        try:
            assert len(load_tokenizer(path).encode("a b c")) == 3
        except CorruptDataError as error:
            message = "tokenizer.json.*Copy the files of the tokenizer again"
            refused += re.search(message, str(error), re.DOTALL) is not None
    assert refused > 55
    path.unlink()
    for vocabulary in ("", "[]", "{}", '{"a": -1}', '{"a": 1.5}', '{"a": 0, "a": 1}', '{"a": 0}'):
        (tmp_path / "vocab.json").write_text(vocabulary)
        (tmp_path / "merges.txt").write_text("#version: 0.2\na b c\n")
        with pytest.raises(CorruptDataError, match="tokenizer"):
            load_tokenizer(tmp_path)
    start = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n"
    for lines, reason in (
        (start + b"a\n", r"\[MASK\] is missing"),
        (start + b"[MASK]\na\na\n", "a line occurs twice"),
        (b"\xff\n", "is not UTF-8"),
    ):
        (tmp_path / "vocab.txt").write_bytes(lines)
        with pytest.raises(CorruptDataError, match=reason):
            load_tokenizer(tmp_path / "vocab.txt")
    cases = [
        (([], "x"), "x has no tokens"),
        (([0, 10**6], "x"), "x has 2 tokens and the id 1000000"),
    ]
    check_refusals(vocab_size_of, cases, CorruptDataError)


@pytest.mark.parametrize("spec", ["bytes", "gpt2", "speeches-wordpiece", "words"])
def test_the_files_of_a_tokenizer_make_the_same_tokens_in_transformers(spec, tmp_path):
    transformers = pytest.importorskip("transformers")
    if spec == "gpt2":
        need(GPT2_BPE)
    words = write_words(tmp_path / "words.json", ["[UNK]", "we", "the", "</s>"])
    tokenizer = load_tokenizer(words if spec == "words" else spec)
    for name, content in tokenizer.files().items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    for text in ("we the people", "Ünïcode, two  spaces, \n\n and 世界 \t end. "):
        tokens = tokenizer.encode(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokens
        assert again.encode(text) == tokens
        assert again.decode(tokens) == tokenizer.decode(tokens)
    assert theirs.eos_token_id == again.eod == tokenizer.eod
    assert again.vocab_size == tokenizer.vocab_size


def test_a_package_that_is_not_installed_is_named_with_its_extra():
    for package in ("not-installed", "numpy"):
        with pytest.raises(
            MissingExtraError, match=rf"x of the package {package} .*megatron\[text"
        ):
            locate_installed(package, "x", extra="text")


SENTENCES = [
    ["One.", "Two!", "Three?", "Four"],
    ["Mr. Adams met Gen. Lee—Dr. Ash too—on Oct. 5 at St. Louis.", "He left."],
    ["The U.S. Navy and J. Q. Adams.", "See No. 5.", "No.", "Yes."],
    ['He said "Stop."', 'Then "Go!"', "(At once.)", "He went."],
    ["It cost $2.5 million.", "20 men came. it rained"],
    ["What?!", "Oh...", "Well"],
]


def test_sentences_end_where_a_reader_ends_them():
    for sentences in SENTENCES:
        assert split_sentences(" ".join(sentences)) == sentences
    lines = ["A heading", "A line\nbroken.", "New"]
    assert split_sentences("A heading\n\nA line\nbroken. New") == lines


@given(st.text(st.sampled_from(list("AbC1 .!?\"')(\n\t’é")), max_size=60))
def test_no_character_is_lost_and_no_sentence_is_empty(text):
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)
    # A single sentence is not split again.
    assert all(split_sentences(sentence) == [sentence] for sentence in sentences)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_preprocess_writes_each_sentence_as_a_sequence(tmp_path, workers):
    texts = ["One. Two! Three", "", "Alone.", "Mr. A. B. Clay spoke.\n\nAll rose."]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    paths = [str(tmp_path / "in.jsonl"), str(tmp_path / "out")]
    options = ["--workers", workers, "--no-progress", "--split-sentences"]
    run_command("preprocess", COMMAND, [*paths, *options], "")
    corpus = TokenFile(tmp_path / "out")
    sentences = [ByteTokenizer().decode(corpus[n].tolist()) for n in range(len(corpus))]
    expected = ["One.", "Two!", "Three", "Alone.", "Mr. A. B. Clay spoke.", "All rose."]
    assert (sentences, corpus.document_index.tolist()) == (expected, [0, 3, 3, 4, 6])
    # As in Megatron's tool, the end of a document follows its last sentence.
    paths[1] = str(tmp_path / "end")
    run_command("preprocess", COMMAND, [*paths, *options, "--append-eod"], "")
    corpus = TokenFile(tmp_path / "end")
    assert [int((corpus[number] == 256).sum()) for number in range(6)] == [0, 0, 1, 1, 0, 1]
    assert [int(corpus[number][-1]) for number in (2, 3, 5)] == [256] * 3


def test_several_processes_write_the_speeches_once_and_sentences_to_other_files(tmp_path):
    need(SPEECHES)
    tokenizer = ByteTokenizer()
    with multiprocessing.get_context("fork").Pool(3) as pool:
        results = [pool.apply_async(prepare_speeches, (tmp_path, tokenizer)) for _ in range(3)]
        first, *others = [result.get(timeout=60) for result in results]
    assert others == [first, first]
    assert {path.suffix for path in tmp_path.iterdir()} == {".bin", ".idx", ".json", ".lock"}
    corpus = TokenFile(first["heldout"])
    assert corpus.num_tokens == corpus.description.num_bytes + corpus.num_documents
    assert tokenizer.decode(corpus[3].tolist()) == load_speeches("heldout")[3]
    by_sentence = prepare_speeches(tmp_path, tokenizer, by_sentence=True)
    assert not set(first.values()) & set(by_sentence.values())
    corpus = TokenFile(by_sentence["heldout"])
    assert corpus.num_documents == 22
    assert len(corpus) > 100 * 22


def test_changed_speeches_are_refused(tmp_path, monkeypatch):
    (tmp_path / "speeches").mkdir()
    header = "fileid,year,date,sha256\n"
    (tmp_path / "metadata.csv").write_text(f"{header}a,1800,1800-01-01,{'0' * 64}\n")
    (tmp_path / "speeches" / "a.txt").write_text("changed")
    monkeypatch.setattr(speeches, "locate_installed", lambda *_, **__: tmp_path)
    with pytest.raises(CorruptDataError, match=r"a\.txt must have sha256"):
        load_speeches("train")
