"""Choice of how the ranks of context parallelism exchange keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.context_groups import ContextGroupsChoice
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.settings import divisors

#: How ranks that share a sequence exchange keys and values.
ContextTransport = Literal["ring", "all_to_all", "all_gather", "hierarchical"]


@dataclass(frozen=True)
class ContextLinks:
    """Requested transport, and the distribution over hosts of the ranks that share a sequence.

    Args:
        transport: Requested transport; "auto" lets each layer choose.
        inner: Neighbouring ranks that exchange heads in a hierarchical transport; 1 if there is no
            such transport (ranks).
        is_one_host: Whether all ranks that share a sequence are on one host.
        groups: Ranks that share a document: "all" means all that share a sequence, "documents"
            the smallest groups that the documents of a batch allow.
    """

    transport: ContextTransport | Literal["auto"] = "auto"
    inner: int = 1
    is_one_host: bool = True
    groups: ContextGroupsChoice = "all"

    @classmethod
    def of(
        cls,
        transport: ContextTransport | Literal["auto"],
        layout: ParallelLayout,
        ranks_per_host: int,
        groups: ContextGroupsChoice = "all",
    ) -> ContextLinks:
        """Find the links of a layout.

        Args:
            layout: Sizes and order of the axes.
            ranks_per_host: Number of processes on every host (ranks).
            groups: Ranks that share a document. Groups of them have one level.

        Raises:
            ParallelPlanError: If a hierarchical transport is requested and cp has no two levels.
        """
        cp = layout.cp
        neighbours = min(_neighbours(ranks, ranks_per_host) for ranks in layout.groups("cp"))
        inner = neighbours if 1 < neighbours < cp and groups == "all" else 1
        if transport == "hierarchical" and inner == 1:
            # On one host every division is possible. The largest inner group sends the least.
            inner = divisors(cp)[-2] if neighbours == cp and cp > 1 else 1
            if inner == 1:
                raise ParallelPlanError(
                    "context.transport 'hierarchical' needs a cp that can be divided into two "
                    f"levels: cp is {cp}, and {neighbours} of its ranks are neighbours on a host. "
                    "Ranks of the inner level exchange heads, and those of the outer level form a "
                    "ring. Use a cp that is not prime, 'ring' or 'all_to_all'."
                )
        return cls(transport, inner, neighbours == cp, groups)


@dataclass(frozen=True)
class ContextChoice:
    """A transport, with the reason for the choice.

    Args:
        transport: How ranks exchange keys and values.
    """

    transport: ContextTransport
    reason: str


def check_transport_option(transport: str, cp: int) -> None:
    """Refuse a transport without ranks that share a sequence.

    Args:
        cp: Ranks that share a sequence (ranks).

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

    Args:
        links: Requested transport, and the links of the ranks.
        cp: Ranks that share a sequence (ranks).
        heads: Query heads of a tensor-parallel rank (heads).
        kv_heads: Key/value heads of a tensor-parallel rank (heads).

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
    if links.is_one_host:
        return _choose_on_one_host(cp, heads, kv_heads)
    if links.inner > 1 and _divides(links.inner, heads, kv_heads):
        return ContextChoice(
            "hierarchical",
            f"cp spans hosts; {links.inner} ranks of each exchange heads, and a ring joins hosts",
        )
    return ContextChoice("ring", "cp spans hosts, and a ring overlaps with the computation")


def _choose_on_one_host(cp: int, heads: int, kv_heads: int) -> ContextChoice:
    if _divides(cp, heads, kv_heads):
        why = f"{heads} query and {kv_heads} key/value heads divide over cp {cp} on one host"
        return ContextChoice("all_to_all", why)
    why = f"{heads} query and {kv_heads} key/value heads do not divide evenly over cp {cp}"
    if kv_heads == 1:
        return ContextChoice("all_gather", f"{why}, and one key/value head is cheap to gather")
    return ContextChoice("ring", why)


def _divides(ranks: int, heads: int, kv_heads: int) -> bool:
    """Return whether each rank gets equally many heads, of whole groups of a key/value head."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _neighbours(ranks: list[int], ranks_per_host: int) -> int:
    """Return how many consecutive ranks of a group share each host; 1 if the hosts differ."""
    hosts = [rank // ranks_per_host for rank in ranks]
    count = hosts.count(hosts[0])
    if len(ranks) % count:
        return 1
    runs = [hosts[start : start + count] for start in range(0, len(ranks), count)]
    return count if all(len(set(run)) == 1 for run in runs) else 1
