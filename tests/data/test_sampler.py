"""Ranks share each global batch without overlap, and any number of ranks resumes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.sampler import TokenBatchSampler
from lightning_megatron.errors import ParallelPlanError

sizes = st.tuples(st.integers(1, 4), st.integers(1, 4))


class Trainer:
    """Counter of finished batches, in place of a Trainer."""

    def __init__(self) -> None:
        self.finished = 0

    def __call__(self) -> int:
        return self.finished


def make_samplers(
    num_samples: int, batch_size: int, dp_size: int, **options: object
) -> list[TokenBatchSampler]:
    return [
        TokenBatchSampler(num_samples, batch_size, rank, dp_size, **options)
        for rank in range(dp_size)
    ]  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(16, 60),
    size=sizes,
    seed=st.sampled_from([None, 3]),
    epoch=st.integers(0, 2),
)
def test_ranks_take_contiguous_disjoint_shares(
    num_samples: int, size: tuple[int, int], seed: int | None, epoch: int
) -> None:
    batch_size, dp_size = size
    samplers = make_samplers(num_samples, batch_size, dp_size, seed=seed)
    [single] = make_samplers(num_samples, batch_size * dp_size, 1, seed=seed)
    for sampler in (*samplers, single):
        sampler.set_epoch(epoch)
    for batch, *shares in zip(single, *samplers, strict=True):
        assert [number for share in shares for number in share] == batch
        assert [len(share) for share in shares] == [batch_size] * dp_size
    assert len(single) == num_samples // (batch_size * dp_size)


@settings(max_examples=100, deadline=None)
@given(
    num_samples=st.integers(16, 60),
    parts=st.lists(st.tuples(sizes, st.integers(0, 3)), min_size=1, max_size=4),
)
def test_changed_ranks_and_batch_sizes_neither_repeat_nor_skip_samples(
    num_samples: int, parts: list[tuple[tuple[int, int], int]]
) -> None:
    state = {"epoch": 0, "consumed": 0}
    taken: list[int] = []
    for (batch_size, dp_size), num_batches in parts:
        trainer = Trainer()
        samplers = make_samplers(num_samples, batch_size, dp_size, seed=1, finished=trainer)
        for sampler in samplers:
            sampler.load_state_dict(state)
        if samplers[0].epoch > 0:
            break
        rows = zip(*samplers, strict=True)
        for shares, _ in zip(rows, range(num_batches), strict=False):
            taken += [number for share in shares for number in share]
            trainer.finished += 1
        states = [sampler.state_dict() for sampler in samplers]
        assert all(rank_state == states[0] for rank_state in states)
        state = states[0]
    assert taken == list(range(len(taken)))


def test_the_state_counts_finished_samples_and_not_prefetched_samples() -> None:
    trainer = Trainer()
    [sampler] = make_samplers(40, 4, 1, finished=trainer)
    batches = iter(sampler)
    for _ in range(5):
        next(batches)
    trainer.finished += 2
    assert sampler.state_dict() == {"epoch": 0, "consumed": 8}


def test_epochs_have_different_orders_that_depend_only_on_the_seed() -> None:
    orders = []
    for _ in range(2):
        [sampler] = make_samplers(30, 5, 1, seed=7)
        orders_of_epochs = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            orders_of_epochs.append([number for batch in sampler for number in batch])
        orders.append(orders_of_epochs)
    assert orders[0] == orders[1]
    assert all(sorted(order) == list(range(30)) for order in orders[0])
    assert orders[0][0] == list(range(30)) != orders[0][1] != orders[0][2]


@settings(max_examples=60, deadline=None)
@given(num_samples=st.integers(1, 40), size=sizes)
def test_evaluation_takes_every_sample_once_in_equal_shapes(
    num_samples: int, size: tuple[int, int]
) -> None:
    samplers = make_samplers(num_samples, *size, drop_last=False)
    rows = list(zip(*samplers, strict=True))
    assert len(rows) == len(samplers[0])
    assert all(len({len(share) for share in shares}) == 1 for shares in rows)
    real = [number for shares in rows for share in shares for number in share if number >= 0]
    assert real == list(range(num_samples))
    # A share has at most one empty row.
    assert all(share.count(-1) <= 1 for shares in rows for share in shares)


def test_a_stream_continues_across_the_epochs_of_the_trainer() -> None:
    trainer = Trainer()
    [sampler] = make_samplers(12, 2, 1, stream=True, finished=trainer)
    taken = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, _ in zip(sampler, range(3), strict=False):
            taken += batch
            trainer.finished += 1
    assert taken == list(range(12))
    sampler.set_epoch(2)
    assert sampler.state_dict() == {"epoch": 1, "consumed": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 0, 0, 1), "batch_size is 0"),
        ((10, 1, 2, 2), "dp_rank 2"),
        ((5, 3, 0, 2), "it has 5 samples, and the first batch 6 over 2"),
    ],
)
def test_invalid_batch_sizes_ranks_and_sample_counts_are_refused(
    arguments: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ParallelPlanError, match=message):
        TokenBatchSampler(*arguments)
