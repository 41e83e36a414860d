"""From raw text to a score: corpora, samples, schedules, loss scales, preferences and metrics follow
the formulas of those who defined them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.csgraph import connected_components

from lightning_megatron import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    TokenDataModule,
    WeightDecaySchedule,
)
from lightning_megatron.data.sampler import TokenBatchSampler
from lightning_megatron.optimizer.loss_scale import DynamicLossScale
from lightning_megatron.tasks.bert.masking import NGramMasking, WordPieces
from lightning_megatron.tasks.corpus.clusters import find_clusters
from lightning_megatron.tasks.corpus.signatures import least_equal
from lightning_megatron.tasks.evaluation import ClozeAccuracy, WordPerplexity
from lightning_megatron.tasks.finetuning.scores import ClassScores
from lightning_megatron.tasks.preferences.pair_loss import PairLoss
from tests.data.recorder import write_documents

NUM_STEPS, WARMUP = 30, 6


def test_near_duplicates_are_those_of_a_comparison_of_all_pairs() -> None:
    for seed, threshold in ((0, 0.8), (1, 0.9), (2, 0.75)):
        draw = np.random.default_rng(seed)
        texts = draw.integers(0, 2**32, (6, 128), dtype=np.uint32)[draw.integers(0, 6, 40)]
        need = least_equal(threshold)
        # Half of the texts have exactly as many equal parts as similar texts must have.
        for row in range(20):
            texts[row, draw.permutation(128)[need:]] = draw.integers(0, 2**32, 128 - need)
        equal = (texts[:, None] == texts[None]).sum(-1) >= need
        _, labels = connected_components(equal)
        firsts = {label: number for number, label in reversed(list(enumerate(labels)))}
        found = find_clusters(texts, np.ones(40, bool), threshold)
        assert found.tolist() == [firsts[label] for label in labels]


LENGTHS = [9, 3, 4, 2, 5, 1, 14]


@pytest.mark.parametrize("documents", ["joined", "whole"])
def test_validation_predicts_every_token_of_a_corpus_once(documents: str, tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", LENGTHS)
    data = TokenDataModule(
        val=str(tmp_path / "corpus"), seq_length=4, batch_size=1, documents=documents
    )
    data.setup("fit")
    rows = [
        row
        for batch in data.val_dataloader()
        for row in zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True)
    ]
    pairs = [pair for row in rows for pair in zip(*row, strict=True) if pair[1] >= 0]
    starts = set(np.cumsum([0, *LENGTHS]).tolist()) if documents == "whole" else {0}
    assert sorted(label for _, label in pairs) == [
        token for token in range(sum(LENGTHS)) if token not in starts
    ]
    assert all(label == token + 1 for token, label in pairs)
    assert all(max(labels) >= 0 for _, labels in rows), "every row predicts a token"


def test_ranks_share_the_samples_of_an_epoch_and_count_them_when_they_resume() -> None:
    for num_samples, batch_size, ranks in ((12, 2, 3), (10, 4, 1), (11, 2, 2)):
        finished: list[int] = []
        samplers = [
            TokenBatchSampler(
                num_samples,
                batch_size,
                rank,
                ranks,
                seed=1,
                drop_last=False,
                finished=lambda finished=finished: len(finished),
            )
            for rank in range(ranks)
        ]
        shares = [list(sampler) for sampler in samplers]
        finished += range(len(shares[0]))
        samples = [sample for share in shares for batch in share for sample in batch]
        assert sorted(sample for sample in samples if sample >= 0) == list(range(num_samples))
        for sampler in samplers:
            assert sampler.state_dict() == {"epoch": 0, "consumed": num_samples}


@given(st.lists(st.integers(5, 60), min_size=2, max_size=60), st.integers(0, 2**32 - 1))
def test_bert_masks_whole_words_within_the_share_of_tokens(words: list[int], seed: int) -> None:
    pieces = WordPieces(0, 2, 3, 4, np.arange(61) >= 41)
    tokens = np.array([2, *words, 3])
    masked, labels = NGramMasking(0.15, 3).mask(
        tokens, [(1, 1 + len(words))], pieces, np.random.RandomState(seed)
    )
    is_chosen = labels != -100
    assert is_chosen.sum() <= max(1, round(0.15 * len(words)))
    assert np.array_equal(labels[is_chosen], tokens[is_chosen])
    assert np.array_equal(masked[~is_chosen], tokens[~is_chosen])
    continues = pieces.continues[tokens]
    for position in range(2, len(words) + 1):
        assert not continues[position] or is_chosen[position] == is_chosen[position - 1]


def optimizer_of(*weight_decays: float) -> torch.optim.AdamW:
    """Return an optimizer of two groups with different rates."""
    return torch.optim.AdamW(
        {"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate, "weight_decay": decay}
        for rate, decay in zip((0.02, 0.005), weight_decays, strict=True)
    )


def values_of_steps(scheduler: Any, key: str) -> list[list[float]]:
    """Return a value of the groups of a scheduler's optimizer before every step."""
    values = []
    for _ in range(NUM_STEPS + 1):
        values.append([group[key] for group in scheduler.optimizer.param_groups])
        scheduler.optimizer.step()
        scheduler.step()
    return values


def test_learning_rates_equal_those_of_transformers() -> None:
    get_scheduler = pytest.importorskip("transformers.optimization").get_scheduler
    for kind, ours in {
        "constant_with_warmup": lambda o: ConstantSchedule(o, warmup_steps=WARMUP),
        "linear": lambda o: LinearSchedule(o, NUM_STEPS, WARMUP),
        "cosine": lambda o: CosineSchedule(o, NUM_STEPS, WARMUP),
    }.items():
        theirs = get_scheduler(kind, optimizer_of(0.1, 0.0), WARMUP, NUM_STEPS)
        actual = values_of_steps(ours(optimizer_of(0.1, 0.0)), "lr")
        for step, rates in enumerate(values_of_steps(theirs, "lr")):
            assert actual[step] == pytest.approx(rates, rel=1e-13, abs=1e-18), (kind, step)


def test_weight_decays_rise_in_proportion() -> None:
    decays = WeightDecaySchedule(optimizer_of(0.1, 0.05), 0.2, 0.4, NUM_STEPS)
    for step, values in enumerate(values_of_steps(decays, "weight_decay")):
        value = 0.2 + 0.2 * step / NUM_STEPS
        assert values == pytest.approx([value, value / 2])


def test_the_loss_scale_follows_megatrons_rule() -> None:
    scale, seen = DynamicLossScale(16.0, growth_interval=2, hysteresis=2), []
    for overflows in (True, True, True, False, False, True, False, False):
        scale.update(overflows)
        seen.append(scale.scale)
    # The second overflow and all after it halve the scale; two clean steps double it and allow one
    # overflow again.
    assert seen == [16.0, 8.0, 4.0, 4.0, 8.0, 8.0, 8.0, 16.0]


def test_losses_of_preferences_are_those_of_the_papers() -> None:
    beta, share = 0.3, 0.1
    ratios = torch.tensor([[2.0, -1.0], [-0.5, 0.25], [5.0, 0.0]], dtype=torch.float64)
    counts = torch.tensor([[2, 4], [1, 5], [3, 3]])

    def right(margin: float) -> float:
        return math.log1p(math.exp(-beta * margin))

    formulas = {
        "sigmoid": lambda c, r, *_: (1 - share) * right(c - r) + share * right(r - c),
        "robust": lambda c, r, *_: (
            ((1 - share) * right(c - r) - share * right(r - c)) / (1 - 2 * share)
        ),
        "hinge": lambda c, r, *_: max(0.0, 1 - beta * (c - r)),
        "ipo": lambda c, r, n, m: (c / n - r / m - 1 / (2 * beta)) ** 2,
        "apo_zero": lambda c, r, *_: (
            1 - 1 / (1 + math.exp(-beta * c)) + 1 / (1 + math.exp(-beta * r))
        ),
    }
    for name, formula in formulas.items():
        smoothing = share if name in ("sigmoid", "robust") else 0.0
        actual = PairLoss(name, beta, smoothing).of(ratios, counts)
        pairs = zip(ratios.tolist(), counts.tolist(), strict=True)
        expected = [formula(*values, *lengths) for values, lengths in pairs]
        assert actual.tolist() == pytest.approx(expected, abs=1e-12), name


def test_metrics_count_words_with_labels_and_ensembles_average_probabilities() -> None:
    labels = torch.tensor([[-100, 4, 5], [-100, -100, 6], [-100, -100, -100]])
    hits = torch.tensor([[False, True, True], [True, True, False], [True, True, True]])
    accuracy, perplexity = ClozeAccuracy(), WordPerplexity(4)
    accuracy.update(hits, labels)
    perplexity.update(torch.tensor([[9.0, 1.0, 2.0], [9.0, 9.0, 3.0], [9.0] * 3]), labels)
    assert float(accuracy.compute()) == 1 / 2
    assert float(perplexity.compute()) == pytest.approx(math.exp(6 / 4))
    scores = torch.tensor([[[0.0, 10.0]], [[3.0, 0.0]], [[3.0, 0.0]]])
    torch.testing.assert_close(ClassScores.combined(scores), scores.softmax(-1).mean(0))
