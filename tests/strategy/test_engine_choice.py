"""Transformer Engine is chosen by an option or by Lightning's plugin, or refused with a reason."""

from __future__ import annotations

import ctypes
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import TransformerEnginePrecision

from lightning_megatron import FP8, GPT, GPTConfig, MegatronStrategy
from lightning_megatron.errors import MissingExtraError, ParallelPlanError
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.transformer_engine.engine_scaling import EngineScaling
from lightning_megatron.models.fp8_layers import MODULES, _linears, set_fp8, set_part, unset_fp8
from lightning_megatron.models.layered import single_mesh
from lightning_megatron.strategy.checks.engine_checks import check_cudnn, check_engine
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from tests.fits import SIZES, strategy_with
from tests.layers.fake_engine import installed
from tests.refusals import check_refusals
from tests.strategy.test_options import trainer

CUDA = torch.device("cuda", 0)


Format = Enum("Format", ["HYBRID", "E4M3", "E5M2"])
KINDS = {
    "delayed": "delayed", "current": "float8_current_scaling", "block": "float8_block_scaling", "mxfp8": "mxfp8",
}  # fmt: skip


class Recipe:
    """Recipe with the attributes and methods of Transformer Engine's recipes."""

    def __init__(
        self, kind: str = "delayed", fp8_format: Any = Format.HYBRID, **changes: Any
    ) -> None:
        attributes = {"fp8_format": fp8_format, "margin": 0, "amax_history_len": 1024}
        attributes |= {"amax_compute_algo": "max", "scaling_factor_compute_algo": None}
        attributes |= {"reduce_amax": True, "backward_override": None}
        attributes |= {"fp8_dpa": False, "fp8_mha": False, **changes}
        vars(self).update(attributes)
        for name, method in KINDS.items():
            setattr(self, method, lambda is_kind=name == kind: is_kind)


def test_recipe_objects_give_the_settings_of_fp8():
    for recipe, settings in (
        (Recipe(margin=2, amax_history_len=7), ("delayed", "hybrid", 7, 2)),
        (Recipe(amax_compute_algo="most_recent"), ("delayed", "hybrid", 1, 0)),
        (Recipe("current"), ("tensorwise", "hybrid", 1024, 0)),
        (Recipe("block", Format.E4M3), ("blockwise", "e4m3", 1024, 0)),
        (Recipe("mxfp8", Format.E4M3), ("mxfp8", "e4m3", 1024, 0)),
    ):
        actual = FP8(te_recipe=recipe, last_bf16=1)
        assert (actual.recipe, actual.format, actual.history, actual.margin) == settings
        assert (actual.te_recipe, actual.last_bf16) == (recipe, 1)


#: Refused recipes, and refused arguments of the strategy.
RECIPES: list[tuple[dict[str, Any], str]] = [
    ({"te_recipe": "delayed"}, "of type str"),
    ({"te_recipe": Recipe("nvfp4")}, "cannot be Recipe"),
    ({"te_recipe": Recipe(fp8_dpa=True)}, "fp8_dpa=True"),
    ({"te_recipe": Recipe(backward_override="high")}, "backward_override='high'"),
    ({"te_recipe": Recipe(reduce_amax=False)}, "reduce_amax=False"),
    ({"te_recipe": Recipe(amax_compute_algo=max)}, "'max' or 'most_recent'"),
    ({"te_recipe": Recipe("current", Format.E5M2)}, "HYBRID or E4M3: it is E5M2"),
    ({"te_recipe": Recipe("current"), "recipe": "blockwise"}, "says 'tensorwise'"),
    ({"te_recipe": Recipe(), "history": 3}, "fp8.history (3) contradicts"),
]
BACKENDS: list[tuple[dict[str, Any], str]] = [
    ({"linear.backend": "cublas"}, "linear.backend must be native or te: it is 'cublas'"),
    ({"fp8": "mxfp8"}, "recipe 'mxfp8' needs linear.backend='te'"),
    ({"fp8": FP8(te_recipe=Recipe("current"))}, "te_recipe needs linear.backend='te'"),
    ({"linear.parts": ("norms",)}, "linear.parts (norms) needs linear.backend 'te'"),
    ({"linear.backend": "te", "linear.parts": ("head",)}, "must be"),
    ({"linear.backend": "te", "linear.parts": ("attention",), "cp": 2}, "cannot be used with cp (2)"),
    ({"linear.backend": "te", "linear.parts": ("attention",), "recompute": "full_except_core"}, "cannot be used with recompute"),
    ({"linear.backend": "te", "linear.parts": ("experts",), "cuda_graphs": "full"}, "cannot be used with cuda_graphs"),
    ({"linear.backend": "te", "fp8": "rowwise"}, "must be tensorwise, delayed, blockwise or mxfp8"),
    ({"linear.backend": "te", "fp8": FP8(emulate=True)}, "emulate cannot be used with linear.backend='te'"),
    ({"linear.backend": "te", "tp": 2, "linear.overlap": True}, "cannot be used with linear.overlap"),
]  # fmt: skip
#: Device, precision and recipe.
DEVICES: list[tuple[tuple[Any, ...], str]] = [
    (("cpu", "bf16-mixed", None), "needs an NVIDIA GPU: the device is cpu"),
    (("cuda", "32-true", None), "needs precision bf16-mixed or bf16-true: it is 32-true"),
    (("cuda", "16-mixed", "delayed"), "needs precision bf16-mixed or bf16-true: it is 16-mixed"),
    (("cuda", "bf16-true", "mxfp8"), "says 'needs 10.0.'"),
]


def test_settings_that_transformer_engine_does_not_have_are_refused():
    def check(device, precision, fp8):
        check_engine(
            MegatronStrategy(linear={"backend": "te"}, fp8=fp8).options,
            torch.device(device),
            precision,
        )

    check_refusals(FP8, RECIPES)
    check_refusals(strategy_with, BACKENDS)
    with installed(available=(False, "needs 10.0.")):
        check_refusals(check, DEVICES)
    with installed():
        for fp8 in (None, "tensorwise", "delayed", "blockwise", "mxfp8"):
            check("cuda", "bf16-mixed", fp8)


def test_a_missing_or_old_transformer_engine_is_refused(monkeypatch):
    with installed() as engine:
        del engine.Float8Quantizer
        with pytest.raises(MissingExtraError, match="2.20 or newer.*no Float8Quantizer"):
            check_engine(MegatronStrategy(linear={"backend": "te"}).options, CUDA, "bf16-mixed")
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(MissingExtraError, match=r"ModuleNotFoundError.*lightning-megatron\[te\]"):
        trainer(1, MegatronStrategy(linear={"backend": "te"}), precision="bf16-mixed")


def test_the_cudnn_of_torch_is_loaded_first_and_a_mixture_is_refused(monkeypatch, tmp_path):
    (tmp_path / "transformer_engine").mkdir()
    libraries = tmp_path / "nvidia" / "cudnn" / "lib"
    libraries.mkdir(parents=True)
    for name in ("libcudnn.so.9", "libcudnn_ops.so.9", "libcudnn_ops.txt"):
        (libraries / name).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setenv("CUDNN_HOME", "")
    monkeypatch.delenv("CUDNN_HOME")
    loaded: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: loaded.append(Path(path).name))
    plain, engine, captured = (
        MegatronStrategy(**options).options
        for options in ({}, {"linear": {"backend": "te"}}, {"cuda_graphs": "full"})
    )
    assert loaded == 3 * ["libcudnn.so.9", "libcudnn_ops.so.9"]
    assert os.environ["CUDNN_HOME"] == str(libraries.parent)

    def fail() -> None:
        raise RuntimeError("compiled against (9, 19, 0) but found (9, 14, 0).")

    check_cudnn(engine, CUDA)
    monkeypatch.setattr(torch.backends.cudnn, "version", fail)
    check_cudnn(plain, CUDA)
    for options in (engine, captured):
        check_cudnn(options, torch.device("cpu"))
        with pytest.raises(ParallelPlanError, match=r"another one was loaded.*9, 14, 0"):
            check_cudnn(options, CUDA)


def make_plugin(**changes: Any) -> TransformerEnginePrecision:
    """Return Lightning's plugin without its constructor, which needs Transformer Engine."""
    result = TransformerEnginePrecision.__new__(TransformerEnginePrecision)
    half = {"weights_dtype": torch.bfloat16, "fallback_compute_dtype": torch.bfloat16}
    defaults = {**half, "recipe": Recipe(), "replace_layers": None}
    vars(result).update(defaults | changes)
    return result


def test_lightnings_plugin_sets_backend_recipe_and_precision():
    recipe = Recipe("current")
    strategy = MegatronStrategy(tp=2)
    strategy.precision_plugin = make_plugin(recipe=recipe)
    assert strategy.options.linear.backend == "te"
    assert strategy.options.products == FP8(te_recipe=recipe)
    assert strategy.options.tp == 2
    assert isinstance(strategy.precision_plugin, MegatronPrecision)
    assert strategy.precision_plugin.precision == "bf16-true"
    settings = FP8(te_recipe=recipe, keep=("*.mlp.down",))
    strategy = MegatronStrategy(linear={"backend": "te"}, fp8=settings)
    strategy.precision_plugin = make_plugin(recipe=recipe, weights_dtype=torch.float32)
    assert strategy.options.products == settings
    assert strategy.precision_plugin.precision == "bf16-mixed"


def test_plugins_with_unsupported_settings_are_refused():
    def set_plugin(options, **arguments):
        strategy_with(**options).precision_plugin = make_plugin(**arguments)

    half = {"weights_dtype": torch.float16, "fallback_compute_dtype": torch.float16}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"options": {}, "replace_layers": False}, "replace_layers=False"),
        ({"options": {"fp8": "tensorwise"}}, "fp8 (tensorwise) cannot be used with"),
        ({"options": {}, **half}, "cannot have weights_dtype torch.float16"),
    ]
    check_refusals(set_plugin, cases)


def test_the_trainer_accepts_the_plugin_and_refuses_the_cpu():
    # The CPU is refused after the plugin is accepted.
    with installed(), pytest.raises(ParallelPlanError, match="needs an NVIDIA GPU"):
        trainer(1, MegatronStrategy(), plugins=make_plugin())


def test_fp8_and_norms_of_transformer_engine_are_set_and_unset_in_a_model():
    sizes: dict[str, Any] = {**SIZES, "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64}
    model = GPT(GPTConfig.llama(**sizes), mesh=single_mesh(0), seed=1)
    device = torch.device("cpu")
    linears = {name: part for _, name, part in _linears(model)}
    chosen = set_fp8(model, FP8("delayed", last_bf16=1), False, device, "te")
    assert set(chosen) == {name for name in linears if name.startswith("layers.0.")}
    for name, part in linears.items():
        assert isinstance(part.scaling, EngineScaling)
        assert (part.scaling.settings is not None) == (name in chosen)
        assert (part.scaling.scales is not None) == (name in chosen)
    assert model.delayed_scales is not None
    # Two norms in each layer, and the final norm; no mixture of experts.
    assert [set_part(model, part, "te") for part in MODULES] == [5, 2, 0]
    assert model.layers["0"].attention_norm.uses_engine
    assert model.layers["1"].attention.uses_engine
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
