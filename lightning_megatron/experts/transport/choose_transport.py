"""Choice of the transport of a layer's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.transport.clone_transfer import CloneCollectives
from lightning_megatron.experts.transport.cloning import PlacedClones
from lightning_megatron.experts.transport.cloning_dispatchers import (
    CloningDispatcher,
    PeerCloningDispatcher,
)
from lightning_megatron.experts.transport.dispatchers import (
    AllToAllDispatcher,
    Dispatcher,
    GatherDispatcher,
    LocalDispatcher,
    OneSidedDispatcher,
)
from lightning_megatron.experts.transport.peer_clones import (
    Matrices,
    PeerClones,
    PeerSource,
)
from lightning_megatron.experts.transport.peer_transfer import (
    Puts,
    transfer_over,
)
from lightning_megatron.experts.transport.row_limit import LayerRows
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.choose_kernels import reason_against_puts
from lightning_megatron.plan.expert_clones import ExpertClones, ExpertPlaces
from lightning_megatron.plan.experts import ChosenTransport, Transport, transport_over_ep
from lightning_megatron.plan.shards import ShardRange, even_range

#: Function that returns the transfers of the first and of the second matrix between homes and
#: clones.
SourcesOfClones = Callable[[PlacedClones], Sequence[CloneCollectives | PeerSource]]


@dataclass(frozen=True)
class TransportChoice:
    """Transport of a layer's tokens over ep, with the reason for its choice.

    ``clone_sources`` returns the transfers of the first and of the second matrix between homes and
    the clones of a microbatch; None without places for clones.
    """

    dispatcher: Dispatcher
    transport: ChosenTransport
    reason: str
    clone_sources: SourcesOfClones | None = None


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
) -> TransportChoice:
    """Choose the transport of a layer's tokens.

    An all-gather sends each rank the tokens of ``ep - 1`` other ranks; an all-to-all sends ``top_k
    / ep`` times as many rows. One-sided puts send only the tokens of the rank's experts, with the
    static sizes of an all-gather. They replace the all-gather on GPUs with peer access, unless the
    all-gather can overlap with a shared expert. A limit on the rows of experts needs one of these
    two, because the buffers of an all-to-all have exactly the received rows. With clones "auto"
    means puts, which also move the weights of clones: only then are ``matrices`` needed.

    Communication: that of
        :func:`~lightning_megatron.layers.fused.choose_kernels.reason_against_puts`, where puts may
        be chosen.
    """
    local_experts = even_range(
        num_experts, mesh.ep.size, mesh.ep.rank, what="num_experts", axis="ep"
    )
    if clones is not None and transport == "auto" and mesh.ep.size > 1:
        resolved, why = _transport_of_clones(mesh)
    else:
        resolved, why = _transport(top_k, mesh, transport, has_shared, limit is not None)
    sources = None
    if clones is None:
        dispatcher, what = _over_ep(local_experts, num_experts, mesh, resolved, limit)
    else:
        clones.check(num_experts, mesh.ep.size)
        layout = ExpertPlaces(mesh.ep.size, num_experts, clones.places)
        size = layout.homes + layout.places
        physical = ShardRange(mesh.ep.rank * size, (mesh.ep.rank + 1) * size)
        inner, what = _over_ep(physical, mesh.ep.size * size, mesh, resolved, limit)
        dispatcher, sources = _with_clones(inner, num_experts, mesh.ep, clones, matrices)
        what = f"{what}, to experts and their clones"
    reason = f"{what}: {why}"
    if mesh.etp.size > 1:
        dispatcher = GatherDispatcher(dispatcher, mesh.etp)
        reason = f"{reason}; all-gather over etp, whose ranks hold parts of the same experts"
    return TransportChoice(dispatcher, resolved, reason, sources)


def _with_clones(
    inner: Dispatcher,
    num_experts: int,
    ep: MeshAxis,
    settings: ExpertClones,
    matrices: Matrices | None,
) -> tuple[Dispatcher, SourcesOfClones]:
    """Return the dispatcher to homes and clones, and the transfers of weights: puts with puts."""
    if isinstance(inner, OneSidedDispatcher) and isinstance(inner.transfer, Puts):
        assert matrices is not None, "weights are put by their homes"
        kernels = inner.transfer.kernels
        peers = PeerClones(ep, num_experts, settings.places, matrices, kernels)
        return (
            PeerCloningDispatcher(
                inner.local_experts, inner.transfer, inner.limit, peers=peers, settings=settings
            ),
            lambda clones: peers.sources(),
        )
    return (
        CloningDispatcher(inner, ep, num_experts, settings),
        lambda clones: (CloneCollectives(ep, clones.layout, clones.owners),) * 2,
    )


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
    top_k: int, mesh: ParallelMesh, requested: Transport, has_shared: bool, is_limited: bool
) -> tuple[ChosenTransport, str]:
    """Return the transport over ep, and the reason for it."""
    ep = mesh.ep.size
    if ep == 1:
        return "none", "ep is 1: this rank has all experts"
    if requested != "auto":
        return transport_over_ep(top_k, ep, requested), "asked for"
    why = f"top_k ({top_k}) is {'at least' if top_k >= ep else 'below'} ep ({ep})"
    if is_limited and top_k < ep:
        why = "experts.rows limits buffers of static sizes"
    if (top_k < ep and not is_limited) or mesh.device.type != "cuda":
        return transport_over_ep(top_k, ep, is_limited=is_limited), why
    # A put cannot overlap with the shared expert, an all-gather can.
    reason: str | None = "an all-gather overlaps with the shared expert"
    if not has_shared:
        reason = reason_against_puts(mesh.ep, mesh.device)
    if reason is None:
        why += ", and these GPUs write into each other's memory"
    else:
        why += f"; no puts: {reason}"
    can_put = reason is None
    return transport_over_ep(top_k, ep, can_put=can_put, is_limited=is_limited), why


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
