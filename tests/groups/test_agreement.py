"""Ranks agree on names and compare their configurations through the store, before any group exists."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_megatron.errors import RankMismatchError
from lightning_megatron.groups import fingerprint
from lightning_megatron.groups.agent_store import agree_on_name
from lightning_megatron.groups.fingerprint import _is_timeout, check_same_in_store
from lightning_megatron.groups.sources import digest_of_sources, package_hash

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


def test_ranks_of_an_attempt_share_a_name_that_differs_from_the_previous_attempt() -> None:
    store = dist.HashStore()
    first, second = (agree(store, [2, 1, 0], 3) for _ in range(2))
    assert len(set(first.values())) == len(set(second.values())) == 1
    assert first[0] != second[0]


@pytest.mark.parametrize("died", [[0], [1, 2]])
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


def test_comparisons_of_equal_configurations_pass_and_are_numbered() -> None:
    store = dist.HashStore()
    for number in range(3):
        same = {rank: {"tp": 2, "order": "tp"} for rank in range(4)}
        assert compare(store, same, range(4)) == dict.fromkeys(range(4), number)


def test_every_rank_names_the_rank_that_differs_with_both_values_and_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = {rank: {"tp": 2, "sources": "b" if rank == 3 else "a"} for rank in range(4)}
    for message in compare(dist.HashStore(), fields, range(4)).values():
        assert "rank 3 has sources='b', the others 'a'" in message
    monkeypatch.setattr(fingerprint.socket, "gethostname", lambda: threading.current_thread().name)
    message = compare(dist.HashStore(), fields, range(4))[0]
    assert "rank 3 on host1 has sources='b', the others 'a'" in message


def test_disjoint_parts_of_a_world_are_compared_separately() -> None:
    store = dist.HashStore()
    first = compare(store, {0: {"tp": 2}, 1: {"tp": 2}}, range(2))
    second = compare(store, {2: {"tp": 1}, 3: {"tp": 1}}, range(2, 4))
    assert {**first, **second} == dict.fromkeys(range(4), 0)


def test_ranks_that_do_not_join_in_time_are_reported() -> None:
    errors = compare(dist.HashStore(), {0: {}, 2: {}}, range(3), patience=0.2)
    assert "rank 1 did not join within 0.2 s" in errors[0]
    assert "rank 0 did not join within 0.2 s" in errors[2]


def test_waiting_for_a_late_rank_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    stores.append(dist.TCPStore("127.0.0.1", stores[0].port, is_master=False))

    def run(rank: int) -> int:
        time.sleep(1.5 * rank)
        return check_same_in_store(stores[rank], rank, range(2), {"tp": 2}, PATIENCE)

    assert in_threads(range(2), run) == {0: 0, 1: 0}
    assert capfd.readouterr().err == ""


def test_ranks_whose_layouts_cover_different_ranks_raise_without_waiting() -> None:
    store, layouts = dist.HashStore(), (range(4), range(2))
    errors = in_threads(
        range(2), lambda rank: check_same_in_store(store, rank, layouts[rank], {}, PATIENCE)
    )
    assert "layout of rank 0 has ranks 0 to 3, the layout of rank 1 has ranks 0 to 1" in errors[0]
    assert "layout of rank 1 has ranks 0 to 1, the layout of rank 0 has ranks 0 to 3" in errors[1]


def test_the_hash_of_sources_depends_on_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("x = 1\n")
    first = digest_of_sources(tmp_path)
    (tmp_path / "room" / "a.py").write_text("x = 2\n")
    second = digest_of_sources(tmp_path)
    (tmp_path / "room" / "a.py").rename(tmp_path / "b.py")
    third = digest_of_sources(tmp_path)
    (tmp_path / "notes.txt").write_text("no source")
    assert len({first, second, third, digest_of_sources(tmp_path)}) == 3
    assert package_hash() == package_hash()


def test_a_timeout_of_a_file_store_is_recognized(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(RuntimeError) as caught:
        store.wait(["nothing"], timedelta(seconds=0.01))
    assert _is_timeout(caught.value)
    assert not _is_timeout(RuntimeError("Connection reset by peer"))
