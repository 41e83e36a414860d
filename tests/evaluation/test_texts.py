"""Texts of evaluations become words, windows and passages, and errors name invalid files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import CorruptDataError, ParallelPlanError, UnsupportedError
from lightning_megatron.evaluation.lambada import ClozeRows, Passage, read_passages
from lightning_megatron.evaluation.wikitext import (
    SlidingWindows,
    count_words,
    detokenize,
    read_wikitext,
)

#: The test part of WikiText-2, beside the checkout.
WIKITEXT_2 = Path(__file__).parents[3] / "shared" / "data" / "wikitext2-test.txt"


TEXTS = {
    "a role @-@ playing game , sold 1 @,@ 200 @.@ 5 times .\n": "a role-playing game, sold 1,200.5 times .\n",
    " \n = = = Plot = = = \n \n It 's the boys ' ball ; no ? \n": "\n=== Plot ===\n\nIt's the boys' ball; no?\n",
    'He said : " yes ! " ( or [ no ] { so } ) . It is 20 ° C': 'He said: "yes!" (or [no] {so}). It is 20°C',
    "the ' Bill ' of N pages": "the 'Bill' of 1 pages",
}  # fmt: skip


def test_wikitext_becomes_plain_text_with_the_published_number_of_words(tmp_path):
    for text, plain in TEXTS.items():
        assert detokenize(text) == plain
    path = tmp_path / "text"
    path.write_bytes(b" \n = A = \n \n b c . \n")
    assert read_wikitext(path) == ("\n= A =\n\nb c.\n", 8)
    assert read_wikitext(path, is_plain=True) == (path.read_text(), 8)
    assert count_words("a b\nc") == 2
    if not WIKITEXT_2.exists():
        pytest.skip("the test part of WikiText-2 is not here")
    # The test part of WikiText-103 is the same text, with other rare words replaced.
    assert read_wikitext(WIKITEXT_2).num_words == 245_566


@given(
    num_tokens=st.integers(2, 60),
    window=st.integers(1, 20),
    stride=st.integers(1, 20),
    at=st.data(),
)
def test_windows_score_each_token_once_with_its_context(num_tokens, window, stride, at):
    stride = min(stride, window)
    rows = SlidingWindows(range(num_tokens), window, stride)
    scored = []
    for number in range(len(rows)):
        row = rows[number]
        positions = (row["labels"] != -100).nonzero().flatten()
        assert len(positions), "a window without a label is work for nothing"
        labels = row["labels"][positions]
        scored += labels.tolist()
        assert torch.equal(row["tokens"][positions], labels - 1)
        assert number == 0 or int(positions[0]) >= window - stride
    assert scored == list(range(1, num_tokens))
    assert rows.num_targets == len(scored)


def test_windows_are_as_many_as_in_the_paper_and_skip_no_tokens():
    # WikiText-103 has 270,329 tokens in the paper: one window, and one for each 32 further targets.
    assert len(SlidingWindows(range(270_329), 1024, 32)) == 1 + -(-(270_328 - 1024) // 32) == 8417
    with pytest.raises(ParallelPlanError, match=r"stride \(9\) must be at least 1 and at most the"):
        SlidingWindows(range(20), 8, 9)
    with pytest.raises(CorruptDataError, match="at least two tokens.*it has 1"):
        SlidingWindows([3], 8, 8)


def test_a_passage_has_labels_for_its_last_word(tmp_path):
    path = tmp_path / "lambada.jsonl"
    path.write_text('{"text": "to the bridge \\n"}\n\n{"text": "a\\nb", "more": 1}\n')
    passages = read_passages(path)
    assert passages == [Passage("to the", "bridge", f"{path}:1"), Passage("a", "b", f"{path}:3")]
    rows = ClozeRows(passages, lambda text: list(text.encode()))
    row = rows[0]
    assert (len(rows), rows.window) == (2, 12)
    assert bytes(row["tokens"].tolist()) == b"to the bridg"
    has_label = row["labels"] != -100
    assert bytes(row["labels"][has_label].tolist()) == b" bridge"
    assert bytes(row["tokens"][has_label].tolist()) == b"e bridg"
    assert rows[1]["tokens"].tolist() == [97, 32, *[0] * 10]
    assert rows[1]["labels"].tolist() == [32, 98, *[-100] * 10]


def test_errors_name_a_line_without_a_passage(tmp_path):
    path = tmp_path / "bad.jsonl"
    for line, message in {
        '{"text": "a b"': "is not valid JSON: Expecting ',' delimiter",
        '{"words": "a b"}': "has no text under the key 'text'",
        '{"text": "alone "}': "has fewer than two words: 'alone '",
        '{"text": "a \\ud800"}': "is half of a surrogate pair",
    }.items():
        path.write_text('{"text": "good line"}\n' + line)
        with pytest.raises(CorruptDataError, match=message) as raised:
            read_passages(path)
        assert str(raised.value).startswith(f"{path}:2 ")
    passages = [Passage("abc", "def", "file:7")]
    with pytest.raises(ParallelPlanError, match=r"file:7 has 6 tokens .* window \(5\)"):
        ClozeRows(passages, lambda text: list(text.encode()), window=5)
    with pytest.raises(CorruptDataError, match="file:7 has a context of 0 tokens"):
        ClozeRows(passages, lambda text: [] if text == "abc" else [1])


def test_files_that_hold_no_text_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match=r"LAMBADA must be a file of JSON lines"):
        read_passages(tmp_path / "none.jsonl")
    with pytest.raises(UnsupportedError, match="must be a file"):
        read_wikitext(tmp_path / "none")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(CorruptDataError, match="has no passage"):
        read_passages(empty)
    with pytest.raises(CorruptDataError, match="has no word in 1 lines"):
        read_wikitext(empty)
    empty.write_bytes(b"good\nb\xffad\n")
    with pytest.raises(CorruptDataError, match=r"empty.jsonl:2 is not UTF-8: .* at byte 1"):
        read_wikitext(empty)
