"""Random streams agree or differ as specified, whatever the order of computation, and replays of
recorded computations draw the numbers of eager ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_megatron.groups.generators import GeneratorPool, StreamPosition
from lightning_megatron.groups.random import RandomStreams, derive_seed
from lightning_megatron.layers.recompute import replayed
from tests.tape import TapeBackend


def draw(streams: RandomStreams, name, count: int = 4) -> tuple[float, ...]:
    with streams.fork(name):
        return tuple(torch.rand(count).tolist())


def test_no_two_streams_collide():
    """Hashed seeds do not collide, unlike sums of small multiples of ranks as in Megatron-Core."""
    key_of_seed = {}
    for cp, tp, ep, etp, microbatch, layer in itertools.product(
        range(2), range(4), range(4), range(2), range(3), range(4)
    ):
        streams = RandomStreams(1234, cp=cp, tp=tp, ep=ep, etp=etp)
        streams.begin_microbatch(5, microbatch)
        streams.seek(layer)
        for name, coordinates in {
            "replicated": (cp,),
            "tensor": (cp, tp),
            "expert": (cp, ep, etp),
        }.items():
            key = (name, coordinates, microbatch, layer)
            assert key_of_seed.setdefault(streams._seed_of(name), key) == key
    assert len(key_of_seed) == 3 * 4 * (2 + 2 * 4 + 2 * 4 * 2)


def test_draws_do_not_depend_on_the_order_of_layers_and_microbatches():
    def run(order):
        streams, drawn = RandomStreams(9), {}
        for microbatch, layer in order:
            streams.begin_microbatch(2, microbatch)
            streams.seek(layer)
            drawn[microbatch, layer] = (draw(streams, "replicated"), draw(streams, "replicated"))
        return drawn

    places = list(itertools.product(range(3), range(4)))
    assert run(places) == run(places[::-1])


def test_a_layer_that_runs_twice_in_a_microbatch_draws_different_numbers():
    streams = RandomStreams(9)
    streams.begin_microbatch(1, 0)
    draws, positions = [], []
    for layer in (3, 4, 3, 4):
        positions.append(streams.seek(layer))
        draws.append(draw(streams, "tensor"))
    assert len(set(draws)) == 4
    streams.begin_microbatch(1, 0)
    for layer, position, expected in zip((3, 4, 3, 4), positions, draws, strict=True):
        streams.seek(layer, replace(position, is_replay=True))
        streams.seek(layer)
        assert draw(streams, "tensor") == expected
    streams.begin_microbatch(1, 0)
    streams.seek(3)
    assert draw(streams, "tensor") == draws[0]


def test_torch_checkpointing_repeats_the_draws_of_every_run():
    streams = RandomStreams(9)
    streams.begin_microbatch(1, 0)

    def drop(x):
        streams.seek(3)
        with streams.fork("replicated"):
            # The square makes the backward pass need the activations.
            return (x * torch.rand(8)).square().sqrt()

    inputs = [torch.ones(8, requires_grad=True) for _ in range(3)]
    outputs = [checkpoint(drop, x, use_reentrant=False) for x in inputs]
    sum(output.sum() for output in outputs).backward()
    assert not torch.equal(outputs[0], outputs[1])
    for x, output in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(x.grad, output)


def test_forking_leaves_the_default_generator_unchanged_even_after_an_error():
    streams = RandomStreams(4)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    draw(streams, "tensor")
    with pytest.raises(KeyError), streams.fork("replicated"):
        raise KeyError
    assert torch.equal(torch.rand(3), expected)


def test_derived_seeds_depend_on_the_type_of_parts_and_fit_a_generator():
    assert derive_seed(1, "1") != derive_seed("1", 1)
    assert derive_seed(12, 3) != derive_seed(1, 23)
    assert all(0 <= derive_seed(i) < 2**63 for i in range(1000))


Function = Callable[[RandomStreams], list[Tensor]]


def streams_at(step: int, microbatch: int) -> RandomStreams:
    streams = RandomStreams(9, tp=1)
    streams.begin_microbatch(step, microbatch)
    return streams


def draw_in_layers(streams: RandomStreams) -> list[Tensor]:
    """Draw from several streams of two layers, from some of them twice."""
    draws: list[Tensor] = []
    with streams.fork_default():
        draws.append(torch.randint(0, 100, (5,)))
    for layer in (3, 4):
        streams.seek(layer)
        for _ in range(2):
            with streams.fork("replicated"):
                draws.append(F.dropout(torch.ones(7), 0.5))
            with streams.fork("tensor"):
                draws.append(torch.empty(7).normal_())
    return draws


class Recorded:
    """Function that was recorded at one position, for replays at other positions."""

    def __init__(self, streams: RandomStreams, function: Function) -> None:
        pool, backend = GeneratorPool(torch.device("cpu")), TapeBackend()
        with streams.recording(pool) as recorder:
            self.tape, self.results = backend.capture(
                lambda: function(streams), backend.make_pool(), pool
            )
        self.draws = recorder.recorded

    def replay(self, streams: RandomStreams) -> StreamPosition:
        position = streams.seed_generators(self.draws, None)
        self.tape.replay()
        return position


def test_a_replay_draws_the_numbers_of_its_own_position():
    recorded = Recorded(streams_at(1, 0), draw_in_layers)
    for step, microbatch in ((4, 7), (1, 0), (4, 8)):
        streams, expected = streams_at(step, microbatch), streams_at(step, microbatch)
        recorded.replay(streams)
        assert all(map(torch.equal, recorded.results, draw_in_layers(expected)))
        assert streams.position == expected.position
        assert streams._runs == expected._runs


def test_a_replay_that_recomputes_needs_the_position_of_its_forward_pass():
    streams, x = streams_at(1, 0), torch.ones(9, requires_grad=True)
    sums: list[Tensor] = []

    def dropped(x: Tensor) -> Tensor:
        with streams.fork("replicated"):
            return F.dropout(x * x)

    def forward(streams: RandomStreams) -> list[Tensor]:
        streams.seek(3)
        sums.append(replayed(dropped, streams, 3, x).sum())
        return sums

    Recorded(streams, forward)
    backward = Recorded(streams, lambda streams: list(torch.autograd.grad(sums.pop(), x)))
    assert [at.is_replay for _, at in backward.draws.draws] == [True]
    with pytest.raises(RuntimeError, match="by the position of their forward pass"):
        backward.replay(streams)
