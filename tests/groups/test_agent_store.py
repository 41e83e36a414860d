"""Ranks agree on a name through a store that still contains entries of an earlier attempt."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_megatron.errors import RankMismatchError
from lightning_megatron.groups.agent_store import agree_on_name

PATIENCE = timedelta(seconds=30)


def agree(
    store: dist.Store, ranks: list[int], size: int, patience: timedelta = PATIENCE
) -> dict[int, str]:
    """Run the agreement of several ranks, each in a thread."""
    names: dict[int, str] = {}

    def run(rank: int) -> None:
        try:
            names[rank] = agree_on_name(store, rank, size, patience)
        except RankMismatchError as error:
            names[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def test_ranks_of_an_attempt_share_a_name_that_differs_from_the_previous_attempt() -> None:
    store = dist.HashStore()
    first, second = (agree(store, [2, 1, 0], 3) for _ in range(2))
    assert len(set(first.values())) == len(set(second.values())) == 1
    assert first[0] != second[0]


@pytest.mark.parametrize("died", [[0], [1], [0, 2], [1, 2]])
def test_ranks_that_died_before_the_agreement_do_not_break_the_next_attempt(
    died: list[int],
) -> None:
    store = dist.HashStore()
    answers = agree(
        store, [rank for rank in range(3) if rank not in died], 3, timedelta(seconds=0.2)
    )
    assert all(
        "did not join in time" in answer
        for rank, answer in answers.items()
        if rank == 0 or 0 in died
    )
    names = agree(store, [1, 2, 0], 3)
    assert len(set(names.values())) == 1
    assert "did not" not in names[0]


def test_a_smaller_number_of_ranks_agrees_after_a_machine_is_lost() -> None:
    store = dist.HashStore()
    agree(store, [0, 1, 2, 3], 4)
    assert len(set(agree(store, [1, 0], 2).values())) == 1
