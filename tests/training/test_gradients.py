"""Sums and clipping of gradients over every kind of layout, against one process that holds the full tensors."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.training import GradientSync, MainParameters, clip_by_norm_, clip_by_value_, grad_norm
from lightning_megatron.training.shared_gradients import original_name, overlapping_pieces, resolve_ties
from tests.training.synthetic import HEAD, WORD, full_gradients, parameters, pieces, set_gradients
from tests.world import run_world

LAYOUTS = ({"tp": 4}, {"tp": 2, "pp": 2}, {"pp": 4}, {"tp": 2}, {"pp": 2}, {})


def errors_of_layout(mesh: ParallelMesh, bucket_bytes: int) -> dict[str, float]:
    named = parameters(mesh)
    main = MainParameters(named)
    sync = GradientSync(main, mesh, bucket_bytes)
    set_gradients(named, mesh)
    before = {name: p.grad.clone() for name, p in named.items()}
    sync.finish()
    truth = full_gradients(mesh.data.size)
    largest, unshared = 0.0, 0.0
    for name, piece in pieces(mesh).items():
        want = piece.spec.shard(truth[WORD if name == HEAD else name], piece.local_size)
        largest = max(largest, (named[name].grad - want).abs().max().item())
        if "qkv" in name and mesh.data.size == 1:
            queries = piece.spec.ranges[0].size
            unshared = max(unshared, (named[name].grad[:queries] - before[name][:queries]).abs().max().item())

    twins = [nn.Parameter(torch.zeros_like(full)) for full in truth.values()]
    for twin, full in zip(twins, truth.values(), strict=True):
        twin.grad = full.clone()
    want_norm = torch.nn.utils.clip_grad_norm_(twins, 0.5)
    norm = clip_by_norm_(main, mesh, 0.5)
    clipped = dict(zip(truth, twins, strict=True))
    clip_error = max(
        (named[name].grad - piece.spec.shard(clipped[WORD if name == HEAD else name].grad, piece.local_size))
        .abs()
        .max()
        .item()
        for name, piece in pieces(mesh).items()
    )
    # A norm below the limit must leave the gradients bitwise as they are.
    kept = {name: p.grad.clone() for name, p in named.items()}
    clip_by_norm_(main, mesh, 100.0)
    changed = max((named[name].grad - kept[name]).abs().max().item() for name in named)
    return {
        "gradient": largest,
        "unshared rows": unshared,
        "norm": abs(norm.item() - want_norm.item()),
        "clip": clip_error,
        "clip below the limit": changed,
    }


def missing_gradients(rank: int, mesh: ParallelMesh) -> dict[str, Any]:
    """Leave gradients out on some ranks and on all ranks of a data-parallel group."""
    main = MainParameters({name: nn.Parameter(torch.ones(3)) for name in ("everywhere", "somewhere", "nowhere")})
    frozen = MainParameters({"frozen": nn.Parameter(torch.ones(2), requires_grad=False)})
    sync = GradientSync(main, mesh)
    GradientSync(frozen, mesh).finish()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_megatron").addHandler(handler)
    for _ in range(2):
        main.zero_grad()
        main.main("everywhere").grad = torch.full((3,), float(rank))
        if rank == 0:
            main.main("somewhere").grad = torch.full((3,), 8.0)
        sync.finish()
    grads = {name: None if main.main(name).grad is None else main.main(name).grad.tolist() for name in main.names}
    return {"grads": grads, "records": records}


def tie_errors(mesh: ParallelMesh) -> list[str]:
    """Check optimizers that treat the embedding and its copy alike, and differently."""
    named = parameters(mesh)
    sync = GradientSync(MainParameters(named), mesh)
    rest = [parameter for name, parameter in named.items() if name != HEAD]
    head = [parameter for name, parameter in named.items() if name == HEAD]
    found = []
    for groups in ([{"params": [*rest, *head]}], [{"params": rest}, {"params": head, "weight_decay": 0.1}]):
        try:
            sync.check_ties(torch.optim.SGD(groups, lr=0.1))
        except UnsupportedError as error:
            found.append(str(error))
    return found


def world(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for sizes in LAYOUTS:
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes))
        # One bucket for all, and buckets that hold a gradient or two each.
        found[str(sizes)] = [errors_of_layout(mesh, bucket_bytes) for bucket_bytes in (100_000_000, 200)]
        if not sizes:
            found["missing"] = missing_gradients(rank, mesh)
            sync_bf16 = MainParameters({"weight": nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))})
            sync_bf16.main("weight").grad = torch.full((4,), float(rank), dtype=torch.bfloat16)
            GradientSync(sync_bf16, mesh).finish()
            gradient = sync_bf16.main("weight").grad
            found["bf16"] = (str(gradient.dtype), gradient.tolist())
        if sizes == {"pp": 2}:
            try:
                GradientSync(MainParameters({"outside.weight": nn.Parameter(torch.ones(1))}), mesh)
            except UnsupportedError as error:
                found["on several stages"] = str(error)
            found["ties"] = tie_errors(mesh)
        mesh.destroy()
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_world(world, 4)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_reduced_gradients_norm_and_clipping_equal_one_process(
    results: list[dict[str, Any]], sizes: dict[str, int]
) -> None:
    for rank, result in enumerate(results):
        for errors in result[str(sizes)]:
            assert all(error < 1e-10 for error in errors.values()), f"rank {rank}: {errors}"
            assert errors["unshared rows"] == 0, "rows held by one rank must come out as they were"
            assert errors["clip below the limit"] == 0


def test_missing_gradients_count_as_zeros_only_where_others_have_them(results: list[dict[str, Any]]) -> None:
    for result in results:
        grads = result["missing"]["grads"]
        assert grads == {"everywhere": [1.5] * 3, "somewhere": [2.0] * 3, "nowhere": None}


def test_a_filled_gradient_is_named_once_in_the_log(results: list[dict[str, Any]]) -> None:
    assert results[0]["missing"]["records"] == []
    for result in results[1:]:
        (record,) = result["missing"]["records"]
        assert "somewhere" in record
        assert "nowhere" not in record


def test_half_precision_gradients_without_mains_are_averaged_in_their_dtype(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["bf16"] == ("torch.bfloat16", [1.5] * 4)


def test_a_parameter_on_several_stages_is_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "'outside.weight' is on several" in result["on several stages"]


def test_a_tied_embedding_in_different_groups_is_refused_on_every_stage(results: list[dict[str, Any]]) -> None:
    for result in results:
        (message,) = result["ties"]
        assert f"{WORD!r} is in group 0" in message
        assert f"its copy {HEAD!r} in group 1" in message


def test_one_process_leaves_gradients_alone() -> None:
    mesh = ParallelMesh.single()
    named = parameters(mesh)
    main = MainParameters(named)
    set_gradients(named, mesh)
    before = {name: p.grad.clone() for name, p in named.items()}
    GradientSync(main, mesh).finish()
    assert all(torch.equal(named[name].grad, before[name]) for name in named)


def test_norm_is_float32_and_zero_without_gradients() -> None:
    mesh = ParallelMesh.single()
    main = MainParameters({"weight": nn.Parameter(torch.ones(2))})
    norm = grad_norm(main, mesh)
    assert norm.dtype == torch.float32
    assert norm.item() == 0
    clip_by_norm_(main, mesh, 1.0)
    clip_by_value_(main, 1.0)


def test_norm_of_half_precision_gradients_is_summed_in_float32() -> None:
    main = MainParameters({"weight": nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))})
    main.main("weight").grad = torch.full((4096,), 0.01, dtype=torch.bfloat16)
    want = main.main("weight").grad.double().norm().item()
    assert grad_norm(main, ParallelMesh.single()).item() == pytest.approx(want, rel=1e-5)


def test_norm_and_clipping_can_be_limited_to_names() -> None:
    mesh = ParallelMesh.single()
    main = MainParameters({name: nn.Parameter(torch.ones(1)) for name in "ab"})
    for name in "ab":
        main.main(name).grad = torch.tensor([4.0])
    assert clip_by_norm_(main, mesh, 1.0, names=["b"]).item() == 4.0
    assert main.main("a").grad.item() == 4.0
    assert main.main("b").grad.item() == pytest.approx(1.0)


def test_clip_by_value_equals_torch() -> None:
    main = MainParameters({"weight": nn.Parameter(torch.ones(5))})
    main.main("weight").grad = torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0])
    clip_by_value_(main, 0.75)
    assert main.main("weight").grad.tolist() == [-0.75, -0.5, 0.0, 0.5, 0.75]


def test_sparse_gradients_are_refused() -> None:
    mesh = ParallelMesh.single()
    main = MainParameters({"weight": nn.Parameter(torch.ones(2, 2))})
    sync = GradientSync(main, mesh)
    main.main("weight").grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(UnsupportedError, match="sparse=False"):
        sync._gradient("weight")


def test_only_rows_of_several_ranks_are_pieces() -> None:
    assert overlapping_pieces([[(0, 4), (8, 10)], [(4, 8), (8, 10)]]) == [(8, 10)]
    assert overlapping_pieces([[(0, 4)], [(0, 4)]]) == [(0, 4)]
    assert overlapping_pieces([[(0, 4)], [(2, 6)]]) == [(2, 4)]
    assert overlapping_pieces([[(0, 4)], [(4, 8)]]) == []
    assert overlapping_pieces([[(0, 0)], [(0, 4)]]) == []


def test_a_tied_copy_finds_its_original_below_the_longest_common_prefix() -> None:
    names = {"word.weight", "model.word.weight"}
    assert original_name("model.head.weight", "word.weight", names) == "model.word.weight"
    assert original_name("head.weight", "word.weight", names) == "word.weight"
    assert original_name("head.weight", "absent.weight", names) is None
    with pytest.raises(UnsupportedError, match="no stage holds"):
        resolve_ties([[("a", None)], [("head", "b")]])
