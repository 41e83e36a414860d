"""Balancing gives all ranks equal work, and does not change the rows of a global batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_megatron.data.balance import RowBalance, attention_work, balanced_shares
from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.sampler import TokenBatchSampler, imbalance_line
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from tests.data.recorder import Recorder, make_trainer, run
from tests.data.test_datamodule_resume import StopAfter
from tests.data.test_sampler import Trainer

ROW = 64


class Rows:
    """Samples with given document lengths."""

    seq_length = ROW

    def __init__(self, documents: Sequence[list[int]]) -> None:
        self.documents = documents

    def lengths(self, index: int) -> list[int]:
        return list(self.documents[index])


def rows_of_mixed_lengths(count: int, seed: int = 0) -> Rows:
    """Return rows of documents of equal length, which is between 1 and the row length."""
    random = np.random.RandomState(seed)
    sizes = 2 ** random.randint(0, 7, count)
    return Rows([[int(size)] * (ROW // size - 1) + [int(size) + 1] for size in sizes])


def largest_share_work(work: Sequence[int], shares: Sequence[Sequence[int]]) -> int:
    return max(sum(work[item] for item in share) for share in shares)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), shares=st.integers(1, 6), size=st.integers(1, 6))
def test_all_shares_have_equally_many_items(data: st.DataObject, shares: int, size: int) -> None:
    count = shares * size
    work = data.draw(st.lists(st.integers(0, 10**12), min_size=count, max_size=count))
    balanced = balanced_shares(work, shares)
    assert [len(share) for share in balanced] == [size] * shares
    assert sorted(item for share in balanced for item in share) == list(range(count))
    # The excess over the mean is at most that of one item over the smallest.
    assert largest_share_work(work, balanced) * shares <= sum(work) + shares * (
        max(work) - min(work)
    )
    assert balanced == balanced_shares(list(work), shares)


def test_two_shares_are_within_10_percent_of_the_optimal_division() -> None:
    random = np.random.RandomState(1)
    for _ in range(20):
        work = (random.pareto(1.5, 12) * 1000 + 1).astype(int).tolist()
        best = min(
            max(sum(work[i] for i in half), sum(work) - sum(work[i] for i in half))
            for half in combinations(range(12), 6)
        )
        assert largest_share_work(work, balanced_shares(work, 2)) <= 1.1 * best


def test_items_that_do_not_divide_evenly_raise() -> None:
    with pytest.raises(ParallelPlanError, match="5 rows, 2 shares"):
        balanced_shares([1] * 5, 2)


def test_attention_work_of_a_row_includes_its_padding() -> None:
    # The last token of a window is only a label.
    assert attention_work([3, 4, 2], 8) == 9 + 16 + 1
    assert attention_work([4], 8) == 9 + 25
    assert attention_work([9], 8) == 64


@pytest.mark.parametrize("microbatch_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_and_microbatches_have_about_equal_work(seed: int, microbatch_size: int) -> None:
    rows = rows_of_mixed_lengths(64, seed)
    balance = RowBalance(rows, 4, microbatch_size)
    before, after = balance.imbalance([range(64)])
    assert after <= 1.05 < 1.1 < before
    shares = balance.shares(range(64))
    microbatch_work = [
        [
            sum(map(balance.work, share[at : at + microbatch_size]))
            for at in range(0, 16, microbatch_size)
        ]
        for share in shares
    ]
    # The busiest rank sets the time of a microbatch that ends with an exchange of all ranks.
    critical_work = sum(max(of_ranks) for of_ranks in zip(*microbatch_work, strict=True))
    work = [balance.work(row) for row in range(64)]
    unbalanced_work = zip(*(
        [sum(work[at : at + microbatch_size]) for at in range(start, start + 16, microbatch_size)]
        for start in range(0, 64, 16)
    ), strict=True)  # fmt: skip
    assert critical_work <= 1.25 * sum(work) / 4
    assert critical_work < sum(max(of_ranks) for of_ranks in unbalanced_work)


def test_rows_of_equal_work_keep_their_order() -> None:
    rows = Rows([[ROW + 1]] * 8)
    assert RowBalance(rows, 2, 4).shares(range(8)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from([(1, 2), (2, 2), (2, 4), (4, 1)]), st.integers(0, 3)),
        min_size=1, max_size=4,
    ),
    seed=st.sampled_from([None, 5]),
)  # fmt: skip
def test_another_number_of_ranks_continues_with_the_same_global_batches(
    parts: list[tuple[tuple[int, int], int]], seed: int | None
) -> None:
    rows = rows_of_mixed_lengths(48)
    state = {"epoch": 1, "consumed": 0}
    taken: list[int] = []
    [plain] = [TokenBatchSampler(48, 1, seed=seed)]
    plain.set_epoch(1)
    order = [number for batch in plain for number in batch]
    for (batch_size, dp_size), num_batches in parts:
        trainer = Trainer()
        samplers = [
            TokenBatchSampler(
                48, batch_size, rank, dp_size, seed=seed, finished=trainer,
                balance=RowBalance(rows, dp_size, batch_size),
            )
            for rank in range(dp_size)
        ]  # fmt: skip
        for sampler in samplers:
            sampler.load_state_dict(state)
        if samplers[0].epoch > 1:
            break
        for shares, _ in zip(zip(*samplers, strict=True), range(num_batches), strict=False):
            batch = [number for share in shares for number in share]
            start = len(taken)
            assert sorted(batch) == sorted(order[start : start + len(batch)])
            taken += batch
            trainer.finished += 1
        state = samplers[0].state_dict()
    assert len(taken) == len(set(taken))


class OneOfTwoRanks(SingleDeviceStrategy):
    """Strategy that reports two data ranks and microbatches of 2 rows."""

    index = 0
    distributed_sampler_kwargs = property(lambda self: {"num_replicas": 2, "rank": self.index})

    def samples_per_microbatch(self, batch_size: int) -> int:
        return 2


def write_documents_of_mixed_lengths(prefix: Path) -> str:
    with TokenFileWriter(prefix, dtype="i4") as writer:
        first = 0
        for size in [30, 1, 2, 3, 20, 1, 1, 2, 5, 25, 3, 2, 1, 4, 18, 2, 2, 1, 3, 40] * 3:
            writer.add_document(np.arange(first, first + size))
            first += size
    return str(prefix)


def test_a_killed_run_continues_with_the_next_rows_of_each_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = write_documents_of_mixed_lengths(tmp_path / "c")

    def fit(index: int, *callbacks: StopAfter, path: Path | None = None, **options: bool) -> list:
        strategy = OneOfTwoRanks()
        strategy.index = index
        data = TokenDataModule(prefix, seq_length=12, batch_size=4, documents="separate", **options)  # type: ignore[arg-type]
        trainer = make_trainer(tmp_path, *callbacks, strategy=strategy, max_steps=5)
        module = FirstTokenRecorder()
        return run(module, data, trainer, path)

    with caplog.at_level("INFO", logger="lightning.pytorch"):
        balanced = [fit(index, balance_attention=True) for index in range(2)]
    assert "Attention work of the busiest of 2 data ranks" in caplog.text
    plain = [fit(index) for index in range(2)]
    for balanced_batch, plain_batch in zip(
        zip(*balanced, strict=True), zip(*plain, strict=True), strict=True
    ):
        assert sorted(sum(balanced_batch, [])) == sorted(sum(plain_batch, []))
    assert balanced != plain
    path = tmp_path / "killed.ckpt"
    for index in range(2):
        first = fit(index, StopAfter(3, path), balance_attention=True)
        assert first + fit(index, path=path, balance_attention=True) == balanced[index]


class FirstTokenRecorder(Recorder):
    """Module that records the first token of every row; labels across document ends are -100."""

    def training_step(self, batch: dict, _: int) -> object:  # type: ignore[override]
        self.seen.append(batch["tokens"][:, 0].tolist())
        return self.layer(self.layer.weight.new_ones(1)).sum()


def test_the_imbalance_line_compares_work_with_and_without_balance(tmp_path: Path) -> None:
    rows = rows_of_mixed_lengths(64)
    sampler = TokenBatchSampler(64, 4, 0, 4, balance=RowBalance(rows, 4, 4))
    before, after = RowBalance(rows, 4, 4).imbalance(list(sampler.global_batches(9)))
    assert f"{after:.3f} times the mean" in imbalance_line(sampler)
    assert f"{before:.3f} times without balancing (next 4 global" in imbalance_line(sampler)
    assert after < before


def test_balancing_joined_documents_raises(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="equal attention work"):
        TokenDataModule("corpus", balance_attention=True)
