"""Inputs of layers in host memory return in time, and only two are on the device at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import Recomputation
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.layers.offload import IN_FLIGHT, Copies
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, set_slot
from lightning_megatron.layers.recomputed_block import RecomputedForward
from lightning_megatron.memory.live_memory import LiveMemory
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT

SIZES: dict[str, Any] = {"vocab_size": 64, "max_seq_length": 16, "hidden_size": 32, "num_heads": 4}
CONFIG = GPTConfig.gpt2(**SIZES, num_layers=6, hidden_dropout=0.1)
OFFLOAD = Recomputation(("full",), offload=True)


class RecordedCopies(Copies):
    """Copies that are NaN until they are waited for, and record their events."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.events: list[str] = []

    def leave(self, tensor: Tensor) -> tuple[Tensor, Any]:
        self.events.append("leave")
        return tensor.clone(), None

    def arrive(self, host: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        self.events.append("arrive")
        empty = torch.full_like(host, torch.nan)
        return empty, (empty, host)

    def wait(self, event: Any) -> None:
        self.events.append("wait")
        if event is not None:
            event[0].copy_(event[1])


def build_model(copies: Any = None, settings: Any = OFFLOAD) -> GPT:
    model = GPT(CONFIG, seed=1)
    model._owns_mesh = False
    model.recompute = settings
    for layer in model.layers.values():
        if isinstance(layer.forward, RecomputedForward) and layer.forward.offload is not None:
            layer.forward.offload._copies = copies
    return model.train()


def train_microbatches(model: GPT, order: tuple[int, ...]) -> list[Tensor]:
    """Run three microbatches forward, and then backward in an order; return losses and gradients."""
    losses = []
    for number in range(3):
        model.mesh.random.begin_microbatch(0, number)
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(number))
        losses.append(model(tokens, labels=tokens).mean())
    for number in order:
        losses[number].backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*(loss.detach() for loss in losses), *gradients]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_gradients_with_offload_have_the_same_bits(order):
    expected = train_microbatches(build_model(settings="full"), order)
    for layers in (None, 1, 4):
        settings = Recomputation(("full",), layers=layers, at="last", offload=True)
        actual = train_microbatches(build_model(RecordedCopies(), settings), order)
        assert all(map(torch.equal, actual, expected)), layers
        assert len(actual) == len(expected)


def test_the_input_of_a_layer_is_fetched_while_a_later_layer_runs_backward():
    copies = RecordedCopies()
    model = build_model(copies)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    loss = model(tokens, labels=tokens).mean()
    # Four of six inputs left the device; the copies of the last two are in progress.
    assert copies.events == ["leave"] * 3 + ["wait", "leave"] * 3 + ["wait"]
    copies.events.clear()
    loss.backward()
    # Inputs of layers 5 and 4 are on the device; each layer starts the copy of an earlier layer.
    assert copies.events == ["wait", "wait", *["arrive", "wait"] * 4]


def test_forward_passes_keep_two_inputs_on_the_device():
    memory_after_forward = {}
    for name, settings in (("device", "full"), ("host", OFFLOAD)):
        model = build_model(settings=settings)
        memory = LiveMemory()
        for parameter in model.parameters():
            slot = GradientSlot(torch.zeros_like(parameter), lambda: None)
            set_slot(parameter, slot)
            memory.leave_out([parameter, slot.gradient])
        tokens = torch.zeros(2, 16, dtype=torch.long)
        with memory:
            loss = model(tokens, labels=tokens).mean()
            memory_after_forward[name] = memory.now
        assert loss.requires_grad
    # On the CPU the counted memory includes the host copies of all inputs.
    extra = memory_after_forward["host"] - memory_after_forward["device"]
    assert extra == IN_FLIGHT * 2 * 16 * 32 * 4


def test_offload_of_norms_and_of_compiled_layers_is_refused():
    with pytest.raises(ParallelPlanError, match="offload needs parts of full or full_except_core"):
        Recomputation(("norms",), offload=True)
    model = GPT(CONFIG, seed=1)
    model.layers["0"].compile()
    with pytest.raises(UnsupportedError, match="cannot be used with torch.compile"):
        model.recompute = OFFLOAD
