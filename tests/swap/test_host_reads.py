"""Replaced Hugging Face models read masks and positions on the host, at most once a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups import host_values
from lightning_megatron.groups.mesh import ParallelMesh
from tests.swap.families import twin_of
from tests.swap.parts import swapped

B, S, MICROBATCHES = 8, 12, 4


def batches() -> dict[str, tuple[dict[str, Tensor], int]]:
    """Return batches and how many of their tensors are read."""
    tokens = torch.randint(2, 50, (B, S), generator=torch.Generator().manual_seed(1))
    left = (torch.arange(S) >= (torch.arange(B) % 4)[:, None]).long()
    right, row = left.flip(1).contiguous(), {"input_ids": tokens}
    labels = [tokens.masked_fill(mask == 0, -100) for mask in (left * left.roll(1, 1), right)]
    packed = torch.cat([torch.arange(5), torch.arange(S - 5)]).expand(B, S).contiguous()
    return {
        "padded": ({**row, "attention_mask": left, "labels": labels[0]}, 2),
        "padded on the right": ({**row, "attention_mask": right, "labels": labels[1]}, 2),
        "packed": ({**row, "position_ids": packed, "labels": tokens}, 1),
    }


def losses_of(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    size = B // MICROBATCHES
    parts = [{k: x[start : start + size] for k, x in batch.items()} for start in range(0, B, size)]
    return [model(**part, use_cache=False).loss.detach() for part in parts]


def test_each_tensor_of_a_device_batch_is_read_once_for_all_microbatches_or_never_if_noted(
    monkeypatch,
):
    monkeypatch.setattr(host_values, "_is_on_host", lambda tensor: False)
    mesh, twin = ParallelMesh.single(), twin_of("llama")
    model = swapped(twin_of("llama"), mesh)
    for name, (batch, count) in batches().items():
        expected = losses_of(twin, batch)
        before = mesh.host_values.num_reads
        torch.testing.assert_close(losses_of(model, batch), expected, rtol=1e-5, atol=1e-5)
        assert mesh.host_values.num_reads - before == count, name
        # A batch that is noted before it is moved to the device is not read at all.
        moved = {key: tensor.clone() for key, tensor in batch.items()}
        for key, tensor in moved.items():
            mesh.host_values.note(tensor, batch[key])
        before = mesh.host_values.num_reads
        torch.testing.assert_close(losses_of(model, moved), expected, rtol=1e-5, atol=1e-5)
        assert mesh.host_values.num_reads == before, name
