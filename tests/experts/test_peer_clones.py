"""Clones whose weights and gradients move by one-sided puts do not change results."""

from __future__ import annotations

import importlib.util

import pytest

from lightning_megatron.plan.clone_memory import CloneMemory
from tests.kernels.program import interpreted


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton, which comes with the CUDA builds of torch",
)
def test_clones_by_puts_do_not_change_the_bits_of_exact_sums() -> None:
    results = interpreted("tests.experts.interpreted_clones")
    assert results.keys() == {"2 ranks", "4 ranks"}
    failed = [f"{name}:\n{report}" for name, report in results.items() if report]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("element", [2, 4])
def test_stacks_of_clones_are_adjacent_and_aligned_to_128_bytes(element: int) -> None:
    memory = CloneMemory(3, ((5, 7), (7, 4)), element)
    sizes = [3 * 35 * element, 3 * 28 * element]
    starts = [*memory.starts, memory.num_bytes]
    assert starts[0] == 0
    assert all(start % 128 == 0 for start in starts)
    assert all(
        0 <= after - start - size < 128
        for start, after, size in zip(starts, starts[1:], sizes, strict=False)
    )
