"""The speeches are complete, split by year, and written once by several processes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from lightning_megatron.data import speeches
from lightning_megatron.data.speeches import load_speeches, prepare_speeches
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.tokenizer import ByteTokenizer, load_tokenizer
from lightning_megatron.errors import CorruptDataError
from tests.corpora import GPT2_BPE, SPEECHES, need


def test_train_and_heldout_speeches_are_complete() -> None:
    need(SPEECHES)
    train, heldout = load_speeches("train"), load_speeches("heldout")
    assert len(train) + len(heldout) == 249
    assert (sum(map(len, train)), sum(map(len, heldout))) == (11_325_479, 855_614)
    assert train[0].startswith("Fellow-Citizens of the Senate")


def test_a_changed_speech_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "speeches").mkdir()
    (tmp_path / "metadata.csv").write_text(
        f"fileid,year,date,sha256\na,1800,1800-01-01,{'0' * 64}\n"
    )
    (tmp_path / "speeches" / "a.txt").write_text("changed")
    monkeypatch.setattr(speeches, "locate_installed", lambda *_, **__: tmp_path)
    with pytest.raises(CorruptDataError, match=r"a\.txt must have sha256"):
        load_speeches("train")
    assert load_speeches("heldout") == []


def test_several_processes_write_the_corpus_once(tmp_path: Path) -> None:
    need(SPEECHES)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        results = [
            pool.apply_async(prepare_speeches, (tmp_path, ByteTokenizer())) for _ in range(3)
        ]
        first, *other_prefixes = [result.get(timeout=60) for result in results]
    assert other_prefixes == [first, first]
    assert {path.suffix for path in tmp_path.iterdir()} == {".bin", ".idx", ".json", ".lock"}
    before = Path(first["train"] + ".idx").stat().st_mtime_ns
    prepare_speeches(tmp_path, ByteTokenizer())
    assert Path(first["train"] + ".idx").stat().st_mtime_ns == before
    corpus = TokenFile(first["heldout"])
    assert corpus.description is not None
    assert corpus.num_tokens == corpus.description.num_bytes + corpus.num_documents
    texts = load_speeches("heldout")
    assert ByteTokenizer().decode(corpus[3].tolist()) == texts[3]


def test_gpt2_encodes_a_real_speech_reversibly() -> None:
    need(SPEECHES)
    need(GPT2_BPE)
    tokenizer = load_tokenizer("gpt2")
    text = load_speeches("heldout")[0]
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert 4.0 < len(text) / len(tokens) < 5.5
