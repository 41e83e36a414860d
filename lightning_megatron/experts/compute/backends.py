"""Backends of the three products of a grouped linear layer: two kernels and a reference loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.experts.compute.bundled_launch import launch, launch_swiglu
from lightning_megatron.experts.compute.choose_backend import BackendName
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, SlotRow, stacked_view
from lightning_megatron.plan.grouped_gemm import Pass
from lightning_megatron.shapes import Float, Int


class Loop:
    """Loop over groups: the reference for the other backends, for any device and dtype."""

    @staticmethod
    def output(
        rows: Float[Tensor, "rows in_local"],
        weights: Sequence[Float[Tensor, "out_local in_local"]]
        | Float[Tensor, "experts out_local in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows out_local"]:
        """Return rows times the transposes of weights."""
        result = rows.new_empty((rows.shape[0], weights[0].shape[0]))
        for weight, group in zip(weights, _groups(ends), strict=True):
            torch.mm(rows[group], weight.to(rows.dtype).t(), out=result[group])
        return result

    @staticmethod
    def input_gradient(
        grad: Float[Tensor, "rows out_local"],
        weights: Sequence[Float[Tensor, "out_local in_local"]]
        | Float[Tensor, "experts out_local in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows in_local"]:
        """Return the gradient of rows."""
        result = grad.new_empty((grad.shape[0], weights[0].shape[1]))
        for weight, group in zip(weights, _groups(ends), strict=True):
            torch.mm(grad[group], weight.to(grad.dtype), out=result[group])
        return result

    @staticmethod
    def weight_gradients(
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "experts out_local in_local"]:
        """Return the gradients of all weights as one stack."""
        return torch.stack([grad[group].t() @ rows[group] for group in _groups(ends)])

    @staticmethod
    def add_weight_gradients(
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
        slots: Sequence[GradientSlot],
    ) -> None:
        """Add the gradient of every weight to its slot."""
        for slot, group in zip(slots, _groups(ends), strict=True):
            slot.add_product(grad[group], rows[group])

    # Products of homes, whose groups come first, and of clones, whose weights are in another stack.

    @classmethod
    def output_of_both(
        cls,
        rows: Float[Tensor, "rows in_local"],
        homes: Sequence[Float[Tensor, "out_local in_local"]]
        | Float[Tensor, "homes out_local in_local"],
        clones: Float[Tensor, "places out_local in_local"],
        ends: Int[Tensor, "groups"],
    ) -> Float[Tensor, "rows out_local"]:
        """Return rows times the transposes of the weights of homes, then of clones."""
        return cls.output(rows, [*homes, *clones], ends)

    @classmethod
    def input_gradient_of_both(
        cls,
        grad: Float[Tensor, "rows out_local"],
        homes: Sequence[Float[Tensor, "out_local in_local"]]
        | Float[Tensor, "homes out_local in_local"],
        clones: Float[Tensor, "places out_local in_local"],
        ends: Int[Tensor, "groups"],
    ) -> Float[Tensor, "rows in_local"]:
        """Return the gradient of the rows of homes, then of clones."""
        return cls.input_gradient(grad, [*homes, *clones], ends)

    @classmethod
    def add_weight_gradients_of_both(
        cls,
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "groups"],
        slots: Sequence[GradientSlot],
        clones: Float[Tensor, "places out_local in_local"],
    ) -> None:
        """Add the gradients of homes to their slots, and write those of clones."""
        others = [GradientSlot(gradient, on_gradient=lambda: None) for gradient in clones]
        cls.add_weight_gradients(grad, rows, ends, [*slots, *others])


class GroupedMM(Loop):
    """Grouped products by torch's kernel."""

    @staticmethod
    def output(
        rows: Float[Tensor, "rows in_local"],
        weights: Sequence[Float[Tensor, "out_local in_local"]]
        | Float[Tensor, "experts out_local in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows out_local"]:
        """Return rows times the transposes of weights."""
        return F.grouped_mm(rows, stacked(weights).to(rows.dtype).transpose(1, 2), offs=ends)

    @staticmethod
    def input_gradient(
        grad: Float[Tensor, "rows out_local"],
        weights: Sequence[Float[Tensor, "out_local in_local"]]
        | Float[Tensor, "experts out_local in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows in_local"]:
        """Return the gradient of rows."""
        return F.grouped_mm(grad, stacked(weights).to(grad.dtype), offs=ends)

    @staticmethod
    def weight_gradients(
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "experts out_local in_local"]:
        """Return the gradients of all weights as one stack."""
        result = F.grouped_mm(grad.t(), rows, offs=ends)
        # For an empty group some of torch's kernels return the old contents of the accumulators.
        is_empty = ends == torch.cat([ends.new_zeros(1), ends[:-1]])
        return result.masked_fill_(is_empty.view(-1, 1, 1), 0)

    @classmethod
    def add_weight_gradients(
        cls,
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
        slots: Sequence[GradientSlot],
    ) -> None:
        """Add the gradient of every weight to its slot."""
        for slot, gradient in zip(
            slots, cls.weight_gradients(grad, rows, ends).unbind(), strict=True
        ):
            slot.add(gradient)


class Bundled(GroupedMM):
    """Grouped products by the bundled kernels, which add weight gradients to float32 slots."""

    @staticmethod
    def output(
        rows: Float[Tensor, "rows in_local"],
        weights: Sequence[Float[Tensor, "out_local in_local"]]
        | Float[Tensor, "experts out_local in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows out_local"]:
        """Return rows times the transposes of weights."""
        stack = _with_whole_row_strides(stacked(weights).to(rows.dtype))
        return launch(
            Pass.FORWARD, rows.new_empty((rows.shape[0], stack.shape[1])), rows, stack, ends
        )

    @staticmethod
    def swiglu(
        rows: Float[Tensor, "rows hidden"],
        weights: Sequence[Float[Tensor, "gate_up hidden"]]
        | Float[Tensor, "experts gate_up hidden"],
        probabilities: Float[Tensor, "rows"],
        ends: Int[Tensor, "experts"],
        *,
        keep: bool,
    ) -> tuple[Float[Tensor, "rows gate_up//2"], Float[Tensor, "rows gate_up"] | None]:
        """Return SwiGLU of the product times probabilities, and the product itself if it is kept.

        The product is rounded before the activation in both cases.
        """
        stack = _with_whole_row_strides(stacked(weights).to(rows.dtype))
        out_features = stack.shape[1]
        result = rows.new_empty((rows.shape[0], out_features // 2))
        kept = rows.new_empty((rows.shape[0], out_features)) if keep else None
        launch_swiglu(result, kept, rows, stack, probabilities, ends)
        return result, kept

    @staticmethod
    def input_gradient(
        grad: Float[Tensor, "rows out_local"],
        weights: Sequence[Float[Tensor, "out_local in_local"]]
        | Float[Tensor, "experts out_local in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows in_local"]:
        """Return the gradient of rows."""
        stack = _with_whole_row_strides(stacked(weights).to(grad.dtype))
        return launch(
            Pass.DATA_GRAD, grad.new_empty((grad.shape[0], stack.shape[2])), grad, stack, ends
        )

    @staticmethod
    def weight_gradients(
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "experts out_local in_local"]:
        """Return the gradients of all weights as one stack."""
        result = grad.new_empty((ends.shape[0], grad.shape[1], rows.shape[1]))
        return launch(Pass.WEIGHT_GRAD_BF16, result, grad, rows, ends)

    @classmethod
    def add_weight_gradients(
        cls,
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
        slots: Sequence[GradientSlot],
    ) -> None:
        """Add the gradient of every weight to its slot."""
        row = SlotRow.of(slots)

        def add(sums: Tensor, overwrite: bool) -> None:
            which = Pass.WEIGHT_GRAD_FP32 if overwrite else Pass.WEIGHT_GRAD_ADD
            launch(which, sums, grad, rows, ends, row.scale)

        if not _accepts_sums(row) or not row.add(add):
            super().add_weight_gradients(grad, rows, ends, slots)

    # One tensor map serves the weights of one launch, so that clones are a second launch.

    @classmethod
    def output_of_both(
        cls,
        rows: Float[Tensor, "rows in_local"],
        homes: Sequence[Float[Tensor, "out_local in_local"]]
        | Float[Tensor, "homes out_local in_local"],
        clones: Float[Tensor, "places out_local in_local"],
        ends: Int[Tensor, "groups"],
    ) -> Float[Tensor, "rows out_local"]:
        """Return rows times the transposes of the weights of homes, then of clones."""
        result = cls.output(rows, homes, ends[: len(homes)])
        stack = _with_whole_row_strides(clones.to(rows.dtype))
        return launch(Pass.FORWARD, result, rows, stack, ends, first_group=len(homes))

    @classmethod
    def swiglu_of_both(
        cls,
        rows: Float[Tensor, "rows hidden"],
        homes: Sequence[Float[Tensor, "gate_up hidden"]] | Float[Tensor, "homes gate_up hidden"],
        clones: Float[Tensor, "places gate_up hidden"],
        probabilities: Float[Tensor, "rows"],
        ends: Int[Tensor, "groups"],
        *,
        keep: bool,
    ) -> tuple[Float[Tensor, "rows gate_up//2"], Float[Tensor, "rows gate_up"] | None]:
        """Return the result of :meth:`swiglu` for the rows of homes, then of clones."""
        result, kept = cls.swiglu(rows, homes, probabilities, ends[: len(homes)], keep=keep)
        stack = _with_whole_row_strides(clones.to(rows.dtype))
        launch_swiglu(result, kept, rows, stack, probabilities, ends, len(homes))
        return result, kept

    @classmethod
    def input_gradient_of_both(
        cls,
        grad: Float[Tensor, "rows out_local"],
        homes: Sequence[Float[Tensor, "out_local in_local"]]
        | Float[Tensor, "homes out_local in_local"],
        clones: Float[Tensor, "places out_local in_local"],
        ends: Int[Tensor, "groups"],
    ) -> Float[Tensor, "rows in_local"]:
        """Return the gradient of the rows of homes, then of clones."""
        result = cls.input_gradient(grad, homes, ends[: len(homes)])
        stack = _with_whole_row_strides(clones.to(grad.dtype))
        return launch(Pass.DATA_GRAD, result, grad, stack, ends, first_group=len(homes))

    @classmethod
    def add_weight_gradients_of_both(
        cls,
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "groups"],
        slots: Sequence[GradientSlot],
        clones: Float[Tensor, "places out_local in_local"],
    ) -> None:
        """Add the gradients of homes to their slots, and write those of clones."""
        if clones.dtype != torch.float32:
            super().add_weight_gradients_of_both(grad, rows, ends, slots, clones)
            return
        cls.add_weight_gradients(grad, rows, ends[: len(slots)], slots)
        launch(Pass.WEIGHT_GRAD_FP32, clones, grad, rows, ends, first_group=len(slots))


BACKENDS: dict[BackendName, type[Loop]] = {
    "bundled": Bundled,
    "grouped_mm": GroupedMM,
    "loop": Loop,
}


def stacked(
    weights: Sequence[Float[Tensor, "out_local in_local"]]
    | Float[Tensor, "experts out_local in_local"],
) -> Float[Tensor, "experts out_local in_local"]:
    """Return weights as one tensor: a view if they have a constant stride, else a copy."""
    if isinstance(weights, Tensor):
        return weights
    view = stacked_view(weights)
    return torch.stack(tuple(weights)) if view is None else view


def _with_whole_row_strides(stack: Tensor) -> Tensor:
    """Return a stack whose weights lie whole rows apart, so that kernels see one matrix."""
    return stack if _has_whole_row_strides(stack) else stack.contiguous()


def _has_whole_row_strides(stack: Tensor) -> bool:
    _, _, k = stack.shape
    return stack.stride(0) % k == 0 and stack.stride()[1:] == (k, 1)


def _accepts_sums(row: SlotRow) -> bool:
    return row.sums is not None and row.sums.dtype == torch.float32 and row.is_contiguous


def _groups(ends: Tensor) -> list[slice]:
    bounds = [0, *ends.tolist()]
    return [slice(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
