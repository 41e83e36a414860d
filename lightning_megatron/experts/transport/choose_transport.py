"""Choice of the transport of a layer's tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.transport.dispatchers import (
    AllToAllDispatcher,
    Dispatcher,
    GatherDispatcher,
    LocalDispatcher,
    OneSidedDispatcher,
    SwitchingDispatcher,
)
from lightning_megatron.experts.transport.peer_clones import Matrices, PeerClones
from lightning_megatron.experts.transport.peer_transfer import transfer_over
from lightning_megatron.experts.transport.row_limit import LayerRows
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.choose_kernels import reason_against_puts
from lightning_megatron.plan.expert_clones import ExpertClones, ExpertPlaces
from lightning_megatron.plan.experts import ChosenTransport, Transport, collective_over_ep
from lightning_megatron.plan.shards import ShardRange, even_range


@dataclass(frozen=True)
class TransportChoice:
    """Transport of a layer's tokens over ep, with the reason for its choice.

    ``clones`` is None without places for clones.
    """

    dispatcher: Dispatcher
    transport: ChosenTransport
    reason: str
    clones: PeerClones | None = None


def choose_transport(
    num_experts: int,
    top_k: int,
    mesh: ParallelMesh,
    transport: Transport = "auto",
    *,
    has_shared: bool = False,
    clones: ExpertClones | None = None,
    matrices: Matrices | None = None,
    limit: LayerRows | None = None,
    needs_static: bool = False,
) -> TransportChoice:
    """Choose the transport of a layer's tokens.

    One-sided puts move the fewest rows (:func:`~lightning_megatron.plan.experts.rows_received`),
    and their sizes are static. They need GPUs with peer access, and cannot overlap with a shared
    expert. Instead of them, an all-gather also has static sizes. Both keep buffers for the worst
    routing in every layer, so if ``top_k`` is below ``ep``, "auto" means an all-to-all, whose sizes
    the host reads. A limit on the rows of experts, and graphs of them (``needs_static``), exclude
    it. With clones "auto" means puts, and collectives in their place between CPUs, which also move
    the weights of clones: only then are ``matrices`` needed.

    Communication: that of
        :func:`~lightning_megatron.layers.fused.choose_kernels.reason_against_puts`, where puts may
        be chosen.
    """
    local_experts = even_range(
        num_experts, mesh.ep.size, mesh.ep.rank, what="num_experts", axis="ep"
    )
    peers = None
    if clones is None:
        is_static = needs_static or limit is not None
        resolved, why = _transport(top_k, mesh, transport, has_shared, is_static)
    else:
        clones.check(num_experts, mesh.ep.size)
        clones.check_transport(transport)
        resolved, why = _transport_of_clones(mesh)
        layout = ExpertPlaces(mesh.ep.size, num_experts, clones.places)
        size = layout.homes + layout.places
        local_experts = ShardRange(mesh.ep.rank * size, (mesh.ep.rank + 1) * size)
    dispatcher, what = _over_ep(local_experts, num_experts, mesh, resolved, limit)
    if clones is not None:
        assert isinstance(dispatcher, OneSidedDispatcher), "clones are transferred like tokens"
        assert matrices is not None, "weights are put by their homes"
        peers = PeerClones(num_experts, clones, matrices, dispatcher.transfer)
        dispatcher = replace(dispatcher, clones=peers)
        what = f"{what}, to experts and their clones"
    reason = f"{what}: {why}"
    if mesh.etp.size > 1:
        dispatcher = GatherDispatcher(dispatcher, mesh.etp)
        reason = f"{reason}; all-gather over etp, whose ranks hold parts of the same experts"
    if mesh.turns is not None:
        dispatcher = SwitchingDispatcher(dispatcher, mesh.turns)
        reason = f"{reason}; another microbatch computes meanwhile"
    return TransportChoice(dispatcher, resolved, reason, peers)


def _transport_of_clones(mesh: ParallelMesh) -> tuple[ChosenTransport, str]:
    """Return the transport over ep with clones, and the reason for it."""
    reason = reason_against_puts(mesh.ep, mesh.device) if mesh.device.type == "cuda" else None
    if reason is not None:
        raise UnsupportedError(
            "experts.clones needs GPUs that write into each other's memory: "
            f"{reason}. Use experts.clones=0."
        )
    return "one_sided", "experts.clones needs it"


def _transport(
    top_k: int, mesh: ParallelMesh, requested: Transport, has_shared: bool, needs_static: bool
) -> tuple[ChosenTransport, str]:
    """Return the transport over ep, and the reason for it."""
    ep = mesh.ep.size
    if ep == 1:
        return "none", "ep is 1: this rank has all experts"
    if requested != "auto":
        return requested, "asked for"
    gathers_few = top_k >= ep
    collective = collective_over_ep(top_k, ep, needs_static)
    if collective == "all_to_all":
        why = (
            f"top_k ({top_k}) is below ep ({ep}), and static sizes would keep memory for all tokens"
        )
        return collective, why
    # A put cannot overlap with the shared expert, an all-gather can.
    reason: str | None = "an all-gather overlaps with the shared expert"
    if not (has_shared and gathers_few):
        reason = reason_against_puts(mesh.ep, mesh.device)
    if reason is None:
        return "one_sided", "these GPUs write into each other's memory"
    why = "experts.rows and graphs of experts need static sizes"
    if gathers_few:
        why = f"top_k ({top_k}) is at least ep ({ep})"
    return collective, f"{why}; no puts: {reason}"


def _over_ep(
    local_experts: ShardRange,
    num_experts: int,
    mesh: ParallelMesh,
    transport: ChosenTransport,
    limit: LayerRows | None,
) -> tuple[Dispatcher, str]:
    local = LocalDispatcher(local_experts, limit)
    ep = mesh.ep
    if transport == "none":
        return local, "no dispatch"
    if transport == "one_sided":
        puts = OneSidedDispatcher(
            local_experts, transfer_over(ep, local_experts.size, mesh.device), limit
        )
        return puts, "one-sided puts over ep, of static sizes"
    if transport == "all_gather":
        return GatherDispatcher(local, ep), "all-gather over ep, of static sizes"
    return AllToAllDispatcher(num_experts, ep), "all-to-all over ep, of sizes that the host reads"
