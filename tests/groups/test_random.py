"""Random streams agree or differ as specified, whatever the order of computation, and replays of recorded computations draw the numbers of eager ones."""

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
from lightning_megatron.groups.mask_keys import MaskKeys
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


def test_a_layer_replays_its_draws_from_a_saved_position():
    streams = RandomStreams(9)
    streams.begin_microbatch(1, 0)
    position = streams.seek(3)
    first = (draw(streams, "tensor"), draw(streams, "replicated"), draw(streams, "tensor"))
    assert first[0] != first[2], "successive draws must go on, not start again"
    streams.begin_microbatch(1, 1)
    streams.seek(1)
    draw(streams, "tensor")
    streams.seek(3, position)
    assert first == (
        draw(streams, "tensor"),
        draw(streams, "replicated"),
        draw(streams, "tensor"),
    )


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


def test_an_unknown_stream_is_refused_with_the_legal_names():
    with (
        pytest.raises(ValueError, match="replicated, tensor, expert: 'model'"),
        RandomStreams(1).fork("model"),
    ):
        pass


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


def test_a_recorded_computation_draws_the_same_numbers_as_an_eager_one() -> None:
    default = torch.get_rng_state()
    assert are_equal(
        Recorded(streams_at(1, 0), draw_in_layers).results, draw_in_layers(streams_at(1, 0))
    )
    assert torch.equal(torch.get_rng_state(), default), "the default generator is left alone"


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


def enter_and_drop(streams: RandomStreams) -> list[Tensor]:
    streams.seek(3)
    return drop(streams)


def test_streams_continue_across_graphs_and_python_code_of_one_layer() -> None:
    streams = streams_at(1, 0)
    first = Recorded(streams, enter_and_drop)
    # The Python code between the two graphs does not run at the capture.
    second = Recorded(streams, drop)
    for microbatch in (1, 2):
        streams = streams_at(1, microbatch)
        eager = streams_at(1, microbatch)
        first.replay(streams)
        between = drop(streams)
        second.replay(streams)
        after = drop(streams)
        actual = [*first.results, *between, *second.results, *after]
        assert are_equal(actual, enter_and_drop(eager) + drop(eager) + drop(eager) + drop(eager))


def test_repeated_replays_in_a_microbatch_draw_new_numbers_for_each_run() -> None:
    recorded = Recorded(streams_at(1, 0), enter_and_drop)
    streams = streams_at(2, 3)
    expected = streams_at(2, 3)
    for run in range(3):
        position = recorded.replay(streams)
        assert position.run == run
        assert are_equal(recorded.results, enter_and_drop(expected))


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


def test_a_generator_pool_that_is_too_small_raises() -> None:
    streams = streams_at(1, 0)
    pool = GeneratorPool(CPU)
    with streams.recording(pool):
        draw_in_layers(streams)
    assert pool.num_taken == 7
    exact = GeneratorPool(CPU, pool.num_taken)
    with streams.recording(exact):
        draw_in_layers(streams)
    small = GeneratorPool(CPU, pool.num_taken - 1)
    with (
        pytest.raises(RuntimeError, match="at most the 6 random streams"),
        streams.recording(small),
    ):
        draw_in_layers(streams)


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


def test_keys_of_masks_before_a_capture_lie_where_a_recomputation_without_recording_puts_them() -> (
    None
):
    device = torch.device("meta")
    recorded = MaskKeys(device).take((5, 0, 1, 1))
    assert recorded.device == RandomStreams(7).mask_key("hidden", 1).device
    assert recorded.tolist() == [5, 0, 1, 1]
    assert MaskKeys(device, 1).take(None).device == device


def test_nested_recordings_raise_and_leave_the_streams_usable() -> None:
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


def test_preserve_position_restores_the_position_of_streams() -> None:
    streams = streams_at(1, 4)
    expected = streams_at(1, 4)
    enter_and_drop(streams)
    enter_and_drop(expected)
    with streams.preserve_position():
        Recorded(streams_at(1, 0), draw_in_layers)
        streams.begin_microbatch(8, 8)
        draw_in_layers(streams)
    assert are_equal(
        drop(streams) + draw_in_layers(streams), drop(expected) + draw_in_layers(expected)
    )


def test_an_exact_pool_has_no_generators_for_streams_without_draws() -> None:
    streams = RandomStreams(3)

    def step() -> Tensor:
        streams.begin_microbatch(1, 0)
        drawn = []
        for layer, is_drawn in enumerate((True, False, True)):
            streams.seek(layer)
            with streams.fork("tensor"):
                drawn += [torch.rand(3) for _ in range(is_drawn)]
        return torch.stack(drawn)

    growing_pool = GeneratorPool(CPU)
    with streams.recording(growing_pool):
        expected = step()
    assert len(growing_pool.generators) == 3
    exact_pool = growing_pool.exact()
    with streams.recording(exact_pool) as recorder:
        assert torch.equal(step(), expected)
    assert len(exact_pool.generators) == 2
    assert [draw.generator for draw, _ in recorder.recorded.draws] == exact_pool.generators
