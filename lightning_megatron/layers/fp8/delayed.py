"""Delayed scaling: scales from the largest magnitudes of tensors in earlier steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.shapes import Float, Int, Shaped

#: Which factor of a layer's products a tensor is.
Use = Literal["input", "weight", "gradient"]
_USES: Final[tuple[Use, ...]] = ("input", "weight", "gradient")
_WEIGHT: Final = _USES.index("weight")
_LARGEST: Final = {"e4m3": 448.0, "e5m2": 57344.0}


class DelayedScales:
    """Scales of the linear layers of a model, from the largest magnitudes in earlier steps.

    During a step, casts record the largest magnitudes. At its end these enter a history, whose
    maximum sets the scales of the next step. All microbatches of a step, and their recomputations,
    therefore use the same scales. All tensors keep their addresses, and the host reads no value
    from the device.

    Until the first step has ended, the scale of a tensor follows from the tensor's magnitude. A
    tensor that was zero in the whole history has the scale 1. A magnitude that is not finite enters
    the history as 0.

    A weight that is kept in 8 bits has a scale of its own, computed by the optimizer. Only its
    magnitude enters the history, so that a run that casts the weight can continue with it.

    Shapes: history ``(layers, history, 3)``, the last step first, with the magnitudes of inputs,
        weights and gradients of outputs.
    """

    def __init__(self, settings: FP8, names: Sequence[str], device: torch.device) -> None:
        self.settings = settings
        self.names = tuple(names)
        #: Whether the first step has not ended yet.
        self.is_fresh = True
        shape = len(self.names), settings.history, len(_USES)
        self.history: Float[Tensor, "layers history 3"] = torch.zeros(
            shape, dtype=torch.float32, device=device
        )
        # Bit patterns of magnitudes, the form that casts use: first the magnitudes that set the
        # scales, then the magnitudes of this step.
        self.bits = torch.zeros((2, shape[0], shape[2]), dtype=torch.int32, device=device)
        forms = "e4m3", "e4m3", settings.gradient_format
        self._largest = torch.tensor([_LARGEST[form] for form in forms], device=device)
        # Factors by which casts of Transformer Engine multiply.
        self.factors = torch.ones((shape[0], shape[2]), dtype=torch.float32, device=device)
        # Bit patterns of the magnitudes of weights that are kept in 8 bits, by index of the layer.
        self.stored: dict[int, Int[Tensor, "1"]] = {}

    def serves(self, settings: FP8, names: Sequence[str], device: torch.device) -> bool:
        """Return whether a run with these settings and layers can continue with these scales."""
        is_same = (settings, tuple(names)) == (self.settings, self.names)
        return is_same and torch.empty(0, device=device).device == self.history.device

    def layer(self, index: int) -> LayerScales:
        """Return the scales of the layer with an index in :attr:`names`."""
        return LayerScales(self, index)

    @property
    def step_tensors(self) -> list[Shaped[Tensor, "..."]]:
        """Return the tensors that steps write."""
        return [self.history, self.bits, self.factors]

    @torch.no_grad()
    def end_step(self, mesh: ParallelMesh) -> None:
        """Set the scales of the next step.

        A CUDA graph can capture the call, which only writes tensors that keep their addresses.

        Communication: an all-reduce of three numbers per layer over tp, and one over dp x cp.
        """
        self.is_fresh = False
        if not self.names:
            return
        recorded = self.bits[1]
        places = [recorded[index, _WEIGHT : _WEIGHT + 1] for index in self.stored]
        if places:
            torch._foreach_copy_(places, list(self.stored.values()))
        for axis in (mesh.tp, mesh.data):
            all_reduce_(recorded, axis, "max")
        magnitudes = recorded.view(torch.float32)
        kept = torch.where(magnitudes.isfinite(), magnitudes, 0.0)
        self.history.copy_(torch.cat([kept[:, None], self.history[:, :-1]], 1))
        recorded.zero_()
        self._set_scales()

    @torch.no_grad()
    def start_with(
        self, histories: Sequence[Float[Tensor, "saved 3"]], *, is_complete: bool
    ) -> None:
        """Continue from the last steps of saved histories of any length, one for each layer.

        Args:
            is_complete: Whether all layers of all stages have a history; otherwise the scales of
                the first step follow from its tensors.
        """
        self.history.zero_()
        for history, saved in zip(self.history, histories, strict=True):
            length = min(len(history), len(saved))
            history[:length].copy_(saved[:length])
        self._set_scales()
        self.is_fresh = not is_complete

    def _set_scales(self) -> None:
        largest = self.history.amax(1)
        most = torch.finfo(torch.float32).max
        above = (largest * 2.0**self.settings.margin).clamp(max=most)
        magnitudes = torch.where(largest > 0, above, self._largest)
        self.bits[0].copy_(magnitudes.view(torch.int32))
        self.factors.copy_(self._largest / magnitudes)


class LayerScales:
    """Delayed scales of one layer, by use."""

    def __init__(self, model: DelayedScales, index: int) -> None:
        self._model = model
        self._index = index
        magnitudes, recorded = model.bits[:, index].unbind()
        self._magnitudes = dict(zip(_USES, magnitudes.split(1), strict=True))
        #: Bit patterns of the largest magnitudes of this step, which casts update.
        self.step_magnitudes = dict(zip(_USES, recorded.unbind(), strict=True))
        #: Factors by which casts multiply: the inverses of the scales.
        self.factors = dict(zip(_USES, model.factors[index].split(1), strict=True))

    def magnitude(self, use: Use) -> Int[Tensor, "1"] | None:
        """Return the bit pattern of the magnitude that sets a scale; None in the first step."""
        return None if self._model.is_fresh else self._magnitudes[use]

    def follow_weight(self, magnitude: Int[Tensor, "1"] | None) -> None:
        """Let the weight's magnitude enter the history, without casts of the weight.

        Args:
            magnitude: Bit pattern of the magnitude, at an address that stays the same; None if
                casts record it.
        """
        self._model.stored.pop(self._index, None)
        if magnitude is not None:
            self._model.stored[self._index] = magnitude
