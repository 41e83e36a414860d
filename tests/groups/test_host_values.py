"""The host knows the values of a moved batch and of its views until the tensors are written to."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from lightning_megatron.groups import host_values
from lightning_megatron.groups.host_values import HostValues


def make_batch() -> dict[str, Tensor]:
    return {
        "mask": torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]),
        "labels": torch.arange(9).view(3, 3),
        "weights": torch.rand(3, 3),
    }


@pytest.mark.parametrize("evaluates", [False, True])
def test_values_of_views_of_a_moved_batch_are_known_on_the_host(evaluates: bool) -> None:
    original, host = make_batch(), HostValues()
    with torch.inference_mode(evaluates):
        with host.record_moves():
            moved: Any = move_data_to_device(original, torch.device("meta"))
            assert torch.is_grad_enabled() is not evaluates
        views = {name: tensor[1:3] for name, tensor in moved.items()}
        for name in ("mask", "labels"):
            known = host.of(views[name])
            assert known is not None
            assert torch.equal(known, original[name][1:3])
            assert torch.equal(host.read(moved[name].t()[1:]), original[name].t()[1:])
    assert host.of(views["weights"]) is None, "nothing is decided by floating-point numbers"
    assert host.of(views["mask"] + 1) is None
    assert host.num_reads == 0
    with host.record_moves():
        pass
    assert host.of(views["mask"]) is None, "the values of the last batch are forgotten"


@pytest.mark.parametrize("side", ["device", "host"])
def test_values_of_a_tensor_that_was_written_to_are_forgotten(side: str) -> None:
    original, host = make_batch(), HostValues()
    with host.record_moves():
        moved: Any = move_data_to_device(original, torch.device("meta"))
    (moved if side == "device" else original)["mask"][0, 0] = 0
    assert host.of(moved["mask"]) is None
    assert host.of(moved["labels"]) is not None


def test_host_tensors_are_returned_unchanged() -> None:
    host = HostValues()
    mask = make_batch()["mask"]
    assert host.of(mask) is mask
    assert host.read(mask) is mask
    with torch.inference_mode():
        result = mask + 1
        assert host.read(result) is result


def test_a_device_tensor_is_read_once_for_all_its_views(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_values, "_is_on_host", lambda tensor: False)
    host = HostValues()
    mask = make_batch()["mask"]
    for row in mask.split(1):
        assert torch.equal(host.read(row), row)
    assert host.num_reads == 1
    mask[2, 2] = 0
    for row in mask.split(1):
        assert torch.equal(host.read(row), row)
    assert host.num_reads == 2


def test_values_of_freed_tensors_are_forgotten() -> None:
    host = HostValues()
    with host.record_moves():
        moved: Any = move_data_to_device(make_batch(), torch.device("meta"))
    assert len(host._cache) == 2
    del moved
    gc.collect()
    host.note(torch.ones(3, dtype=torch.long), torch.ones(3, dtype=torch.long))
    assert len(host._cache) == 1
