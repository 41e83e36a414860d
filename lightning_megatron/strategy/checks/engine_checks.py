"""Checks of products in 8 bits and of Transformer Engine against a run, before any process group
exists.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import torch
from lightning.pytorch.plugins.precision import Precision, TransformerEnginePrecision
from torch import nn

from lightning_megatron.errors import MissingExtraError, ParallelPlanError, UnsupportedError
from lightning_megatron.layers.fp8.operand import has_products
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from lightning_megatron.user_code import is_compiled

#: Precisions of products in 8 bits on a GPU, and of Transformer Engine.
_PRECISIONS = ("bf16-mixed", "bf16-true")
#: Functions of Transformer Engine that return whether a device supports a recipe.
_QUESTIONS = {
    "tensorwise": "is_fp8_available",
    "delayed": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
#: Names in Transformer Engine that the layers need, apart from its public classes.
_NEEDED = ("prepare_for_saving", "restore_from_saved", "Float8Quantizer")


def with_plugin_recipe(options: StrategyOptions, plugin: Precision) -> StrategyOptions:
    """Return the options with the recipe of Lightning's precision plugin for Transformer Engine.

    Under Lightning, the plugin replaces torch modules and enters the recipe around every step.
    Under this strategy, the layers of this package use the recipe instead.
    """
    if not isinstance(plugin, TransformerEnginePrecision):
        return options
    if plugin.replace_layers is False:
        raise UnsupportedError(
            "TransformerEnginePrecision(replace_layers=False) cannot be used: with it the module "
            "chooses its own layers, but here the strategy chooses them. Leave replace_layers out, "
            "and name the layers to keep in bfloat16 in fp8.keep with linear.backend='te'."
        )
    from_plugin = FP8(te_recipe=plugin.recipe)
    products = options.products
    if products is not None and products.te_recipe is not plugin.recipe:
        raise UnsupportedError(
            f"fp8 ({products.recipe}) cannot be used with TransformerEnginePrecision "
            f"({from_plugin.recipe}): both set a recipe. Leave one of them out."
        )
    return replace(
        options, linear=replace(options.linear, backend="te"), fp8=products or from_plugin
    )


def check_engine(options: StrategyOptions, device: torch.device, precision: str) -> None:
    """Refuse Transformer Engine if it is not installed, or does not support a run."""
    engine = _installed()
    if precision not in _PRECISIONS:
        raise ParallelPlanError(
            f"linear.backend ('te') needs precision {' or '.join(_PRECISIONS)}: it is {precision}. "
            "Change the precision, or use linear.backend='native'."
        )
    if device.type != "cuda" or torch.version.hip is not None:
        raise ParallelPlanError(
            f"linear.backend ('te') needs an NVIDIA GPU: the device is {device}. Use "
            "linear.backend='native'."
        )
    settings = options.products
    if settings is None or options.linear.backend_of("products") == "native":
        return
    is_available, reason = getattr(engine, _QUESTIONS[settings.recipe])(return_reason=True)
    if not is_available:
        raise ParallelPlanError(
            f"fp8 ({settings.recipe}) with linear.backend='te' needs a GPU that supports it: "
            f"Transformer Engine says {reason!r} Use another recipe, or fp8=None."
        )


def _installed() -> ModuleType:
    """Import Transformer Engine; raise if it is missing or too old."""
    try:
        engine = import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise MissingExtraError(
            "linear.backend ('te') needs Transformer Engine, which cannot be imported "
            f"({type(error).__name__}: {error}). Install the extra with pip install "
            "'lightning-megatron[te]', or use linear.backend='native'."
        ) from error
    missing = [name for name in _NEEDED if not hasattr(engine, name)]
    if missing:
        raise MissingExtraError(
            "linear.backend ('te') needs Transformer Engine 2.20 or newer: the installed one has "
            f"no {', '.join(missing)}. Upgrade it, or use linear.backend='native'."
        )
    return engine


def load_cudnn_of_torch() -> None:
    """Load the cuDNN that pip installed beside torch, before Transformer Engine loads another one.

    Transformer Engine, if it is installed, prefers the cuDNN of the system. Of two versions, each
    library of cuDNN is then that which was loaded first. Eager steps run, but captured attention,
    also that of torch, has wrong results or invalid memory accesses when it is replayed.
    """
    nvidia = PathFinder.find_spec("nvidia")
    if nvidia is None or PathFinder.find_spec("transformer_engine") is None:
        return
    for folder in nvidia.submodule_search_locations or []:
        libraries = sorted(Path(folder, "cudnn", "lib").glob("libcudnn*.so.*"))
        if libraries:
            os.environ.setdefault("CUDNN_HOME", str(Path(folder, "cudnn")))
        for library in libraries:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def check_cudnn(options: StrategyOptions, device: torch.device) -> None:
    """Refuse a mixture of two versions of cuDNN, which captured attention does not survive."""
    if device.type != "cuda" or (options.linear.backend == "native" and options.graphs is None):
        return
    try:
        torch.backends.cudnn.version()
    except RuntimeError as error:
        raise ParallelPlanError(
            "cuda_graphs and linear.backend 'te' need the cuDNN of torch: another one was loaded "
            "first, with which captured attention gives wrong results or invalid memory accesses "
            f"({error}) Import transformer_engine after the strategy is made, or set CUDNN_HOME "
            "and LD_LIBRARY_PATH to the cuDNN of torch before Python starts."
        ) from error


def check_fp8(settings: FP8 | None, device: torch.device, precision: str) -> None:
    """Refuse products in 8 bits that the device or the precision does not support.

    Args:
        settings: Settings of the run; None without such products.
    """
    if settings is None:
        return
    if precision.startswith("16"):
        raise ParallelPlanError(
            f"fp8 ({settings.recipe}) cannot be used with precision {precision}, because its loss "
            "scale reacts to infinite gradients, which casts to 8 bits do not produce. Use "
            "bf16-mixed or bf16-true."
        )
    if not emulates(settings, device) and precision not in _PRECISIONS:
        raise ParallelPlanError(
            f"fp8 ({settings.recipe}) needs precision {' or '.join(_PRECISIONS)}: it is "
            f"{precision}. Products in 8 bits have results in bfloat16. Change the precision, or "
            "use fp8=None."
        )


def check_not_compiled(module: nn.Module, settings: FP8 | None) -> None:
    """Refuse compiled modules if weights are kept in 8 bits.

    Args:
        settings: Settings of the run; None without products in 8 bits.
    """
    if settings is None or settings.parameters is None:
        return
    for name, part in module.named_modules():
        if is_compiled(part):
            raise UnsupportedError(
                "fp8.parameters ('fp8') cannot be used with torch.compile, because compiled graphs "
                f"read the weights directly: {name or type(part).__name__} is compiled. Leave one "
                "of them out."
            )


def emulates(settings: FP8, device: torch.device) -> bool:
    """Return whether products are emulated: rounded to 8 bits, but multiplied in a wider type."""
    if has_products(device, settings.recipe == "blockwise"):
        return False
    if not settings.emulate:
        raise ParallelPlanError(
            f"fp8 ({settings.recipe}) needs a GPU with matrix products in 8 bits: {device} does "
            "not have them. tensorwise and rowwise need compute capability 8.9 (Ada, Hopper) or "
            "newer, blockwise needs 9.0 (Hopper). Use fp8.emulate to round to 8 bits and multiply "
            "in the precision of the device, which is slow, or fp8=None."
        )
    return True
