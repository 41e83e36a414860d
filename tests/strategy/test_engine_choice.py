"""Transformer Engine is chosen by an option or by Lightning's plugin, or refused with a reason."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import TransformerEnginePrecision

from lightning_megatron import (
    FP8,
    GPT,
    GPTConfig,
    MegatronStrategy,
    ParallelPlanError,
    UnsupportedError,
)
from lightning_megatron.errors import MissingExtraError
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.transformer_engine.engine_scaling import EngineScaling
from lightning_megatron.models.fp8_layers import _linears, set_fp8, set_norms, unset_fp8
from lightning_megatron.models.layered import single_mesh
from lightning_megatron.strategy.checks.engine_checks import check_engine
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from tests.layers.fake_engine import installed
from tests.strategy.test_options import trainer

CUDA = torch.device("cuda", 0)


class Format(Enum):
    """Formats with the names of Transformer Engine."""

    HYBRID = 1
    E4M3 = 2
    E5M2 = 3


@dataclass
class Recipe:
    """Recipe with the attributes and methods of Transformer Engine's recipes."""

    kind: str = "delayed"
    fp8_format: Any = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Any = None

    def delayed(self) -> bool:
        return self.kind == "delayed"

    def float8_current_scaling(self) -> bool:
        return self.kind == "current"

    def float8_block_scaling(self) -> bool:
        return self.kind == "block"

    def mxfp8(self) -> bool:
        return self.kind == "mxfp8"


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (Recipe(margin=2, amax_history_len=7), ("delayed", "hybrid", 7, 2)),
        (Recipe(amax_compute_algo="most_recent"), ("delayed", "hybrid", 1, 0)),
        (Recipe("current"), ("tensorwise", "hybrid", 1024, 0)),
        (Recipe("block", Format.E4M3), ("blockwise", "e4m3", 1024, 0)),
        (Recipe("mxfp8", Format.E4M3), ("mxfp8", "e4m3", 1024, 0)),
    ],
)
def test_recipe_objects_give_the_settings_of_fp8(recipe, settings):
    actual = FP8(te_recipe=recipe, last_bf16=1)
    assert (actual.recipe, actual.format, actual.history, actual.margin) == settings
    assert actual.te_recipe is recipe
    assert actual.last_bf16 == 1


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"te_recipe": "delayed"}, ParallelPlanError, "must be a recipe of Transformer Engine.*type str"),
        ({"te_recipe": Recipe("nvfp4")}, UnsupportedError, "cannot be Recipe.*Use one of them"),
        ({"te_recipe": Recipe(fp8_dpa=True)}, UnsupportedError, "fp8_dpa=True.*Leave it out"),
        ({"te_recipe": Recipe(backward_override="high")}, UnsupportedError, "backward_override='high'"),
        ({"te_recipe": Recipe(reduce_amax=False)}, UnsupportedError, "reduce_amax=False.*Legal: True"),
        ({"te_recipe": Recipe(amax_compute_algo=max)}, UnsupportedError, "amax_compute_algo=.*'max' or 'most_recent'"),
        ({"te_recipe": Recipe("current", Format.E5M2)}, UnsupportedError, "HYBRID or E4M3: it is E5M2"),
        ({"te_recipe": Recipe("current"), "recipe": "blockwise"}, ParallelPlanError, "'blockwise'.*says 'tensorwise'"),
        ({"te_recipe": Recipe(), "history": 3}, ParallelPlanError, "fp8.history .3. contradicts"),
    ],
)  # fmt: skip
def test_recipe_objects_with_unsupported_settings_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        FP8(**arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "cublas"}, "backend must be native or te: it is 'cublas'"),
        ({"fp8": "mxfp8"}, "recipe 'mxfp8' needs backend='te'"),
        ({"fp8": FP8(te_recipe=Recipe("current"))}, "te_recipe needs backend='te'"),
        ({"backend": "te", "cuda_graphs": "segments"}, "cannot be used with cuda_graphs"),
        ({"backend": "te", "fp8": "rowwise"}, "must be tensorwise, delayed, blockwise or mxfp8"),
        ({"backend": "te", "fp8": FP8(emulate=True)}, "emulate cannot be used with backend='te'"),
        (
            {"backend": "te", "tp": 2, "overlap_tensor_parallel": True},
            "backend .'te'. cannot be used with overlap_tensor_parallel",
        ),
    ],
)
def test_options_that_contradict_the_backend_are_refused(arguments, words):
    with pytest.raises(ParallelPlanError, match=words):
        MegatronStrategy(**arguments)


def test_a_missing_transformer_engine_raises_with_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(MissingExtraError, match=r"ModuleNotFoundError.*lightning-megatron\[te\]"):
        trainer(1, MegatronStrategy(backend="te"), precision="bf16-mixed")


def test_an_old_transformer_engine_is_refused():
    options = MegatronStrategy(backend="te").options
    with installed() as engine:
        del engine.Float8Quantizer
        with pytest.raises(MissingExtraError, match="2.20 or newer.*no Float8Quantizer"):
            check_engine(options, CUDA, "bf16-mixed")


@pytest.mark.parametrize(
    ("device", "precision", "fp8", "words"),
    [
        ("cpu", "bf16-mixed", None, "needs an NVIDIA GPU: the device is cpu"),
        ("cuda", "32-true", None, "needs precision bf16-mixed or bf16-true: it is 32-true"),
        ("cuda", "16-mixed", "delayed", "needs precision bf16-mixed or bf16-true: it is 16-mixed"),
        ("cuda", "bf16-true", "mxfp8", r"fp8 \(mxfp8\).*says 'needs 10.0.'"),
    ],
)
def test_devices_and_precisions_without_support_are_refused(device, precision, fp8, words):
    options = MegatronStrategy(backend="te", fp8=fp8).options
    with (
        installed(available=(False, "needs 10.0.")),
        pytest.raises(ParallelPlanError, match=words),
    ):
        check_engine(options, torch.device(device), precision)


def test_a_gpu_with_bf16_mixed_is_accepted_for_every_recipe():
    with installed():
        for fp8 in (None, "tensorwise", "delayed", "blockwise", "mxfp8"):
            check_engine(MegatronStrategy(backend="te", fp8=fp8).options, CUDA, "bf16-mixed")


def make_plugin(**changes: Any) -> TransformerEnginePrecision:
    """Return Lightning's plugin without its constructor, which needs Transformer Engine."""
    result = TransformerEnginePrecision.__new__(TransformerEnginePrecision)
    defaults = {
        "weights_dtype": torch.bfloat16,
        "fallback_compute_dtype": torch.bfloat16,
        "recipe": Recipe(),
        "replace_layers": None,
    }
    vars(result).update(defaults | changes)
    return result


def test_lightnings_plugin_sets_backend_recipe_and_precision():
    recipe = Recipe("current")
    strategy = MegatronStrategy(tp=2)
    strategy.precision_plugin = make_plugin(recipe=recipe)
    assert strategy.options.backend == "te"
    assert strategy.options.products == FP8(te_recipe=recipe)
    assert strategy.options.tp == 2
    assert isinstance(strategy.precision_plugin, MegatronPrecision)
    assert strategy.precision_plugin.precision == "bf16-true"
    settings = FP8(te_recipe=recipe, keep=("*.mlp.down",))
    strategy = MegatronStrategy(backend="te", fp8=settings)
    strategy.precision_plugin = make_plugin(recipe=recipe, weights_dtype=torch.float32)
    assert strategy.options.products == settings
    assert strategy.precision_plugin.precision == "bf16-mixed"


@pytest.mark.parametrize(
    ("options", "arguments", "words"),
    [
        ({}, {"replace_layers": False}, "replace_layers=False"),
        ({"fp8": "tensorwise"}, {}, "fp8 .tensorwise. cannot be used with.*Leave one"),
        (
            {},
            {"weights_dtype": torch.float16, "fallback_compute_dtype": torch.float16},
            "cannot have weights_dtype torch.float16",
        ),
    ],
)
def test_plugins_with_unsupported_settings_are_refused(options, arguments, words):
    strategy = MegatronStrategy(**options)
    with pytest.raises(UnsupportedError, match=words):
        strategy.precision_plugin = make_plugin(**arguments)


def test_the_trainer_accepts_the_plugin_and_refuses_the_cpu():
    # The CPU is refused after the plugin is accepted.
    with installed(), pytest.raises(ParallelPlanError, match="needs an NVIDIA GPU"):
        trainer(1, MegatronStrategy(), plugins=make_plugin())


def test_fp8_and_norms_of_transformer_engine_are_set_and_unset_in_a_model():
    model = GPT(
        GPTConfig.llama(
            vocab_size=32,
            max_seq_length=8,
            num_layers=2,
            hidden_size=64,
            num_heads=4,
            ffn_hidden_size=64,
        ),
        mesh=single_mesh(0),
        seed=1,
    )
    device = torch.device("cpu")
    linears = {name: part for _, name, part in _linears(model)}
    chosen = set_fp8(model, FP8("delayed", last_bf16=1), False, device, "te")
    assert set(chosen) == {name for name in linears if name.startswith("layers.0.")}
    for name, part in linears.items():
        assert isinstance(part.scaling, EngineScaling)
        assert (part.scaling.settings is not None) == (name in chosen)
        assert (part.scaling.scales is not None) == (name in chosen)
    assert model.delayed_scales is not None
    # Two norms in each layer, and the final norm.
    assert set_norms(model, "te") == 5
    assert model.layers["0"].attention_norm.uses_engine
    unset_fp8(model, device, "te")
    assert all(part.scaling.settings is None for part in linears.values())
    set_fp8(model, FP8(emulate=True), True, device)
    assert all(isinstance(part.scaling, Scaling) for part in linears.values())
    unset_fp8(model)
    assert all(part.scaling is None for part in linears.values())


def test_blockwise_sizes_of_transformer_engine_need_multiples_of_128():
    FP8("blockwise").check_sizes("layers.0.mlp.up", 128, 384, "te")
    with pytest.raises(ParallelPlanError, match="multiples of 512"):
        FP8("blockwise").check_sizes("layers.0.mlp.up", 128, 384)
    with pytest.raises(ParallelPlanError, match="multiples of 32"):
        FP8("mxfp8").check_sizes("layers.0.mlp.up", 48, 64, "te")
