"""Program that runs layers with clones by one-sided puts in Triton's interpreter, on CPUs whose
processes share memory, and prints failures as JSON.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_megatron.experts.transport import peer_clones as transport
from lightning_megatron.experts.transport import peer_passes
from lightning_megatron.experts.transport.peer_transfer import Puts
from lightning_megatron.experts.transport.permute import permute_both
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.kernels import triton as kernels
from lightning_megatron.kernels.triton import peer_clones, peer_rows
from lightning_megatron.plan.layout import ParallelLayout
from tests.experts.cloned_layer import Case, ClonedLayer, any_legal_plan, distance, floats
from tests.experts.host_peers import delay, share_memory, start_late
from tests.kernels import interpreted  # noqa: F401  mends the interpreter
from tests.kernels.program import report_checks
from tests.world import run_world

#: Cases of each number of ranks.
CASES = {
    2: {
        "one rank late": Case("one_sided", 1, has_slots=True),
        "autograd": Case("one_sided", 2, seed=1),
        "recomputed": Case("one_sided", 2, floats, has_slots=True, recomputes=True, seed=2),
        "swapped weights": Case("one_sided", 2, has_slots=True),
        "gradients twice": Case("one_sided", 2, has_slots=True),
        "no wait": Case("one_sided", 2, has_slots=True, seed=4),
    },
    4: {"any plan": Case("one_sided", 3, has_slots=True, seed=3)},
}
#: Cases with a deliberate error, which the comparison must find on some rank.
BROKEN = {"swapped weights", "gradients twice", "no wait"}


def with_swapped_weights(put: Callable[..., None]) -> Callable[..., None]:
    """Return a function that puts the weights of the next expert of the home rank."""
    return lambda weights, *where: put(weights.roll(1, 0), *where)


def with_doubled_gradients(add: Callable[..., None]) -> Callable[..., None]:
    """Return a function that adds the gradients of clones twice."""

    def add_twice(*arguments: object) -> None:
        add(*arguments)
        add(*arguments)

    return add_twice


def _compare_cases(rank: int, size: int, folder: str) -> dict[str, tuple[float, int]]:
    # With small blocks and few programs, each program handles several blocks.
    peer_rows._BLOCK = peer_clones._WEIGHTS = peer_clones._GRADIENTS = 16
    peer_rows._PROGRAMS = peer_clones._PROGRAMS = 2
    results = {}
    with pytest.MonkeyPatch.context() as world_patch:
        share_memory(world_patch, Path(folder), kernels)
        mesh = ParallelMesh.create(ParallelLayout(size, ep=size))
        clones = ClonedLayer(mesh, Case("one_sided", 1)).choice.clones
        assert clones is not None
        assert isinstance(clones.transfer, Puts), clones
        for name, case in CASES[size].items():
            with pytest.MonkeyPatch.context() as patch:
                if name == "any plan":
                    patch.setattr(transport, "place_clones", any_legal_plan)
                if name in ("one rank late", "no wait") and rank == 1:
                    delay(patch, kernels, lambda: time.sleep(0.02))
                if name == "no wait":
                    patch.setattr(Puts, "begin", lambda self: None)
                    if rank == 1:
                        slow_permute = start_late(permute_both, lambda: time.sleep(0.5))
                        patch.setattr(peer_passes, "permute_both", slow_permute)
                if name == "swapped weights":
                    patch.setattr(kernels, "put_weights", with_swapped_weights(kernels.put_weights))
                if name == "gradients twice":
                    add = kernels.add_clone_gradients
                    patch.setattr(kernels, "add_clone_gradients", with_doubled_gradients(add))
                results[name] = distance(mesh, case, "all_gather")
        mesh.destroy()
    return results


def check(size: int) -> None:
    """Demand the bits of a layer without clones, and that deliberate errors are found."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_world(_compare_cases, size, folder)
    for name in CASES[size]:
        largest_difference = max(results[name][0] for results in ranks)
        assert all(results[name][1] > 0 for results in ranks), f"{name}: nothing moves"
        if name in BROKEN:
            assert largest_difference > 0.1, f"{name}: not noticed"
        elif name == "recomputed":
            # Gradients of clones are transferred in float32.
            assert largest_difference < 1e-6, f"{name}: {largest_difference}"
        else:
            assert largest_difference == 0, f"{name}: {largest_difference}"


if __name__ == "__main__":
    report_checks({f"{size} ranks": lambda size=size: check(size) for size in CASES})
