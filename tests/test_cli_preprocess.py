"""Tests of `preprocess`: it writes all documents in order with any number of workers, and reports
invalid lines by number.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from lightning_megatron.cli.main import main as command_line
from lightning_megatron.cli.preprocess import main
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.tokenizer import ByteTokenizer
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from tests.corpora import SPEECHES, need


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> None:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")


def documents(prefix: Path) -> list[str]:
    corpus = TokenFile(prefix)
    bounds = corpus.document_index
    tokens = [
        corpus.tokens[corpus.starts[a] : corpus.starts[b]]
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    return [ByteTokenizer().decode(piece.tolist()) for piece in tokens]


def test_json_lines_become_documents_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["first", "", "third é", "fourth"]
    write_jsonl(tmp_path / "in.jsonl", texts)
    main(
        [
            "--input",
            str(tmp_path / "in.jsonl"),
            "--output",
            str(tmp_path / "out"),
            "--append-eod",
            "--workers",
            "1",
        ]
    )
    assert documents(tmp_path / "out") == texts
    corpus = TokenFile(tmp_path / "out")
    # an empty text is an empty document, without end-of-document token
    assert corpus.document_index.tolist() == [0, 1, 1, 2, 3]
    assert [int(corpus[i][-1]) for i in range(3)] == [256, 256, 256]
    assert corpus.description is not None
    assert corpus.description.num_bytes == sum(len(text.encode()) for text in texts)
    printed = capsys.readouterr()
    assert "4 documents" in printed.out
    assert "documents/s" in printed.out
    assert "MB/s" in printed.out


def test_output_files_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_megatron.data.preprocess.CHUNK_BYTES", 200)
    for part in range(3):
        write_jsonl(
            tmp_path / f"in{part}.jsonl", [f"{part} {i} " + "x" * (i % 17) for i in range(150)]
        )
    for workers in (1, 3):
        arguments = [
            "--output",
            str(tmp_path / f"out{workers}"),
            "--workers",
            str(workers),
            "--no-progress",
        ]
        main(["--input", str(tmp_path / "in*.jsonl"), *arguments])
    for suffix in ("bin", "idx", "json"):
        assert (tmp_path / f"out1.{suffix}").read_bytes() == (
            tmp_path / f"out3.{suffix}"
        ).read_bytes()
    assert len(documents(tmp_path / "out3")) == 450


@pytest.mark.parametrize("workers", [1, 2])
def test_an_invalid_line_is_reported_and_nothing_is_written(tmp_path: Path, workers: int) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n\n{"text": "b"\n')
    with pytest.raises(CorruptDataError, match=r"in\.jsonl:3 is not valid JSON"):
        main(
            [
                "--input",
                str(tmp_path / "in.jsonl"),
                "--output",
                str(tmp_path / "out"),
                "--workers",
                str(workers),
            ]
        )
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_missing_key_is_reported_with_the_existing_keys(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", ["a"], key="content")
    with pytest.raises(
        CorruptDataError, match=r"in\.jsonl:1 has no text under the key 'text': \['content'\]"
    ):
        main(
            [
                "--input",
                str(tmp_path / "in.jsonl"),
                "--output",
                str(tmp_path / "out"),
                "--workers",
                "1",
            ]
        )
    main(
        [
            "--input",
            str(tmp_path / "in.jsonl"),
            "--output",
            str(tmp_path / "out"),
            "--json-key",
            "content",
        ]
    )
    assert documents(tmp_path / "out") == ["a"]


def test_text_that_is_not_utf8_is_reported_by_line(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"good\nb\xe9d\n")
    with pytest.raises(CorruptDataError, match=r"in\.txt:2 is not UTF-8"):
        main(
            [
                "--input",
                str(tmp_path / "in.txt"),
                "--output",
                str(tmp_path / "out"),
                "--document",
                "line",
            ]
        )


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("file", ["one\ntwo\n\n\nthree\n", "four"]),
        ("line", ["one", "two", "three", "four"]),
        ("paragraph", ["one\ntwo", "three", "four"]),
    ],
)
def test_plain_text_is_cut_by_file_line_or_paragraph(
    tmp_path: Path, document: str, expected: list[str]
) -> None:
    directory = tmp_path / "texts"
    directory.mkdir()
    (directory / "a.txt").write_text("one\ntwo\n\n\nthree\n")
    with gzip.open(directory / "b.txt.gz", "wt") as file:
        file.write("four")
    (directory / "ignored.bin").write_bytes(b"\xff")
    main(
        [
            "--input",
            str(directory),
            "--output",
            str(tmp_path / "out"),
            "--document",
            document,
            "--no-progress",
        ]
    )
    assert documents(tmp_path / "out") == expected


def test_an_input_pattern_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no input was found"):
        main(["--input", str(tmp_path / "*.jsonl"), "--output", str(tmp_path / "out")])


def test_speeches_option_writes_a_token_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need(SPEECHES)
    main(["--speeches", "heldout", "--output", str(tmp_path / "heldout")])
    assert "tokens" in capsys.readouterr().out
    assert TokenFile(tmp_path / "heldout").num_tokens > 855_614


def test_the_command_line_prints_the_error_and_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text("not json\n")
    with pytest.raises(SystemExit, match="2"):
        command_line(
            ["preprocess", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]
        )
    assert "in.jsonl:1 is not valid JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[" * 100_000, "in.jsonl:2 is not valid JSON: "),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "in.jsonl:2 is not valid JSON: "),
        ('{"text": "a", "text": "b"}', "in.jsonl:2 is not valid JSON: the key 'text' occurs twice"),
        (
            '{"text": "a\\ud800b"}',
            "in.jsonl:2 is not valid text: character 2 is half of a surrogate pair",
        ),
    ],
)
def test_malformed_lines_are_reported_by_number(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"text": "first"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(CorruptDataError) as caught:
        main(
            [
                "--input",
                str(path),
                "--output",
                str(tmp_path / "out"),
                "--workers",
                "1",
                "--no-progress",
            ]
        )
    assert reason in str(caught.value)
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_damaged_gzip_file_is_reported_by_name(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    packed = gzip.compress(b"".join(b'{"text": "line %d"}\n' % n for n in range(500)))
    for content in (
        packed[:-9],
        packed[: len(packed) // 2],
        packed[:40] + bytes(40) + packed[80:],
        b"no gzip",
        packed[:3],
    ):
        path.write_bytes(content)
        with pytest.raises(CorruptDataError, match=r"in\.jsonl\.gz cannot be read to its end"):
            main(
                [
                    "--input",
                    str(path),
                    "--output",
                    str(tmp_path / "out"),
                    "--workers",
                    "1",
                    "--no-progress",
                ]
            )
