"""Agreement of the ranks on the token counts that training steps return."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.fingerprint import check_same_everywhere
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.strategy.step.microbatch_losses import choose_token_scale


class TokenCounting:
    """Scale of token counts, and whether steps count tokens: the same on all ranks of a fit.

    Args:
        mesh: The groups of this rank.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._scale: int | None = None
        self._is_counted: bool | None = None

    def scale(self, microbatches: Sequence[Microbatch]) -> int:
        """Return the divisor of token counts, chosen from the first batches of all ranks (tokens).

        Args:
            microbatches: Microbatches of this rank.

        Communication: at the first call one all-reduce over the data axis on the CPU.
        """
        if self._scale is None:
            local_scale = torch.tensor(choose_token_scale(microbatches))
            self._scale = int(all_reduce_(local_scale, self._mesh.data_cpu, "max"))
        return self._scale

    def check(self, is_counted: bool) -> None:
        """Refuse steps that return token counts on some ranks or in some batches only.

        Args:
            is_counted: Whether this step has returned token counts.

        Raises:
            RankMismatchError: At the first call, if other ranks differ.
            ValueError: If earlier batches differ.

        Communication: at the first call one gather over the world on the CPU.
        """
        if self._is_counted is None:
            check_same_everywhere(
                self._mesh.world_cpu, {"training_step returns num_tokens": is_counted}
            )
            self._is_counted = is_counted
        elif is_counted != self._is_counted:
            raise ValueError(
                "training_step must return num_tokens for every batch of a fit or for none: it "
                f"{'does so now, but did not' if is_counted else 'does not do so now, but did'} "
                "before. Gradients are averaged either over tokens or over samples, not over both. "
                "Return 0 for a batch without a valid token."
            )
