"""Texts become words, windows and passages, and metrics of language models equal direct calculations."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from lightning_megatron import GPT, GPTConfig, ParallelLayout, ParallelMesh
from lightning_megatron.building_blocks import row_scores, token_losses, token_scores
from lightning_megatron.errors import CorruptDataError, ParallelPlanError, UnsupportedError
from lightning_megatron.layers.loss.cross_entropy import vocab_parallel_argmax
from lightning_megatron.tasks.evaluation import ClozeAccuracy, WordPerplexity
from lightning_megatron.tasks.evaluation.lambada import ClozeRows, Passage, read_passages
from lightning_megatron.tasks.evaluation.wikitext import (
    SlidingWindows,
    count_words,
    detokenize,
    read_wikitext,
)
from tests.world import run_world

NAN, INF = math.nan, math.inf
SMALL = GPTConfig.llama(vocab_size=29, max_seq_length=8, num_layers=2, hidden_size=16, num_heads=2)
# Five tokens of the vocabulary and three columns of padding, whose logits must not count.
LOGITS = torch.tensor(
    [
        [0.0, 3.0, 1.0, 3.0, 2.0, 9.0, 9.0, 9.0],
        [-INF, -INF, -INF, -INF, -INF, 9.0, 9.0, 9.0],
        [0.0, NAN, 1.0, 2.0, INF, 9.0, 9.0, 9.0],
        [0.0, 1.0, 1.0, 1.0, INF, 9.0, 9.0, 9.0],
        [4.0, 1.0, 1.0, NAN, 4.0, 9.0, 9.0, 9.0],
        [1.0, 0.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0],
    ]
)
LARGEST = [1, 0, 5, 4, 5, 0]


def argmax_of_part(rank: int, size: int) -> list[list[int]]:
    """Return the places of the largest logits, of which each rank has a part."""
    mesh = ParallelMesh.create(ParallelLayout(size, tp=size))
    width = 8 // size
    part = LOGITS[:, rank * width : (rank + 1) * width]
    return [
        vocab_parallel_argmax(part.to(dtype), mesh, 5).tolist()
        for dtype in (torch.float64, torch.bfloat16)
    ]


def test_argmax_is_the_first_largest_logit_of_the_vocabulary():
    single = vocab_parallel_argmax(LOGITS, ParallelMesh.single(), 5)
    assert single.tolist() == LARGEST
    finite = LOGITS[:, :5].isfinite().all(-1)
    assert torch.equal(single[finite], LOGITS[finite, :5].argmax(-1))


def test_token_scores_of_a_gpt_match_its_logits():
    model = GPT(SMALL, seed=3).eval().double()
    tokens, labels = torch.randint(29, (2, 3, 8))
    labels[0, :5] = -100
    logits = model(tokens)
    labels[1] = logits[1].argmax(-1)
    expected = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    for chunk in (None, 4):
        model.loss_chunk = chunk
        scores = token_scores(model, tokens, labels)
        torch.testing.assert_close(scores.losses, expected)
        assert torch.equal(scores.hits, logits.argmax(-1) == labels)
        assert scores.hits[1].all()
        assert torch.equal(token_losses(model, tokens, labels), scores.losses)
    assert model.hidden_states is None


def scores_on_stages(rank, size, tokens, labels):
    mesh = ParallelMesh.create(ParallelLayout(size, pp=size))
    return row_scores(GPT(SMALL, mesh=mesh, seed=3).eval().double(), tokens, labels)


def test_row_scores_are_the_same_on_every_stage():
    model = GPT(SMALL, seed=3).eval().double()
    tokens = torch.randint(29, (3, 8))
    labels = model(tokens).argmax(-1)
    labels[0, :5] = -100
    labels[2, 3] = (labels[2, 3] + 1) % 29
    sums = -token_losses(model, tokens, labels).sum(1)
    expected = list(zip(map(pytest.approx, sums.tolist()), [True, True, False], strict=True))
    assert row_scores(model, tokens, labels) == expected
    for scores in run_world(scores_on_stages, 2, tokens, labels):
        assert scores == expected


def test_a_perplexity_is_normalised_by_words():
    losses = torch.tensor([[1.0, 2.0, 50.0], [3.0, 50.0, 4.0]])
    labels = torch.tensor([[5, 6, -100], [7, -100, 8]])
    for metric, count in ((WordPerplexity(5), 5), (WordPerplexity(), 4)):
        metric.update(losses[:1], labels[:1])
        metric.update(losses[1:], labels[1:])
        assert float(metric.compute()) == math.exp(10 / count)
    with pytest.raises(ParallelPlanError, match="num_words"):
        WordPerplexity(0)
    # Many losses are added without rounding them.
    metric, label = WordPerplexity(), torch.ones(1, 1, dtype=torch.int64)
    for loss in (2.0**25, 1.0) * 2:
        metric.update(torch.full((1, 1), loss), label)
    assert float(metric.loss_sum) == 2.0**26 + 2


def test_a_word_is_right_if_all_its_tokens_are_right():
    labels = torch.tensor([[-100, 4, 5], [7, 8, -100], [-100, -100, -100]])
    hits = torch.tensor([[False, True, True], [True, False, True], [True, True, True]])
    metric, empty, perplexity = ClozeAccuracy(), ClozeAccuracy(), WordPerplexity(3)
    metric.update(hits, labels)
    metric.update(hits[:1], labels[:1])
    assert float(metric.compute()) == 2 / 3
    empty.update(hits[2:], labels[2:])
    perplexity.update(torch.ones(1, 3), labels[2:])
    assert math.isnan(float(empty.compute()))
    assert math.isnan(float(perplexity.compute()))


#: The test part of WikiText-2, beside the checkout.
WIKITEXT_2 = Path(__file__).parents[4] / "shared" / "data" / "wikitext2-test.txt"


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
    }.items():
        path.write_text('{"text": "good line"}\n' + line)
        with pytest.raises(CorruptDataError, match=f"bad.jsonl:2 .*{message}"):
            read_passages(path)
    passages = [Passage("abc", "def", "file:7")]
    with pytest.raises(ParallelPlanError, match=r"file:7 has 6 tokens .* window \(5\)"):
        ClozeRows(passages, lambda text: list(text.encode()), window=5)
    with pytest.raises(CorruptDataError, match="file:7 has a context of 0 tokens"):
        ClozeRows(passages, lambda text: [] if text == "abc" else [1])
    path.write_bytes(b"good\nb\xffad\n")
    with pytest.raises(CorruptDataError, match=r"bad.jsonl:2 is not UTF-8: .* at byte 1"):
        read_wikitext(path)


def test_files_without_text_are_refused(tmp_path):
    empty, none = tmp_path / "empty.jsonl", tmp_path / "none.jsonl"
    empty.write_text("\n")
    for read, missing, reason in (
        (read_passages, "LAMBADA must be a file of JSON lines", "has no passage"),
        (read_wikitext, "text to evaluate on must be a file", "has no word in 1 lines"),
    ):
        with pytest.raises(UnsupportedError, match=missing):
            read(none)
        with pytest.raises(CorruptDataError, match=reason):
            read(empty)
