"""GPT in every layout of tensors, sequences and layers equals GPT in one process."""

from __future__ import annotations

import copy

import pytest
import torch

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from tests.models.stages import join_tied_gradients, run_pipeline
from tests.oracles import assert_equal, assert_same_gradients, full_weights
from tests.world import run_world

B, S, V = 2, 8, 77
SIZES = {"vocab_size": V, "max_seq_length": 12, "num_layers": 4, "hidden_size": 16, "num_heads": 4}
CONFIGS = {
    "gpt2 tied": GPTConfig.gpt2(**SIZES),
    "gpt2 untied post": GPTConfig.gpt2(
        **SIZES, tie_embeddings=False, norm_position="post", activation="gelu"
    ),
    "llama": GPTConfig.llama(**SIZES, num_kv_heads=2, ffn_hidden_size=24),
    "llama tied": GPTConfig.llama(**SIZES, num_kv_heads=1, ffn_hidden_size=24, tie_embeddings=True),
}
LAYOUTS = [
    ({"tp": 1}, False),
    ({"tp": 2}, False),
    ({"tp": 2}, True),
    ({"tp": 4}, False),
    ({"tp": 4}, True),
    ({"pp": 2}, False),
    ({"pp": 2, "vpp": 2}, False),
    ({"pp": 2, "vpp": 2, "shape": "v"}, False),
    ({"pp": 4}, False),
    ({"tp": 2, "pp": 2}, True),
]


def draw_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, V, (B, S), generator=generator)
    labels = torch.randint(0, V, (B, S), generator=generator)
    labels[0, 2] = -100
    return tokens, labels


def check_layout(mesh: ParallelMesh, name: str) -> None:
    case_name = f"{name} {mesh.layout} sp={mesh.sequence_parallel}"
    config, (tokens, labels) = CONFIGS[name], draw_batch()
    single, model = GPT(config, seed=7), GPT(config, mesh, seed=7)
    weights = full_weights(single, single.mesh)
    for key, weight in full_weights(model, mesh).items():
        source = "embedding.word.weight" if config.tie_embeddings and key == "head.weight" else key
        assert torch.equal(weight, weights[source]), f"{case_name}: {key} starts differently"

    expected = single(tokens, labels, label_smoothing=0.1)
    grad = torch.rand(expected.shape, generator=torch.Generator().manual_seed(9))
    expected.backward(grad)
    gradients = {key: p.grad[: weights[key].shape[0]] for key, p in single.named_parameters()}
    if mesh.pp.size > 1:
        with pytest.raises(UnsupportedError, match="2|4"):
            model(tokens, labels)
        losses = run_pipeline(model, tokens, labels, grad)
        keys = {key for key, _ in model.named_parameters()}
        if config.tie_embeddings:
            join_tied_gradients(model, gradients)
        gradients = {key: gradients[key] for key in keys}
    else:
        losses = model(tokens, labels, label_smoothing=0.1)
        losses.backward(grad)
        assert_equal(model(tokens), single(tokens), f"{case_name}: logits")
    assert_equal(losses, expected, f"{case_name}: losses")
    assert_same_gradients(model, mesh, gradients, case_name)


def check_layouts(rank: int, size: int) -> None:
    torch.set_default_dtype(torch.float64)
    for sizes, sequence_parallel in LAYOUTS:
        layout = ParallelLayout(world_size=size, **sizes)
        mesh = ParallelMesh.create(layout, seed=5, sequence_parallel=sequence_parallel)
        for name in CONFIGS:
            check_layout(mesh, name)
        mesh.destroy()


def test_every_layout_matches_weights_losses_and_gradients_of_one_process() -> None:
    run_world(check_layouts, 4)


def test_invalid_inputs_raise() -> None:
    model = GPT(CONFIGS["gpt2 tied"], seed=1)
    with pytest.raises(
        ParallelPlanError, match=r"seq_length \(13\) must not exceed max_seq_length \(12\)"
    ):
        model(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(IndexError, match=r"\[0, 77\): an id is 77"):
        model(torch.full((1, 4), 77))
    with pytest.raises(ParallelPlanError, match="none, selective, norms, activations, experts"):
        model.recompute = "some"


def test_a_model_built_under_a_meta_device_stays_on_meta() -> None:
    with torch.device("meta"):
        model = GPT(CONFIGS["llama"], seed=1)
    assert all(p.is_meta for p in model.parameters())


def test_a_copied_model_has_separate_parameters_and_the_same_shard_specs() -> None:
    model = GPT(CONFIGS["gpt2 tied"])
    model_copy = copy.deepcopy(model)
    for (name, parameter), copied in zip(
        model.named_parameters(), model_copy.parameters(), strict=True
    ):
        assert copied is not parameter, name
        assert shard_spec_of(copied) == shard_spec_of(parameter), name
    tokens, labels = draw_batch()
    assert_equal(model_copy(tokens, labels), model(tokens, labels), "losses")
