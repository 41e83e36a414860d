"""Casts and matrix products of Transformer Engine, for the linear layers of this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.layers.fp8.delayed import LayerScales, Use
from lightning_megatron.layers.fp8.scaling import StoredWeight
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.shapes import Float

#: A tensor, or Transformer Engine's class of a matrix in 8 bits.
Factor = Any
#: Name of one of the three products of a linear layer.
Pass = Literal["forward", "input gradient", "weight gradient"]
_STORAGE: Final = "transformer_engine.pytorch.tensor.storage.float8_tensor_storage"
_LAYOUTS: Final[dict[Pass, str]] = {
    "forward": "TN",
    "input gradient": "NN",
    "weight gradient": "NT",
}
_ACCURACIES: Final[dict[Pass, str]] = {
    "forward": "fp8_gemm_fprop",
    "input gradient": "fp8_gemm_dgrad",
    "weight gradient": "fp8_gemm_wgrad",
}
_SETTINGS: Final[dict[Use, str]] = {
    "input": "fp8_quant_fwd_inp",
    "weight": "fp8_quant_fwd_weight",
    "gradient": "fp8_quant_bwd_grad",
}


@dataclass(frozen=True, eq=False)
class EngineScaling:
    """Casts and products of a linear layer with Transformer Engine.

    Scales of tensors, blocks and groups of 32 elements follow from this rank's tensors. Scales from
    earlier steps are those of :class:`~lightning_megatron.layers.fp8.delayed.DelayedScales`, which
    all ranks of a stage share; in the first step, scales follow from each tensor.

    Args:
        settings: The user's settings; None means products in the dtype of the inputs.
        scales: Scales of this layer from earlier steps; None if scales follow from each tensor.
        stored: The weight, if it is kept in 8 bits; None casts it.
    """

    settings: FP8 | None
    device: torch.device
    scales: LayerScales | None = None
    stored: StoredWeight | None = None

    def reading(self, stored: StoredWeight | None) -> EngineScaling:
        """Return a copy that reads the weight where the optimizer keeps it; None casts it again.

        From now on the history of :attr:`scales` gets the weight's magnitude from the same place.
        """
        if self.scales is not None:
            self.scales.follow_weight(None if stored is None else stored.magnitude)
        return replace(self, stored=stored)

    def cast_weight(
        self,
        weight: Float[Tensor, "rows columns"] | None,
        dtype: torch.dtype,
        *,
        columns: bool,
        counts: bool,
    ) -> Factor:
        """Cast the weight of a layer, as :meth:`cast`, or read it where it is kept in 8 bits."""
        if self.stored is None or self.settings is None:
            assert weight is not None, "a weight that is cast was kept"
            return self.cast(weight.to(dtype), "weight", columns=columns, counts=counts)
        rows = self.stored.rows
        kept = self.stored.columns(self.settings.multiple).values if columns else None
        make = import_module(_STORAGE).Float8TensorStorage
        return make(
            data=rows.values.view(torch.uint8),
            fp8_scale_inv=rows.scale,
            fp8_dtype=self._current_quantizers["weight"].dtype,
            fake_dtype=dtype,
            data_transpose=None if kept is None else kept.view(torch.uint8),
        )

    def cast(
        self, matrix: Float[Tensor, "rows columns"], use: Use, *, columns: bool, counts: bool
    ) -> Factor:
        """Cast a factor to 8 bits; without settings, return it without a cast.

        Args:
            columns: Whether a product that sums over columns will use it, too, besides the product
                that sums over rows.
            counts: Whether the largest magnitude counts towards the scales of the next step.
        """
        matrix = matrix.contiguous()
        if self.settings is None:
            return matrix
        quantizer = self._quantizer(use, matrix, counts)
        quantizer.set_usage(rowwise=True, columnwise=columns)
        quantizer.internal = True
        return quantizer(matrix)

    def padded(self, matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "padded columns"]:
        """Return a matrix with its number of rows padded by zeros to fit products in 8 bits."""
        if self.settings is None:
            return matrix
        missing = -len(matrix) % self.settings.multiple
        return F.pad(matrix, (0, 0, 0, missing)) if missing else matrix

    def product(
        self,
        left: Factor,
        right: Factor,
        of: Pass,
        dtype: torch.dtype,
        *,
        out: Float[Tensor, "rows columns"] | None = None,
        adds: bool = False,
        scale: float = 1.0,
    ) -> Float[Tensor, "rows columns"]:
        """Return one of the products of a linear layer.

        Args:
            left: The weight; for the weight gradient, the inputs.
            right: The inputs; for the gradients, the gradient of the outputs.
            out: Memory of the result, of this dtype, to which ``adds`` adds the result.
            scale: Factor of the result.
        """
        product, *_ = import_module("transformer_engine.pytorch.cpp_extensions").general_gemm(
            left,
            right,
            out_dtype=dtype,
            layout=_LAYOUTS[of],
            grad=of != "forward",
            out=out,
            accumulate=adds,
            alpha=scale,
            use_split_accumulator=self._is_accurate(of),
        )
        result: Tensor = product
        return result

    @property
    def can_scale(self) -> bool:
        """Return whether :meth:`product` supports a ``scale`` other than 1."""
        return self.settings is None or self.settings.has_one_scale

    def _is_accurate(self, of: Pass) -> bool:
        """Return whether a product accumulates in full float32 precision."""
        if self.settings is None:
            return False
        accuracy = getattr(self._recipe, _ACCURACIES[of], None)
        return of != "forward" if accuracy is None else accuracy.use_split_accumulator

    @cached_property
    def _recipe(self) -> Any:
        return engine_recipe(self.settings)

    def _quantizer(self, use: Use, matrix: Tensor, counts: bool) -> Any:
        if self.scales is None:
            return self._current_quantizers[use]
        if self.scales.magnitude(use) is not None:
            return self._delayed_quantizers[use, counts]
        if counts:
            largest = self.scales.step_magnitudes[use].view(torch.float32)
            largest.copy_(torch.maximum(largest, matrix.abs().amax().float()))
        return self._current_quantizers[use]

    @cached_property
    def _current_quantizers(self) -> dict[Use, Any]:
        """Return the quantizers whose scales follow from each tensor."""
        quantization = import_module("transformer_engine.pytorch.quantization")
        recipe = self._recipe
        if self.scales is not None:
            recipes = import_module("transformer_engine.common.recipe")
            recipe = recipes.Float8CurrentScaling(fp8_format=recipe.fp8_format)
        make = quantization.RecipeState.create
        forward = make(recipe, mode="forward", num_quantizers=2, device=self.device)
        backward = make(recipe, mode="backward", num_quantizers=1, device=self.device)
        inputs, weight = forward.make_quantizers()
        (gradient,) = backward.make_quantizers()
        quantizers: dict[Use, Any] = {"input": inputs, "weight": weight, "gradient": gradient}
        if recipe.float8_current_scaling():
            for use, quantizer in quantizers.items():
                settings = getattr(recipe, _SETTINGS[use])
                has_powers = recipe.use_power_2_scales or settings.power_2_scale
                quantizer.force_pow_2_scales = has_powers
                quantizer.amax_epsilon = settings.amax_epsilon
        return quantizers

    @cached_property
    def _delayed_quantizers(self) -> dict[tuple[Use, bool], Any]:
        """Return the quantizers with scales from earlier steps, by use and ``counts``."""
        assert self.scales is not None, "only recipes with such scales ask for them"
        make = import_module("transformer_engine.pytorch").Float8Quantizer
        unused = torch.zeros(1, dtype=torch.float32, device=self.device)
        quantizers = {}
        for use, quantizer in self._current_quantizers.items():
            largest = self.scales.step_magnitudes[use].view(torch.float32).reshape(1)
            for counts in (True, False):
                amax = largest if counts else unused
                quantizers[use, counts] = make(self.scales.factors[use], amax, quantizer.dtype)
        return quantizers


def engine_recipe(settings: FP8 | None) -> Any:
    """Return Transformer Engine's recipe for some settings."""
    assert settings is not None, "products in the type of the inputs have no recipe"
    if settings.te_recipe is not None:
        return settings.te_recipe
    recipes = import_module("transformer_engine.common.recipe")
    is_hybrid = settings.gradient_format == "e5m2"
    options = {"fp8_format": recipes.Format.HYBRID if is_hybrid else recipes.Format.E4M3}
    if settings.recipe == "delayed":
        options |= {"margin": settings.margin, "amax_history_len": settings.history}
    names = {
        "tensorwise": "Float8CurrentScaling",
        "delayed": "DelayedScaling",
        "blockwise": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
    }
    return getattr(recipes, names[settings.recipe])(**options)


@dataclass(frozen=True)
class EngineProduct:
    """Weight gradient of a linear layer that Transformer Engine computes, for gradient slots."""

    scaling: EngineScaling
    inputs: Factor
    gradient: Factor
    dtype: torch.dtype

    def value(self) -> Float[Tensor, "out_local in_local"]:
        """Return the gradient."""
        return self.scaling.product(self.inputs, self.gradient, "weight gradient", self.dtype)

    def add_to(
        self, sums: Float[Tensor, "out_local in_local"], *, is_empty: bool, scale: float
    ) -> bool:
        """Add the gradient to a sum in place; return False if the product cannot write to it."""
        if not sums.is_contiguous() or (scale != 1 and not self.scaling.can_scale):
            return False
        self.scaling.product(
            self.inputs,
            self.gradient,
            "weight gradient",
            sums.dtype,
            out=sums,
            adds=not is_empty,
            scale=scale,
        )
        return True

    def split(self, rows: Sequence[int]) -> None:
        """Return None: the products of some rows cannot be computed separately."""
