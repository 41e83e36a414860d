"""Initial weights have the documented distribution, depend on seed and name alone, and need little
memory beyond the shard.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.init import ONES, Initializer, initialize_, sharded_parameter
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.shards import full_range

CONFIG = GPTConfig.llama(
    vocab_size=1000,
    max_seq_length=64,
    num_layers=8,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=2,
    ffn_hidden_size=192,
)


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live real tensors, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, storage.nbytes())

    def _forget(self, num_bytes: int) -> None:
        self.live -= num_bytes


def mesh_of(rank: int, **sizes: int) -> ParallelMesh:
    """Describe one rank of a layout without process groups, to build a model that does not run."""
    layout = ParallelLayout(world_size=8, **sizes)
    coordinates = layout.coordinates(rank)
    axes = {
        name: MeshAxis(
            name,
            next(tuple(ranks) for ranks in layout.groups(name) if rank in ranks),
            coordinates[name],
        )
        for name in ("tp", "pp")
    }
    return ParallelMesh(layout, rank, torch.device("cpu"), RandomStreams(0), **axes)


def num_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


@pytest.mark.parametrize(
    "sizes", [{"tp": 4}, {"pp": 4}, {"tp": 2, "pp": 4}, {"tp": 2, "pp": 2, "vpp": 2}]
)
def test_no_rank_ever_holds_more_than_its_shard_and_one_full_tensor(sizes: dict[str, int]) -> None:
    full_model = GPT(CONFIG, seed=1)
    largest = (
        max(torch.Size(shard_spec_of(p).full_shape).numel() for p in full_model.parameters()) * 4
    )
    for rank in range(8):
        with LiveBytes() as counter:
            model = GPT(CONFIG, mesh_of(rank, **sizes), seed=1)
        shard = num_bytes(model)
        assert counter.live >= shard, "the counter sees the parameters"
        assert counter.peak <= shard + largest + 4096, (
            f"rank {rank}: {counter.peak} bytes, {shard} its shard"
        )
        assert counter.peak < num_bytes(full_model)


def test_the_counter_counts_a_full_model() -> None:
    with LiveBytes() as counter:
        model = GPT(CONFIG, seed=1)
    assert counter.peak >= num_bytes(model)


def test_weights_have_the_documented_distribution() -> None:
    model = GPT(
        GPTConfig.gpt2(
            vocab_size=500, max_seq_length=64, num_layers=8, hidden_size=128, num_heads=4
        ),
        seed=3,
    )
    for name, parameter in model.named_parameters():
        values = parameter.detach()[: shard_spec_of(parameter).full_shape[0]]
        if name.endswith("bias"):
            assert bool((values == 0).all()), name
        elif "norm" in name:
            assert bool((values == 1).all()), name
        else:
            residual = name.endswith(("output.weight", "down.weight"))
            expected = 0.02 / 4 if residual else 0.02
            assert float(values.std()) == pytest.approx(expected, rel=0.03), name
            assert float(values.mean()) == pytest.approx(0.0, abs=expected * 0.05), name


def test_weights_depend_on_seed_and_name_and_not_on_default_generators() -> None:
    before = torch.get_rng_state()
    first, second, other_seed = GPT(CONFIG, seed=1), GPT(CONFIG, seed=1), GPT(CONFIG, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    named = dict(second.named_parameters())
    assert all(torch.equal(p, named[name]) for name, p in first.named_parameters())
    assert not torch.equal(first.embedding.word.weight, other_seed.embedding.word.weight)
    assert not torch.equal(first.layers["0"].mlp.down.weight, first.layers["1"].mlp.down.weight)


def test_without_a_seed_weights_follow_the_seed_of_torch() -> None:
    torch.manual_seed(11)
    assert torch.equal(GPT(CONFIG).head.weight, GPT(CONFIG, seed=11).head.weight)


def test_bfloat16_weights_are_rounded_float32_weights() -> None:
    wide = GPT(CONFIG, seed=1)
    try:
        torch.set_default_dtype(torch.bfloat16)
        half = GPT(CONFIG, seed=1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(half.head.weight, wide.head.weight.bfloat16())


def test_shared_parameters_stay_shared_and_keep_their_shard_spec() -> None:
    with torch.device("meta"):
        first, second = nn.Module(), nn.Module()
        first.weight = sharded_parameter(
            (6, 2), [full_range(6)], Initializer.normal(), local_size=8
        )
        second.weight = first.weight
        root = nn.ModuleDict({"first": first, "second": second})
    initialize_(root, "cpu", seed=0)
    assert first.weight is second.weight
    assert shard_spec_of(first.weight).full_shape == (6, 2)
    assert bool((first.weight[6:] == 0).all())


def test_real_parameters_are_filled_in_place() -> None:
    module = nn.Module()
    module.weight = weight = sharded_parameter((3,), [full_range(3)], ONES)
    initialize_(module, "cpu", seed=0)
    assert module.weight is weight
    assert weight.tolist() == [1.0, 1.0, 1.0]


def test_a_parameter_without_initializer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"must have an initializer: '0\.weight' has none"):
        initialize_(nn.Sequential(nn.Linear(2, 2)), "cpu", seed=0)
