"""Recorded computations draw, at every replay, the numbers of the same computation in Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.graphs.tape import TapeBackend
from lightning_megatron.groups.generators import GeneratorPool, draw_from
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.groups.recorded_draws import RecordedDraws
from lightning_megatron.groups.stream_position import StreamPosition
from lightning_megatron.layers.recompute import replayed

CPU = torch.device("cpu")
Function = Callable[[RandomStreams], list[Tensor]]


def streams_at(step: int, microbatch: int) -> RandomStreams:
    streams = RandomStreams(9, tp=1)
    streams.begin_microbatch(step, microbatch)
    return streams


def layers(streams: RandomStreams) -> list[Tensor]:
    """Draw from several streams of two layers, from some of them twice."""
    found: list[Tensor] = []
    with streams.fork_default():
        found.append(torch.randint(0, 100, (5,)))
    for layer in (3, 4):
        streams.seek(layer)
        for _ in range(2):
            with streams.fork("replicated"):
                found.append(F.dropout(torch.ones(7), 0.5))
            with streams.fork("tensor"):
                found.append(torch.empty(7).normal_())
        with streams.fork("replicated", "router"):
            found.append(torch.rand(3))
    return found


class Recorded:
    """Function that was recorded at one position, for replays at others."""

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


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def test_a_recorded_computation_draws_what_it_would_draw_without_a_recording() -> None:
    default = torch.get_rng_state()
    assert are_equal(Recorded(streams_at(1, 0), layers).results, layers(streams_at(1, 0)))
    assert torch.equal(torch.get_rng_state(), default), "the default generator is left alone"


def test_a_replay_draws_the_numbers_of_its_own_position() -> None:
    recorded = Recorded(streams_at(1, 0), layers)
    for step, microbatch in ((4, 7), (1, 0), (4, 8)):
        streams = streams_at(step, microbatch)
        recorded.replay(streams)
        expected = streams_at(step, microbatch)
        assert are_equal(recorded.results, layers(expected))
        assert streams.position == expected.position
        assert streams._runs == expected._runs


def test_a_replay_without_new_seeds_is_noticed() -> None:
    recorded = Recorded(streams_at(1, 0), layers)
    recorded.tape.replay()
    assert not are_equal(recorded.results, layers(streams_at(4, 7)))


def test_the_record_names_each_stream_with_its_place() -> None:
    draws = Recorded(streams_at(1, 5), layers).draws.draws
    assert [(draw.stream, draw.purpose, at.layer, at.run) for draw, at in draws] == [
        ("default", "", 0, 0),
        *(
            (stream, purpose, layer, 0)
            for layer in (3, 4)
            for stream, purpose in (("replicated", ""), ("tensor", ""), ("replicated", "router"))
        ),
    ]
    assert len({id(draw.generator) for draw, _ in draws}) == len(draws)
    assert {(at.step, at.microbatch, at.is_replay) for _, at in draws} == {(1, 5, False)}


def drop(streams: RandomStreams) -> list[Tensor]:
    with streams.fork("replicated"):
        return [F.dropout(torch.ones(9), 0.5)]


def enter_and_drop(streams: RandomStreams) -> list[Tensor]:
    streams.seek(3)
    return drop(streams)


def test_streams_continue_over_graphs_and_python_code_of_one_layer() -> None:
    streams = streams_at(1, 0)
    first = Recorded(streams, enter_and_drop)
    # The Python code between the two does not run at the capture.
    second = Recorded(streams, drop)
    for microbatch in (1, 2):
        streams = streams_at(1, microbatch)
        expected = streams_at(1, microbatch)
        first.replay(streams)
        between = drop(streams)
        second.replay(streams)
        after = drop(streams)
        found = [*first.results, *between, *second.results, *after]
        assert are_equal(
            found, enter_and_drop(expected) + drop(expected) + drop(expected) + drop(expected)
        )


def test_a_graph_of_a_layer_that_runs_again_in_a_microbatch_draws_other_numbers() -> None:
    recorded = Recorded(streams_at(1, 0), enter_and_drop)
    streams = streams_at(2, 3)
    expected = streams_at(2, 3)
    for run in range(3):
        position = recorded.replay(streams)
        assert position.run == run
        assert are_equal(recorded.results, enter_and_drop(expected))


def recomputing(x: Tensor) -> tuple[Function, Function]:
    """Return a forward pass that drops elements of ``x``, and its backward pass, which does it
    again.
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


def test_recomputed_activations_are_dropped_as_in_their_own_forward_pass() -> None:
    x = torch.arange(1.0, 10.0, requires_grad=True)
    captured = streams_at(1, 0)
    forward, backward = recomputing(x)
    forwards = Recorded(captured, forward)
    backwards = Recorded(captured, backward)
    assert [at.is_replay for _, at in backwards.draws.draws] == [True]
    streams = streams_at(5, 2)
    expected = streams_at(5, 2)
    for _ in range(2):  # the second time it is a later run of the layer in the microbatch
        position = forwards.replay(streams)
        forward, backward = recomputing(x)
        assert are_equal(forwards.results, forward(expected))
        # Other microbatches run before the backward pass.
        interrupted = replace_microbatch(streams)
        backwards.replay(streams, position)
        assert streams.position == interrupted
        streams.position = expected.position
        assert are_equal(backwards.results, backward(expected))


def replace_microbatch(streams: RandomStreams) -> StreamPosition:
    """Move the streams to another microbatch, without a new count of runs."""
    return streams.seek(6, StreamPosition(8, 8))


def test_recomputed_activations_need_the_position_of_their_forward_pass() -> None:
    captured = streams_at(1, 0)
    forward, backward = recomputing(torch.ones(9, requires_grad=True))
    Recorded(captured, forward)
    backwards = Recorded(captured, backward)
    with pytest.raises(RuntimeError, match="by the position of their forward pass"):
        backwards.replay(captured)


def test_microbatches_that_begin_inside_a_recording_keep_their_numbers() -> None:
    def step_of(number: int) -> Function:
        def step(streams: RandomStreams) -> list[Tensor]:
            found = []
            for microbatch in (2, 5):
                streams.begin_microbatch(number, microbatch)
                found += layers(streams)
            return found

        return step

    recorded = Recorded(streams_at(1, 0), step_of(1))
    recorded.replay(streams_at(7, 0), StreamPosition(step=7))
    assert are_equal(recorded.results, step_of(7)(streams_at(0, 0)))


def test_a_pool_of_a_fixed_size_says_how_to_find_the_right_one() -> None:
    streams = streams_at(1, 0)
    pool = GeneratorPool(CPU)
    with streams.recording(pool):
        layers(streams)
    assert pool.num_taken == 7
    exact = GeneratorPool(CPU, pool.num_taken)
    with streams.recording(exact):
        layers(streams)
    small = GeneratorPool(CPU, pool.num_taken - 1)
    with (
        pytest.raises(RuntimeError, match="at most the 6 random streams"),
        streams.recording(small),
    ):
        layers(streams)


def test_a_pool_knows_which_generator_draws() -> None:
    streams = streams_at(1, 0)
    pool = GeneratorPool(CPU)
    with streams.recording(pool):
        assert pool.current is None
        with streams.fork_default():
            outer = pool.current
            with streams.fork("tensor"):
                assert pool.current is pool.generators[1]
            assert pool.current is outer is pool.generators[0]
    assert pool.current is None


def test_recordings_are_not_nested_and_end_with_an_error() -> None:
    streams = streams_at(1, 0)
    with (
        pytest.raises(RuntimeError, match="must not be nested"),
        streams.recording(GeneratorPool(CPU)),
        streams.recording(GeneratorPool(CPU)),
    ):
        pass
    with streams.recording(GeneratorPool(CPU)) as recorder:
        pass
    assert recorder.recorded == RecordedDraws()


def test_streams_return_to_a_kept_position() -> None:
    streams = streams_at(1, 4)
    expected = streams_at(1, 4)
    enter_and_drop(streams)
    enter_and_drop(expected)
    with streams.preserve_position():
        Recorded(streams_at(1, 0), layers)
        streams.begin_microbatch(8, 8)
        layers(streams)
    assert are_equal(drop(streams) + layers(streams), drop(expected) + layers(expected))


def test_a_block_draws_from_a_generator_and_leaves_the_default_one() -> None:
    generator = torch.Generator().manual_seed(3)
    expected = torch.rand(6, generator=torch.Generator().manual_seed(3))
    default = torch.get_rng_state()
    found = []
    for _ in range(2):
        with draw_from(generator):
            found.append(torch.rand(3))
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(torch.get_rng_state(), default)


def test_streams_without_draws_have_no_generator_in_a_pool_for_a_capture() -> None:
    streams = RandomStreams(3)

    def step() -> Tensor:
        streams.begin_microbatch(1, 0)
        drawn = []
        for layer, is_drawn in enumerate((True, False, True)):
            streams.seek(layer)
            with streams.fork("tensor"):
                drawn += [torch.rand(3) for _ in range(is_drawn)]
        return torch.stack(drawn)

    found = GeneratorPool(CPU)
    with streams.recording(found):
        expected = step()
    assert len(found.generators) == 3
    pool = found.exact()
    with streams.recording(pool) as recorder:
        assert torch.equal(step(), expected)
    assert len(pool.generators) == 2
    assert [draw.generator for draw, _ in recorder.recorded.draws] == pool.generators
