"""Sizes that 8-bit products do not support raise before processes start."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_megatron import FP8, MegatronStrategy
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.layers.linear.linear import ColumnParallelLinear
from lightning_megatron.layers.low_rank import LowRank, LowRankUpdates
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.models.fp8_layers import _linears, _local_sizes, set_fp8
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.model_shape import linear_sizes
from lightning_megatron.strategy.options.sizes import check_sizes
from tests.memory.measured import CONFIGS
from tests.swap.parts import mesh_of

SIZES: dict[str, Any] = {"vocab_size": 64, "max_seq_length": 16, "num_layers": 2, "num_heads": 4}
SHARED = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "shared_ffn_hidden_size": 48}
EXPERTS = GPTConfig.llama(**SIZES, hidden_size=32, ffn_hidden_size=64, experts=SHARED)
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


class Configures(LightningModule):
    """Module that may build its model in ``configure_model``."""

    def configure_model(self) -> None: ...


def check_fp8_sizes(
    tp: int, config: Any = None, model: Any = None, kind: Any = LightningModule, **settings: Any
) -> None:
    """Check a module whose constructor keeps a configuration, or builds a model."""
    module = kind()
    if config is not None:
        module.config = config
    if model is not None:
        module.model = model
    options = MegatronStrategy(tp=tp, fp8=FP8(emulate=True, **settings)).options
    check_sizes(module, options, ParallelLayout(2, tp=tp), {})


def test_indivisible_sizes_are_refused_before_processes_start():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_head=4, n_layer=2, n_inner=80
    )
    for given in (
        {"config": INDIVISIBLE},
        {"model": GPT(INDIVISIBLE, seed=1)},
        {"model": transformers.GPT2LMHeadModel(theirs)},
    ):
        with pytest.raises(ParallelPlanError, match=re.escape(MESSAGE)):
            check_fp8_sizes(2, **given)
        check_fp8_sizes(2, **given, keep=("*.mlp.*",))
        check_fp8_sizes(1, **given)
    with pytest.raises(ParallelPlanError, match=r"'\*.mlp.gate' matches none of .*layers.N.mlp.up"):
        check_fp8_sizes(1, INDIVISIBLE, keep=("*.mlp.gate",))
    encoder = EncoderConfig(
        vocab_size=64,
        num_positions=16,
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        ffn_hidden_size=72,
    )
    with pytest.raises(ParallelPlanError, match="layers.0.mlp.up has 72 output"):
        check_fp8_sizes(1, encoder)
    check_fp8_sizes(1, encoder, keep=("*.mlp.*",))
    check_fp8_sizes(1, EXPERTS, keep=("*.mlp.shared.*",))
    check_fp8_sizes(2, model=GPT(INDIVISIBLE, seed=1), kind=Configures)


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
