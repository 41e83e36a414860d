"""Small layers that are replicated on every tensor-parallel rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.collectives import reduce_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.loss.cross_entropy import check_ids
from lightning_megatron.layers.parameters.init import ZEROS, Initializer, sharded_parameter
from lightning_megatron.plan.shards import full_range
from lightning_megatron.shapes import Float, Int


class ReplicatedLinear(nn.Module):
    """Linear layer ``x A^T + b`` with a full weight on every tensor-parallel rank.

    Equal to torch.nn.Linear(in_features, out_features, bias).

    Args:
        partial: Whether the ranks multiply different vectors, so that their gradients must be
            summed.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: ParallelMesh,
        *,
        partial: bool,
        bias: bool = True,
        initializer: Initializer | None = None,
    ) -> None:
        super().__init__()
        whole = [full_range(out_features, mesh.tp.rank)]
        drawn = initializer or Initializer.normal()
        self.weight = sharded_parameter((out_features, in_features), whole, drawn, partial=partial)
        self.bias = None
        if bias:
            self.bias = sharded_parameter((out_features,), whole, ZEROS, partial=partial)
        #: Low-rank updates of the outputs; see ``layers.low_rank``.
        self.low_rank: nn.Module | None = None

    def forward(
        self, hidden: Float[Tensor, "*tokens in_features"]
    ) -> Float[Tensor, "*tokens out_features"]:
        output = F.linear(hidden, self.weight, self.bias)
        return output if self.low_rank is None else self.low_rank(hidden, output)


class TableEmbedding(nn.Module):
    """Embedding with a small table, for example of positions or token types.

    Equal to torch.nn.Embedding(num_rows, hidden_size, padding_idx=untrained), with the output
    transposed to sequence first. The row ``untrained`` gets no gradient; None means that all rows
    get one.
    """

    def __init__(
        self,
        num_rows: int,
        hidden_size: int,
        mesh: ParallelMesh,
        *,
        untrained: int | None = None,
        initializer: Initializer | None = None,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.untrained = untrained
        self.weight = sharded_parameter(
            (num_rows, hidden_size),
            [full_range(num_rows, mesh.tp.rank)],
            initializer or Initializer.normal(),
            # Under sequence parallelism each rank looks up its own positions only.
            partial=mesh.sequence_parallel,
        )

    def forward(
        self, ids: Int[Tensor, "batch seq"] | int
    ) -> Float[Tensor, "seq_local #batch hidden"]:
        """Return this rank's vectors of some ids, or of the positions 0 to a sequence length."""
        num_rows = self.weight.shape[0]
        if isinstance(ids, Tensor):
            check_ids(ids, num_rows)
            return F.embedding(local_ids(ids, self.mesh), self.weight, padding_idx=self.untrained)
        if ids > num_rows:
            raise ParallelPlanError(
                f"seq_length ({ids}) must not exceed max_seq_length ({num_rows}), because the "
                f"position table has no further rows. Use at most {num_rows} tokens or a larger "
                "max_seq_length."
            )
        if not self.mesh.sequence_parallel:
            return self.weight[:ids].unsqueeze(1)
        length = ids // self.mesh.tp.size
        first = self.mesh.tp.rank * length
        return self.weight[first : first + length].unsqueeze(1)


def local_ids(ids: Int[Tensor, "batch seq"], mesh: ParallelMesh) -> Int[Tensor, "seq_local batch"]:
    """Return the ids at this rank's positions, sequence first."""
    return ids.t().chunk(mesh.tp.size)[mesh.tp.rank] if mesh.sequence_parallel else ids.t()


def first_place(
    hidden: Float[Tensor, "seq_local batch hidden"], mesh: ParallelMesh
) -> Float[Tensor, "batch hidden"]:
    """Return the vectors at the first position of every sequence, on all tensor-parallel ranks.

    All ranks must compute the same values from the result. Its gradient is then counted once.

    Communication: under sequence parallelism an all-reduce over tp forward, none backward.
    """
    if not mesh.sequence_parallel:
        return hidden[0]
    # The other ranks contribute zeros that depend on their hidden states, because their earlier
    # layers must take part in the communication of the backward pass.
    is_remote = torch.full((), mesh.tp.rank != 0, dtype=torch.bool, device=hidden.device)
    return reduce_from_axis(hidden[0].masked_fill(is_remote, 0.0), mesh.tp)
