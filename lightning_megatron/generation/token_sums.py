"""Sums of the products of one token over the ranks, which the kernels of the products send."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.peer_memory import PeerRegion
from lightning_megatron.layers.fused.choose_kernels import reason_against_puts
from lightning_megatron.layers.fused.one_shot import one_shot_all_reduce_
from lightning_megatron.layers.norm import RMSNorm
from lightning_megatron.shapes import Float, Int


class TokenSums:
    """Sums over the ranks in a pass over one token, with the residual addition and norm after them.

    Ranks that can write into each other's memory send their products from the kernels that compute
    them. Other ranks run an all-reduce.

    Communication: on GPUs, the constructor allocates shared memory, so it must not be called in the
        capture of a CUDA graph.
    """

    def __init__(
        self, axis: MeshAxis, kernels: ModuleType, width: int, device: torch.device
    ) -> None:
        self._axis = axis
        self._kernels = kernels
        self._region: PeerRegion | None = None
        if axis.group is not None and reason_against_puts(axis, device) is None:
            size = kernels.token_sum_bytes(axis.size, width)
            self._region = axis.peer_memory.reserve(axis.group, size, device, "token sums")
        self._number = 0

    @property
    def are_sent(self) -> bool:
        """Return whether ranks write into each other's memory."""
        return self._region is not None

    def begin(self, num_sums: int) -> None:
        """Begin a pass with a number of calls of :meth:`embed` and :meth:`add_norm`."""
        self._number = 0
        if self._region is not None:
            # The kernels add the number of a sum in its pass to the first number of the region.
            self._region.view(0, (1,), torch.int64).add_(num_sums)

    def embed(
        self, tokens: Int[Tensor, "1 1"], table: Float[Tensor, "vocab_local hidden"], norm: RMSNorm
    ) -> tuple[Float[Tensor, "1 1 hidden"], Float[Tensor, "1 1 hidden"]]:
        """Return the vector of a token, and the normalised vector; only if sums are sent.

        Communication: an all-reduce.
        """
        place = self._next_place()
        self._kernels.send_token_vector(tokens, table, *place)
        vectors = self._kernels.add_norm_sums(None, norm.scale(), norm.eps, *place)
        stream, normed = (vector.view(1, 1, -1) for vector in vectors)
        return stream, normed

    def add_norm(
        self,
        vector: Float[Tensor, "in_local"],
        weight: Float[Tensor, "hidden in_local"],
        stream: Float[Tensor, "1 1 hidden"],
        norm: RMSNorm,
    ) -> tuple[Float[Tensor, "1 1 hidden"], Float[Tensor, "1 1 hidden"]]:
        """Add the product of all ranks to the residual stream, and normalise the sum.

        Equal to ``norm(stream, row_linear(vector, weight), with_stream=True)``.

        Communication: an all-reduce.
        """
        if self._region is None:
            update = self._kernels.multiply_vector(vector, weight, None)
            update = one_shot_all_reduce_(update, self._axis, "sum")
            return norm(stream, update.view(stream.shape), True)
        place = self._next_place()
        self._kernels.send_vector_product(vector, weight, *place)
        vectors = self._kernels.add_norm_sums(stream.view(-1), norm.scale(), norm.eps, *place)
        total, normed = (part.view(stream.shape) for part in vectors)
        return total, normed

    def _next_place(self) -> tuple[Tensor, int, int]:
        """Return the regions, this rank's position, and the number of the next sum."""
        assert self._region is not None, "ranks write into each other's memory"
        assert self._region.pointers is not None, "regions on GPUs have addresses"
        self._axis.note("all_reduce")
        self._number += 1
        return self._region.pointers, self._axis.rank, self._number
