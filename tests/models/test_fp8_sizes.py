"""Sizes that 8-bit products do not support raise before processes start."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_megatron import FP8, MegatronStrategy, ParallelPlanError
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.layers.low_rank import LowRank, LowRankUpdates
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.models.fp8_layers import _linears, _local_sizes, check_fp8_config, set_fp8
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.hugging_face_lm import HuggingFaceCausalLM
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.linear_sizes import linear_sizes
from lightning_megatron.strategy.options.sizes import check_sizes
from tests.models.memory import CONFIGS
from tests.swap.parts import mesh_of

SIZES: dict[str, Any] = {"vocab_size": 64, "max_seq_length": 16, "num_layers": 2, "num_heads": 4}
SHARED = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "shared_ffn_hidden_size": 48}
EXPERTS = GPTConfig.llama(**SIZES, hidden_size=32, ffn_hidden_size=64, experts=SHARED)
ENCODER = EncoderConfig(
    vocab_size=64, num_positions=16, num_layers=2, hidden_size=32, num_heads=4, ffn_hidden_size=72
)
#: With two ranks, each has 40 features, which is no multiple of 16.
INDIVISIBLE = GPTConfig.gpt2(**SIZES, hidden_size=32, ffn_hidden_size=80)
MESSAGE = "multiples of 16: layers.0.mlp.up has 40 output and 32 input features"


def test_linear_sizes_equal_those_of_the_built_layers():
    for config in (*CONFIGS.values(), EXPERTS):
        for tp in (1, 2, 4):
            with torch.device("meta"):
                model = GPT(config, mesh_of(tp, tp_rank=tp - 1), seed=1)
            expected = {name: _local_sizes(linear) for _, name, linear in _linears(model)}
            shape = config.memory_shape()
            actual = {
                f"layers.{layer}.{name}": sizes
                for layer in range(config.num_layers)
                for name, sizes in linear_sizes(shape, layer, tp).items()
            }
            assert actual == expected


def test_an_encoder_with_indivisible_layers_is_refused():
    indivisible_layers = dict.fromkeys(
        name
        for _, name, linear in _linears(Encoder(ENCODER, seed=1))
        if any(size % 16 for size in _local_sizes(linear))
    )
    assert list(indivisible_layers) == [
        f"layers.{layer}.mlp.{name}" for layer in (0, 1) for name in ("up", "down")
    ]
    with pytest.raises(ParallelPlanError, match="layers.0.mlp.up has 72 output"):
        check_fp8_config(ENCODER, FP8(), 1)
    check_fp8_config(ENCODER, FP8(keep=tuple(indivisible_layers)), 1)


class WithConfig(LightningModule):
    """Module with the configuration of the model that it will build."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config


class WithModel(LightningModule):
    """Module whose model is built in the constructor."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model


class WithConfigureModel(WithModel):
    """Module that builds its model in ``configure_model``."""

    def configure_model(self) -> None:
        """Build the model."""


def make_hugging_face_config() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_head=4, n_layer=2, n_inner=80
    )


def check_fp8_sizes(module: LightningModule, tp: int, **settings: Any) -> None:
    options = MegatronStrategy(tp=tp, fp8=FP8(emulate=True, **settings)).options
    check_sizes(module, options, ParallelLayout(2, tp=tp), {})


@pytest.mark.parametrize("kind", ["config", "model", "Hugging Face model", "folder"])
def test_indivisible_sizes_are_refused_before_processes_start(kind, tmp_path):
    module: LightningModule
    if kind == "config":
        module = WithConfig(INDIVISIBLE)
    elif kind == "model":
        module = WithModel(GPT(INDIVISIBLE, seed=1))
    elif kind == "folder":
        make_hugging_face_config().save_pretrained(tmp_path)
        module = HuggingFaceCausalLM(str(tmp_path), from_scratch=True)
    else:
        transformers = pytest.importorskip("transformers")
        module = WithModel(transformers.GPT2LMHeadModel(make_hugging_face_config()))
    with pytest.raises(ParallelPlanError, match=re.escape(MESSAGE)):
        check_fp8_sizes(module, tp=2)
    check_fp8_sizes(module, tp=2, keep=("*.mlp.*",))
    check_fp8_sizes(module, tp=1)


def test_models_built_in_configure_model_are_not_checked_early():
    check_fp8_sizes(WithConfigureModel(GPT(INDIVISIBLE, seed=1)), tp=2)


def test_lora_factors_are_not_counted_as_layers():
    model = GPT(CONFIGS["llama"], seed=1)
    before = [name for _, name, _ in _linears(model)]
    base = model.layers["0"].attention.qkv
    # The LoRA rank of 4 is no multiple of 16.
    update = LowRank(base, range(16), 4, model.mesh)
    base.low_rank = LowRankUpdates({"query": update})
    assert [name for _, name, _ in _linears(model)] == before
    names = set_fp8(model, FP8(emulate=True), True, torch.device("cpu"))
    assert names == before
    assert base.scaling is not None
    assert isinstance(update.b, ColumnParallelLinear)
    assert update.b.scaling is None


def test_patterns_without_a_match_are_refused_before_processes_start():
    with pytest.raises(ParallelPlanError, match=r"'\*.mlp.gate' matches none of .*layers.N.mlp.up"):
        check_fp8_sizes(WithConfig(INDIVISIBLE), tp=1, keep=("*.mlp.gate",))
    check_fp8_sizes(WithConfig(EXPERTS), tp=1, keep=("*.mlp.shared.*",))
    with pytest.raises(ParallelPlanError, match="fp8.keep must name linear layers"):
        check_fp8_sizes(WithConfig(EXPERTS), tp=1, keep=("layers.2.*",))
