"""Store of attention cores' results for the recomputation of their block."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_megatron.shapes import Float

#: Output of an attention core, and the log-sum-exp of the scores of every query.
Results = tuple[Float[Tensor, "seq batch heads head_dim"], Float[Tensor, "batch heads seq"]]


class CoreResults:
    """Outputs and log-sum-exps of the attention cores of a block that is recomputed.

    The gradients of an attention core need its inputs, its output and the log-sum-exps of its
    scores. The inputs are cheap to recompute, but in long rows the core is not. The first forward
    pass therefore stores the results of the cores here, and later passes read them in the same
    order.
    """

    def __init__(self) -> None:
        self._kept: list[Results] = []
        self._num_taken: int | None = None

    def start(self) -> None:
        """Begin a forward pass: the first one stores results, later ones read them."""
        self._num_taken = 0 if self._kept else None

    def of(self, compute: Callable[[], Results]) -> Results:
        """Return the next core's results; compute and store them only in the first pass."""
        if self._num_taken is None:
            out, lse = compute()
            self._kept.append((out.detach(), lse.detach()))
            return out, lse
        out, lse = self._kept[self._num_taken]
        self._num_taken += 1
        # Autograd attaches the tensors that a custom function returns to its graph.
        return out.detach(), lse.detach()
