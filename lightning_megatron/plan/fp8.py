"""Settings of matrix products in 8 bits, and the sizes that they need."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.settings import Index, coerce_fields, coerced

FP8Recipe = Literal["tensorwise", "rowwise", "blockwise"]
"""How the numbers of a tensor are scaled to the range of 8 bits, as :class:`FP8` describes it."""

#: Rows and columns of a block that shares a scale (elements).
BLOCK = 128


@dataclass(frozen=True)
class FP8:
    """Linear layers that compute in 8 bits, and how their tensors are scaled.

    The layers are the linear layers of attention, MLPs and shared experts. Embeddings, the head,
    norms, routers and the products of routed experts keep the precision of the run. Weights,
    gradients and optimizer states keep their types, too: a checkpoint does not depend on this.

    Args:
        recipe: Numbers that share a scale, which is computed from their largest magnitude:
            ``tensorwise`` (all numbers of a tensor), ``rowwise`` (the numbers that one product sums
            up: a row or a column) or ``blockwise`` (128 neighbours of a row or a column; in weights
            blocks of 128 x 128).
        format: ``e4m3`` has 4 bits of exponent and 3 of fraction. ``hybrid`` is e4m3, but e5m2 for
            gradients of outputs, which has a larger range and fewer digits. None means hybrid for
            tensorwise, else e4m3.
        first_bf16: Layers at the start of the model that keep the precision of the run.
        last_bf16: Layers at its end that do.
        keep: Patterns of the names of layers that do, such as ``*.mlp.down`` or ``layers.3.*``.
        emulate: Whether devices without products in 8 bits, such as CPUs, round to 8 bits and
            multiply in their own precision, which is slow. Without it they are refused.

    Raises:
        ParallelPlanError: If a value has the wrong type or is out of its range.

    Source: Micikevicius et al. 2022 (formats); DeepSeek-AI 2024 (https://arxiv.org/abs/2412.19437),
        section 3.3 (blockwise).
    """

    recipe: FP8Recipe = "tensorwise"
    format: Literal["hybrid", "e4m3"] | None = None
    first_bf16: Index = 0
    last_bf16: Index = 0
    keep: tuple[str, ...] = ()
    emulate: bool = False

    def __post_init__(self) -> None:
        coerce_fields(self, "fp8.")

    @classmethod
    def of(cls, value: Any) -> FP8 | None:
        """Return the settings that a user gave in one of several forms; None without any.

        Args:
            value: The name of a recipe, a mapping of settings, or settings.

        Raises:
            ParallelPlanError: For any other value, and as for the class.
        """
        found: FP8Recipe | FP8 | None = coerced("fp8", value, FP8Recipe | FP8 | None)
        return cls(found) if isinstance(found, str) else found

    @property
    def gradient_format(self) -> Literal["e5m2", "e4m3"]:
        """Return the format of gradients of outputs."""
        is_hybrid = self.recipe == "tensorwise" if self.format is None else self.format == "hybrid"
        return "e5m2" if is_hybrid else "e4m3"

    @property
    def multiple(self) -> int:
        """Return the number that tokens are padded to a multiple of (tokens)."""
        return BLOCK if self.recipe == "blockwise" else 16

    @property
    def feature_multiple(self) -> int:
        """Return the number that features of a rank must be a multiple of (elements).

        The products of GPUs read the scales of square blocks four at a time.
        """
        return self.multiple if self.emulate or self.recipe != "blockwise" else 4 * BLOCK

    def includes(self, layer: int, num_layers: int, name: str) -> bool:
        """Return whether a linear layer computes in 8 bits.

        Args:
            layer: Index of the block that it is in.
            num_layers: Number of blocks of the model.
            name: Name of the linear layer in the model.
        """
        is_inside = self.first_bf16 <= layer < num_layers - self.last_bf16
        return is_inside and not any(fnmatchcase(name, pattern) for pattern in self.keep)

    def check_sizes(self, name: str, out_features: int, in_features: int) -> None:
        """Refuse a linear layer whose sizes on a rank do not fit.

        Args:
            name: Name of the layer.
            out_features: Output features of a rank (elements).
            in_features: Input features of a rank (elements).

        Raises:
            ParallelPlanError: If they do not divide.
        """
        multiple = self.feature_multiple
        if out_features % multiple or in_features % multiple:
            raise ParallelPlanError(
                f"fp8 ({self.recipe}) needs sizes that are multiples of {multiple}: {name} "
                f"has {out_features} output and {in_features} input features on this rank. Name "
                f"it in fp8.keep, such as keep=[{name!r}], use "
                + ("another recipe, " if multiple > 16 else "")
                + "a smaller tp, or fp8=None."
            )


def check_fp8_products(settings: FP8 | None, overlap_tensor_parallel: bool) -> None:
    """Refuse products in 8 bits that are cut into pieces.

    Args:
        settings: Settings of the products; None without products in 8 bits.
        overlap_tensor_parallel: Whether products overlap with the communication over tp.

    Raises:
        ParallelPlanError: If both are asked for.
    """
    if settings is not None and overlap_tensor_parallel:
        raise ParallelPlanError(
            f"fp8 ({settings.recipe}) cannot be used with overlap_tensor_parallel, whose products "
            "of pieces have 16 bits. Leave one of them out."
        )
