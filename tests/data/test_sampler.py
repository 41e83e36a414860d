"""Ranks share each global batch without overlap and with equal work, and any number resumes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data.balance import RowBalance, attention_work, balanced_shares
from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.sampler import TokenBatchSampler, imbalance_line
from tests.data.recorder import (
    OneRank,
    Recorder,
    StopAfter,
    check_resumes,
    make_trainer,
    run,
    write_documents,
)
from tests.refusals import check_refusals

ROW = 64


class Trainer:
    """Counter of finished batches, in place of a Trainer."""

    def __init__(self) -> None:
        self.finished = 0

    def __call__(self) -> int:
        return self.finished


class Rows:
    """Samples with given document lengths."""

    seq_length = ROW

    def __init__(self, documents: Sequence[list[int]]) -> None:
        self.documents = documents

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


@given(
    st.integers(16, 60),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([None, 3]),
    st.integers(0, 2),
)
def test_ranks_take_contiguous_disjoint_shares(num_samples, batch_size, dp_size, seed, epoch):
    samplers = samplers_of(num_samples, batch_size, dp_size, seed=seed)
    [single] = samplers_of(num_samples, batch_size * dp_size, 1, seed=seed)
    for sampler in (*samplers, single):
        sampler.set_epoch(epoch)
    for batch, *shares in zip(single, *samplers, strict=True):
        assert [number for share in shares for number in share] == batch
        assert [len(share) for share in shares] == [batch_size] * dp_size
    assert len(single) == num_samples // (batch_size * dp_size)


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
        balance = RowBalance(rows, dp_size, batch_size) if balanced else None
        trainer = Trainer()
        samplers = samplers_of(
            48, batch_size, dp_size, seed=seed, finished=trainer, balance=balance
        )
        for sampler in samplers:
            sampler.load_state_dict(state)
        if samplers[0].epoch > 1:
            break
        steps = range(draw.randint(0, 3))
        for shares, _ in zip(zip(*samplers, strict=True), steps, strict=False):
            batch = [row for share in shares for row in share]
            expected = order[len(taken) : len(taken) + len(batch)]
            assert sorted(batch) == sorted(expected)
            assert balanced or batch == expected
            taken += batch
            trainer.finished += 1
        states = [sampler.state_dict() for sampler in samplers]
        assert all(rank_state == states[0] for rank_state in states)
        state = states[0]
    assert len(taken) == len(set(taken))


def test_the_state_counts_finished_samples_and_not_prefetched_samples():
    trainer = Trainer()
    [sampler] = samplers_of(40, 4, 1, finished=trainer)
    batches = iter(sampler)
    for _ in range(5):
        next(batches)
    trainer.finished += 2
    assert sampler.state_dict() == {"epoch": 0, "consumed": 8}
    # A last batch of fewer samples ends the epoch.
    trainer = Trainer()
    [sampler] = samplers_of(10, 4, 1, drop_last=False, finished=trainer)
    trainer.finished += len(list(sampler))
    assert sampler.state_dict() == {"epoch": 0, "consumed": 10}


def test_epochs_have_different_orders_that_depend_only_on_the_seed():
    orders = []
    for _ in range(2):
        [sampler] = samplers_of(30, 5, 1, seed=7)
        orders.append([])
        for epoch in range(3):
            sampler.set_epoch(epoch)
            orders[-1].append([number for batch in sampler for number in batch])
    assert orders[0] == orders[1]
    assert all(sorted(order) == list(range(30)) for order in orders[0])
    assert orders[0][0] == list(range(30)) != orders[0][1] != orders[0][2]


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
    trainer = Trainer()
    [sampler] = samplers_of(12, 2, 1, stream=True, finished=trainer)
    taken = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, _ in zip(sampler, range(3), strict=False):
            taken += batch
            trainer.finished += 1
    assert taken == list(range(12))
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


def test_two_shares_are_within_10_percent_of_the_optimal_division():
    draw = np.random.RandomState(1)
    for _ in range(10):
        work = (draw.pareto(1.5, 10) * 1000 + 1).astype(int).tolist()
        halves = [sum(work[i] for i in half) for half in combinations(range(10), 5)]
        best = min(max(half, sum(work) - half) for half in halves)
        assert largest(work, balanced_shares(work, 2)) <= 1.1 * best


def test_attention_work_of_a_row_includes_its_padding():
    # The last token of a window is only a label.
    assert attention_work([3, 4, 2], 8) == 9 + 16 + 1
    assert attention_work([4], 8) == 9 + 25
    assert attention_work([9], 8) == 64
    equal = Rows([[ROW + 1]] * 8)
    assert RowBalance(equal, 2, 4).shares(range(8)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_and_microbatches_have_about_equal_work(size):
    for seed in range(5):
        balance = RowBalance(mixed_rows(64, seed), 4, size)
        before, after = balance.imbalance([range(64)])
        assert after <= 1.05 < 1.1 < before

        def critical(shares: Sequence[Sequence[int]], balance: RowBalance = balance) -> int:
            """Sum the work of the busiest rank of each microbatch, at whose end all ranks meet."""
            starts = range(0, 16, size)
            return sum(
                max(sum(map(balance.work, share[at : at + size])) for share in shares)
                for at in starts
            )

        balanced = critical(balance.shares(range(64)))
        assert balanced <= 1.25 * sum(map(balance.work, range(64))) / 4
        assert balanced < critical([range(start, start + 16) for start in range(0, 64, 16)])
    sampler = TokenBatchSampler(64, 4, 0, 4, balance=RowBalance(mixed_rows(64), 4, 4))
    before, after = RowBalance(mixed_rows(64), 4, 4).imbalance(list(sampler.global_batches(9)))
    assert f"{after:.3f} times the mean" in imbalance_line(sampler)
    assert f"{before:.3f} times without balancing (next 4 global" in imbalance_line(sampler)


def test_a_killed_balanced_run_continues_with_the_next_rows_of_each_rank(tmp_path, caplog):
    lengths = [30, 1, 2, 3, 20, 1, 1, 2, 5, 25, 3, 2, 1, 4, 18, 2, 2, 1, 3, 40] * 3
    write_documents(tmp_path / "c", lengths)

    def fit(
        index: int, balanced: bool, *callbacks: StopAfter, ckpt_path: Path | None = None
    ) -> list[list[int]]:
        data = TokenDataModule(
            str(tmp_path / "c"), seq_length=12, batch_size=4, documents="separate",
            balance_attention=balanced,
        )  # fmt: skip
        trainer = make_trainer(tmp_path, *callbacks, strategy=OneRank(index, 2), max_steps=5)
        return run(Recorder(), data, trainer, ckpt_path)

    with caplog.at_level("INFO", logger="lightning.pytorch"):
        balanced = [
            check_resumes(
                lambda *callbacks, index=index, **options: fit(index, True, *callbacks, **options),
                tmp_path,
                3,
            )
            for index in range(2)
        ]
    assert "Attention work of the busiest of 2 data ranks" in caplog.text
    plain = [fit(index, False) for index in range(2)]
    joined = [[sorted(a + b) for a, b in zip(*ranks, strict=True)] for ranks in (balanced, plain)]
    assert joined[0] == joined[1]
    assert balanced != plain
