"""A GPT whose backward passes run in halves has the losses and gradients of full passes and of one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.gradient_slot import GradientSlot
from lightning_megatron.layers.weight_gradient_queue import Start
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.layered import WORD_EMBEDDING
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import Microbatch, split_batch
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.schedule import Schedule, build_schedule
from tests.oracles import assert_equal
from tests.pipeline.halves import with_halves
from tests.training.runs import Run
from tests.world import run_world

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "max_seq_length": 8,
    "num_layers": 4,
    "hidden_size": 16,
    "num_heads": 2,
}
KINDS = {
    "gpt2, tied": GPTConfig.gpt2(**SIZES, tie_embeddings=True),
    "llama": GPTConfig.llama(**SIZES, num_kv_heads=2, ffn_hidden_size=24),
    "experts": GPTConfig.llama(
        **SIZES,
        num_kv_heads=2,
        ffn_hidden_size=24,
        experts={"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8},
    ),
}
NUM_MICROBATCHES = 6
DELAYS = (0, 2, NUM_MICROBATCHES)
#: Linear layers of a block that defer their products: two of attention, two of the MLP or experts.
PRODUCTS_OF_BLOCK = 4
#: Kinds, sizes of the axes and recomputation of runs in two processes.
CASES = [
    *[(kind, {"pp": 2}, "none") for kind in KINDS],
    *[(kind, {"pp": 2, "vpp": 2}, "none") for kind in ("gpt2, tied", "experts")],
    *[(kind, {"tp": 2}, "none") for kind in ("gpt2, tied", "llama")],
    ("llama", {"tp": 2, "sequence_parallel": True}, "none"),
    ("llama", {"pp": 2}, "full"),
    ("llama", {"pp": 2}, "selective"),
    ("experts", {"pp": 2}, "experts"),
    ("experts", {"ep": 2}, "none"),
]
Result = tuple[list[Tensor], dict[str, Tensor]]


def make_microbatches() -> list[Microbatch]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, SIZES["vocab_size"], (2 * NUM_MICROBATCHES, 9), generator=generator)
    return split_batch({"tokens": tokens}, 2)


def step(model: GPT, data: dict[str, Tensor]) -> Tensor:
    tokens = data["tokens"]
    return model(tokens[:, :-1], tokens[:, 1:]).mean()


def scheduled(
    layout: ParallelLayout, delay: int | None, number: int, forward_only: bool
) -> Schedule:
    name = "1f1b" if layout.vpp == 1 else "interleaved"
    schedule = build_schedule(name, layout.pp, number, layout.vpp, forward_only=forward_only)
    return schedule if delay is None else with_halves(schedule, delay)


class Trained(Run):
    """A GPT with gradient slots in flat buffers."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        super().__init__(dict(model.named_parameters()), model.mesh)
        self.num_deferred = 0
        queue = self.reducer.weight_gradients
        put: Callable[[Start, Sequence[GradientSlot]], None] = queue.put

        def count_and_put(start: Start, slots: Sequence[GradientSlot]) -> None:
            self.num_deferred += 1
            put(start, slots)

        queue.put = count_and_put  # type: ignore[method-assign]

    def result_of(self, delay: int | None) -> Result:
        """Return the losses and this rank's gradients of a step."""
        self.zero_grad()
        self.num_deferred = 0
        mesh = self.model.mesh
        executor = PipelineExecutor(
            mesh,
            self.model if mesh.pp.size > 1 else None,
            partial(scheduled, mesh.layout, delay),
        )
        losses = executor.run(
            partial(step, self.model),
            make_microbatches(),
            backward=True,
            loss_of=lambda loss, _: loss / NUM_MICROBATCHES,
            weight_gradients=self.reducer.weight_gradients,
        )
        gradients = self.reducer.unreduced_gradients(set(self.main.trained))
        assert gradients.keys() == set(self.main.trained)
        return losses, {name: gradient.clone() for name, gradient in gradients.items()}

    def check(self, label: str) -> Result:
        """Compare steps in halves with a step of full passes, and return the latter's results."""
        losses, gradients = self.result_of(None)
        assert self.num_deferred == 0, label
        model = self.model
        has_head = model.mesh.pp.is_last
        products = PRODUCTS_OF_BLOCK * len(model.layers) + has_head
        for delay in DELAYS:
            actual_losses, actual = self.result_of(delay)
            assert self.num_deferred == products * NUM_MICROBATCHES, label
            assert all(map(torch.equal, actual_losses, losses)), label
            for name, gradient in actual.items():
                assert_equal(gradient, gradients[name], f"{label}, delay {delay}: {name}", 1e-12)
        return losses, gradients


def results_of_one_process(kind: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses and gradients of one process with plain autograd."""
    model = GPT(KINDS[kind], ParallelMesh.single(), seed=1)
    losses = [step(model, part.data) for part in make_microbatches()]
    torch.stack(losses).mean().backward()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_to_one_process(
    mesh: ParallelMesh, actual: Result, kind: str, expected: Result, label: str
) -> None:
    for loss, twin in zip(actual[0], expected[0] if mesh.pp.is_last else (), strict=True):
        assert_equal(loss, twin, f"{label}: loss", 1e-12)
    for name, gradient in actual[1].items():
        twin_name = name
        if (
            mesh.pp.size > 1
            and KINDS[kind].tie_embeddings
            and name in (WORD_EMBEDDING, "head.weight")
        ):
            # The copies of a tied weight have parts of its gradient.
            all_reduce_(gradient, mesh.embedding)
            twin_name = WORD_EMBEDDING
        assert_equal(gradient, expected[1][twin_name], f"{label}: {name}", 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_halves_in_one_process_equal_full_passes(kind: str) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = ParallelMesh.single()
    actual = Trained(GPT(KINDS[kind], mesh, seed=1)).check(kind)
    assert_equal_to_one_process(mesh, actual, kind, results_of_one_process(kind), kind)


def check_cases(rank: int, size: int) -> int:
    torch.set_default_dtype(torch.float64)
    for kind, axes, recompute in CASES:
        sizes = dict(axes)
        sequence_parallel = bool(sizes.pop("sequence_parallel", False))
        mesh = ParallelMesh.create(
            ParallelLayout(size, **sizes), sequence_parallel=sequence_parallel
        )
        model = GPT(KINDS[kind], mesh, seed=1)
        model.recompute = recompute
        label = f"{kind}, {axes}, recompute {recompute}"
        actual = Trained(model).check(label)
        if mesh.pp.size > 1:
            assert_equal_to_one_process(mesh, actual, kind, results_of_one_process(kind), label)
        mesh.destroy()
    return len(CASES)


def test_halves_in_two_processes_equal_full_passes() -> None:
    assert run_world(check_cases, 2) == [len(CASES)] * 2


def test_without_a_queue_the_input_halves_compute_all_gradients() -> None:
    torch.set_default_dtype(torch.float64)
    mesh = ParallelMesh.single()
    model = GPT(KINDS["llama"], mesh, seed=1)
    _, expected = results_of_one_process("llama")
    PipelineExecutor(mesh, None, partial(scheduled, mesh.layout, 2)).run(
        partial(step, model),
        make_microbatches(),
        backward=True,
        loss_of=lambda loss, _: loss / NUM_MICROBATCHES,
    )
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_equal(parameter.grad, expected[name], name, 1e-12)


def test_an_error_in_a_step_leaves_no_deferred_weight_gradients() -> None:
    torch.set_default_dtype(torch.float64)
    mesh = ParallelMesh.single()
    run = Trained(GPT(KINDS["llama"], mesh, seed=1))
    calls: list[Any] = []

    def fail_at_the_second_call(data: dict[str, Tensor]) -> Tensor:
        calls.append(data)
        if len(calls) == 2:
            raise RuntimeError("stop")
        return step(run.model, data)

    queue = run.reducer.weight_gradients
    with pytest.raises(RuntimeError, match="stop"):
        PipelineExecutor(mesh, None, partial(scheduled, mesh.layout, 2)).run(
            fail_at_the_second_call,
            make_microbatches(),
            backward=True,
            loss_of=lambda loss, _: loss,
            weight_gradients=queue,
        )
    assert run.num_deferred == PRODUCTS_OF_BLOCK * SIZES["num_layers"] + 1
    run.result_of(2)
