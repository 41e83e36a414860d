"""Graphs of segments equal eager steps bit by bit, with every schedule and in every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameters.gradient_slot import slot_of
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.plan.actions import Action, PipelineUnit
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.recomputation import Recomputation
from lightning_megatron.plan.schedule import build_schedule
from tests.graphs.trained import (
    SIZES,
    Case,
    assert_equal_bits,
    batch_of,
    counted_replays,
    train,
    two_in_flight,
)
from tests.tape import Operator

GPT2 = GPTConfig.gpt2(**SIZES, hidden_dropout=0.2, attention_dropout=0.3)
LLAMA = GPTConfig.llama(**SIZES, num_kv_heads=2, ffn_hidden_size=24)
EXPERTS = ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=16, aux_loss=0.01)
MODELS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "experts": replace(LLAMA, experts=EXPERTS),
    "shared": replace(LLAMA, experts=replace(EXPERTS, shared_ffn_hidden_size=8)),
}


PARTS = Recomputation(("norms", "activations", "selective"))
LAYERS = Recomputation(("full",), layers=2)


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def check(case: Case, label: str = "") -> Any:
    """Compare training with graphs and eager training, and return the runner of the graphs."""
    expected = train(case, ParallelMesh.single(), graphs=False)
    actual = train(case, ParallelMesh.single(), graphs=True)
    assert actual.runner is not None
    assert actual.runner.failure is None, actual.runner.failure
    assert actual.runner.num_graphs > 0, label
    assert_equal_bits(actual, expected, label)
    return actual.runner


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [
        ("llama", "none"),
        ("shared", "full"),
        ("experts", "expert_inputs"),
        ("gpt2", PARTS),
        ("experts", LAYERS),
    ],
)
def test_graphs_of_segments_match_eager_training_in_one_process(kind, recompute):
    runner = check(Case(MODELS[kind], recompute=recompute), label=kind)
    # Each piece has forward and backward graphs, of the first microbatch and of later microbatches.
    # Layers that keep only their inputs are a separate piece.
    assert runner.num_graphs == (12 if recompute in ("full", LAYERS) else 4)
    assert runner.counts.num_slots == 1
    assert not runner.eager


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_graphs_of_an_encoder_match_eager_training(position, recompute):
    config = EncoderConfig(
        vocab_size=77, num_positions=12, num_layers=3, hidden_size=16, num_heads=4,
        ffn_hidden_size=24, hidden_dropout=0.2, attention_dropout=0.1, norm_position=position,
        head="masked_lm",
    )  # fmt: skip
    runner = check(Case(config, recompute=recompute), label=position)
    assert runner.num_graphs == (12 if recompute == "full" else 4)


def test_graphs_of_a_single_scope_match_eager_training():
    for scope in ("embedding", "attention", "mlp", "head"):
        check(Case(GPT2, scopes=(scope,)), label=scope)


def other_lengths(step: int, number: int) -> int:
    """Return shorter sequences for two microbatches after the first captures."""
    return 6 if (step, number) in ((2, 2), (3, 0), (4, 1)) else 8


def test_microbatches_of_new_shapes_get_their_own_graphs():
    case = Case(GPT2, recompute="full", max_shapes=4, length=other_lengths)
    with counted_replays() as replays:
        runner = check(case)
    assert not runner.eager
    assert replays == {"training": 9 * 3}, "all microbatches of the steps 2, 3 and 4"
    # Each shape is the first shape of a step once.
    assert runner.num_graphs == 2 * 4 * 3
    assert (runner.counts.num_shapes, runner.counts.num_slots) == (2, 1)


def test_shapes_beyond_max_shapes_run_eagerly():
    lengths = (8, 7, 6, 5)
    case = Case(LLAMA, max_shapes=2, length=lambda step, number: lengths[(step + number) % 4])
    with counted_replays() as replays:
        runner = check(case)
    reason = "cuda_graphs.max_shapes (2) others are captured"
    # The first two shapes of the third step have graphs. Four of nine microbatches have them.
    assert runner.eager == {("a training_step of a further shape", reason): 5}
    assert replays == {"training": 4}
    assert runner.counts.num_shapes == 2


def test_forward_graphs_without_a_captured_backward_graph_keep_their_memory():
    trained = train(Case(LLAMA, max_shapes=4), ParallelMesh.single(), graphs=True)
    model, runner = trained.model, trained.runner
    assert runner is not None
    slots = [slot for parameter in model.parameters() if (slot := slot_of(parameter)) is not None]

    def loss_of(length):
        tokens, labels = batch_of(Case(LLAMA, length=lambda *_: length), model.mesh, 9, 0).data
        runner.begin_step(build_schedule("1f1b", 1, 2))
        with runner.during(Action("F", 0, 1)):
            return model(tokens, labels).mean()

    def gradients_of(length):
        for slot in slots:
            slot.gradient.zero_()
        loss_of(length).backward()
        return [slot.gradient.clone() for slot in slots]

    loss_of(6)
    by_graphs = [gradients_of(length) for length in (8, 7, 6, 8, 6)]
    assert runner.failure is None
    assert runner.counts.num_shapes == 3
    model.runner = None
    for graphs, length in zip(by_graphs, (8, 7, 6, 8, 6), strict=True):
        assert all(map(torch.equal, graphs, gradients_of(length)))


def test_a_stage_with_two_microbatches_in_flight_shares_graphs_of_recomputed_layers():
    runner = check(Case(GPT2, two_in_flight, (3, 3, 5, 2, 4), recompute="full"))
    assert not runner.eager
    assert_inputs_suffice(runner)
    # Embedding and head have two slots, the first of which also runs the first microbatch of a
    # step. The layers have one slot.
    numbers = {number: slot.counts.total() for (_, number), slot in runner._slots.items()}
    assert {number: count for number, count in numbers.items() if count} == {0: 8, 1: 4, None: 4}


def assert_inputs_suffice(runner: Any) -> None:
    """Assert that backward graphs of a shared slot read only tensors that forward graphs keep."""
    for (_, number), slot in runner._slots.items():
        recordings = [recording for graphs in slot._sets.values() for recording in graphs.values()]
        for recording in recordings if number is None else ():
            kept = [*recording._inputs.copied, *recording._between]
            kept_memory = set(map(memory_of, kept))
            made_memory = set(map(memory_of, recording._forward[0].graph._made)) - kept_memory
            read_memory = {
                memory_of(argument)
                for entry in recording._backward[0].graph._entries
                if isinstance(entry, Operator)
                for argument in tree_leaves((entry.args, entry.kwargs))
                if isinstance(argument, Tensor)
            }
            assert kept_memory & read_memory, recording.part.label
            assert not made_memory & read_memory, recording.part.label


def memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


class ReadsHost(torch.autograd.Function):
    """Identity that reads values on the host in its forward or in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
        ctx.where = where
        if where == "forward":
            x.sum().item()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.where == "backward":
            gradients[0].sum().item()
        return gradients[0], None


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_segments_that_cannot_be_captured_run_eagerly(where):
    def spoil(model):
        mlp = model.layers["1"].mlp
        run = mlp.forward
        mlp.forward = lambda hidden: ReadsHost.apply(run(hidden), where)  # type: ignore[method-assign]

    expected, actual = (
        train(Case(LLAMA), ParallelMesh.single(), graphs=graphs, spoil=spoil)
        for graphs in (False, True)
    )
    assert actual.runner is not None
    failure = actual.runner.failure or ""
    name = "forward" if where == "forward" else "first backward"
    assert f"embedding, layers 0..3, head, {name}, slot 0" in failure
    assert "item" in failure or "_local_scalar_dense" in failure
    assert_equal_bits(actual, expected, where)


def test_graphs_end_after_the_segments_named_in_cuts_and_a_slot_holds_one_microbatch():
    runner = check(Case(LLAMA, begins=("layers.1", "layers.3")))
    assert runner.num_graphs == 3 * 4
    slot = next(iter(runner._slots.values()))
    slot.occupy(PipelineUnit(0, 3))
    with pytest.raises(AssertionError, match="one microbatch at a time"):
        slot.occupy(PipelineUnit(0, 4))


def test_a_backward_pass_needs_its_own_activations_and_hidden_states_are_collected_eagerly():
    trained = train(Case(LLAMA), ParallelMesh.single(), graphs=True)
    model, runner = trained.model, trained.runner
    tokens, labels = batch_of(Case(LLAMA), model.mesh, 9, 0).data

    def forward():
        assert runner is not None
        runner.begin_step(build_schedule("1f1b", 1, 2))
        with runner.during(Action("F", 0, 0)):
            return model(tokens, labels).mean()

    stale, loss = forward(), forward()
    with pytest.raises(RuntimeError, match="another microbatch had overwritten the activations"):
        stale.backward()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    model.hidden_states = states = []
    forward()
    assert len(states) == SIZES["num_layers"] + 1
