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

from lightning_megatron.graphs.tape import TapeBackend
from lightning_megatron.groups.generators import GeneratorPool
from lightning_megatron.groups.random import RandomStreams, derive_seed
from lightning_megatron.groups.recorded_draws import RecordedDraws
from lightning_megatron.groups.stream_position import StreamPosition
from lightning_megatron.layers.recompute import replayed


def draw(streams: RandomStreams, name, count: int = 4) -> tuple[float, ...]:
    with streams.fork(name):
        return tuple(torch.rand(count).tolist())


def test_replicated_streams_agree_and_tensor_streams_differ_over_tp():
    a, b = RandomStreams(1, tp=0), RandomStreams(1, tp=1)
    assert draw(a, "replicated") == draw(b, "replicated")
    assert draw(a, "tensor") != draw(b, "tensor")
    assert draw(a, "expert") == draw(b, "expert")


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


def test_a_loaded_state_continues_the_draws():
    streams = RandomStreams(4, tp=1)
    streams.begin_microbatch(7, 3)
    loaded = RandomStreams(0, tp=1)
    loaded.load_state_dict(streams.state_dict())
    assert draw(loaded, "tensor") == draw(streams, "tensor")


def test_derived_seeds_depend_on_the_type_of_parts_and_fit_a_generator():
    assert derive_seed(1, "1") != derive_seed("1", 1)
    assert derive_seed(12, 3) != derive_seed(1, 23)
    assert all(0 <= derive_seed(i) < 2**63 for i in range(1000))


CPU = torch.device("cpu")
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
        with streams.fork("replicated", "router"):
            draws.append(torch.rand(3))
    return draws


class Recorded:
    """Function that was recorded at one position, for replays at other positions."""

    def __init__(self, streams: RandomStreams, function: Function) -> None:
        pool = GeneratorPool(CPU)
        backend = TapeBackend()
        with streams.recording(pool) as recorder:
            self.tape, self.results = backend.capture(
                lambda: function(streams), backend.make_pool(), pool
            )
        self.draws: RecordedDraws = recorder.recorded

    def replay(
        self, streams: RandomStreams, position: StreamPosition | None = None
    ) -> StreamPosition:
        position = streams.seed_generators(self.draws, position)
        self.tape.replay()
        return position


def are_equal(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return len(actual) == len(expected) > 0 and all(map(torch.equal, actual, expected))


def test_a_replay_draws_the_numbers_of_its_own_position() -> None:
    recorded = Recorded(streams_at(1, 0), draw_in_layers)
    for step, microbatch in ((4, 7), (1, 0), (4, 8)):
        streams = streams_at(step, microbatch)
        recorded.replay(streams)
        expected = streams_at(step, microbatch)
        assert are_equal(recorded.results, draw_in_layers(expected))
        assert streams.position == expected.position
        assert streams._runs == expected._runs


def drop(streams: RandomStreams) -> list[Tensor]:
    with streams.fork("replicated"):
        return [F.dropout(torch.ones(9), 0.5)]


def make_recomputation(x: Tensor) -> tuple[Function, Function]:
    """Return a forward pass that drops elements of ``x``, and a backward pass that recomputes
    the forward pass.
    """
    sums: list[Tensor] = []

    def forward(streams: RandomStreams) -> list[Tensor]:
        streams.seek(3)
        y = replayed(lambda t: drop(streams)[0] * t * t, streams, 3, x)
        sums.append(y.sum())
        return [y]

    def backward(streams: RandomStreams) -> list[Tensor]:
        return list(torch.autograd.grad(sums.pop(), x))

    return forward, backward


def test_recomputation_repeats_the_dropout_of_its_forward_pass() -> None:
    x = torch.arange(1.0, 10.0, requires_grad=True)
    captured = streams_at(1, 0)
    forward, backward = make_recomputation(x)
    recorded_forward = Recorded(captured, forward)
    recorded_backward = Recorded(captured, backward)
    assert [at.is_replay for _, at in recorded_backward.draws.draws] == [True]
    streams = streams_at(5, 2)
    expected = streams_at(5, 2)
    for _ in range(2):  # the second time is a later run of the layer in the microbatch
        position = recorded_forward.replay(streams)
        forward, backward = make_recomputation(x)
        assert are_equal(recorded_forward.results, forward(expected))
        # Other microbatches run before the backward pass.
        interrupted = seek_other_microbatch(streams)
        recorded_backward.replay(streams, position)
        assert streams.position == interrupted
        streams.position = expected.position
        assert are_equal(recorded_backward.results, backward(expected))


def seek_other_microbatch(streams: RandomStreams) -> StreamPosition:
    """Move the streams to another microbatch, without a new count of runs."""
    return streams.seek(6, StreamPosition(8, 8))


def test_a_recomputing_replay_without_the_forward_position_raises() -> None:
    captured = streams_at(1, 0)
    forward, backward = make_recomputation(torch.ones(9, requires_grad=True))
    Recorded(captured, forward)
    recorded_backward = Recorded(captured, backward)
    with pytest.raises(RuntimeError, match="by the position of their forward pass"):
        recorded_backward.replay(captured)


def test_a_replay_keeps_microbatch_numbers_that_begin_inside_its_recording() -> None:
    def step_of(number: int) -> Function:
        def step(streams: RandomStreams) -> list[Tensor]:
            draws = []
            for microbatch in (2, 5):
                streams.begin_microbatch(number, microbatch)
                draws += draw_in_layers(streams)
            return draws

        return step

    recorded = Recorded(streams_at(1, 0), step_of(1))
    recorded.replay(streams_at(7, 0), StreamPosition(step=7))
    assert are_equal(recorded.results, step_of(7)(streams_at(0, 0)))


def take_keys(streams: RandomStreams) -> list[Tensor]:
    """Take keys of dropout masks in two layers, and compute with them."""
    keys = []
    for layer in (3, 4):
        streams.seek(layer)
        keys += [streams.mask_key(purpose, 6) * 2 for purpose in ("hidden", "hidden", "attention")]
    return keys


def test_a_replay_reads_the_keys_of_masks_of_its_own_position() -> None:
    streams = streams_at(1, 0)
    streams.begin_microbatch(1, 0, (4, 1, 3))
    recorded = Recorded(streams, take_keys)
    for samples in ((0, 2, 3), (7, 1, 6), (4, 1, 3)):
        streams = RandomStreams(9, tp=1)
        streams.begin_microbatch(2, 5, samples)
        recorded.replay(streams)
        expected = RandomStreams(9)
        expected.begin_microbatch(2, 0, samples)
        assert are_equal(recorded.results, take_keys(expected))
    assert len({int(key[0]) for key in recorded.results}) == 6
