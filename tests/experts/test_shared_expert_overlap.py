"""The shared expert runs during the transport of tokens to experts, and its backward pass during
the transport of their gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.groups import in_flight
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from tests.experts.test_layer import hidden_of, layer_of
from tests.recorded import record_starts
from tests.world import run_world


def record_events(layer: Any, patch: pytest.MonkeyPatch) -> list[str]:
    """Run forward and backward, and return the events in order."""
    events: list[str] = []
    record_starts(patch, in_flight, ("all_gather", "reduce_scatter", "all_to_all"), events)
    layer.shared.register_forward_hook(lambda *_: events.append("shared"))
    layer.experts.register_forward_hook(lambda *_: events.append("experts"))
    layer.shared.register_full_backward_hook(lambda *_: events.append("shared backward"))
    output = layer(hidden_of("beside").requires_grad_())
    events.append("backward")
    output.backward(hidden_of("outer"))
    return events


def check_order(rank: int, size: int) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = ParallelMesh.create(ParallelLayout(world_size=size, ep=size))
    for transport, dispatch, combine, num_tensors in (
        ("all_gather", "all_gather", "reduce_scatter", 3),
        ("all_to_all", "all_to_all", "all_to_all", 2),
    ):
        layer = layer_of(mesh, {"transport": transport}, shared_ffn_hidden_size=8, shared_gate=True)
        with pytest.MonkeyPatch.context() as patch:
            events = record_events(layer, patch)
        forward = (
            [f"{dispatch} starts"] * num_tensors + ["shared"] + [f"{dispatch} ends"] * num_tensors
        )
        # Indices of experts have no gradients.
        backward = [f"{combine} starts"] * 2 + ["shared backward"] + [f"{combine} ends"] * 2
        assert events == [*forward, "experts", "backward", *backward], (transport, events)
    mesh.destroy()


def test_the_shared_expert_overlaps_with_the_transport_of_tokens_and_gradients() -> None:
    run_world(check_order, 2)


def test_a_second_wait_for_a_transfer_raises() -> None:
    flight = in_flight.InFlight(torch.zeros(2))
    assert flight.wait().shape == (2,)
    with pytest.raises(AssertionError, match="wait is called once"):
        flight.wait()
