"""Ranks share each global batch without overlap and with equal work, and any number resumes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data.balance import RowBalance, attention_work, balanced_shares
from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.sampler import TokenBatchSampler
from tests.refusals import check_refusals

ROW = 64


@dataclass
class Rows:
    """Samples with given document lengths."""

    documents: Sequence[list[int]]
    seq_length = ROW

    def lengths(self, index: int) -> list[int]:
        return list(self.documents[index])


def mixed_rows(count: int, seed: int = 0) -> Rows:
    """Return rows of documents of equal length, which is between 1 and the row length."""
    sizes = 2 ** np.random.RandomState(seed).randint(0, 7, count)
    return Rows([[int(size)] * (ROW // size - 1) + [int(size) + 1] for size in sizes])


def samplers_of(
    num_samples: int, batch_size: int, dp_size: int, **options: object
) -> list[TokenBatchSampler]:
    return [
        TokenBatchSampler(num_samples, batch_size, rank, dp_size, **options)
        for rank in range(dp_size)
    ]


@pytest.mark.parametrize("balanced", [False, True])
@given(number=st.integers(0, 2**32))
def test_changed_ranks_and_batch_sizes_neither_repeat_nor_skip_samples(balanced, number):
    draw = random.Random(number)
    rows, seed = mixed_rows(48), draw.choice([None, 5])
    [plain] = samplers_of(48, 1, 1, seed=seed)
    plain.set_epoch(1)
    order = [row for batch in plain for row in batch]
    state, taken = {"epoch": 1, "consumed": 0}, []
    for _ in range(draw.randint(1, 4)):
        batch_size, dp_size = draw.choice([(1, 2), (2, 2), (2, 4), (4, 1), (3, 1), (1, 4)])
        finished: list[int] = []
        options = {"seed": seed, "finished": finished.__len__}
        options["balance"] = RowBalance(rows, dp_size, batch_size) if balanced else None
        samplers = samplers_of(48, batch_size, dp_size, **options)
        for sampler in samplers:
            sampler.load_state_dict(state)
        if samplers[0].epoch > 1:
            break
        steps = range(draw.randint(0, 3))
        for shares, step in zip(zip(*samplers, strict=True), steps, strict=False):
            assert [len(share) for share in shares] == [batch_size] * dp_size
            batch = [row for share in shares for row in share]
            expected = order[len(taken) : len(taken) + len(batch)]
            assert sorted(batch) == sorted(expected)
            assert balanced or batch == expected
            taken += batch
            finished.append(step)
        state, *others = [sampler.state_dict() for sampler in samplers]
        assert all(other == state for other in others)
    assert len(taken) == len(set(taken))


def test_the_state_counts_finished_samples_and_not_prefetched_samples():
    finished: list[list[int]] = []
    [sampler] = samplers_of(40, 4, 1, finished=finished.__len__)
    batches = iter(sampler)
    prefetched = [next(batches) for _ in range(5)]
    finished += prefetched[:2]
    assert sampler.state_dict() == {"epoch": 0, "consumed": 8}


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4))
def test_evaluation_takes_every_sample_once_in_equal_shapes(num_samples, batch_size, dp_size):
    samplers = samplers_of(num_samples, batch_size, dp_size, drop_last=False)
    rows = list(zip(*samplers, strict=True))
    assert len(rows) == len(samplers[0])
    assert all(len({len(share) for share in shares}) == 1 for shares in rows)
    real = [number for shares in rows for share in shares for number in share if number >= 0]
    assert real == list(range(num_samples))
    assert all(share.count(-1) <= 1 for shares in rows for share in shares), "empty rows"


def test_a_stream_continues_across_the_epochs_of_the_trainer():
    finished: list[list[int]] = []
    [sampler] = samplers_of(12, 2, 1, stream=True, finished=finished.__len__)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, _ in zip(sampler, range(3), strict=False):
            finished.append(batch)
    assert sum(finished, []) == list(range(12))
    sampler.set_epoch(2)
    assert sampler.state_dict() == {"epoch": 1, "consumed": 0}


def test_invalid_sizes_ranks_and_settings_are_refused():
    check_refusals(
        TokenBatchSampler,
        [
            ((10, 0, 0, 1), "batch_size is 0"),
            ((10, 1, 2, 2), "dp_rank 2"),
            ((5, 3, 0, 2), "it has 5 samples, and the first batch 6 over 2"),
        ],
    )
    check_refusals(balanced_shares, [(([1] * 5, 2), "5 rows, 2 shares")])
    joined = {"train": "corpus", "balance_attention": True}
    check_refusals(TokenDataModule, [(joined, "equal attention work")])


def largest(work: Sequence[int], shares: Sequence[Sequence[int]]) -> int:
    return max(sum(work[item] for item in share) for share in shares)


@given(st.data(), st.integers(1, 6), st.integers(1, 6))
def test_all_shares_have_equally_many_items_and_about_equal_work(data, shares, size):
    count = shares * size
    work = data.draw(st.lists(st.integers(0, 10**12), min_size=count, max_size=count))
    balanced = balanced_shares(work, shares)
    assert [len(share) for share in balanced] == [size] * shares
    assert sorted(item for share in balanced for item in share) == list(range(count))
    # The excess over the mean is at most that of one item over the smallest.
    assert largest(work, balanced) * shares <= sum(work) + shares * (max(work) - min(work))
    assert balanced == balanced_shares(list(work), shares)


def test_attention_work_of_a_row_includes_its_padding():
    # The last token of a window is only a label.
    assert attention_work([3, 4, 2], 8) == 9 + 16 + 1
    assert attention_work([4], 8) == 9 + 25
    assert attention_work([9], 8) == 64
    equal = Rows([[ROW + 1]] * 8)
    assert RowBalance(equal, 2, 4).shares(range(8)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("size", [1, 4])
def test_ranks_and_microbatches_have_about_equal_work(size):
    for seed in range(5):
        balance = RowBalance(mixed_rows(64, seed), 4, size)
        before, after = balance.imbalance([range(64)])
        assert after <= 1.05 < 1.1 < before

        def critical(shares: Sequence[Sequence[int]], balance: RowBalance = balance) -> int:
            """Sum the work of the busiest rank of each microbatch, at whose end all ranks meet."""
            works = [list(map(balance.work, share)) for share in shares]
            starts = range(0, 16, size)
            return sum(max(sum(work[at : at + size]) for work in works) for at in starts)

        balanced = critical(balance.shares(range(64)))
        assert balanced <= 1.25 * sum(map(balance.work, range(64))) / 4
        assert balanced < critical([range(start, start + 16) for start in range(0, 64, 16)])
