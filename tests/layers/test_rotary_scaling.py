"""Scaled rotary frequencies and tables have the same bits as those of Hugging Face."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from lightning_megatron.layers.rotary import RotaryTables, position_tables
from lightning_megatron.plan.rotary_scaling import RotaryScaling

modeling_phi3 = pytest.importorskip("transformers.models.phi3.modeling_phi3")
transformers = pytest.importorskip("transformers")
SHORT, LONG = tuple(1.0 + 0.1 * i for i in range(24)), tuple(2.0 + 0.37 * i for i in range(24))
FACTORS = {"short_factors": SHORT, "long_factors": LONG}
THEIRS = {"short_factor": list(SHORT), "long_factor": list(LONG)}

# Settings of this package, and further numbers under the names of Hugging Face.
SCALINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"kind": "linear", "factor": 3.0}, {}),
    ({"kind": "llama3", "factor": 8.0, "original_length": 8192}, {"low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    (
        {"kind": "llama3", "factor": 32.0, "original_length": 100, "low_frequency_factor": 1.5, "high_frequency_factor": 7.0},
        {"low_freq_factor": 1.5, "high_freq_factor": 7.0},
    ),
    ({"kind": "yarn", "factor": 4.0, "original_length": 4096}, {}),
    ({"kind": "yarn", "factor": 16.0, "original_length": 64, "truncate": False}, {"truncate": False}),
    (
        {"kind": "yarn", "factor": 40.0, "original_length": 512, "beta_fast": 16.0, "beta_slow": 2.0},
        {"beta_fast": 16.0, "beta_slow": 2.0},
    ),
    ({"kind": "yarn", "factor": 2.0, "original_length": 4, "attention_factor": 1.3}, {"attention_factor": 1.3}),
    ({"kind": "longrope", "factor": 32.0, "original_length": 16, **FACTORS}, THEIRS),
    ({"kind": "longrope", "original_length": 16, **FACTORS, "attention_factor": 1.2}, {**THEIRS, "attention_factor": 1.2}),
]  # fmt: skip


def their_config(ours: RotaryScaling, their_settings: dict[str, Any]) -> Any:
    parameters = {"rope_type": ours.kind, "rope_theta": 10000.0, "factor": ours.factor}
    original = {}
    if ours.original_length is not None:
        original = {"original_max_position_embeddings": ours.original_length}
    config_class = transformers.Phi3Config if ours.kind == "longrope" else transformers.LlamaConfig
    return config_class(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=131072, pad_token_id=0, **original,
        rope_parameters={**parameters, **original, "partial_rotary_factor": 0.75, **their_settings},
    )  # fmt: skip


@pytest.mark.parametrize(("ours", "their_settings"), SCALINGS)
def test_tables_of_rows_and_positions_have_the_bits_of_hugging_face(ours, their_settings):
    scaling = RotaryScaling(**ours)
    module = modeling_phi3.Phi3RotaryEmbedding(their_config(scaling, their_settings))
    for length, dtype in itertools.product(
        (16, 17), (torch.bfloat16, torch.float32, torch.float64)
    ):
        positions = torch.stack((torch.arange(length), torch.arange(length).flip(0)))
        theirs = module(torch.empty(0, dtype=dtype), positions)
        rows = RotaryTables(48, 10000.0, scaling)(length, torch.empty(0, dtype=dtype))
        at_positions = position_tables(positions, 48, scaling=scaling, dtype=dtype)
        for row_table, position_table, their_table in zip(rows, at_positions, theirs, strict=True):
            assert torch.equal(row_table[:, 0, 0], their_table[0])
            assert torch.equal(position_table[:, :, 0].transpose(0, 1), their_table)


def test_tables_of_rows_are_cached_and_tables_of_positions_are_not():
    tables, hidden, positions = RotaryTables(8, 100.0), torch.empty(0), torch.tensor([[3, 1, 2]])
    cached = tables(3, hidden)
    at_positions = position_tables(positions, 8, base=100.0)
    assert torch.equal(tables(3, hidden, positions)[0][:, 0], at_positions[0][:, 0])
    assert tables(3, hidden) is cached
