"""Ranks agree on names and compare their configurations through the store, before any group exists."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.scale import CountingStore
from lightning_megatron.errors import RankMismatchError
from lightning_megatron.groups import fingerprint, notices
from lightning_megatron.groups.agent_store import agree_on_name
from lightning_megatron.groups.fingerprint import (
    check_same_in_store,
    digest_of_sources,
)

PATIENCE = timedelta(seconds=30)
Answers = dict[int, Any]


def in_threads(ranks: Iterable[int], run: Callable[[int], Any]) -> Answers:
    """Run a function in one thread for each rank; return the results or the errors."""
    answers: Answers = {}

    def answer(rank: int) -> None:
        try:
            answers[rank] = run(rank)
        except RankMismatchError as error:
            answers[rank] = str(error)

    threads = [
        threading.Thread(target=answer, args=(rank,), name=f"host{rank // 2}") for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def agree(
    store: dist.Store, ranks: list[int], size: int, patience: timedelta = PATIENCE
) -> Answers:
    return in_threads(ranks, lambda rank: agree_on_name(store, rank, size, patience))


def compare(
    store: dist.Store, fields: Mapping[int, Any], ranks: range, patience: float = 30
) -> Answers:
    seconds = timedelta(seconds=patience)
    return in_threads(
        fields, lambda rank: check_same_in_store(store, rank, ranks, fields[rank], seconds)
    )


def test_ranks_of_an_attempt_share_a_name_that_differs_from_those_of_other_attempts() -> None:
    store = dist.HashStore()
    first, second = (agree(store, [2, 1, 0], 3) for _ in range(2))
    # A machine is lost.
    third = agree(store, [1, 0], 2)
    assert [len(set(names.values())) for names in (first, second, third)] == [1, 1, 1]
    assert len({first[0], second[0], third[0]}) == 3


def test_ranks_that_died_before_the_agreement_do_not_break_the_next_attempt() -> None:
    for died in ([0], [1, 2]):
        store = dist.HashStore()
        alive = [rank for rank in range(3) if rank not in died]
        answers = agree(store, alive, 3, timedelta(seconds=0.2))
        assert all("did not join in time" in answers[rank] for rank in alive)
        names = agree(store, [1, 2, 0], 3)
        assert len(set(names.values())) == 1
        assert "did not" not in names[0]


def test_equal_configurations_pass_also_in_disjoint_parts_and_are_numbered() -> None:
    store = dist.HashStore()
    for number in range(3):
        same = {rank: {"tp": 2, "order": "tp"} for rank in range(4)}
        assert compare(store, same, range(4)) == dict.fromkeys(range(4), number)
    store = dist.HashStore()
    assert compare(store, {0: {"tp": 2}, 1: {"tp": 2}}, range(2)) == {0: 0, 1: 0}
    assert compare(store, {2: {"tp": 1}, 3: {"tp": 1}}, range(2, 4)) == {2: 0, 3: 0}


def test_every_rank_names_the_rank_that_differs_with_both_values_and_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = {rank: {"tp": 2, "sources": "b" if rank == 3 else "a"} for rank in range(4)}
    for message in compare(dist.HashStore(), fields, range(4)).values():
        assert "rank 3 has sources='b', the others 'a'" in message
    monkeypatch.setattr(fingerprint.socket, "gethostname", lambda: threading.current_thread().name)
    message = compare(dist.HashStore(), fields, range(4))[0]
    assert "rank 3 on host1 has sources='b', the others 'a'" in message


def test_ranks_that_do_not_join_and_layouts_of_different_ranks_are_reported() -> None:
    errors = compare(dist.HashStore(), {0: {}, 2: {}}, range(3), patience=0.2)
    assert all("rank 1 did not join within 0.2 s" in errors[rank] for rank in (0, 2))
    errors = compare(dist.HashStore(), {1: {}, 2: {}}, range(3), patience=0.2)
    assert all("rank 0 did not join within 0.2 s" in errors[rank] for rank in (1, 2))
    store, layouts = dist.HashStore(), (range(4), range(2))
    errors = in_threads(
        range(2), lambda rank: check_same_in_store(store, rank, layouts[rank], {}, PATIENCE)
    )
    assert "layout of rank 0 has ranks 0 to 3, the layout of rank 1 has ranks 0 to 1" in errors[0]
    assert "layout of rank 1 has ranks 0 to 1, the layout of rank 0 has ranks 0 to 3" in errors[1]


def test_each_of_16384_ranks_compares_its_configuration_with_eight_requests() -> None:
    size = 16384
    store = CountingStore()
    # The ranks come one after the other here, and would wait for the result of the last one.
    store.set(f"lightning_megatron/same/0 to {size - 1}/1/result", "")
    counts = []
    for rank in range(size):
        before = store.num_requests
        assert check_same_in_store(store, rank, range(size), {"tp": 8, "pp": 16}, PATIENCE) == 0
        counts.append(store.num_requests - before)
    assert max(counts[:-1]) <= 8, "only the last rank reads and writes the result"
    assert counts[-1] <= 11


def test_the_first_of_many_ranks_answers_each_with_three_requests() -> None:
    store = CountingStore()
    names = agree(store, list(range(200)), 200)
    assert len(set(names.values())) == 1
    # The others ask with five requests, and wait with one in each fiftieth of a second.
    assert store.num_requests < 20 * 200


def test_the_hash_of_sources_depends_on_names_and_contents(tmp_path: Path) -> None:
    digests = []
    for name, text in (("room/a.py", "x = 1"), ("room/a.py", "x = 2"), ("b.py", "x = 2")):
        (tmp_path / "room" / "a.py").unlink(missing_ok=True)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        digests.append(digest_of_sources(tmp_path))
    (tmp_path / "notes.txt").write_text("no source")
    assert len({*digests, digest_of_sources(tmp_path)}) == 3


def test_no_notice_is_under_way_when_the_process_ends(monkeypatch):
    ends: list[Callable[[], None]] = []
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    monkeypatch.setattr(notices.atexit, "register", ends.append)
    monkeypatch.setattr(notices, "default_store", lambda: store)
    held = notices.Notices("job")
    held.post("name", "text")
    watch = threading.Thread(target=lambda: [held.read(["name"]) for _ in range(1000)])
    watch.start()
    assert held.read(["name"]) == {"name": "text"}
    (end,) = ends
    end()
    assert "notices" not in {thread.name for thread in threading.enumerate()}
    assert held.read(["name"]) == {}
    watch.join()
