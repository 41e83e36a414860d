"""The reports of ranks name the rank that does not arrive, and those that wait for it."""

from __future__ import annotations

from dataclasses import replace

from lightning_megatron.groups.journal import Call, Journal
from lightning_megatron.strategy.process.rank_status import (
    RankStatus,
    hang_report,
    is_ahead,
    missing_ranks,
)


def test_a_status_survives_conversion_to_text_and_back() -> None:
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


def status_at(rank: int, call: Call | None, waits: bool = True, **counts: int) -> RankStatus:
    return RankStatus(
        rank,
        "host",
        100 + rank,
        "",
        1,
        0.0,
        "train, global_step 5",
        waits,
        call,
        counts,
        ("a.py:1 in f",),
    )


DP = Call("all_reduce", "dp", 4, (0, 2))
TP = Call("all_gather", "tp", 9, (0, 1))


def test_a_computing_rank_is_at_fault_and_ranks_that_wait_for_it_are_not() -> None:
    # Rank 1 waits for rank 0 over tp, rank 0 waits for rank 2 over dp, and rank 2 computes.
    statuses = {
        0: status_at(0, DP, dp=4, tp=8),
        1: status_at(1, TP, dp=3, tp=9),
        2: status_at(2, DP._replace(number=3), False, dp=3),
    }
    assert missing_ranks(statuses, {}, 3) == [2]


def test_a_silent_rank_is_at_fault_even_if_its_last_status_is_in_a_collective() -> None:
    statuses = {0: status_at(0, DP, dp=4), 2: status_at(2, DP._replace(number=3), dp=3)}
    assert missing_ranks(statuses, {2: 5.0}, 3) == [2]
    assert (
        "rank 2 (host, process 102): train, global_step 5, no status report for 5 s"
        in hang_report(statuses, [2], {2: 5.0})
    )


def test_a_rank_that_never_reported_is_at_fault() -> None:
    statuses = {0: status_at(0, DP, dp=4)}
    assert missing_ranks(statuses, {}, 3) == [2]
    assert "rank 2 has never reported its status" in hang_report(statuses, [2], {})


def test_all_ranks_in_unrelated_collectives_are_at_fault() -> None:
    statuses = {
        0: status_at(0, DP, dp=4, tp=8),
        1: status_at(1, TP, tp=9),
        2: status_at(2, Call("barrier", "world", 1, (0, 1, 2)), dp=3),
    }
    assert missing_ranks(statuses, {}, 3) == [0, 1, 2]


def test_pipeline_neighbours_are_distinguished_by_waiting_and_not_by_counts() -> None:
    exchange = Call("exchange", "pp neighbours", 8, (1,))
    computing = status_at(1, Call("exchange", "pp neighbours", 11, (0, 2)), False)
    assert missing_ranks(
        {0: status_at(0, exchange), 1: computing, 2: status_at(2, exchange)}, {}, 3
    ) == [1]


def test_a_rank_outside_of_collectives_is_at_fault_if_all_ranks_of_the_group_wait() -> None:
    statuses = {0: status_at(0, DP, dp=4), 1: status_at(1, None, False), 2: status_at(2, DP, dp=4)}
    assert missing_ranks(statuses, {}, 3) == [1]


def test_a_rank_is_ahead_when_a_rank_of_its_group_started_fewer_collectives() -> None:
    ahead, behind = status_at(0, DP, False, dp=4), status_at(2, DP._replace(number=3), False, dp=3)
    assert is_ahead(ahead, {0: ahead, 2: behind})
    assert not is_ahead(behind, {0: ahead, 2: behind})
    assert not is_ahead(replace(ahead, call=None), {0: ahead, 2: behind})
