"""Ranks compare their configurations through the store before any group exists."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_megatron import CausalLM, GPTConfig, MegatronStrategy, ParallelMesh
from lightning_megatron.errors import RankMismatchError
from lightning_megatron.groups import fingerprint, mesh, mesh_groups
from lightning_megatron.groups.fingerprint import _is_timeout, check_same_in_store
from lightning_megatron.groups.sources import digest_of_sources, package_hash
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.process import ranks
from tests.world import run_world


def compare(
    store: dist.Store, fields: Mapping[int, Any], ranks: range, patience: float = 30
) -> dict[int, Any]:
    """Compare fields in one thread per rank; return the number or the error of each rank."""
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = check_same_in_store(
                store, rank, ranks, fields[rank], timedelta(seconds=patience)
            )
        except RankMismatchError as error:
            results[rank] = str(error)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"host{rank // 2}") for rank in fields
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_comparisons_of_equal_configurations_pass_and_are_numbered() -> None:
    store = dist.HashStore()
    for number in range(3):
        same = {rank: {"tp": 2, "order": "tp"} for rank in range(4)}
        assert compare(store, same, range(4)) == dict.fromkeys(range(4), number)


def test_every_rank_names_the_rank_that_differs_with_both_values() -> None:
    fields = {rank: {"tp": 2, "sources": "b" if rank == 3 else "a"} for rank in range(4)}
    for message in compare(dist.HashStore(), fields, range(4)).values():
        assert "rank 3 has sources='b', the others 'a'" in message


def test_errors_name_hosts_if_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint.socket, "gethostname", lambda: threading.current_thread().name)
    fields = {rank: {"sources": "b" if rank == 3 else "a"} for rank in range(4)}
    assert (
        "rank 3 on host1 has sources='b', the others 'a'"
        in compare(dist.HashStore(), fields, range(4))[0]
    )


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
    numbers: dict[int, int] = {}

    def run(rank: int) -> None:
        time.sleep(1.5 * rank)
        patience = timedelta(seconds=60)
        numbers[rank] = check_same_in_store(stores[rank], rank, range(2), {"tp": 2}, patience)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers == {0: 0, 1: 0}
    assert capfd.readouterr().err == ""


def test_ranks_whose_layouts_cover_different_ranks_raise_without_waiting() -> None:
    store, errors = dist.HashStore(), {}

    def run(rank: int, ranks: range) -> None:
        try:
            check_same_in_store(store, rank, ranks, {}, timedelta(seconds=60))
        except RankMismatchError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=run, args=args) for args in ((0, range(4)), (1, range(2)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (
        "the layout of rank 0 has ranks 0 to 3, the layout of rank 1 has ranks 0 to 1" in errors[0]
    )
    assert (
        "the layout of rank 1 has ranks 0 to 1, the layout of rank 0 has ranks 0 to 3" in errors[1]
    )


def test_the_hash_of_sources_depends_on_names_and_contents_and_is_cheap(tmp_path: Path) -> None:
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
    times = []
    for _ in range(5):
        began = time.thread_time()
        digest_of_sources(Path(mesh.__file__).parents[1])
        times.append(time.thread_time() - began)
    assert min(times) < 0.1


def _check_different_sources(rank: int, size: int) -> None:
    digest = "0123456789ab" if rank == 1 else package_hash()
    message = (
        rf"rank 1 has lightning-megatron sources='0123456789ab', the others '{package_hash()}'"
    )

    def no_group(*_: Any, **__: Any) -> Any:
        raise AssertionError("ranks that disagree must not make a group")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", no_group)
        patch.setattr(mesh_groups, "package_hash", lambda: digest)
        with pytest.raises(RankMismatchError, match=message):
            ParallelMesh.create(ParallelLayout(size, tp=2))
        patch.setattr(ranks, "package_hash", lambda: digest)
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=MegatronStrategy(tp=2),
            **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False),
        )
        sizes = {
            "vocab_size": 16,
            "max_seq_length": 8,
            "num_layers": 1,
            "hidden_size": 8,
            "num_heads": 2,
        }
        with pytest.raises(RankMismatchError, match=message):
            trainer.fit(CausalLM(GPTConfig.gpt2(**sizes)), [])


def test_ranks_with_different_sources_raise_before_any_group_exists() -> None:
    run_world(_check_different_sources, 2)


def test_a_timeout_of_a_file_store_is_recognized(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(RuntimeError) as caught:
        store.wait(["nothing"], timedelta(seconds=0.01))
    assert _is_timeout(caught.value)
    assert not _is_timeout(RuntimeError("Connection reset by peer"))
