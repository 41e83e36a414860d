"""What steps change is found, whatever it is, and reaches another rank as it was."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.modules.attribute_sync import AttributeSync
from lightning_megatron.strategy.modules.serialization import pack, unpack
from lightning_megatron.strategy.modules.state_digest import digest, num_kept
from tests.strategy.tiny import TinyLM


def inference_tensor() -> list[Tensor]:
    with torch.inference_mode():
        return [torch.zeros(3)]


def written_in_inference(value: Tensor) -> None:
    with torch.inference_mode():
        value.add_(1)


def last_of_two_stages() -> ParallelMesh:
    single = ParallelMesh.single()
    layout = ParallelLayout(2, pp=2)
    return replace(single, layout=layout, pp=MeshAxis("pp", (0, 1), 1))


class Held:
    """An object of the user's, with an attribute that cannot be looked into."""

    def __init__(self) -> None:
        self.lock, self.values = threading.Lock(), {"a": [1.0]}


VALUES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1], lambda value: value.append(2)),
    "item of a list": (lambda: [1, 2], lambda value: value.__setitem__(0, 3)),
    "list of lists": (lambda: [[1], [2]], lambda value: value[1].append(2)),
    "tensor": (lambda: torch.zeros(3), lambda value: value.add_(1)),
    "large tensor": (lambda: torch.zeros(100_000), lambda value: value[7].add_(1)),
    "tensor through .data": (lambda: torch.zeros(3), lambda value: value.data.add_(1)),
    "tensor in a list": (lambda: [torch.zeros(3)], lambda value: value[0].add_(1)),
    "tensor of inference in a list": (
        inference_tensor,
        lambda value: written_in_inference(value[0]),
    ),
    "array": (lambda: np.zeros((3, 3)), lambda value: value.__setitem__((1, 1), 1)),
    "dict": (lambda: {"a": 1}, lambda value: value.update(a=2)),
    "defaultdict": (lambda: defaultdict(list), lambda value: value["a"].append(2)),
    "counter": (Counter, lambda value: value.update("a")),
    "deque": (deque, lambda value: value.append(1)),
    "set": (lambda: {1}, lambda value: value.add(2)),
    "object": (Held, lambda value: value.values["a"].append(2.0)),
    "metric": (
        lambda: {"it": vars(MeanMetric())},
        lambda value: value["it"].__setitem__("mean_value", 2.0),
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_digest_changes_with_its_object_and_only_then(name: str) -> None:
    make, change = VALUES[name]
    value = make()
    before = digest(value)
    assert before is not None
    assert digest(value) == before
    change(value)
    assert digest(value) != before


def test_a_list_that_has_grown_keeps_its_items_and_any_other_keeps_none() -> None:
    values = [torch.zeros(2), 1.0]
    before = digest(values)
    values.append(2.0)
    assert num_kept(values, before) == 2
    values[0].add_(1)  # type: ignore[union-attr]
    assert num_kept(values, before) == 0
    assert num_kept([*values], digest(values)) == 0


def test_a_parcel_gives_the_receiver_its_own_modules_and_tensors_that_can_be_written() -> None:
    sender, receiver = TinyLM(), TinyLM()
    for module in (sender, receiver):
        module.layer = torch.nn.Linear(2, 2)
    with torch.inference_mode():
        part = torch.arange(1000.0)[:3]
    tensors = [
        part,
        torch.ones(2, dtype=torch.bfloat16),
        torch.zeros(0),
        torch.tensor(1 + 2j),
        torch.tensor(True),
    ]
    data = pack(
        {"tensors": tensors, "again": part, "layer": sender.layer, "weight": sender.layer.weight},
        sender,
    )
    assert len(data) < 2000
    found = unpack(data, receiver, torch.device("cpu"))
    for ours, theirs in zip(found["tensors"], tensors, strict=True):
        torch.testing.assert_close(ours, theirs.clone())
    assert found["again"] is found["tensors"][0]
    assert found["layer"] is receiver.layer
    assert found["weight"] is receiver.layer.weight
    found["again"].add_(1)


def test_what_cannot_be_sent_is_named_and_the_rest_is_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = TinyLM()
    state = AttributeSync(module, last_of_two_stages())
    state.begin()
    module.held, module.count = Held(), 3
    with caplog.at_level(logging.WARNING):
        data = state._packed()
    assert (
        "self.held has changed in the steps of the last pipeline stage and cannot be sent"
        in caplog.text
    )
    assert data is not None
    assert [place[2] for place in unpack(data, module, torch.device("cpu")).changed] == ["count"]


def test_communication_is_not_a_change_of_a_layer_that_holds_the_mesh() -> None:
    module, mesh = TinyLM(), last_of_two_stages()
    module.drop = torch.nn.Dropout()
    module.drop.mesh, module.drop.axis = mesh, mesh.tp
    state = AttributeSync(module, mesh)
    state.begin()
    mesh.tp.note("all_reduce")
    assert state._packed() is None


def test_a_trial_leaves_no_trace() -> None:
    module = TinyLM()
    module.count, module.kept = 1, [1]
    kept = module.kept
    state = AttributeSync(module, last_of_two_stages())
    with state.trial():
        module.count, module.new = 2, 3
        kept.append(2)
    assert (module.count, kept, hasattr(module, "new")) == (1, [1], False)
