"""The reports of ranks name the rank that does not arrive, and those that wait for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_megatron.groups.journal import Call, Journal
from lightning_megatron.strategy.process.rank_status import (
    RankStatus,
    hang_report,
    is_ahead,
    missing_ranks,
)


def test_a_status_survives_conversion_to_text_and_back():
    journal = Journal()
    assert journal.last is None
    first = journal.note("all_reduce", "dp", (0, 1))
    journal.note("broadcast", "tp", (0, 2))
    journal.record_wait(first)
    status = RankStatus.observe(3, 7, "train, global_step 5", journal)
    assert status.call == Call("all_reduce", "dp", 1, (0, 1))
    assert status.counts == {"dp": 1, "tp": 1}
    assert not status.waits
    assert "rank_status.py" in status.lines[0]
    assert any("test_rank_status.py" in line for line in status.lines)
    assert RankStatus.from_text(status.to_text()) == status


@pytest.mark.parametrize(
    "ranks", [(), (3,), (1, 1), (5, 2), (0, 1, 2, 3, 32, 33, 34, 35), tuple(range(7, 16384, 8))]
)
def test_the_ranks_of_a_call_survive_in_a_text_of_bounded_length(ranks: tuple[int, ...]):
    status = status_at(0, Call("all_reduce", "data", 3, ranks), data=3)
    assert RankStatus.from_text(status.to_text()) == status
    assert len(status.to_text()) < 400


def test_a_report_of_16384_ranks_that_hang_names_the_missing_one_and_some_of_the_others():
    ranks = tuple(range(16384))
    call = Call("all_reduce", "world", 2, ranks)
    statuses = {rank: status_at(rank, call, world=2) for rank in ranks[1:]}
    statuses[0] = status_at(0, Call("all_reduce", "world", 1, ranks), False, world=1)
    assert missing_ranks(statuses, [], len(ranks)) == [0]
    report = hang_report(statuses, [0], {})
    assert "rank 63: train" in report
    assert report.endswith("and 16319 other ranks")


def status_at(rank: int, call: Call | None, waits: bool = True, **counts: int) -> RankStatus:
    place = "train, global_step 5"
    lines = ("a.py:1 in f",)
    return RankStatus(rank, "host", 100 + rank, "", 1, 0.0, place, waits, call, counts, lines)


DP = Call("all_reduce", "dp", 4, (0, 2))
BEFORE = DP._replace(number=3)
TP = Call("all_gather", "tp", 9, (0, 1))
NEAR = Call("exchange", "pp neighbours", 8, (1,))
FAR = Call("exchange", "pp neighbours", 11, (0, 2))
WORLD = Call("barrier", "world", 1, (0, 1, 2))
FIRST = status_at(0, DP, dp=4, tp=8)
#: Statuses of the ranks of a job of three, and the ranks at fault.
CASES: dict[str, tuple[list[RankStatus], dict[int, float], list[int]]] = {
    "rank 1 waits for 0 over tp, 0 waits for 2 over dp, and 2 computes": (
        [FIRST, status_at(1, TP, dp=3, tp=9), status_at(2, BEFORE, False, dp=3)], {}, [2],
    ),
    "a silent rank, even if its last status is in a collective": (
        [status_at(0, DP, dp=4), status_at(2, BEFORE, dp=3)], {2: 5.0}, [2],
    ),
    "a rank that never reported": ([status_at(0, DP, dp=4)], {}, [2]),
    "all ranks, which are in unrelated collectives": (
        [FIRST, status_at(1, TP, tp=9), status_at(2, WORLD, dp=3)], {}, [0, 1, 2],
    ),
    "pipeline neighbours are distinguished by waiting and not by counts": (
        [status_at(0, NEAR), status_at(1, FAR, False), status_at(2, NEAR)], {}, [1],
    ),
    "a rank outside of collectives, if all ranks of the group wait": (
        [status_at(0, DP, dp=4), status_at(1, None, False), status_at(2, DP, dp=4)], {}, [1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_others_wait_for_are_at_fault(name):
    statuses, silent, expected = CASES[name]
    assert missing_ranks({status.rank: status for status in statuses}, silent, 3) == expected


def test_a_report_names_silent_ranks_and_ranks_that_never_reported():
    statuses = {0: status_at(0, DP, dp=4), 2: status_at(2, BEFORE, dp=3)}
    silent = "rank 2 (host, process 102): train, global_step 5, no status report for 5 s"
    assert silent in hang_report(statuses, [2], {2: 5.0})
    assert "rank 2 has never reported its status" in hang_report({0: statuses[0]}, [2], {})


def test_a_rank_is_ahead_when_a_rank_of_its_group_started_fewer_collectives():
    ahead, behind = status_at(0, DP, False, dp=4), status_at(2, BEFORE, False, dp=3)
    assert is_ahead(ahead, {0: ahead, 2: behind})
    assert not is_ahead(behind, {0: ahead, 2: behind})
    assert not is_ahead(replace(ahead, call=None), {0: ahead, 2: behind})
