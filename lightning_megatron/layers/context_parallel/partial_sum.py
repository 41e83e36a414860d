"""Exact sum of the partial results of attention over disjoint sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.layers.context_parallel.blocks import Rows, put_at, taken
from lightning_megatron.shapes import Float


def dtype_of_sums(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results are added: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class PartialSum:
    """Sum of the partial results of attention over disjoint sets of keys.

    Let ``s_ij`` be the scaled score of query ``i`` and key ``j``. Attention over a set ``A`` of
    keys is ``o_A = sum_j exp(s_ij - l_A) v_j`` with ``l_A = log sum_j exp(s_ij)``. For disjoint
    sets ``A`` and ``B``::

        l = log(exp(l_A) + exp(l_B))
        o = exp(l_A - l) o_A + exp(l_B - l) o_B

    is attention over their union, exactly. A query without keys has ``l = -inf`` and ``o = 0``. The
    sums are in float32 for half types, and in the dtype of the queries otherwise.

    Args:
        query: Queries of the whole sum.
    """

    def __init__(self, query: Float[Tensor, "seq batch heads head_dim"]) -> None:
        dtype = dtype_of_sums(query.dtype)
        self.out = query.new_zeros(query.shape, dtype=dtype)
        self._log_sum = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)

    @property
    def log_sum(self) -> Float[Tensor, "batch heads seq"]:
        """Return the logarithms of the sums of the exponentiated scores."""
        return self._log_sum.permute(1, 2, 0)

    def add(
        self,
        rows: Rows,
        out: Float[Tensor, "rows batch heads head_dim"],
        log_sum: Float[Tensor, "batch heads rows"],
    ) -> None:
        """Add the attention of some queries to keys that were not added for them before.

        Args:
            rows: Rows of the queries.
            out: Partial attention.
            log_sum: Logarithm of the sum of the exponentiated scores.
        """
        before = taken(self._log_sum, rows)
        added = log_sum.permute(2, 0, 1).to(before.dtype)
        total = torch.logaddexp(before, added)
        # For a query without keys so far, -inf - -inf would be NaN.
        shift = total.masked_fill(total.isneginf(), 0.0)
        old = (before - shift).exp().unsqueeze(-1)
        new = (added - shift).exp().unsqueeze(-1)
        put_at(self.out, rows, old * taken(self.out, rows) + new * out)
        put_at(self._log_sum, rows, total)
