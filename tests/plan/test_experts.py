"""Mixtures of experts whose settings contradict each other or the layout are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout

SIZES: dict[str, Any] = {"num_experts": 12, "top_k": 2, "ffn_hidden_size": 16}
MODEL: dict[str, Any] = {
    "vocab_size": 53,
    "max_seq_length": 16,
    "num_layers": 4,
    "hidden_size": 48,
    "num_heads": 6,
}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts": 0}, r"experts.num_experts must be a whole number of at least 1: it is 0"),
        ({"top_k": 13}, r"top_k \(13\) of experts must be at most num_experts \(12\)"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size .* at least 1"),
        ({"shared_ffn_hidden_size": 0}, "shared_ffn_hidden_size .* at least 1 or None"),
        ({"shared_gate": True}, "shared_gate .* False, .*shared_ffn_hidden_size is None"),
        ({"scoring": "tanh"}, r"scoring must be softmax or sigmoid: it is 'tanh'"),
        ({"aux_loss_scope": "layer"}, "aux_loss_scope .* microbatch, sequence or global"),
        ({"aux_loss": -0.1}, r"aux_loss .* at least 0: it is -0.1"),
        ({"z_loss": -1.0}, "z_loss"),
        ({"jitter": 1.0}, r"jitter .* at least 0 and below 1: it is 1.0"),
        ({"score_scale": 0.0}, "score_scale .* above 0"),
        ({"capacity_factor": 0.0}, "capacity_factor .* above 0 or None"),
        ({"expert_bias_rate": 0.001}, "expert_bias_rate .* 0, .*no expert has a bias"),
        (
            {"num_groups": 5},
            r"num_groups \(5\) of experts must be 1, 2, 3, 4 or 6, because num_experts \(12\)",
        ),
        ({"num_groups": 12}, "num_groups .* 1, 2, 3, 4 or 6"),
        ({"num_groups": 3, "top_k_groups": 4}, r"top_k_groups .* at most num_groups \(3\)"),
        (
            {"num_groups": 6, "top_k": 3},
            r"top_k \(3\) .* at most 2, because top_k_groups \(1\) of num_groups \(6\)",
        ),
        ({"layers": 0}, "layers .* at least 1"),
        ({"layers": (False, False)}, "layers .* have a true value"),
    ],
)
def test_invalid_or_contradictory_settings_of_experts_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParallelPlanError, match=message):
        ExpertsConfig(**{**SIZES, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 5}, r"layers \(5\) of experts must be at most num_layers \(4\)"),
        ({"layers": (True, False)}, r"for each of num_layers \(4\): it has 2"),
    ],
)
def test_layers_with_experts_that_the_model_lacks_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParallelPlanError, match=message):
        GPTConfig(**MODEL, bias=False, experts=ExpertsConfig(**SIZES, **settings))


def test_experts_with_biases_are_refused() -> None:
    with pytest.raises(ParallelPlanError, match=r"mlp_bias \(True\) must be False with experts"):
        GPTConfig(**MODEL, experts=ExpertsConfig(**SIZES))


def test_every_nth_layer_or_the_layers_of_a_list_have_experts() -> None:
    assert [ExpertsConfig(**SIZES, layers=2).is_in(layer) for layer in range(5)] == [
        False,
        True,
        False,
        True,
        False,
    ]
    # A settings file has lists and mappings.
    config = GPTConfig(**MODEL, bias=False, experts={**SIZES, "layers": [False, True, True, False]})  # type: ignore[arg-type]
    assert config.experts == ExpertsConfig(**SIZES, layers=(False, True, True, False))
    assert [config.has_experts_in(layer) for layer in range(4)] == [False, True, True, False]
    assert hash(config) == hash(GPTConfig(**MODEL, bias=False, experts=config.experts))
    assert not GPTConfig(**MODEL).has_experts_in(0)


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        ({"world_size": 8, "ep": 8}, "num_experts (12) must be a multiple of ep (8)"),
        ({"world_size": 16, "ep": 16}, "num_experts (12) must be a multiple of ep (16)"),
        (
            {"world_size": 3, "etp": 3},
            "ffn_hidden_size of experts (16) must be a multiple of etp (3)",
        ),
    ],
)
def test_layouts_that_do_not_divide_the_experts_are_refused(
    layout: dict[str, int], rule: str
) -> None:
    config = GPTConfig(**MODEL, bias=False, experts=ExpertsConfig(**SIZES))  # type: ignore[arg-type]
    config.check_layout(ParallelLayout(4, ep=4))
    with pytest.raises(ParallelPlanError, match=re.escape(rule)):
        config.check_layout(ParallelLayout(**layout))
