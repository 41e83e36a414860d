"""Choice of how the ranks of context parallelism exchange keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.layout import ParallelLayout

#: How ranks that share a sequence exchange keys and values.
ContextTransport = Literal["ring", "all_to_all", "all_gather"]


@dataclass(frozen=True)
class ContextLinks:
    """Requested transport, and the distribution over hosts of the ranks that share a sequence.

    Args:
        transport: Requested transport; "auto" lets each layer choose.
        is_one_host: Whether all ranks that share a sequence are on one host.
    """

    transport: ContextTransport | Literal["auto"] = "auto"
    is_one_host: bool = True

    @classmethod
    def of(
        cls,
        transport: ContextTransport | Literal["auto"],
        layout: ParallelLayout,
        ranks_per_host: int,
    ) -> ContextLinks:
        """Find the links of a layout on hosts with ``ranks_per_host`` processes each."""
        # The ranks of a group are in ascending order.
        is_one_host = all(
            ranks[0] // ranks_per_host == ranks[-1] // ranks_per_host
            for ranks in layout.groups("cp")
        )
        return cls(transport, is_one_host)


@dataclass(frozen=True)
class ContextChoice:
    """A transport, with the reason for the choice."""

    transport: ContextTransport
    reason: str


def check_transport_option(transport: str, cp: int) -> None:
    """Refuse a transport without ranks that share a sequence.

    Raises:
        ParallelPlanError: If cp is 1 and the transport is not "auto".
    """
    if cp == 1 and transport != "auto":
        raise ParallelPlanError(
            f"context.transport ({transport!r}) needs cp above 1, because only ranks that share a "
            "sequence exchange keys and values. Use cp of 2 or more, or leave context.transport "
            "out."
        )


def choose_context_transport(
    links: ContextLinks, cp: int, heads: int, kv_heads: int, dropout: float = 0.0
) -> ContextChoice:
    """Choose the transport of an attention layer.

    Raises:
        UnsupportedError: If attention weights are dropped and the requested transport has only some
            of them at a time.
    """
    transport = links.transport
    if transport not in ("auto", "all_to_all") and dropout > 0.0:
        raise UnsupportedError(
            f"context.transport {transport!r} cannot be used with attention dropout ({dropout}), "
            "because its ranks add up partial results before the softmax weights, which dropout "
            "acts on, are known. Use 'all_to_all' or 'auto', or an attention dropout of 0."
        )
    if transport != "auto":
        return ContextChoice(transport, "asked for")
    if dropout > 0.0:
        return ContextChoice("all_to_all", "attention dropout needs whole rows of weights")
    if not links.is_one_host:
        return ContextChoice("ring", "cp spans hosts, and a ring overlaps with the computation")
    # Each rank gets equally many heads, of whole groups of a key/value head.
    if heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0):
        why = f"{heads} query and {kv_heads} key/value heads divide over cp {cp} on one host"
        return ContextChoice("all_to_all", why)
    why = f"{heads} query and {kv_heads} key/value heads do not divide evenly over cp {cp}"
    if kv_heads == 1:
        return ContextChoice("all_gather", f"{why}, and one key/value head is cheap to gather")
    return ContextChoice("ring", why)
