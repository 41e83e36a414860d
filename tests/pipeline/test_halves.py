"""A GPT whose backward passes run in halves has the losses and gradients of full passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot
from lightning_megatron.layers.parameters.weight_gradient_queue import Start
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import split_batch
from lightning_megatron.pipeline.step_run import BackwardPasses
from lightning_megatron.plan.schedule import Action, Schedule, build_schedule
from tests.optimizer.runs import Run
from tests.oracles import assert_equal

SIZES: dict[str, Any] = {
    "vocab_size": 50, "max_seq_length": 8, "num_layers": 4, "hidden_size": 16, "num_heads": 2,
}  # fmt: skip
LLAMA: dict[str, Any] = {**SIZES, "num_kv_heads": 2, "ffn_hidden_size": 24}
KINDS = {
    "gpt2, tied": GPTConfig.gpt2(**SIZES, tie_embeddings=True),
    "llama": GPTConfig.llama(**LLAMA),
    "experts": GPTConfig.llama(
        **LLAMA, experts={"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}
    ),
}
NUM_MICROBATCHES = 4
TOKENS = torch.randint(0, 50, (2 * NUM_MICROBATCHES, 9), generator=torch.Generator().manual_seed(5))
#: Four layers of four linear layers that defer their products, and the head.
NUM_PRODUCTS = 4 * 4 + 1
Result = tuple[list[Tensor], dict[str, Tensor]]


def with_halves(schedule: Schedule, delay: int = 1) -> Schedule:
    """Replace every backward pass by its halves. Each weight half waits for ``delay`` input halves of
    its stage; the last weight halves run at the end, in order.
    """
    if schedule.forward_only:
        return schedule
    rows = []
    for row in schedule.rows:
        split: list[Action] = []
        waiting: list[Action] = []
        for action in row:
            if action.kind != "B":
                split.append(action)
                continue
            split.append(action._replace(kind="I"))
            waiting.append(action._replace(kind="W"))
            if len(waiting) > delay:
                split.append(waiting.pop(0))
        rows.append((*split, *waiting))
    return replace(schedule, rows=tuple(rows)).validate()


def step(model: GPT, data: Tensor) -> Tensor:
    return model(data[:, :-1], data[:, 1:]).mean()


def run(model: GPT, delay: int | None, queue: Any, step_fn: Any = None) -> list[Tensor]:
    """Run a step of full passes, or of halves with a delay."""

    def scheduled(number: int, forward_only: bool) -> Schedule:
        schedule = build_schedule("1f1b", 1, number, 1, forward_only=forward_only)
        return schedule if delay is None else with_halves(schedule, delay)

    return PipelineExecutor(model.mesh, None, scheduled).run(
        step_fn or partial(step, model),
        split_batch(TOKENS, 2),
        BackwardPasses(lambda loss, _: loss / NUM_MICROBATCHES, weight_gradients=queue),
    )


class Trained(Run):
    """A GPT with gradient slots in flat buffers, which counts deferred products."""

    def __init__(self, kind: str) -> None:
        self.model = GPT(KINDS[kind], ParallelMesh.single(), seed=1)
        super().__init__(dict(self.model.named_parameters()), self.model.mesh)
        self.num_deferred, self.queue = 0, self.reducer.weight_gradients
        put = self.queue.put

        def count_and_put(start: Start, slots: Sequence[GradientSlot]) -> None:
            self.num_deferred += 1
            put(start, slots)

        self.queue.put = count_and_put  # type: ignore[method-assign]

    def result_of(self, delay: int | None, step_fn: Any = None) -> Result:
        self.zero_grad()
        self.num_deferred = 0
        losses = run(self.model, delay, self.queue, step_fn)
        gradients = self.reducer.unreduced_gradients(set(self.main.trained))
        return losses, {name: gradient.clone() for name, gradient in gradients.items()}


def plain_results(kind: str) -> Result:
    """Return the losses and gradients of plain autograd."""
    model = GPT(KINDS[kind], ParallelMesh.single(), seed=1)
    losses = [step(model, part) for part in TOKENS.split(2)]
    torch.stack(losses).mean().backward()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        assert_equal(gradient, expected[name], f"{what}: {name}", 1e-12)


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_halves_equal_full_passes_and_plain_autograd(kind: str) -> None:
    trained = Trained(kind)
    expected_losses, expected = plain_results(kind)
    for delay in (None, 0, 2, NUM_MICROBATCHES):
        losses, gradients = trained.result_of(delay)
        products = 0 if delay is None else NUM_PRODUCTS * NUM_MICROBATCHES
        assert trained.num_deferred == products, delay
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-12)
        check_equal(gradients, expected, f"delay {delay}")


def test_without_a_queue_the_input_halves_compute_all_gradients() -> None:
    model = GPT(KINDS["llama"], ParallelMesh.single(), seed=1)
    run(model, 2, None)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    check_equal(gradients, plain_results("llama")[1], "no queue")


def test_an_error_in_a_step_leaves_no_deferred_weight_gradients() -> None:
    trained, calls = Trained("llama"), list[Any]()

    def fail_at_the_second_call(data: Tensor) -> Tensor:
        calls.append(data)
        if len(calls) == 2:
            raise RuntimeError("stop")
        return step(trained.model, data)

    with pytest.raises(RuntimeError, match="stop"):
        trained.result_of(2, fail_at_the_second_call)
    assert trained.num_deferred == NUM_PRODUCTS
    check_equal(trained.result_of(2)[1], plain_results("llama")[1], "after an error")
