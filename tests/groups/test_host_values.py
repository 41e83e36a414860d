"""The host knows the values of a batch that it has moved, of all its parts, until they are written."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from lightning_megatron.groups import host_values
from lightning_megatron.groups.host_values import HostValues


def batch() -> dict[str, Tensor]:
    return {
        "mask": torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]),
        "labels": torch.arange(9).view(3, 3),
        "weights": torch.rand(3, 3),
    }


@pytest.mark.parametrize("evaluates", [False, True])
def test_parts_of_a_batch_that_moved_are_known(evaluates: bool) -> None:
    own, host = batch(), HostValues()
    with torch.inference_mode(evaluates):
        with host.record_moves():
            moved: Any = move_data_to_device(own, torch.device("meta"))
            assert torch.is_grad_enabled() is not evaluates
        parts = {name: one[1:3] for name, one in moved.items()}
        for name in ("mask", "labels"):
            known = host.of(parts[name])
            assert known is not None
            assert torch.equal(known, own[name][1:3])
            assert torch.equal(host.read(moved[name].t()[1:]), own[name].t()[1:])
    assert host.of(parts["weights"]) is None, "nothing is decided by floating-point numbers"
    assert host.of(parts["mask"] + 1) is None
    assert host.num_reads == 0
    with host.record_moves():
        pass
    assert host.of(parts["mask"]) is None, "the values of the last batch are forgotten"


@pytest.mark.parametrize("side", ["device", "host"])
def test_values_that_were_written_are_not_known_any_more(side: str) -> None:
    own, host = batch(), HostValues()
    with host.record_moves():
        moved: Any = move_data_to_device(own, torch.device("meta"))
    (moved if side == "device" else own)["mask"][0, 0] = 0
    assert host.of(moved["mask"]) is None
    assert host.of(moved["labels"]) is not None


def test_tensors_of_the_host_are_what_they_are() -> None:
    host = HostValues()
    mask = batch()["mask"]
    assert host.of(mask) is mask
    assert host.read(mask) is mask
    with torch.inference_mode():
        made = mask + 1
        assert host.read(made) is made


def test_what_only_the_device_has_is_read_once_for_all_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_values, "_is_on_host", lambda tensor: False)
    host = HostValues()
    mask = batch()["mask"]
    for part in mask.split(1):
        assert torch.equal(host.read(part), part)
    assert host.num_reads == 1
    mask[2, 2] = 0
    for part in mask.split(1):
        assert torch.equal(host.read(part), part)
    assert host.num_reads == 2


def test_what_is_freed_is_forgotten() -> None:
    host = HostValues()
    with host.record_moves():
        moved: Any = move_data_to_device(batch(), torch.device("meta"))
    assert len(host._cache) == 2
    del moved
    gc.collect()
    host.note(torch.ones(3, dtype=torch.long), torch.ones(3, dtype=torch.long))
    assert len(host._cache) == 1
