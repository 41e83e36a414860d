"""How the dispatcher of a layer is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.experts.dispatch import AllToAllDispatcher, Dispatcher, GatherDispatcher, LocalDispatcher
from lightning_megatron.experts.one_sided import OneSidedDispatcher
from lightning_megatron.experts.peer_transfer import transfer_over, why_no_puts
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.experts import ChosenTransport, Transport, transport_over_ep
from lightning_megatron.plan.shards import ShardRange, even_range


@dataclass(frozen=True)
class DispatcherChoice:
    """Name the dispatcher of a layer, and why.

    Args:
        dispatcher: What brings tokens to experts.
        transport: How they come to the ranks of ep.
        reason: Why this one, for the log.
    """

    dispatcher: Dispatcher
    transport: ChosenTransport
    reason: str


def choose_dispatcher(
    num_experts: int, top_k: int, mesh: ParallelMesh, transport: Transport = "auto", *, has_shared: bool = False
) -> DispatcherChoice:
    """Choose how tokens come to experts.

    An all-gather brings a rank the tokens of ep - 1 others, an all-to-all top_k / ep times as many rows. Puts bring it
    those of them that chose its experts, and have the static sizes of an all-gather: they take its place on GPUs that
    write into each other's memory, unless it has a shared expert to run beside.

    Args:
        num_experts: Experts of the layer.
        top_k: Experts that a token goes to.
        mesh: The groups of this rank.
        transport: How tokens come to the ranks of ep.
        has_shared: Whether a network that every token goes through runs while tokens are on their way.

    Raises:
        ParallelPlanError: If the experts do not divide by ep.
        UnsupportedError: If GPUs cannot put tokens where they were asked to.

    Communication: that of :func:`~lightning_megatron.experts.peer_transfer.why_no_puts`, where puts may be chosen.
    """
    here = even_range(num_experts, mesh.ep.size, mesh.ep.rank, what="num_experts", axis="ep")
    chosen, why = _transport(top_k, mesh, transport, has_shared)
    dispatcher, what = _over_ep(here, num_experts, mesh, chosen)
    reason = f"{what}: {why}"
    if mesh.etp.size > 1:
        dispatcher = GatherDispatcher(dispatcher, mesh.etp)
        reason = f"{reason}; all-gather over etp, whose ranks hold parts of the same experts"
    return DispatcherChoice(dispatcher, chosen, reason)


def _transport(top_k: int, mesh: ParallelMesh, asked: Transport, has_shared: bool) -> tuple[ChosenTransport, str]:
    """Choose what goes over ep, and say why."""
    ep = mesh.ep.size
    if ep == 1:
        return "none", "ep is 1, so that this rank has all experts"
    if asked != "auto":
        return transport_over_ep(top_k, ep, asked), "asked for"
    why = f"top_k ({top_k}) is {'at least' if top_k >= ep else 'below'} ep ({ep})"
    if top_k < ep or mesh.device.type != "cuda":
        return transport_over_ep(top_k, ep), why
    reason = "it runs beside the shared expert" if has_shared else why_no_puts(mesh.ep, mesh.device)
    why += ", and these GPUs write into each other's memory" if reason is None else f"; no puts: {reason}"
    return transport_over_ep(top_k, ep, can_put=reason is None), why


def _over_ep(
    here: ShardRange, num_experts: int, mesh: ParallelMesh, transport: ChosenTransport
) -> tuple[Dispatcher, str]:
    local, ep = LocalDispatcher(here), mesh.ep
    if transport == "none":
        return local, "no dispatch"
    if transport == "one_sided":
        puts = OneSidedDispatcher(here, transfer_over(ep, here.size, mesh.device))
        return puts, "one-sided puts over ep, of static sizes"
    if transport == "all_gather":
        return GatherDispatcher(local, ep), "all-gather over ep, of static sizes"
    return AllToAllDispatcher(num_experts, ep), "all-to-all over ep, of sizes that the host reads"
