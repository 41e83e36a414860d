"""Activations that backward passes recompute, and the layers that do so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.settings import Count, coerce_fields, coerced

Recompute = Literal[
    "none",
    "selective",
    "norms",
    "activations",
    "experts",
    "expert_inputs",
    "full_except_core",
    "full",
]
"""Part of a block that the backward pass recomputes, as :class:`Recomputation` describes it."""

#: Parts that are whole blocks.
WHOLE: tuple[Recompute, ...] = ("full", "full_except_core")

#: Parts of a block, each once, in the order of their names; empty if all activations are kept.
Parts = tuple[Recompute, ...]


@dataclass(frozen=True)
class Recomputation:
    """Activations that backward passes recompute instead of keeping them.

    Args:
        parts: Parts of a block: ``selective`` (the attention core), ``norms`` (outputs of the norms
            before attention and MLP), ``activations`` (outputs of the MLP's activation),
            ``experts`` (activations inside of experts), ``expert_inputs`` (inputs of experts, which
            are sent and sorted again), or one of these alone: ``full`` (everything but the input of
            the block), ``full_except_core`` (the same without the attention core, whose output and
            log-sum-exps are kept), or ``none``, which keeps all.
        layers: Number of layers of each chunk of a stage that recompute; the others keep all. None
            means all layers.
        at: Whether these are the first or the last layers of the chunk.
        offload: Whether the inputs of fully recomputed layers are kept in host memory. It needs
            ``full`` or ``full_except_core``.

    Raises:
        ParallelPlanError: If a value has the wrong type or is out of its range, or if values
            contradict each other.
    """

    parts: tuple[Recompute, ...] = ("full",)
    layers: Count | None = None
    at: Literal["first", "last"] = "first"
    offload: bool = False

    def __post_init__(self) -> None:
        coerce_fields(self, "recompute.")
        listed = ", ".join(self.parts)
        if not self.parts or len(set(self.parts)) < len(self.parts):
            raise ParallelPlanError(
                "recompute.parts must name at least one part, and each once: it is "
                f"{listed or 'empty'}. Use none to keep all activations."
            )
        single = [part for part in ("none", *WHOLE) if part in self.parts]
        if single and len(self.parts) > 1:
            raise ParallelPlanError(
                f"recompute.parts must be {single[0]} alone, or parts without it: it is {listed}. "
                "Parts that are whole blocks include all others, and none means no part. Name one "
                "of them alone."
            )
        if {"experts", "expert_inputs"} <= set(self.parts):
            raise ParallelPlanError(
                f"recompute.parts must name experts or expert_inputs: it is {listed}. experts "
                "recomputes from the inputs of experts, which expert_inputs does not keep. Leave "
                "one of them out."
            )
        if self.offload and self.parts[0] not in WHOLE:
            raise ParallelPlanError(
                f"recompute.offload needs parts of {' or '.join(WHOLE)}: it is {listed}. Only "
                "layers that are recomputed from their input can offload it to the host. Use one "
                "of these, or leave offload out."
            )

    @classmethod
    def of(cls, value: Any) -> Recomputation:
        """Return the settings for any form in which a user can give them.

        Args:
            value: The name of a part, a mapping of settings, or settings; None keeps all.

        Raises:
            ParallelPlanError: For any other value, and as for the class.
        """
        choice: Recompute | Recomputation | None = coerced(
            "recompute", value, Recompute | Recomputation | None
        )
        if isinstance(choice, Recomputation):
            return choice
        return cls(("none",) if choice is None else (choice,))

    @property
    def is_off(self) -> bool:
        """Return whether all activations are kept."""
        return self.parts == ("none",)

    def parts_of(self, place: int, num_layers: int) -> Parts:
        """Return the parts that a layer recomputes."""
        count = num_layers if self.layers is None else min(self.layers, num_layers)
        is_chosen = place < count if self.at == "first" else place >= num_layers - count
        return tuple(sorted(self.parts)) if is_chosen and not self.is_off else ()
