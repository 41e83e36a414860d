"""Initial weights depend on seed and name alone, and need little memory beyond the shard."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.parameters.init import Initializer, initialize_, sharded_parameter
from lightning_megatron.memory.live_memory import LiveMemory
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.shards import full_range

SIZES = {"max_seq_length": 64, "num_layers": 8}
CONFIG = GPTConfig.llama(
    **SIZES, vocab_size=1000, hidden_size=64, num_heads=8, num_kv_heads=2, ffn_hidden_size=192
)


def mesh_of(rank: int, **sizes: int) -> ParallelMesh:
    """Describe one rank of a layout without process groups, to build a model that does not run."""
    layout = ParallelLayout(world_size=8, **sizes)
    axes = {}
    for name in ("tp", "pp"):
        ranks = next(tuple(ranks) for ranks in layout.groups(name) if rank in ranks)
        axes[name] = MeshAxis(name, ranks, layout.coordinates(rank)[name])
    return ParallelMesh(layout, rank, torch.device("cpu"), RandomStreams(0), **axes)


def num_bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def test_no_rank_ever_holds_more_than_its_shard_and_one_full_tensor():
    full_model = GPT(CONFIG, seed=1)
    largest = max(math.prod(shard_spec_of(p).full_shape) for p in full_model.parameters()) * 4
    for sizes in ({"tp": 2, "pp": 4}, {"tp": 2, "pp": 2, "vpp": 2}):
        for rank in (0, 3, 7):
            with LiveMemory() as memory:
                model = GPT(CONFIG, mesh_of(rank, **sizes), seed=1)
            shard = num_bytes(model)
            assert memory.now >= shard
            assert memory.peak <= shard + largest + 4096, (sizes, rank)
            assert memory.peak < num_bytes(full_model)


def test_weights_have_the_documented_distribution():
    config = GPTConfig.gpt2(**SIZES, vocab_size=500, hidden_size=128, num_heads=4)
    model = GPT(config, seed=3)
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


def test_weights_depend_on_seed_and_name_and_not_on_default_generators():
    before = torch.get_rng_state()
    first, second, other_seed = GPT(CONFIG, seed=1), GPT(CONFIG, seed=1), GPT(CONFIG, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(GPT(CONFIG).head.weight, other_seed.head.weight), "without a seed"
    named = dict(second.named_parameters())
    assert all(torch.equal(p, named[name]) for name, p in first.named_parameters())
    assert not torch.equal(first.embedding.word.weight, other_seed.embedding.word.weight)
    assert not torch.equal(first.layers["0"].mlp.down.weight, first.layers["1"].mlp.down.weight)


def test_shared_parameters_stay_shared_and_keep_their_shard_spec():
    with torch.device("meta"):
        first, second = nn.Module(), nn.Module()
        normal = Initializer.normal()
        first.weight = sharded_parameter((6, 2), [full_range(6)], normal, local_size=8)
        second.weight = first.weight
        root = nn.ModuleDict({"first": first, "second": second})
    initialize_(root, "cpu", seed=0)
    assert first.weight is second.weight
    assert shard_spec_of(first.weight).full_shape == (6, 2)
    assert bool((first.weight[6:] == 0).all())


def test_a_parameter_without_initializer_is_refused_by_name():
    with pytest.raises(ValueError, match=r"must have an initializer: '0\.weight' has none"):
        initialize_(nn.Sequential(nn.Linear(2, 2)), "cpu", seed=0)
