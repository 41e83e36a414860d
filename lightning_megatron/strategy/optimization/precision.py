"""Precision plugin: dtypes of parameters and main parameters, without autocast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_megatron.errors import SpeedWarning, UnsupportedError
from lightning_megatron.half_types import default_dtype
from lightning_megatron.optimizer.loss_scale import DynamicLossScale
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.strategy.optimization.training_state import TrainingState


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of the parameters and main parameters of one precision.

    Args:
        parameters: Dtype of the model's parameters and activations.
        main_parameters: Dtype of the main parameters; None means that the optimizer trains the
            model's own.
        is_default: Whether ``parameters`` is also torch's default dtype in user code.
        scales_loss: Whether the loss is scaled so that gradients do not vanish.
    """

    parameters: torch.dtype
    main_parameters: torch.dtype | None = None
    is_default: bool = False
    scales_loss: bool = False


PRECISIONS: Mapping[str, Dtypes] = {
    "32-true": Dtypes(torch.float32),
    "64-true": Dtypes(torch.float64, is_default=True),
    "bf16-true": Dtypes(torch.bfloat16, is_default=True),
    "bf16-mixed": Dtypes(torch.bfloat16, main_parameters=torch.float32),
    "16-mixed": Dtypes(torch.float16, main_parameters=torch.float32, scales_loss=True),
}


class MegatronPrecision(Precision):
    """Precision plugin with half-precision parameters and float32 main parameters.

    * ``32-true``, ``64-true``, ``bf16-true``: parameters of that type, trained as they are.
    * ``bf16-mixed``: bfloat16 parameters and activations; the optimizer trains float32 main
      parameters with float32 gradients. There is no autocast: the whole module computes in
      bfloat16, except code with explicit casts, such as this package's losses.
    * ``16-mixed``: the same with float16 and a dynamic loss scale. All ranks skip the same steps.

    Floating-point inputs are converted to the parameters' dtype. Modules with a model of this
    package are an exception: their inputs are token ids.
    """

    def __init__(
        self, precision: str = "32-true", loss_scale: DynamicLossScale | None = None
    ) -> None:
        if precision not in PRECISIONS:
            raise UnsupportedError(
                f"precision must be one of {', '.join(PRECISIONS)}: {precision!r}. Pass one of "
                "them to Trainer(precision=...)."
            )
        self.precision: Any = precision
        self.dtypes = PRECISIONS[precision]
        self.loss_scale = (loss_scale or DynamicLossScale()) if self.dtypes.scales_loss else None
        self.converts_inputs = True
        self.skipped_steps = 0
        self._has_warned_of_skip = False
        self.last_grad_norm: Tensor | None = None
        self._state: TrainingState | None = None

    @classmethod
    def from_lightning(cls, plugin: Precision | None) -> MegatronPrecision:
        """Convert the plugin that the Trainer has chosen for its ``precision`` argument."""
        if isinstance(plugin, cls):
            return plugin
        if plugin is None or type(plugin) is Precision:
            return cls("32-true")
        if isinstance(plugin, (HalfPrecision, DoublePrecision, MixedPrecision)):
            return cls(str(plugin.precision))
        if isinstance(plugin, TransformerEnginePrecision):
            # The strategy's backend takes the recipe of such a plugin.
            return cls(_precision_around(plugin))
        raise UnsupportedError(
            "a precision plugin must belong to this strategy, which keeps main parameters itself: "
            f"it is {type(plugin).__name__}. Use Trainer(precision=...) with one of "
            f"{', '.join(PRECISIONS)}."
        )

    def bind(self, state: TrainingState | None) -> None:
        """Set the training state that the next steps update."""
        self._state = state

    @property
    def loss_factor(self) -> float:
        """Factor of every loss before its backward pass."""
        return self.loss_scale.scale if self.loss_scale is not None else 1.0

    def values_to_log(self) -> dict[str, float]:
        """Return the loss scale and the number of skipped steps, by name."""
        if self.loss_scale is None:
            return {}
        return {"loss_scale": self.loss_scale.scale, "skipped_steps": float(self.skipped_steps)}

    # ---- types

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert parameters and buffers, except complex ones, to the dtype of the parameters."""
        dtype = self.dtypes.parameters
        if dtype is torch.float32:
            return module
        named = [*module.named_parameters(), *module.named_buffers()]
        if not any(tensor.is_complex() for _, tensor in named):
            return module.to(dtype=dtype)
        if dtype is torch.float64:
            return module.double()
        for name, parameter in module.named_parameters():
            if parameter.is_complex():
                raise UnsupportedError(
                    f"precision {self.precision} needs real parameters: {name!r} is "
                    f"{parameter.dtype}. The main parameters of an optimizer are float32, which "
                    "has no imaginary parts. Use precision 32-true or 64-true, or a real parameter "
                    "with torch.view_as_complex in the step."
                )
        # `to` would convert complex buffers as well, and drop their imaginary parts.
        return module.bfloat16() if dtype is torch.bfloat16 else module.half()

    @override
    def convert_input(self, data: Any) -> Any:
        if self.dtypes.parameters is torch.float32 or not self.converts_inputs:
            return data
        if (
            isinstance(data, Sequence)
            and data
            and all(isinstance(part, Microbatch) for part in data)
        ):
            return [replace(part, data=self.convert_input(part.data)) for part in data]
        return apply_to_collection(data, Tensor, self._converted)

    def _converted(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtypes.parameters) if tensor.is_floating_point() else tensor

    @override
    def tensor_init_context(self) -> AbstractContextManager:
        return default_dtype(self.dtypes.parameters) if self.dtypes.is_default else nullcontext()

    @override
    def module_init_context(self) -> AbstractContextManager:
        return self.tensor_init_context()

    @override
    def forward_context(self) -> AbstractContextManager:
        return self.tensor_init_context()

    # ---- steps

    @property
    def _training(self) -> TrainingState:
        if self._state is None:
            raise RuntimeError(
                "gradients and optimizers must be used while the Trainer runs, from the `setup` "
                "hook to the `teardown` hook: no run is in progress."
            )
        return self._state

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        state = self._training
        state.checks.note("loss", tensor)
        inspector = state.checks.inspector
        if inspector is not None:
            inspector(tensor.grad_fn, True)
        with state.gradients.backward_by_hand():
            scaled = tensor * self.loss_factor if self.loss_scale else tensor
            super().backward(scaled, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.loss_scale is not None and isinstance(optimizer, LBFGS):
            raise UnsupportedError(
                "precision 16-mixed cannot be used with LBFGS, because LBFGS evaluates the loss "
                "several times in a step, and each evaluation could overflow. Use one of "
                f"{', '.join(name for name in PRECISIONS if name != '16-mixed')}."
            )
        state = self._training

        def with_hooks() -> Any:
            result = closure()
            state.gradients.finish_for(optimizer)
            self._after_closure(model, optimizer)
            return result

        scale = self.loss_factor
        result, is_skipped = state.update(optimizer, with_hooks, kwargs)
        self.skipped_steps += is_skipped
        if is_skipped and not self._has_warned_of_skip:
            self._has_warned_of_skip = True
            rank_zero_warn(
                "precision 16-mixed skipped a step: its gradients overflowed at loss scale "
                f"{scale:g}. Some skips are normal until the scale fits; TrainingMetrics logs "
                "their number as train/skipped_steps. If skips continue, use "
                "Trainer(precision='bf16-mixed') or a lower learning rate. Later skips are not "
                "reported.",
                category=SpeedWarning,
            )
        return result

    # ---- clipping

    @override
    def clip_gradients(
        self, optimizer: Optimizer, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        if self._state is not None:
            self._state.gradients.finish_for(optimizer)
            self._state.gradients.adopt_user_changes()
        super().clip_gradients(
            optimizer, 0.0 if clip_val is None else clip_val, gradient_clip_algorithm
        )

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self._training.clipping.by_value(optimizer, float(clip_val))

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.last_grad_norm = self._training.clipping.by_norm(optimizer, float(clip_val))

    # ---- checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        if self.loss_scale is None:
            return {}
        return {"loss_scale": self.loss_scale.state_dict(), "skipped_steps": self.skipped_steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.loss_scale is not None and "loss_scale" in state_dict:
            self.loss_scale.load_state_dict(state_dict["loss_scale"])
            self.skipped_steps = int(state_dict["skipped_steps"])

    @override
    def teardown(self) -> None:
        self._state = None


def _precision_around(plugin: TransformerEnginePrecision) -> str:
    """Return the precision of everything but the products in 8 bits of a plugin."""
    types = plugin.weights_dtype, plugin.fallback_compute_dtype
    names = {
        (torch.bfloat16, torch.bfloat16): "bf16-true",
        (torch.float32, torch.bfloat16): "bf16-mixed",
    }
    if types not in names:
        raise UnsupportedError(
            f"TransformerEnginePrecision cannot have weights_dtype {types[0]} with "
            f"fallback_compute_dtype {types[1]}: this strategy computes in bfloat16 around the "
            "products in 8 bits. Use weights_dtype=torch.bfloat16, or weights_dtype=torch.float32 "
            "with fallback_compute_dtype=torch.bfloat16 for main parameters in float32."
        )
    return names[types]
