"""Choice of the transport of tokens, clones of busy experts, and limits on the rows of a rank."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.experts.transport import choose_transport as choosing
from lightning_megatron.experts.transport import peer_transfer
from lightning_megatron.experts.transport.choose_transport import choose_transport
from lightning_megatron.experts.transport.cloning import PlacedClones, place_clones, to_physical
from lightning_megatron.experts.transport.dispatchers import (
    AllToAllDispatcher,
    GatherDispatcher,
    LocalDispatcher,
    OneSidedDispatcher,
)
from lightning_megatron.experts.transport.permute import map_rows, sort_by_expert
from lightning_megatron.experts.transport.row_limit import LayerRows, RowLimit, RowNeed
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.experts import ExpertsConfig, rows_received, worst_factor
from lightning_megatron.plan.shards import ShardRange
from tests.clone_oracle import ClonePlan, physical_experts, plan_clones
from tests.plan.clone_draws import DrawnSelections, drawn_counts, drawn_selections


def test_the_choice_of_a_dispatcher_has_its_reason():
    single = ParallelMesh.single()
    assert "this rank has all experts" in choose_transport(4, 2, single).reason
    mesh = replace(single, ep=MeshAxis("ep", (0, 1)))
    for top_k, transport, kind, reason in (
        (2, "auto", GatherDispatcher, "top_k (2) is at least ep (2)"),
        (1, "auto", AllToAllDispatcher, "top_k (1) is below ep (2)"),
        (1, "all_gather", GatherDispatcher, "asked for"),
        (2, "all_to_all", AllToAllDispatcher, "asked for"),
        (1, "one_sided", OneSidedDispatcher, "asked for"),
    ):
        choice = choose_transport(4, top_k, mesh, transport)  # type: ignore[arg-type]
        assert isinstance(choice.dispatcher, kind)
        assert reason in choice.reason
    captured = choose_transport(4, 1, mesh, needs_static=True)
    assert captured.transport == "all_gather"
    assert "graphs of experts need static sizes; no puts: ranks are on cpu" in captured.reason


def test_puts_move_the_fewest_rows_on_average_over_all_choices_of_experts():
    for num_experts, top_k, ep in product((4, 8), (1, 2, 3), (2, 4)):
        choices = list(combinations(range(num_experts), top_k))
        size = num_experts // ep
        ranks = sum(len({expert // size for expert in chosen}) for chosen in choices)
        config = ExpertsConfig(num_experts=num_experts, top_k=top_k, ffn_hidden_size=8)
        # One of the ep ranks is the token's own.
        puts = ranks / len(choices) * (ep - 1) / ep
        assert rows_received("one_sided", config, ep) == pytest.approx(puts, rel=1e-12)
        assert rows_received("all_to_all", config, ep) == top_k * (ep - 1) / ep >= puts - 1e-12
        assert rows_received("all_gather", config, ep) == ep - 1 >= puts
        most = map_rows(torch.arange(top_k).expand(ep, -1), 0, size).num_rows
        assert worst_factor(config, ep) * top_k == most


def test_the_reason_names_bytes_and_buffers():
    mesh = replace(ParallelMesh.single(), ep=MeshAxis("ep", (0, 1)))
    config = ExpertsConfig(num_experts=4, top_k=1, ffn_hidden_size=8)
    layer = MixtureOfExperts(16, config, mesh, transport="all_gather")
    assert layer.transport_reason(torch.bfloat16).endswith(
        "a rank receives 32 bytes for each of its tokens, with buffers of 2 times the even share"
    )
    layer.row_limit = LayerRows(RowLimit(1.25, mesh), 0, num_ranks=2)
    assert layer.transport_reason(torch.bfloat16).endswith("of 1.25 times the even share")
    layer.transport = "one_sided"
    assert " 32 bytes" in layer.transport_reason(torch.float32)


def make_gpu_mesh(monkeypatch: pytest.MonkeyPatch, reason_unavailable: str | None) -> ParallelMesh:
    """Return the mesh of two GPUs that can put tokens unless there is a reason against it."""
    monkeypatch.setattr(choosing, "reason_against_puts", lambda axis, device: reason_unavailable)
    monkeypatch.setattr(choosing, "transfer_over", lambda axis, experts_each, device: None)
    single = ParallelMesh.single()
    return replace(single, ep=MeshAxis("ep", (0, 1)), device=torch.device("cuda"))


def test_auto_chooses_puts_on_gpus_that_support_them(monkeypatch):
    for unavailable, top_k, has_shared, kind, reason in (
        (None, 2, False, "one_sided", "these GPUs write into each other's memory"),
        (None, 1, False, "all_to_all", "static sizes would keep memory for all tokens"),
        (None, 1, True, "all_to_all", "static sizes would keep memory for all tokens"),
        (None, 2, True, "all_gather", "an all-gather overlaps with the shared expert"),
        ("ranks are far apart", 2, False, "all_gather", "no puts: ranks are far apart"),
    ):
        mesh = make_gpu_mesh(monkeypatch, unavailable)
        choice = choose_transport(4, top_k, mesh, has_shared=has_shared)
        assert choice.transport == kind
        assert isinstance(choice.dispatcher, OneSidedDispatcher) == (kind == "one_sided")
        assert choice.reason.endswith(reason)
    captured = choose_transport(4, 1, make_gpu_mesh(monkeypatch, None), needs_static=True)
    assert captured.transport == "one_sided", "graphs hold no reads of the host"
    for top_k, has_shared in ((1, False), (2, True)):
        mesh, clones = make_gpu_mesh(monkeypatch, None), ExpertClones(1)
        choice = choose_transport(
            4, top_k, mesh, has_shared=has_shared, clones=clones, matrices=tuple
        )
        assert choice.transport == "one_sided", "clones need puts"


def test_puts_that_are_asked_for_or_needed_are_refused_with_the_reason_against_them(monkeypatch):
    mesh = replace(ParallelMesh.single(), ep=MeshAxis("ep", (0, 1)), device=torch.device("cuda"))
    monkeypatch.setattr(peer_transfer, "reason_against_puts", lambda *_, **__: "they are apart")
    with pytest.raises(UnsupportedError, match="each other's memory: they are apart") as raised:
        choose_transport(4, 2, mesh, "one_sided")
    assert "'all_gather', 'all_to_all' or 'auto'" in str(raised.value)
    mesh = make_gpu_mesh(monkeypatch, "there is no NVLink")
    with pytest.raises(UnsupportedError, match="each other's memory: there is no NVLink"):
        choose_transport(4, 2, mesh, clones=ExpertClones(1))


def test_illegal_settings_of_clones_are_refused():
    with pytest.raises(ParallelPlanError, match=r"clones \(1\) must be at most 0"):
        choose_transport(8, 2, ParallelMesh.single(), clones=ExpertClones(1))
    mesh = replace(ParallelMesh.single(), ep=MeshAxis("ep", (0, 1)))
    with pytest.raises(ParallelPlanError, match="one_sided or auto, not all_gather"):
        choose_transport(8, 2, mesh, "all_gather", clones=ExpertClones(1))
    for settings, name in (((0,), "places"), ((1, -1), "min_rows")):
        with pytest.raises(ParallelPlanError, match=f"{name} must"):
            ExpertClones(*settings)


def as_plan(clones: PlacedClones) -> ClonePlan:
    """Copy a plan from the device to Python numbers."""
    return ClonePlan(
        clones.layout,
        tuple(clones.owners.tolist()),
        tuple(clones.amounts.tolist()),
        tuple(map(tuple, clones.off.tolist())),
        tuple(clones.rows.tolist()),
    )


def test_plans_of_torch_operators_equal_plans_in_python_numbers():
    for number, drawn in enumerate(drawn_counts(200)):
        dtype = torch.int32 if number % 2 else torch.int64
        counts = torch.tensor(drawn.counts, dtype=dtype)
        clones = place_clones(counts, drawn.places, drawn.min_rows)
        assert as_plan(clones) == plan_clones(drawn.counts, drawn.places, drawn.min_rows)
        assert {clones.owners.dtype, clones.off.dtype, clones.rows.dtype} == {torch.int64}
        assert counts.tolist() == drawn.counts, "the counts have changed"


def physical_of(drawn: DrawnSelections, clones: PlacedClones, rank: int) -> Tensor:
    experts = torch.tensor(drawn.selections[rank])
    return to_physical(experts, sort_by_expert(experts, 0, drawn.experts), clones, rank)


def test_selections_go_to_the_places_of_the_plan():
    num_moved = 0
    for drawn in drawn_selections(40):
        plan = plan_clones(drawn.counts, drawn.places)
        clones = place_clones(torch.tensor(drawn.counts), drawn.places)
        for rank, selections in enumerate(drawn.selections):
            expected = physical_experts(selections, plan, rank)
            actual = physical_of(drawn, clones, rank)
            assert actual.tolist() == list(map(list, expected))
            num_moved += sum(plan.off[rank])
    assert num_moved > 250, "hardly any selection moves"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_planning_reads_nothing_from_the_device(device):
    # Fake and meta tensors raise if a number is read or devices are mixed.
    mode = FakeTensorMode() if device == "cpu" else nullcontext()
    with mode:
        counts = torch.zeros(4, 8, dtype=torch.int64, device=device)
        with pytest.raises(RuntimeError):
            int(counts.sum())
        clones = place_clones(counts, 2, 5)
        experts = torch.zeros(10, 3, dtype=torch.int64, device=device)
        physical = to_physical(experts, sort_by_expert(experts, 0, 8), clones, 1)
        assert physical.shape == (10, 3)
        assert clones.off.shape == (4, 8)
        assert {physical.device.type, clones.rows.device.type} == {device}


# Limits on rows, and their counts.


NUM_TOKENS, TOP_K, SIZE = 300, 2, 3
LOCAL_EXPERTS = ShardRange(1, 3)


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def draw_selections() -> torch.Tensor:
    """Choose two of four experts for each token; some choices are dropped."""
    experts = draw(NUM_TOKENS, 4).topk(TOP_K, -1).indices
    experts[draw(NUM_TOKENS, TOP_K) > 1.5] = -1
    return experts


def output_and_gradients(experts: torch.Tensor, limit: LayerRows | None) -> list[torch.Tensor]:
    """Square each row, and return the sums of tokens and all gradients."""
    hidden = draw(NUM_TOKENS, SIZE).requires_grad_()
    probabilities = draw(NUM_TOKENS, TOP_K).requires_grad_()
    dispatcher = LocalDispatcher(LOCAL_EXPERTS, limit)
    prepared = dispatcher.prepare(hidden, probabilities, experts)
    received = dispatcher.receive(dispatcher.send(prepared))
    rows = received.rows**2 * received.probabilities.unsqueeze(1)
    # Rows past the last end must not count, even if they are NaN.
    is_past_end = torch.arange(rows.shape[0]) >= received.ends[-1]
    rows = rows.masked_fill(is_past_end.unsqueeze(1), torch.nan)
    output = dispatcher.combine(dispatcher.send_back(rows, received))
    output.backward(draw(*output.shape))
    gradients = [hidden.grad, probabilities.grad]
    return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]


def test_selections_beyond_the_limit_are_dropped():
    experts = draw_selections()
    needed = int(((experts >= LOCAL_EXPERTS.start) & (experts < LOCAL_EXPERTS.stop)).sum())
    limit = LayerRows(RowLimit(1.0, ParallelMesh.single()), 5, num_ranks=3)
    assert needed > 256
    with limit.limit.limit_rows():
        actual_results = output_and_gradients(experts, limit)
        limit.limit.start_read()()
    assert limit.limit.was_too_small()
    with limit.limit.measure_rows() as measured:
        output_and_gradients(experts, limit)
    (need,) = measured.needs()
    assert need == RowNeed(layer=5, share=NUM_TOKENS * TOP_K // 3, rows=needed)
    full_map = map_rows(experts, LOCAL_EXPERTS.start, LOCAL_EXPERTS.stop - LOCAL_EXPERTS.start)
    dropped = experts.clone()
    dropped.view(-1)[full_map.pairs[256:needed]] = -1
    for actual, expected in zip(actual_results, output_and_gradients(dropped, None), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("numbers", "is_too_small"),
    [
        ([(0, 129, 128)], True),
        ([(0, 128, 128), (1, 0, 128)], False),
        # The share of 129 has another limit, of 256 rows.
        ([(0, 128, 128), (1, 256, 129)], False),
        ([(0, 128, 128), (1, 257, 129), (0, 3, 128)], True),
        ([(1, 200, 129), (0, 129, 128)], True),
        ([], False),
    ],
)
def test_the_limit_of_a_run_is_too_small_if_one_pass_needs_more_rows(numbers, is_too_small):
    limit = RowLimit(1.0, ParallelMesh.single())
    for _ in range(2):
        with limit.limit_rows():
            for layer, needed, share in numbers:
                limit.note(layer, share, torch.tensor([needed], dtype=torch.int32))
            limit.start_read()()
        assert limit.was_too_small() == is_too_small
        with limit.limit_rows():
            limit.start_read()()
        assert not limit.was_too_small()
