"""Functions that gather sharded tensors and compare them with tensors of one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import Placement, ShardSpec, copy_from_full, shard_spec_of


def copy_to_full(
    placement: Placement, local: Tensor, full: Tensor, *, counted_only: bool = False
) -> None:
    """Copy a rank's pieces into the full tensor; with ``counted_only`` only those of copy 0."""
    with torch.no_grad():
        for box, view in placement.local_views(local):
            if not (box.copy and counted_only):
                ends = zip(box.offsets, box.sizes, strict=True)
                full[tuple(slice(start, start + size) for start, size in ends)].copy_(view)


@contextmanager
def float32_as_float64() -> Iterator[None]:
    """Let Hugging Face's routers compute in float64, although they convert every
    input to float32.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        yield


def gather_full(
    local: Tensor, spec: ShardSpec, mesh: ParallelMesh, *, sum_copies: bool = False
) -> Tensor:
    """Return the full tensor on every rank of the tensor axis.

    Args:
        local: This rank's tensor.
        spec: Position of ``local`` in the full tensor.
        mesh: The groups of this rank.
        sum_copies: Whether copies hold parts of a sum (gradients of ``partial`` parameters);
            otherwise copy 0 counts.
    """
    full = local.new_zeros(spec.full_shape)
    copy_to_full(spec, local.detach(), full, counted_only=not sum_copies)
    return all_reduce_(full, mesh.tp)


def full_gradients(module: nn.Module, mesh: ParallelMesh) -> dict[str, Tensor]:
    """Return every full gradient of this rank's layers by name, with copies added where they are
    parts of a sum.
    """
    placed = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        placed[name] = parameter.grad, shard_spec_of(parameter, mesh.tp.rank)
    return gather_all(placed, mesh, sum_copies=True)


def gather_all(
    placed: Mapping[str, tuple[Tensor, ShardSpec]], mesh: ParallelMesh, *, sum_copies: bool
) -> dict[str, Tensor]:
    """Return full tensors on every rank of the tensor axis, by name; copies of partial parameters are
    added with ``sum_copies``.
    """
    # One all-reduce for all tensors: on few cores, waking up every rank is the main cost.
    fulls = {name: local.new_zeros(spec.full_shape) for name, (local, spec) in placed.items()}
    for name, (local, spec) in placed.items():
        copy_to_full(spec, local, fulls[name], counted_only=not (sum_copies and spec.partial))
    flat = all_reduce_(torch.cat([full.flatten() for full in fulls.values()]), mesh.tp)
    parts = flat.split([full.numel() for full in fulls.values()])
    return {
        name: part.view(full.shape) for (name, full), part in zip(fulls.items(), parts, strict=True)
    }


def load_full_(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write this rank's shards of full weights into the parameters of ``module``; ``weights`` must
    have every parameter.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.zero_()
            copy_from_full(shard_spec_of(parameter), parameter, weights[name].detach())


def sequence_part(full: Tensor, mesh: ParallelMesh) -> Tensor:
    """Return this rank's positions of a sequence-first tensor."""
    return full.chunk(mesh.tp.size)[mesh.tp.rank] if mesh.sequence_parallel else full


def assert_equal(actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-10) -> None:
    """Check that two tensors agree to ``tolerance``, relative to the larger of 1 and the largest
    expected element.
    """
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    )
    scale = max(1.0, float(expected.detach().abs().max()) if expected.numel() else 1.0)
    error = float((actual.detach() - expected.detach()).abs().max()) if actual.numel() else 0.0
    assert error <= tolerance * scale, f"{what}: off by {error:.3e}"


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, relative to that of the expected values."""
    wide_actual, wide_expected = actual.detach().double(), expected.detach().double()
    return float((wide_actual - wide_expected).norm() / wide_expected.norm())


def assert_same_gradients(
    module: nn.Module, mesh: ParallelMesh, expected: Mapping[str, Tensor], what: str
) -> None:
    """Check every full gradient of ``module`` against its twin's, by name."""
    actual = full_gradients(module, mesh)
    assert actual.keys() == expected.keys(), f"{what}: {sorted(actual.keys() ^ expected.keys())}"
    for name, gradient in actual.items():
        assert_equal(gradient, expected[name], f"{what}: gradient of {name}")
