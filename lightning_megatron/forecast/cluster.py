"""Description of the GPUs of a job and of what connects them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.chips import CHIPS, Chip
from lightning_megatron.plan.settings import Count, Positive, coerce_fields

#: Memory of GPUs (GiB), by the names that users give them.
_MEMORY = {"H200": 140.0, "H100": 79.0}
#: Memory that CUDA, NCCL and the allocator take (GiB).
_MARGIN = 6.0
#: Names of published figures, by the names that users give the GPUs.
_CHIPS = {"H200": "H200", "H100": "H100 80GB HBM3"}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of a job, and what connects them.

    Args:
        num_gpus: Number of all GPUs.
        gpus_per_node: GPUs that NVLinks connect; fewer if the job has fewer.
        gpu: Name of the GPU, such as "H200" or "h100", or any name with a file of ``speeds``.
        memory: Memory of a GPU that a job may use (GiB); None means that of the GPU, less what
            CUDA and NCCL take.
        network: Bandwidth between nodes, of each GPU and direction (bytes/s).
        speeds: File that ``lightning-megatron doctor --calibrate`` wrote; None means the package's
            measurements of the GPU.

    Raises:
        ParallelPlanError: For sizes that contradict each other, and GPUs that are not known.
    """

    num_gpus: Count
    gpus_per_node: Count = 8
    gpu: str = "H200"
    memory: Positive | None = None
    network: Positive = 50e9
    speeds: str | None = None

    def __post_init__(self) -> None:
        coerce_fields(self)
        name = self.gpu.upper()
        if name not in _MEMORY and self.speeds is None:
            raise ParallelPlanError(
                f"the speeds of the GPU {self.gpu!r} are not known: gpu must be one of "
                f"{', '.join(_MEMORY)}, or have a file of speeds. Run `lightning-megatron doctor "
                "--calibrate FILE` on such GPUs, and give speeds=FILE."
            )
        if name not in _MEMORY and self.memory is None:
            raise ParallelPlanError(
                f"the memory of the GPU {self.gpu!r} is not known. Give memory (GiB) of what a job "
                "may use."
            )
        if self.num_gpus > self.gpus_per_node and self.num_gpus % self.gpus_per_node:
            nodes = -(-self.num_gpus // self.gpus_per_node)
            raise ParallelPlanError(
                f"num_gpus ({self.num_gpus}) must be a multiple of gpus_per_node "
                f"({self.gpus_per_node}), because all nodes are alike. Use "
                f"{nodes * self.gpus_per_node}, or the gpus_per_node of the cluster."
            )

    @property
    def usable_memory(self) -> float:
        """Return the memory of a GPU that a job may use (GiB)."""
        return self.memory or _MEMORY[self.gpu.upper()] - _MARGIN

    @property
    def chip(self) -> Chip | None:
        """Return the published figures of the GPU; None if they are not known."""
        name = _CHIPS.get(self.gpu.upper())
        return None if name is None else CHIPS[name]
