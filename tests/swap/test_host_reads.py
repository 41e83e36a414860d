"""Replaced Hugging Face models read masks and positions on the host, at most once a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatron.groups import host_values
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.swap import parallelize
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from tests.swap.families import twin_of

pytest.importorskip("transformers")

B, S, MICROBATCHES = 8, 12, 4
_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


class ReadCounter(TorchFunctionMode):
    """Count host reads of given tensors and of all results computed from them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        self.alive = list(tensors)
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tracked = [
            value
            for value in torch.utils._pytree.tree_leaves((args, kwargs))
            if self.is_tracked(value)
        ]
        name = getattr(func, "__name__", "")
        if tracked and name in _READS:
            self.names.append(name)
        result = func(*args, **(kwargs or {}))
        if tracked:
            for value in torch.utils._pytree.tree_leaves(result):
                if isinstance(value, Tensor):
                    self.alive.append(value)
                    self.storages.add(value.untyped_storage()._cdata)
        return result

    def is_tracked(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self.storages


def batches() -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 50, (B, S), generator=generator)
    left = (torch.arange(S) >= (torch.arange(B) % 4)[:, None]).long()
    labels = tokens.masked_fill((left * left.roll(1, 1)) == 0, -100)
    packed = torch.cat([torch.arange(5), torch.arange(S - 5)]).expand(B, S).contiguous()
    return {
        "padded": {"input_ids": tokens, "attention_mask": left, "labels": labels},
        "padded on the right": {
            "input_ids": tokens,
            "attention_mask": left.flip(1).contiguous(),
            "labels": tokens.masked_fill(left.flip(1) == 0, -100),
        },
        "packed": {"input_ids": tokens, "position_ids": packed, "labels": tokens},
    }


def replaced(mesh: ParallelMesh) -> Any:
    root = nn.Module()
    root.model = twin_of("llama")
    parallelize(root, mesh)
    assert isinstance(root.model, ReplacedModel)
    return root.model


def test_microbatches_of_a_batch_noted_on_the_host_read_nothing() -> None:
    mesh = ParallelMesh.single()
    model = twin_of("llama")
    for name, batch in batches().items():
        parts = [
            {key: tensor[index::MICROBATCHES] for key, tensor in batch.items()}
            for index in range(2)
        ]
        expected = [model(**part, use_cache=False).loss.detach() for part in parts]
        ours = replaced(mesh)
        moved = {key: tensor.clone() for key, tensor in batch.items()}
        mesh.host_values._cache.clear()
        with ReadCounter(list(moved.values())) as unnoted_reads:
            losses_of(ours, moved)
        # Without a note of the batch, each microbatch has its own reads.
        assert len(unnoted_reads.names) >= 2, name
        for key, tensor in moved.items():
            mesh.host_values.note(tensor, batch[key])
        with ReadCounter(list(moved.values())) as noted_reads:
            losses = losses_of(ours, moved)
        assert noted_reads.names == [], name
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


def losses_of(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    parts = [
        {key: tensor[index::MICROBATCHES] for key, tensor in batch.items()} for index in range(2)
    ]
    return [model(**part, use_cache=False).loss.detach() for part in parts]


def test_each_tensor_of_a_device_batch_is_read_once_for_all_microbatches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_values, "_is_on_host", lambda tensor: False)
    mesh = ParallelMesh.single()
    model = replaced(mesh)
    reads = {"padded": 2, "padded on the right": 2, "packed": 1}
    for name, batch in batches().items():
        before = mesh.host_values.num_reads
        for start in range(0, B, B // MICROBATCHES):
            part = {key: tensor[start : start + B // MICROBATCHES] for key, tensor in batch.items()}
            model(**part, use_cache=False)
        assert mesh.host_values.num_reads - before == reads[name], name
