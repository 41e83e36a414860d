"""Values that the steps of a dispatcher pass on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_megatron.experts.transport.cloning import PlacedClones
from lightning_megatron.experts.transport.permute import RowMap
from lightning_megatron.groups.in_flight import InFlight
from lightning_megatron.shapes import Float, Int


@dataclass(frozen=True)
class RowCounts:
    """Row counts of an all-to-all, on the device.

    Args:
        row_map: Map from the selections of this rank's tokens to the rows, sorted by expert.
        received: Number of rows that each rank sends to each expert of this rank.
        totals: Number of rows sent to each rank, then number of rows received from each rank.
    """

    row_map: RowMap
    received: Int[Tensor, "ranks experts"]
    totals: Int[Tensor, "2 ranks"]

    def read(self) -> tuple[list[int], list[int]]:
        """Return the totals on the host, which waits for the device."""
        sent, received = self.totals.tolist()
        return sent, received


@dataclass(frozen=True)
class PreparedTokens:
    """Tokens that can be sent to the ranks of their experts; with ``counts`` they are rows.

    Shapes: hidden states ``(tokens, hidden)``; probabilities and experts ``(tokens, top_k)``. For
        an all-to-all they are rows: hidden states ``(tokens * top_k, hidden)``, probabilities
        ``(tokens * top_k,)``.

    Experts are numbered in the whole layer; -1 means none.
    """

    hidden: Float[Tensor, "rows hidden"]
    probabilities: Float[Tensor, "*rows"]
    experts: Int[Tensor, "tokens top_k"]
    counts: RowCounts | None = None


@dataclass(frozen=True)
class AllToAllSizes:
    """Row counts of an all-to-all on the host, by rank, kept for the return of outputs.

    The map is that from the selections of this rank's tokens to the rows, sorted by expert.
    """

    row_map: RowMap
    sends: tuple[int, ...]
    receives: tuple[int, ...]


@dataclass(frozen=True)
class TokensInTransit:
    """Tokens in transit to the ranks of their experts, in the numbering of the receiving rank.

    Shapes on arrival: hidden states ``(tokens, hidden)``; probabilities and experts
        ``(tokens, top_k)``, or ``(rows,)`` if rows travel by an all-to-all, which has ``sizes``.
    """

    hidden: InFlight
    probabilities: InFlight
    experts: InFlight
    sizes: AllToAllSizes | None = None


@dataclass(frozen=True)
class ExpertInput:
    """Input of this rank's experts. The ends are int32 on the device.

    Args:
        rows: Tokens sorted by expert. Rows past the last end belong to no expert.
        row_map: Map from the selections of the received tokens to the rows.
        sizes: Row counts, if the tokens came by an all-to-all.
        sent_experts: Experts selected for this rank's own tokens, if one-sided puts moved the
            tokens.
        clones: Clones of busy experts, whose rows follow those of the homes; None if there are no
            places for clones.
        tokens: Tokens that the backward pass can send or sort again to get the rows, without
            gradients; None if it keeps the rows.
    """

    rows: Float[Tensor, "rows hidden"]
    probabilities: Float[Tensor, "rows"]
    row_map: RowMap
    sizes: AllToAllSizes | None = None
    sent_experts: Int[Tensor, "tokens top_k"] | None = None
    clones: PlacedClones | None = None
    tokens: Float[Tensor, "tokens hidden"] | None = None

    @property
    def ends(self) -> Int[Tensor, "experts"]:
        """Return the index one past the last row of each local expert."""
        return self.row_map.ends


@dataclass(frozen=True)
class ExpertOutput:
    """Outputs of experts, ready to be summed for each token; the tokens determine all sizes.

    Args:
        rows: Outputs. Rows past the last end of the map are undefined.
        sent_experts: Experts selected for this rank's own tokens, if one-sided puts move the
            outputs.
        clones: Clones of busy experts; None if there are no places for clones.
        tokens: This rank's own tokens, if the backward pass puts them again.
    """

    rows: Float[Tensor, "rows hidden"]
    row_map: RowMap
    sent_experts: Int[Tensor, "tokens top_k"] | None = None
    clones: PlacedClones | None = None
    tokens: Float[Tensor, "tokens hidden"] | None = None
