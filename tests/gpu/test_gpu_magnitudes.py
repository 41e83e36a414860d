"""Tests that magnitudes from the kernels of norms and SwiGLU give the same bits as magnitudes that
layers find, on GPUs; ``test_gpu_kernels.py`` checks the kernels themselves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.shapes import SHAPES
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from tests.gpu.ranks import run_ranks
from tests.gpu.shared_gpu import gpu_of
from tests.layers.noted_casts import CONFIGS, GIVEN, compare_hand_over, given

#: Layers of Llama 3 8B and of GPT-2 1.2B.
REAL = {
    name: replace(SHAPES[shape], vocab_size=1024, num_layers=1)
    for name, shape in {"llama": "llama8b_half", "gpt2": "gpt2_1_2b"}.items()
}
compare = partial(compare_hand_over, dtype=torch.bfloat16, emulate=False)


def expected_of(kind: str, num_layers: int = 2) -> tuple[list[bool], list[bool]]:
    """Return which inputs and gradients come with magnitudes in two steps without recomputation."""
    inputs, gradients = GIVEN[kind]
    return 2 * num_layers * [*inputs], 2 * num_layers * [*reversed(gradients)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_models_with_hand_over_of_magnitudes_have_the_bits_of_models_without(kind):
    casts = compare(CONFIGS[kind], ParallelMesh.single("cuda", seed=0))
    assert (given(casts, "input"), given(casts, "gradient")) == expected_of(kind)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["selective", "full", "norms", "activations"])
def test_recomputed_models_with_hand_over_have_the_bits_of_models_without(recompute):
    mesh = ParallelMesh.single("cuda", seed=0)
    casts = compare(CONFIGS["llama"], mesh, recompute=recompute)
    inputs, gradients = expected_of("llama")
    assert sum(given(casts, "input")) >= sum(inputs)
    assert given(casts, "gradient") == gradients


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "batch", "length"), [("llama", 1, 4096), ("gpt2", 2, 1024)])
def test_layers_of_real_size_with_hand_over_have_the_bits_of_layers_without(kind, batch, length):
    mesh = ParallelMesh.single("cuda", seed=0)
    casts = compare(REAL[kind], mesh, batch=batch, length=length)
    assert (given(casts, "input"), given(casts, "gradient")) == expected_of(kind, 1)
    torch.cuda.empty_cache()


def _compare_in_world(rank: int, size: int) -> list[tuple[list[bool], list[bool]]]:
    handed_over = []
    for shares in (False, True):
        layout = ParallelLayout(world_size=size, tp=size)
        mesh = ParallelMesh.create(layout, device=gpu_of(rank), seed=0, sequence_parallel=shares)
        casts = compare(CONFIGS["llama"], mesh)
        handed_over.append((given(casts, "input"), given(casts, "gradient")))
        mesh.destroy()
    return handed_over


@pytest.mark.gpu2
def test_ranks_of_the_tensor_axis_hand_over_the_expected_magnitudes():
    for handed_over in run_ranks(_compare_in_world, 2):
        assert handed_over == 2 * [expected_of("llama")]
