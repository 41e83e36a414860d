"""Tests that every replay of a CUDA graph draws the random numbers of the eager computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.groups.generators import GeneratorPool
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.groups.recorded_draws import RecordedDraws
from lightning_megatron.layers.recompute import replayed

pytestmark = pytest.mark.gpu


class Step:
    """Forward and backward pass of two layers with dropout, the second one recomputed."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.streams = RandomStreams(9, tp=1, device=self.device)
        self.x = torch.rand(4096, device=self.device).requires_grad_()
        self.sums: Tensor | None = None

    def forward(self) -> Tensor:
        x = self.dropped(3, self.x)
        y = replayed(lambda t: self.dropped(4, t) * t, self.streams, 4, x)
        self.sums = y.sum()
        return y.detach()

    def dropped(self, layer: int, x: Tensor) -> Tensor:
        self.streams.seek(layer)
        with self.streams.fork("replicated"):
            x = F.dropout(x, 0.3)
        with self.streams.fork("tensor"):
            x = F.dropout(x, 0.1)
        with self.streams.fork("replicated"):
            return F.dropout(x, 0.2)

    def backward(self) -> Tensor:
        assert self.sums is not None, "the forward pass has run"
        (gradient,) = torch.autograd.grad(self.sums, self.x)
        return gradient

    def begin(self, number: int) -> None:
        self.streams.begin_microbatch(number, number + 1)
        with torch.no_grad():
            self.x.uniform_(generator=torch.Generator(self.device).manual_seed(number))


def capture(
    step: Step, function: Callable[[], Tensor], size: int, pool: Any
) -> tuple[torch.cuda.CUDAGraph, Tensor, RecordedDraws]:
    generators = GeneratorPool(step.device, size)
    graph = torch.cuda.CUDAGraph()
    for generator in generators.generators:
        graph.register_generator_state(generator)
    with (
        step.streams.recording(generators) as recorder,
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
    ):
        result = function()
    return graph, result, recorder.recorded


def test_replays_drop_the_same_elements_as_eager_passes_with_recomputation():
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step = Step()
        step.begin(1)
        # An eager run counts the random streams of each pass.
        counts = []
        for function in (step.forward, step.backward):
            pool = GeneratorPool(step.device)
            with step.streams.recording(pool):
                function()
            counts.append(pool.num_taken)
        assert counts == [4, 2]
        shared = torch.cuda.graph_pool_handle()
        forward, output, forward_draws = capture(step, step.forward, counts[0], shared)
        backward, gradient, backward_draws = capture(step, step.backward, counts[1], shared)
        before = torch.cuda.get_rng_state()
        for number in (5, 6, 1):
            step.begin(number)
            position = step.streams.seed_generators(forward_draws)
            forward.replay()
            replayed_output = output.clone()
            # Another microbatch moves the streams before the backward pass.
            step.streams.begin_microbatch(99, 99)
            step.streams.seed_generators(backward_draws, position)
            backward.replay()
            actual = (replayed_output, gradient.clone())
            step.begin(number)
            expected = (step.forward(), step.backward())
            assert all(map(torch.equal, actual, expected)), number
            assert 0.3 < float((expected[0] == 0).float().mean()) < 0.9
        assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.cuda.current_stream().wait_stream(stream)


def test_a_random_stream_continues_in_python_where_a_replay_has_ended():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step = Step()
        ones = torch.ones(512, device=step.device)

        def seek_and_drop() -> Tensor:
            step.streams.seek(3)
            return drop()

        def drop() -> Tensor:
            with step.streams.fork("replicated"):
                return F.dropout(ones, 0.5)

        graphs = []
        step.begin(1)
        for function in (seek_and_drop, drop):
            function()
            graphs.append(capture(step, function, 1, torch.cuda.graph_pool_handle()))
        step.begin(7)
        actual = []
        for graph, result, draws in graphs:
            step.streams.seed_generators(draws)
            graph.replay()
            actual += [result.clone(), drop()]
        step.begin(7)
        expected = [seek_and_drop(), drop(), drop(), drop()]
        assert all(map(torch.equal, actual, expected))
