"""Tests of cleaning: kept documents are the same byte for byte, duplicates are those of a
comparison of all pairs, and errors are reported by line.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from datasketch import MinHash
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.csgraph import connected_components

from lightning_megatron.cli.clean import COMMAND
from lightning_megatron.cli.command import run_command
from lightning_megatron.cli.main import main as command_line
from lightning_megatron.errors import CorruptDataError, ParallelPlanError, UnsupportedError
from lightning_megatron.tasks.corpus.clusters import find_clusters, find_matches
from lightning_megatron.tasks.corpus.signatures import least_equal, shingles_of, signature_of


def text_of(seed: int, words: int = 200) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(5000)}" for _ in range(words))


def changed(text: str, seed: int, times: int) -> str:
    draw = random.Random(seed)
    words = text.split()
    for position in draw.sample(range(len(words)), times):
        words[position] = f"new{position}"
    return " ".join(words)


def run(arguments: list[str]) -> None:
    run_command("clean", COMMAND, arguments, "")


def clean_to(folder: Path, *options: str, output: str = "out.jsonl") -> tuple[list[str], dict]:
    report = folder / f"{output}.report.json"
    run(
        [
            str(folder / "in.jsonl"),
            str(folder / output),
            "--report",
            str(report),
            "--no-progress",
            *options,
        ]
    )
    return (folder / output).read_text().splitlines(), json.loads(report.read_text())


def test_broken_short_test_and_duplicate_documents_are_removed(tmp_path):
    first = text_of(1)
    test = text_of(9)
    mojibake = "schÃ¶n " + text_of(3)
    lines = [
        json.dumps({"text": first, "n": 1}),
        '{"text": "short"}',
        "broken",
        json.dumps({"text": changed(first, 1, 3)}),
        f'{{"big": 1E400, "text":  {json.dumps(mojibake)} , "n": 1.10}}',
        json.dumps({"text": changed(test, 2, 2)}),
        json.dumps({"text": text_of(5), "other": ["é", None]}),
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "test.jsonl").write_text(json.dumps({"text": test}) + "\n")
    test_file = str(tmp_path / "test.jsonl")
    lines_written, report = clean_to(
        tmp_path, "--skip-broken", "--workers", "1", "--tests", test_file
    )
    repaired = json.dumps("schön " + text_of(3), ensure_ascii=False)
    repaired = f'{{"big": 1E400, "text":  {repaired} , "n": 1.10}}'
    assert lines_written == [lines[0], repaired, lines[6]]
    assert [report[name] for name in ("read", "kept", "fixed")] == [7, 3, 1]
    assert report["removed"] == {"broken": 1, "short": 1, "test": 1, "duplicate": 1}
    path = str(tmp_path / "in.jsonl")
    assert report["clusters"] == [{"kept": f"{path}:1", "removed": [f"{path}:4"]}]
    match = {"document": f"{path}:6", "test": f"{tmp_path / 'test.jsonl'}:1"}
    assert report["test_matches"] == [match]
    assert f"{path}:3 is not valid JSON" in report["broken_lines"][0]


def test_the_output_does_not_depend_on_the_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_megatron.data.documents.CHUNK_BYTES", 4000)
    texts = [changed(text_of(n % 20), n, n % 3) for n in range(60)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (tmp_path / "test.txt").write_text(text_of(3)[:500])
    test_file = str(tmp_path / "test.txt")
    one, three = (
        clean_to(tmp_path, "--workers", number, "--tests", test_file, output=f"{number}.jsonl")
        for number in "13"
    )
    assert one == three
    assert one[1]["removed"]["duplicate"] > 20


def test_overlap_equals_a_search_for_every_8_gram(tmp_path):
    corpus = [text_of(n) for n in range(4)]
    test = f"{corpus[1][:300]} and {text_of(77)} {corpus[1][:300]}"
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in corpus))
    (tmp_path / "test.jsonl").write_text(json.dumps({"text": test}) + "\n")
    _, report = clean_to(tmp_path, "--workers", "1", "--tests", str(tmp_path / "test.jsonl"))
    words = test.split()
    grams = [" ".join(words[i : i + 8]) for i in range(len(words) - 7)]
    overlapping = [gram for gram in grams if any(f" {gram} " in f" {text} " for text in corpus)]
    overlap = report["overlap"][0]
    assert 0 < len(overlapping) < len(grams)
    assert (overlap["eight_grams"], overlap["num_found"]) == (len(grams), len(overlapping))
    distinct = len(set(grams)), len(set(overlapping))
    assert (overlap["distinct"], overlap["distinct_found"]) == distinct


@given(st.text(max_size=300))
def test_signatures_match_datasketch(text):
    oracle = MinHash(128, scheme="affine32")
    for gram in shingles_of(text, 3):
        oracle.update(gram.encode())
    assert np.array_equal(signature_of(text, 3), oracle.hashvalues)


@given(st.integers(0, 10_000), st.sampled_from([0.55, 0.7, 0.8, 1.0]))
def test_clusters_and_matches_equal_a_comparison_of_all_pairs(seed, threshold):
    draw = np.random.default_rng(seed)
    bases = draw.integers(0, 2**32, (6, 128), dtype=np.uint32)
    rows = bases[draw.integers(0, 6, 40)]
    noise = draw.random(rows.shape) < draw.choice([0, 0.1, 0.15, 0.3], (40, 1))
    rows = np.where(noise, draw.integers(0, 2**32, rows.shape, dtype=np.uint32), rows)
    equal = (rows[:, None] == rows[None]).sum(-1) >= least_equal(threshold)
    active = draw.random(40) < 0.8
    _, labels = connected_components(equal & active[:, None] & active)
    firsts = {label: number for number, label in reversed(list(enumerate(labels)))}
    expected = [firsts[label] for label in labels]
    assert find_clusters(rows, active, threshold).tolist() == expected
    against = equal[:, :5]
    best = np.where(against.any(1), against.argmax(1), -1)
    assert np.array_equal(find_matches(rows, rows[:5], threshold), best)


def test_invalid_lines_paths_and_thresholds_are_refused(tmp_path, capsys):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\nbroken\n')
    with pytest.raises(CorruptDataError, match=r"in\.jsonl:2 is not valid JSON"):
        run([str(path), str(tmp_path / "out.jsonl"), "--no-progress", "--workers", "2"])
    with pytest.raises(UnsupportedError, match="also an input"):
        run([str(path), str(path), "--overwrite"])
    with pytest.raises(ParallelPlanError, match=r"above 0\.5"):
        run([str(path), str(tmp_path / "out.jsonl"), "--jaccard", "0.5"])
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "out.jsonl").write_text("old")
    with pytest.raises(SystemExit, match="2"):
        command_line(["clean", str(path), str(tmp_path / "out.jsonl"), "--skip-broken"])
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == "old"
    run([str(path), str(tmp_path / "out.jsonl"), "--skip-broken", "--overwrite", "--no-progress"])
    assert (tmp_path / "out.jsonl").read_text() == ""
