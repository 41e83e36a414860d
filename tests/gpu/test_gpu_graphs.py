"""Tests that CUDA graphs replay the bits of eager steps, that captures may fail, and that the host
reads how far a replay is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.graphs.backend import collection_paused
from lightning_megatron.graphs.cuda import CudaBackend
from lightning_megatron.groups.generators import GeneratorPool
from lightning_megatron.groups.journal import DeviceCounter, DeviceProgress, Journal
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.config import GPTConfig
from tests.graphs.steps import SIZES, Step

pytestmark = pytest.mark.gpu

GPT2 = GPTConfig.gpt2(**SIZES, hidden_dropout=0.2, attention_dropout=0.3)
LLAMA = GPTConfig.llama(**SIZES, num_kv_heads=2, ffn_hidden_size=24)


@pytest.fixture(autouse=True)
def stream() -> Iterator[torch.cuda.Stream]:
    """Run the test on a stream that can be captured."""
    side_stream = torch.cuda.Stream()
    with torch.cuda.stream(side_stream):
        yield side_stream
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", ["gpt2 with dropout", "llama"])
def test_replays_of_a_gpt_have_the_loss_and_gradients_of_eager_steps(name):
    mesh = ParallelMesh.single("cuda")
    step = Step(GPT2 if name.startswith("gpt2") else LLAMA, mesh)
    with collection_paused():
        step.assert_replays_equal_eager(CudaBackend(), name)


def test_a_capture_runs_nothing_and_replays_follow_their_inputs():
    backend, x, sums = CudaBackend(), torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    (sums * 1).add_(x)
    graph, doubled = backend.capture(lambda: sums.add_(x) * 2, backend.make_pool())
    assert not torch.cuda.is_current_stream_capturing()
    assert sums.tolist() == [0.0] * 8
    version = sums._version
    for count in (1, 2):
        graph.replay()
        assert sums.tolist() == [count] * 8
        assert doubled.tolist() == [2 * count] * 8
    assert sums._version == version
    graph.release()
    with pytest.raises(RuntimeError, match="has been released"):
        graph.replay()


def _catch_error(x: Tensor) -> None:
    with suppress(RuntimeError):
        x.sum().item()


ERRORS: dict[str, Callable[[Tensor], object]] = {
    "of Python": lambda x: dict[str, int]()["missing"],
    "of CUDA": lambda x: x.sum().item(),
    "of CUDA that the function catches": _catch_error,
}


@pytest.mark.parametrize("name", ERRORS)
def test_eager_work_and_captures_succeed_after_an_error_inside_a_capture(name):
    device = torch.device("cuda")
    backend, x = CudaBackend(), torch.ones(64, device=device)
    pool, generators = backend.make_pool(), GeneratorPool(device, 1)
    (generator,) = generators.generators

    def draw() -> Tensor:
        with generators.draw_from(generator):
            return F.dropout(x, 0.5) + torch.rand(64, device=device)

    def fail() -> Tensor:
        result = draw() + torch.rand(64, device=device)
        ERRORS[name](result)
        return result

    draw()
    first_graph, tripled = backend.capture(lambda: x * 3, pool)
    with pytest.raises((KeyError, RuntimeError)):
        backend.capture(fail, pool, generators)
    assert not torch.cuda.is_current_stream_capturing()
    # Eager work uses random numbers, a synchronisation, memory and pinned memory.
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(torch.rand(64, device=device))
    assert torch.equal(*drawn)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.ones(4096, pin_memory=True).to(device, non_blocking=True).sum().item() == 4096
    generator.manual_seed(5)
    expected = draw()
    graph, replayed = backend.capture(draw, pool, generators)
    generator.manual_seed(5)
    graph.replay()
    assert torch.equal(replayed, expected)
    first_graph.replay()
    assert tripled.tolist() == [3.0] * 64


def test_a_generator_that_is_seeded_between_replays_draws_the_eager_numbers():
    device = torch.device("cuda")
    backend, generators = CudaBackend(), GeneratorPool(device, 2)
    x = torch.ones(1000, device=device)

    def draw() -> list[Tensor]:
        numbers = []
        for generator in generators.generators:
            with generators.draw_from(generator):
                numbers += [F.dropout(x, 0.3), torch.randn(7, device=device), F.dropout(x, 0.3)]
        return numbers

    draw()
    graph, captured = backend.capture(draw, backend.make_pool(), generators)

    def seed(*seeds: int) -> None:
        for generator, value in zip(generators.generators, seeds, strict=True):
            generator.manual_seed(value)

    for seeds in ((1, 2), (3, 4), (1, 2)):
        for _ in range(2):
            seed(*seeds)
            outside = torch.cuda.get_rng_state()
            graph.replay()
            replayed = [tensor.clone() for tensor in captured]
            assert torch.equal(torch.cuda.get_rng_state(), outside)
        seed(*seeds)
        assert all(map(torch.equal, replayed, draw()))


def test_only_captures_of_the_same_pool_reuse_memory_that_is_given_up():
    backend, x = CudaBackend(), torch.ones(1 << 22, device="cuda")
    x * 2
    pool, other_pool = backend.make_pool(), backend.make_pool()
    first, doubled = backend.capture(lambda: x * 2, pool)
    second, tripled = backend.capture(lambda: x * 3, other_pool)
    first.replay()
    second.replay()
    address = doubled.data_ptr()
    given_up = pool.give_up(doubled)
    assert given_up.data_ptr() == address
    assert torch.equal(given_up, 2 * x)
    del doubled
    third, quadrupled = backend.capture(lambda: x * 4, other_pool)
    fourth, quintupled = backend.capture(lambda: x * 5, pool)
    assert quintupled.data_ptr() == address
    assert address not in (tripled.data_ptr(), quadrupled.data_ptr())
    third.replay()
    assert torch.equal(given_up, 2 * x), "a capture of another pool wrote into the memory"
    fourth.replay()
    assert torch.equal(given_up, 5 * x), "the later capture does not use the memory"
    assert torch.equal(tripled, 3 * x)


def test_a_capture_on_the_default_stream_is_refused():
    backend = CudaBackend()
    with (
        torch.cuda.stream(torch.cuda.default_stream()),
        pytest.raises(UnsupportedError, match="another stream than the default one"),
    ):
        backend.capture(lambda: None, backend.make_pool())


def test_the_host_reads_which_part_of_a_graph_the_device_runs():
    journal, backend = Journal(), CudaBackend()
    device = torch.device("cuda", torch.cuda.current_device())
    counter = journal.device = DeviceCounter(device)

    def step() -> None:
        journal.begin_part("first")
        journal.begin_part("second")
        torch.cuda._sleep(10**9)  # about half a second
        journal.begin_part("third")

    with journal.recording("a step"):
        graph, _ = backend.capture(step, backend.make_pool())
    assert counter.progress is None
    torch.cuda.synchronize()
    for number in (1, 2):
        journal.repeat([], "a step", journal.parts)
        graph.replay()
        inside = DeviceProgress(3 * number - 1, 3 * number, "second")
        limit = time.monotonic() + 5
        while counter.progress != inside and time.monotonic() < limit:
            pass
        assert counter.progress == inside
        torch.cuda.synchronize()
        assert counter.progress == DeviceProgress(3 * number, 3 * number, "third")
    graph.release()
