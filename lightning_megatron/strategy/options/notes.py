"""Log lines about options that have no effect in a run, or that another option makes faster."""

from __future__ import annotations

from lightning_megatron.strategy.options.strategy_options import StrategyOptions


def notes_on(options: StrategyOptions, precision: str, device_type: str) -> list[str]:
    """Return log lines about options without effect, and about options that make others faster.

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
    fp8 = options.products
    has_fp8_kernels = fp8 is not None and not fp8.emulate and device_type == "cuda"
    if has_fp8_kernels and options.graphs is None:
        notes.append(
            "fp8 is used without cuda_graphs: Python usually launches the short kernels of FP8 "
            "layers more slowly than the GPU runs them. cuda_graphs='segments' avoids this."
        )
    return notes
