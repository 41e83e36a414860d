"""Metrics of language models, and the token scores that they read, equal direct calculations."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from lightning_megatron import GPT, GPTConfig, ParallelLayout, ParallelMesh
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.evaluation import ClozeAccuracy, WordPerplexity, token_losses, token_scores
from lightning_megatron.layers.vocab_argmax import vocab_parallel_argmax

NAN, INF = math.nan, math.inf
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
    sizes = {"vocab_size": 29, "max_seq_length": 8, "num_layers": 2, "hidden_size": 16}
    model = GPT(GPTConfig.llama(**sizes, num_heads=2), seed=3).eval().double()
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


def test_a_perplexity_is_normalised_by_words():
    losses = torch.tensor([[1.0, 2.0, 50.0], [3.0, 50.0, 4.0]])
    labels = torch.tensor([[5, 6, -100], [7, -100, 8]])
    words, tokens = WordPerplexity(5), WordPerplexity()
    for metric in (words, tokens):
        metric.update(losses[:1], labels[:1])
        metric.update(losses[1:], labels[1:])
    assert float(words.compute()) == math.exp(10 / 5)
    assert float(tokens.compute()) == math.exp(10 / 4)
    with pytest.raises(ParallelPlanError, match="num_words"):
        WordPerplexity(0)
    # Many losses are added without rounding them.
    metric = WordPerplexity()
    for _ in range(2):
        metric.update(torch.full((1, 1), 2.0**25), torch.ones(1, 1, dtype=torch.int64))
        metric.update(torch.full((1, 1), 1.0), torch.ones(1, 1, dtype=torch.int64))
    assert float(metric.loss_sum) == 2.0**26 + 2


def test_a_word_is_right_if_all_its_tokens_are_right():
    metric = ClozeAccuracy()
    labels = torch.tensor([[-100, 4, 5], [-100, -100, 6], [7, 8, -100], [-100, -100, -100]])
    hits = torch.tensor([[False, True, True], [True, True, False], [True, False, True], [True] * 3])
    metric.update(hits, labels)
    assert float(metric.compute()) == 1 / 3
    metric.update(hits[:1], labels[:1])
    assert float(metric.compute()) == 2 / 4
    empty = ClozeAccuracy()
    empty.update(hits[3:], labels[3:])
    assert math.isnan(float(empty.compute()))
    perplexity = WordPerplexity(3)
    perplexity.update(torch.ones(1, 3), labels[3:])
    assert math.isnan(float(perplexity.compute()))
