"""Log lines about options that have no effect in a run."""

from __future__ import annotations

from lightning_megatron.strategy.options.strategy_options import StrategyOptions


def notes_on(options: StrategyOptions, precision: str, device_type: str) -> list[str]:
    """Return log lines about options without effect.

    Args:
        options: The options.
        precision: Precision of the run.
        device_type: Type of the device.
    """
    notes = []
    if options.overlap_tensor_parallel and (device_type != "cuda" or precision == "32-true"):
        notes.append(
            f"overlap_tensor_parallel has no effect with precision {precision} on "
            f"{device_type}: only products in half types on GPUs are divided; others run "
            "before or after their communication."
        )
    if options.nccl_options and device_type != "cuda":
        notes.append(
            f"nccl_options have no effect on {device_type}: its groups use gloo, which does "
            "not have these settings."
        )
    return notes
