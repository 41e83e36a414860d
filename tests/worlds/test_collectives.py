"""Collectives of four ranks, forward and backward, and everything that groups of ranks do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_megatron import CausalLM, GPTConfig, MegatronStrategy
from lightning_megatron.errors import ParallelPlanError, RankMismatchError, UnsupportedError
from lightning_megatron.groups import mesh_groups
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import (
    all_gather_objects,
    all_gather_sequence,
    all_reduce_,
    barrier,
    broadcast_,
    broadcast_object,
    copy_to_axis,
    gather_from_axis,
    gather_objects,
    reduce_from_axis,
    reduce_scatter_sequence,
    split_to_axis,
)
from lightning_megatron.groups.fingerprint import package_hash
from lightning_megatron.groups.journal import Call, RecordedCall
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.nccl_options import GROUP_NAMES
from lightning_megatron.groups.pending import start_all_gather, start_all_reduce, start_transfers
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.process import ranks
from tests.world import run_world

PAIRS: dict[str, Callable[[Tensor, MeshAxis], Tensor]] = {
    "copy": copy_to_axis,
    "reduce": reduce_from_axis,
    "gather 0": lambda x, axis: gather_from_axis(x, axis, 0),
    "gather 2": lambda x, axis: gather_from_axis(x, axis, 2),
    "all-gather 0": lambda x, axis: all_gather_sequence(x, axis, 0),
    "all-gather 1": lambda x, axis: all_gather_sequence(x, axis, 1),
    "reduce-scatter 0": lambda x, axis: reduce_scatter_sequence(x, axis, 0),
    "reduce-scatter 2": lambda x, axis: reduce_scatter_sequence(x, axis, 2),
    "split": lambda x, axis: split_to_axis(x, axis, 1),
}
SIZES: dict[str, Any] = {"vocab_size": 32, "max_seq_length": 8, "hidden_size": 16, "num_heads": 2}


def draw(rank: int, *shape: int) -> Tensor:
    shape = shape or (4, 8, 4)
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def expected_pair(name: str, axis: MeshAxis) -> tuple[Tensor, Tensor]:
    """Return the result of a collective and the gradient of its conjugate, by one process."""
    inputs, size, rank = [draw(peer) for peer in axis.ranks], axis.size, axis.rank
    kind, dim = name.rsplit(" ", 1)[0], int(name[-1]) if name[-1].isdigit() else 1
    result = {
        "copy": lambda: inputs[rank],
        "reduce": lambda: sum(inputs, torch.zeros(())),
        "gather": lambda: torch.cat(inputs, dim),
        "all-gather": lambda: torch.cat(inputs, dim),
        "reduce-scatter": lambda: sum(inputs, torch.zeros(())).chunk(size, dim)[rank],
        "split": lambda: inputs[rank].chunk(size, dim)[rank],
    }[kind]()
    grads = [draw(100 + peer, *result.shape) for peer in axis.ranks]
    gradient = {
        "copy": lambda: sum(grads, torch.zeros(())),
        "reduce": lambda: grads[rank],
        "gather": lambda: grads[rank].chunk(size, dim)[rank],
        "all-gather": lambda: sum(grads, torch.zeros(())).chunk(size, dim)[rank],
        "reduce-scatter": lambda: torch.cat(grads, dim),
        "split": lambda: torch.cat(grads, dim),
    }[kind]()
    return result, gradient


def check_pairs(mesh: ParallelMesh) -> None:
    axis = mesh.tp
    for name, pair in PAIRS.items():
        expected, expected_gradient = expected_pair(name, axis)
        x = draw(axis.ranks[axis.rank]).requires_grad_()
        before = x.detach().clone()
        actual = pair(x, axis)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12, msg=name)
        actual.backward(draw(100 + axis.ranks[axis.rank], *actual.shape))
        torch.testing.assert_close(x.grad, expected_gradient, rtol=0, atol=1e-12, msg=name)
        assert torch.equal(x.detach(), before), f"{name} wrote to its input"
    with pytest.raises(ValueError, match=r"dimension 0 \(3\) must be a multiple of tp.*Pad it"):
        reduce_scatter_sequence(torch.zeros(3), axis)


def check_reductions(mesh: ParallelMesh) -> None:
    axis = mesh.tp
    local, stacked = draw(axis.ranks[axis.rank]), torch.stack([draw(p) for p in axis.ranks])
    reductions = {"sum": stacked.sum(0), "mean": stacked.mean(0), "max": stacked.amax(0)}
    for op, expected in {**reductions, "min": stacked.amin(0)}.items():
        torch.testing.assert_close(all_reduce_(local.clone(), axis, op), expected)
        pending = start_all_reduce(started := local.clone(), axis, op)
        pending.wait()
        torch.testing.assert_close(started, expected)
    last = axis.size - 1
    assert torch.equal(broadcast_(local.clone(), axis, last), stacked[-1])
    assert all_gather_objects(axis.rank, axis) == list(range(axis.size))
    gathered = gather_objects(axis.rank, axis)
    assert gathered == (list(range(axis.size)) if axis.rank == 0 else [])
    assert broadcast_object(f"from {axis.rank}", axis, last) == f"from {last}"


def check_transfers(mesh: ParallelMesh) -> None:
    axis = mesh.world
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    a, b = torch.full((3,), float(axis.rank)), torch.full((2,), 10.0 + axis.rank)
    from_before, from_after = torch.empty(3), torch.empty(2)
    receives = [(from_before, before), (from_after, after)]
    start_transfers([(a, after), (b, before)], receives, axis).wait()
    assert from_before.tolist() == [float(before)] * 3
    assert from_after.tolist() == [10.0 + after] * 2


def communicate(mesh: ParallelMesh) -> None:
    """Start and complete two collectives."""
    x = torch.ones(2)
    pending = start_all_gather(torch.empty(4), x, mesh.tp)
    all_reduce_(x, mesh.tp)
    pending.wait()


def check_journal(mesh: ParallelMesh) -> None:
    """A repeated recording counts like the recorded computation."""
    journal, group, label = mesh.journal, mesh.tp.ranks, "replay of layers 3..4"
    before = journal.counts["tp"]
    communicate(mesh)
    last = journal.last
    with journal.recording() as calls:
        communicate(mesh)
    assert (journal.counts["tp"], journal.last) == (before + 2, last), "a recording counts nothing"
    assert calls == [RecordedCall(name, "tp", group) for name in ("all_gather", "all_reduce")]
    journal.repeat(calls, label)
    assert journal.last == Call(label, "tp", before + 4, group)
    communicate(mesh)
    # A later wait still names the collective that it waits for.
    assert journal.last == Call("all_gather", "tp", before + 5, group)


def check_cpu_axes(mesh: ParallelMesh) -> None:
    for name in GROUP_NAMES:
        axis, cpu_axis = getattr(mesh, name), getattr(mesh, f"{name}_cpu")
        assert cpu_axis.name == f"{name}_cpu"
        assert (cpu_axis.ranks, cpu_axis.rank) == (axis.ranks, axis.rank)
        assert all_gather_objects(mesh.rank, cpu_axis) == list(axis.ranks)


def check_groups(rank: int) -> None:
    with pytest.raises(ParallelPlanError, match="has 4 ranks, and the layout needs 8"):
        ParallelMesh.create(ParallelLayout(8, tp=2))
    mesh = ParallelMesh.create(ParallelLayout(4, tp=2, pp=2), seed=7)
    assert mesh.dp.group is None, "a group of one must not exist"
    tp, pp = rank // 2 * 2, rank % 2
    assert (mesh.tp.ranks, mesh.pp.ranks) == ((tp, tp + 1), (pp, pp + 2))
    assert mesh.embedding.ranks == mesh.pp.ranks
    assert mesh.dp.ranks == mesh.data.ranks == (rank,)
    assert mesh.model.ranks == mesh.world_cpu.ranks == (0, 1, 2, 3)
    for check in (check_pairs, check_reductions, check_transfers, check_journal):
        check(mesh)
    mesh.destroy()
    for sizes in ({"tp": 4}, {"tp": 2, "ep": 2}):
        mesh = ParallelMesh.create(ParallelLayout(4, **sizes))
        check_pairs(mesh)
        check_cpu_axes(mesh)
        mesh.destroy()
    mesh = ParallelMesh.create(ParallelLayout(4, pp=4))
    assert (mesh.embedding.size == 2) == (rank in (0, 3))
    mesh.destroy()


def check_lines(rank: int) -> None:
    """Collectives of many ranks run over rows and columns, with the results of one group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh_groups, "FEW_RANKS", 3)
        mesh = ParallelMesh.create(ParallelLayout(4, tp=2))
    for axis in (mesh.world_cpu, mesh.checkpoint_cpu):
        assert [line.ranks for line in axis.lines] == [
            (rank // 2 * 2, rank // 2 * 2 + 1),
            (rank % 2, rank % 2 + 2),
        ]
        for op, expected in {"sum": 6.0, "mean": 1.5, "max": 3.0, "min": 0.0}.items():
            assert all_reduce_(torch.tensor([float(rank)]), axis, op).item() == expected
        assert all_gather_objects(f"{rank}", axis) == list("0123")
        assert gather_objects(rank, axis) == ([0, 1, 2, 3] if rank == 0 else [])
        for source in range(4):
            assert broadcast_object({"from": rank}, axis, source) == {"from": source}
            assert broadcast_(torch.tensor([rank]), axis, source).item() == source
        barrier(axis)
    assert mesh.tp_cpu.lines == ()
    assert mesh.journal.last.axis.endswith("columns")
    mesh.destroy()
    with pytest.raises(UnsupportedError, match="after the run"):
        barrier(mesh.world_cpu)


def check_destroyed_groups(rank: int) -> None:
    """Collectives of destroyed groups raise an error that says what to do instead."""
    for name in ("tp", "pp"):
        mesh = ParallelMesh.create(ParallelLayout(4, **{name: 2}))
        axis = getattr(mesh, name)
        assert all_reduce_(torch.ones(2), axis).tolist() == [2.0, 2.0]
        mesh.destroy()
        check_refusals_of(mesh, axis)
        # Axes of one rank never communicate.
        assert all_reduce_(torch.ones(2), mesh.cp).tolist() == [1.0, 1.0]


def check_refusals_of(mesh: ParallelMesh, axis: MeshAxis) -> None:
    x = torch.ones(2, requires_grad=True)
    for use in (
        lambda: all_reduce_(torch.ones(2), axis),
        lambda: start_transfers([(torch.ones(2), 1 - axis.rank)], [], axis),
        lambda: copy_to_axis(x, axis).sum().backward(),
        lambda: all_gather_objects(1, mesh.world_cpu),
    ):
        with pytest.raises(UnsupportedError, match="after the run.*on_train_end"):
            use()


def check_different_sources(rank: int) -> None:
    """Ranks with different sources raise before any group exists."""
    digest = "0123456789ab" if rank == 1 else package_hash()
    message = f"rank 1 has lightning-megatron sources='0123456789ab', the others '{package_hash()}'"

    def no_group(*_: Any, **__: Any) -> Any:
        raise AssertionError("ranks that disagree must not make a group")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", no_group)
        patch.setattr(mesh_groups, "package_hash", lambda: digest)
        with pytest.raises(RankMismatchError, match=message):
            ParallelMesh.create(ParallelLayout(4, tp=2))
        patch.setattr(ranks, "package_hash", lambda: digest)
        trainer = Trainer(
            accelerator="cpu", devices=4, strategy=MegatronStrategy(tp=2), barebones=True
        )
        with pytest.raises(RankMismatchError, match=message):
            trainer.fit(CausalLM(GPTConfig.gpt2(**SIZES, num_layers=1)), [])


def check_parts_of_the_world(rank: int) -> None:
    """Layouts of disjoint parts of a job coexist, also parts of different sizes."""
    is_first = rank < 2
    layout = ParallelLayout(2, tp=2) if is_first else ParallelLayout(2, rank_offset=2)
    for _ in range(2):  # groups of the same ranks are created again
        mesh = ParallelMesh.create(layout, seed=1)
        assert mesh.world.ranks == ((0, 1) if is_first else (2, 3))
        assert all_gather_objects(rank, mesh.world_cpu) == list(mesh.world.ranks)
        axis = mesh.tp if is_first else mesh.data
        assert all_reduce_(torch.ones(1) * rank, axis).item() == (1 if is_first else 5)
        mesh.destroy()
    if rank == 0:
        with pytest.raises(ParallelPlanError, match="rank 0 is not in 1 to 3. Give this rank a"):
            ParallelMesh.create(ParallelLayout(3, rank_offset=1))
        assert ParallelMesh.create(ParallelLayout(1)).world.size == 1
    else:
        stages = ParallelMesh.create(ParallelLayout(3, pp=3, rank_offset=1))
        assert stages.embedding.ranks == ((2,) if rank == 2 else (1, 3))
        check_cpu_axes(stages)
    # Collectives of all ranks still work while the parts exist.
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group(list(range(4))))
    assert total.item() == 4
    mesh = ParallelMesh.create(ParallelLayout(4, tp=2))
    assert all_gather_objects(rank, mesh.world_cpu) == list(range(4))


def run_all(rank: int, size: int) -> None:
    check_different_sources(rank)
    check_groups(rank)
    check_lines(rank)
    check_destroyed_groups(rank)
    check_parts_of_the_world(rank)


def test_collectives_equal_one_process_and_groups_of_parts_of_a_world_coexist() -> None:
    run_world(run_all, 4)
