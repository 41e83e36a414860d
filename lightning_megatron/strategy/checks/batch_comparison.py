"""Comparison of the batches that the ranks of tp, pp and cp must read alike."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.fingerprint import check_same_everywhere
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.microbatch import tensors_in
from lightning_megatron.strategy.checks.run_checks import digest_of

#: Elements of a tensor that are read if its batch is not compared by itself.
_NUM_SAMPLED = 256
_REMEDY = (
    "Call seed_everything before the data is created if the data, its order or its augmentation is "
    "random, let no data depend on the rank, and let no callback draw on one rank only from the "
    "generators that the data uses: the strategy gives each data-parallel rank its own batches."
)


class BatchComparison:
    """Comparison of all batches, a few at a time, between ranks that must read the same ones.

    A batch whose number is a power of two, or a multiple of the interval, is compared before its
    step runs. All values of this batch are compared, and samples of the batches since the previous
    comparison.

    Args:
        interval: Longest distance between two comparisons; 0 compares first batches only (batches).
    """

    def __init__(self, mesh: ParallelMesh, interval: int) -> None:
        self._axes = [axis for axis in (mesh.model_cpu, mesh.cp_cpu) if axis.size > 1]
        self._host = mesh.host_values
        self._interval = interval
        self._since: dict[Hashable, _Batches] = {}

    def check(self, key: Hashable, kind: str, number: int, batch: Any) -> None:
        """Record a batch, and compare it if it is due.

        Args:
            key: Identity of the sequence of batches: a step and its dataloader.
            kind: Kind of batch for error texts, such as ``training``.

        Communication: one gather of a digest over tp x pp and one over cp on the CPU, if the batch
            is due.
        """
        if not self._axes or (self._interval == 0 and number > 1):
            return
        noted = self._since.setdefault(key, _Batches(kind, number))
        noted.last = number
        if not self._is_due(number):
            for _, tensor in tensors_in(batch):
                # Reading other tensors would make the host wait for the device.
                values = self._host.of(tensor)
                if values is not None and values.layout == torch.strided:
                    noted.add(values)
            return
        noted.digest.update(digest_of(batch).encode())
        self.finish()

    def finish(self) -> None:
        """Compare the batches since the previous comparison.

        Communication: as :meth:`check`.
        """
        fields = {batches.name: batches.digest.hexdigest()[:16] for batches in self._since.values()}
        self._since.clear()
        for axis in self._axes if fields else ():
            check_same_everywhere(axis, fields, _REMEDY)

    def _is_due(self, number: int) -> bool:
        return number & (number - 1) == 0 or number % self._interval == 0


@dataclass
class _Batches:
    """Digest of consecutive batches."""

    kind: str
    first: int
    last: int = 0
    digest: Any = field(default_factory=hashlib.blake2b)

    @property
    def name(self) -> str:
        """Return a description for error texts."""
        numbers = f"batch {self.last}"
        if self.first < self.last:
            numbers = f"batches {self.first} to {self.last}"
        return f"{self.kind} {numbers} of its data-parallel rank"

    def add(self, values: Tensor) -> None:
        """Add the shape and some values of a tensor on the host."""
        self.digest.update(f"{tuple(values.shape)}{values.dtype}".encode())
        flat = values.detach().resolve_conj().flatten()
        sampled = flat[:: max(1, len(flat) // _NUM_SAMPLED)].contiguous()
        self.digest.update(sampled.view(torch.uint8).numpy().tobytes())
