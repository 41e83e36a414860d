"""``preprocess`` writes all documents in order with any number of workers, and reports invalid lines
by number.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_megatron.cli.command import run_command
from lightning_megatron.cli.preprocess import COMMAND
from lightning_megatron.data.encoded_document import cut_text
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.tokenizer import ByteTokenizer, load_tokenizer
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from tests.corpora import GPT2_BPE, need


def write_jsonl(path: Path, texts: Sequence[str], key: str = "text") -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")


def preprocess(folder: Path, name: str, options: str = "--workers 1", out: str = "out") -> None:
    paths = [str(folder / name), str(folder / out)]
    run_command("preprocess", COMMAND, [*paths, *options.split(), "--no-progress"], "")


def documents(prefix: Path) -> list[str]:
    corpus = TokenFile(prefix)
    bounds = corpus.document_index
    tokens = [
        corpus.tokens[corpus.starts[a] : corpus.starts[b]]
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    return [ByteTokenizer().decode(piece.tolist()) for piece in tokens]


def test_json_lines_become_documents_in_order(tmp_path):
    texts = ["first", "", "third é", "fourth"]
    write_jsonl(tmp_path / "in.jsonl", texts)
    preprocess(tmp_path, "in.jsonl", "--append-eod --workers 1")
    assert documents(tmp_path / "out") == texts
    corpus = TokenFile(tmp_path / "out")
    assert corpus.document_index.tolist() == [0, 1, 1, 2, 3], "an empty text has no end"
    assert [int(corpus[i][-1]) for i in range(3)] == [256, 256, 256]
    write_jsonl(tmp_path / "other.jsonl", ["a"], key="content")
    preprocess(tmp_path, "other.jsonl", "--json-key content")
    assert documents(tmp_path / "out") == ["a"]


def test_output_files_do_not_depend_on_the_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_megatron.data.documents.CHUNK_BYTES", 200)
    for part in range(3):
        write_jsonl(tmp_path / f"in{part}.jsonl", [f"{part} {i} " + "x" * i for i in range(50)])
    for workers in (1, 3):
        preprocess(tmp_path, "in*.jsonl", f"--workers {workers}", f"out{workers}")
    for suffix in ("bin", "idx", "json"):
        one, three = (tmp_path / f"out{workers}.{suffix}" for workers in (1, 3))
        assert one.read_bytes() == three.read_bytes()
    assert len(documents(tmp_path / "out3")) == 150


def test_plain_text_is_cut_by_file_line_or_paragraph(tmp_path):
    directory = tmp_path / "texts"
    directory.mkdir()
    (directory / "a.txt").write_text("one\ntwo\n\n\nthree\n")
    (directory / "b.txt.gz").write_bytes(gzip.compress(b"four"))
    (directory / "ignored.bin").write_bytes(b"\xff")
    for document, expected in {
        "file": ["one\ntwo\n\n\nthree\n", "four"],
        "line": ["one", "two", "three", "four"],
        "paragraph": ["one\ntwo", "three", "four"],
    }.items():
        preprocess(tmp_path, "texts", f"--document {document}")
        assert documents(tmp_path / "out") == expected


def test_an_unknown_suffix_and_a_corpus_without_text_are_refused(tmp_path):
    (tmp_path / "in.csv").write_text("some text")
    with pytest.raises(UnsupportedError, match="suffix of .*in.csv does not say"):
        preprocess(tmp_path, "in.csv")
    with pytest.raises(UnsupportedError, match="suffix of .*in.csv does not say"):
        preprocess(tmp_path, "in.*")
    write_jsonl(tmp_path / "in.jsonl", ["", ""])
    with pytest.raises(CorruptDataError, match="must have text: 2 documents were read"):
        preprocess(tmp_path, "in.jsonl", "--append-eod")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "in.jsonl"]
    write_jsonl(tmp_path / "in.jsonl", ["text"])
    preprocess(tmp_path, "in.jsonl")
    write_jsonl(tmp_path / "out" / "in.JSONL", ["more"])
    preprocess(tmp_path, "out", out="out/two")
    preprocess(tmp_path, "out", out="out/three")
    assert documents(tmp_path / "out/three") == ["more"], "descriptions of corpora are no text"


@pytest.mark.parametrize("options", ["--append-eod", "--split-sentences --append-eod", ""])
@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2", "speeches-wordpiece"])
def test_a_long_document_is_cut_among_workers_into_the_same_tokens(
    tmp_path, monkeypatch, tokenizer, options
):
    if tokenizer == "gpt2":
        need(GPT2_BPE)
    draw = random.Random(3)
    words = (
        "In 1863 our  fathers' nation, U.S.A. naïve (so-called) wept. \n It's.\n\n\n The\n".split(
            " "
        )
    )
    long = " ".join(draw.choice(words) for _ in range(9000))
    texts = ["short", long, "also short", "x" * 5000, long[:4000]]
    write_jsonl(tmp_path / "in.jsonl", texts)
    options += f" --tokenizer {tokenizer}"
    preprocess(tmp_path, "in.jsonl", options, "whole")
    monkeypatch.setattr("lightning_megatron.data.preprocess.PIECE", 1000)
    monkeypatch.setattr("lightning_megatron.data.documents.CHUNK_BYTES", 1000)
    if "sentences" not in options:
        pieces = list(cut_text(long, load_tokenizer(tokenizer), False, 1000))
        assert len(pieces) > 20
    preprocess(tmp_path, "in.jsonl", f"{options} --workers 2", "cut")
    for suffix in ("bin", "idx", "json"):
        whole, cut = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("whole", "cut"))
        assert whole == cut, suffix


FIRST = b'{"text": "first"}\n'
FAULTS = [
    (FIRST + b'\n{"text": "b"\n', "in.jsonl:3 is not valid JSON"),
    (b'{"content": "a"}\n', "in.jsonl:1 has no text under the key 'text': ['content']"),
    (FIRST + b'{"text": "a", "text": "b"}', "in.jsonl:2 is not valid JSON: the key 'text' occurs"),
    (FIRST + b'{"text": "a\\ud800b"}', "in.jsonl:2 is not valid text: character 2 is half of a"),
]


def test_an_invalid_line_is_reported_by_number_and_nothing_is_written(tmp_path):
    path = tmp_path / "in.jsonl"
    for number, (content, message) in enumerate(FAULTS):
        path.write_bytes(content)
        with pytest.raises(CorruptDataError) as caught:
            preprocess(tmp_path, "in.jsonl", f"--workers {2 if number == 0 else 1}")
        assert message in str(caught.value)
        assert sorted(tmp_path.iterdir()) == [path]
    (tmp_path / "in.txt").write_bytes(b"good\nb\xe9d\n")
    with pytest.raises(CorruptDataError, match=r"in\.txt:2 is not UTF-8"):
        preprocess(tmp_path, "in.txt", "--document line")
    with pytest.raises(UnsupportedError, match="names none of these"):
        preprocess(tmp_path, "*.json")


def test_a_damaged_gzip_file_is_reported_by_name(tmp_path):
    packed = gzip.compress(b"".join(b'{"text": "line %d"}\n' % n for n in range(500)))
    zeros = packed[:40] + bytes(40) + packed[80:]
    for content in (packed[:-9], zeros, b"no gzip"):
        (tmp_path / "in.jsonl.gz").write_bytes(content)
        with pytest.raises(CorruptDataError, match=r"in\.jsonl\.gz cannot be read to its end"):
            preprocess(tmp_path, "in.jsonl.gz")
