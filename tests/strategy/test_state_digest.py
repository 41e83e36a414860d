"""Changes of objects by steps are detected, and changed objects are sent to other ranks."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.remote_tensor import RemoteTensor
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.modules.attribute_sync import AttributeSync
from lightning_megatron.strategy.modules.serialization import pack, unpack
from lightning_megatron.strategy.modules.state_digest import digest
from tests.fits import Language


def inference_tensor() -> list[Tensor]:
    with torch.inference_mode():
        return [torch.zeros(3)]


def write_in_inference(value: Tensor) -> None:
    with torch.inference_mode():
        value.add_(1)


def last_of_two_stages() -> ParallelMesh:
    single = ParallelMesh.single()
    layout = ParallelLayout(2, pp=2)
    return replace(single, layout=layout, pp=MeshAxis("pp", (0, 1), 1))


class UserObject:
    """A user's object with an attribute that cannot be inspected."""

    def __init__(self) -> None:
        self.lock, self.values = threading.Lock(), {"a": [1.0]}


VALUES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1], lambda value: value.append(2)),
    "item of a list": (lambda: [1, 2], lambda value: value.__setitem__(0, 3)),
    "list of lists": (lambda: [[1], [2]], lambda value: value[1].append(2)),
    "large tensor": (lambda: torch.zeros(100_000), lambda value: value[7].add_(1)),
    "tensor through .data": (lambda: torch.zeros(3), lambda value: value.data.add_(1)),
    "tensor in a list": (lambda: [torch.zeros(3)], lambda value: value[0].add_(1)),
    "tensor of inference in a list": (inference_tensor, lambda value: write_in_inference(value[0])),
    "array": (lambda: np.zeros((3, 3)), lambda value: value.__setitem__((1, 1), 1)),
    "dict": (lambda: {"a": 1}, lambda value: value.update(a=2)),
    "defaultdict": (lambda: defaultdict(list), lambda value: value["a"].append(2)),
    "counter": (Counter, lambda value: value.update("a")),
    "deque": (deque, lambda value: value.append(1)),
    "set": (lambda: {1}, lambda value: value.add(2)),
    "object": (UserObject, lambda value: value.values["a"].append(2.0)),
    "metric": (lambda: {"metric": vars(MeanMetric())}, lambda value: value["metric"].update(mean_value=2.0)),
}  # fmt: skip


def test_digests_change_only_with_their_objects():
    for name, (make, change) in VALUES.items():
        value = make()
        old_digest = digest(value)
        assert old_digest is not None, name
        assert digest(value) == old_digest, name
        change(value)
        assert digest(value) != old_digest, name


def content_of(value: Any) -> str:
    held = vars(value) if isinstance(value, UserObject) else value
    return repr(held.tolist() if isinstance(held, Tensor) else held)


def test_what_a_repeated_run_of_a_step_changes_is_undone_in_place():
    for name, (make, change) in VALUES.items():
        module = Language()
        module.value, module.part = make(), torch.nn.Module()
        # Nothing can write to these.
        module.fixed, module.expanded = np.frombuffer(b"ab", np.uint8), torch.zeros(1).expand(3)
        module.part.value = ({"in": module.value},)
        value, before = module.value, content_of(module.value)
        with AttributeSync(module, last_of_two_stages()).trial():
            change(value)
            module.value, module.other = make(), 1
            assert content_of(value) != before, name
        assert module.value is value, name
        assert not hasattr(module, "other"), name
        assert content_of(value) == before, name


def test_placeholders_of_other_stages_are_undone_like_other_values():
    module = Language()
    owner: Any = SimpleNamespace(cursor=None)
    module.results, module.last = [RemoteTensor.of(torch.zeros(2), owner, "the loss")], None
    held = [*module.results]
    with AttributeSync(module, last_of_two_stages()).trial():
        module.last = module.new = RemoteTensor.of(torch.zeros(2), owner, "the logits")
        module.results.append(module.new)
    assert [*map(id, module.results)] == [*map(id, held)]
    assert module.last is None
    assert not hasattr(module, "new")


def test_unpacked_values_are_modules_of_the_receiver_and_writable_tensors():
    sender, receiver = Language(), Language()
    for module in (sender, receiver):
        module.layer = torch.nn.Linear(2, 2)
    with torch.inference_mode():
        view = torch.arange(1000.0)[:3]
    half, scalars = torch.ones(2, dtype=torch.bfloat16), (torch.tensor(1 + 2j), torch.tensor(True))
    tensors, layer = [view, half, torch.zeros(0), *scalars], sender.layer
    sent = {"tensors": tensors, "again": view, "layer": layer, "weight": layer.weight}
    data = pack(sent, sender)
    assert len(data) < 2000
    unpacked = unpack(data, receiver, torch.device("cpu"))
    for actual, expected in zip(unpacked["tensors"], tensors, strict=True):
        torch.testing.assert_close(actual, expected.clone())
    assert unpacked["again"] is unpacked["tensors"][0]
    assert unpacked["layer"] is receiver.layer
    assert unpacked["weight"] is receiver.layer.weight
    unpacked["again"].add_(1)


def test_attributes_that_cannot_be_sent_are_named_and_other_attributes_are_sent(caplog):
    module, mesh = Language(), last_of_two_stages()
    module.drop = torch.nn.Dropout()
    module.drop.mesh, module.drop.axis = mesh, mesh.tp
    state = AttributeSync(module, mesh)
    state.begin()
    # Communication is not a change of a layer that holds the mesh.
    mesh.tp.note("all_reduce")
    assert state._packed() is None
    module.held, module.count = UserObject(), 3
    with caplog.at_level(logging.WARNING):
        data = state._packed()
    words = "self.held has changed in the steps of the last pipeline stage and cannot be sent"
    assert words in caplog.text
    assert data is not None
    changed, removed = unpack(data, module, torch.device("cpu"))
    assert [place[2] for place in changed] == ["count"]
    assert not removed
