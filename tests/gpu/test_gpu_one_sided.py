"""Tests that puts of tokens into the memory of peer GPUs give the results of an all-gather."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.experts.transport.choose_transport import choose_transport
from lightning_megatron.experts.transport.dispatchers import Dispatcher, OneSidedDispatcher
from lightning_megatron.experts.transport.row_limit import LayerRows, RowLimit
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.plan.experts import ExpertsConfig, limited_rows
from lightning_megatron.plan.layout import ParallelLayout
from tests.fits import MIXTURE, Report, run_job
from tests.gpu.grouped import captured
from tests.gpu.ranks import gpu_job, on_two_and_four_gpus, run_ranks
from tests.gpu.shared_gpu import gpu_of

NUM_EXPERTS, TOP_K, WIDTH, INNER = 16, 3, 256, 128
#: Tokens per rank of consecutive microbatches: the shared memory grows, and shorter microbatches
#: use a part of it.
LENGTHS = (200, 64, 333, 1, 200)
ROUTINGS = ("random", "all to the last rank", "some nowhere", "all nowhere")
TRANSPORTS: Any = ("one_sided", "all_gather")


class Tokens:
    """Tokens of one rank, the experts that they choose, and the gradient of their output."""

    def __init__(self, length: int, routing: str, seed: int, dtype: Any = torch.bfloat16) -> None:
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.hidden = self.draw(length, WIDTH).to(dtype).requires_grad_()
        self.outer = self.draw(length, WIDTH).to(dtype)
        self.probabilities = self.draw(length, TOP_K).abs().requires_grad_()
        self.experts = self.choose(length, routing)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=self.generator)

    def choose(self, length: int, routing: str) -> Tensor:
        scores = self.draw(length, NUM_EXPERTS)
        if routing == "all to the last rank":
            scores[:, -NUM_EXPERTS // 4 :] += 100.0
        experts = scores.topk(TOP_K).indices
        if routing == "some nowhere":
            experts[self.draw(length, TOP_K) < 0.5] = -1
        return torch.full_like(experts, -1) if routing == "all nowhere" else experts


def output_and_gradients(
    tokens: Tokens, dispatcher: Dispatcher, experts: GroupedMLP, keeps_rows: bool = False
) -> list[Tensor]:
    """Return the output and all gradients; rows are kept for the backward pass, or sent again."""
    prepared = dispatcher.prepare(tokens.hidden, tokens.probabilities, tokens.experts)
    sent = dispatcher.receive(dispatcher.send(prepared))
    if keeps_rows:
        sent = replace(sent, tokens=None)
    recipe = dispatcher.rows_recipe(sent)
    assert (recipe is None) == keeps_rows
    outputs = experts(sent.rows, sent.probabilities, sent.ends, rows_recipe=recipe)
    output = dispatcher.combine(dispatcher.send_back(outputs, sent))
    leaves = tokens.hidden, tokens.probabilities, *experts.parameters()
    return [output.detach(), *torch.autograd.grad(output, leaves, tokens.outer)]


def mesh_of(rank: int, size: int) -> ParallelMesh:
    return ParallelMesh.create(ParallelLayout(size, ep=size), device=gpu_of(rank))


def make_experts(mesh: ParallelMesh, dtype: torch.dtype = torch.bfloat16) -> GroupedMLP:
    config = ExpertsConfig(num_experts=NUM_EXPERTS, top_k=TOP_K, ffn_hidden_size=INNER)
    experts = GroupedMLP(WIDTH, config, mesh)
    initialize_(experts, mesh.device, 1)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.mul_(5.0)
    return experts.to(mesh.device, dtype)


def dispatchers_of(mesh: ParallelMesh, *limits: LayerRows) -> list[Any]:
    """Return the dispatchers of puts and of an all-gather."""
    pairs = zip(TRANSPORTS, limits or (None, None), strict=True)
    return [
        choose_transport(NUM_EXPERTS, TOP_K, mesh, transport, limit=limit).dispatcher
        for transport, limit in pairs
    ]


def _assert_near(
    actual_tensors: list[Tensor], expected_tensors: list[Tensor], what: str, is_exact: bool
) -> None:
    for number, (actual, expected) in enumerate(zip(actual_tensors, expected_tensors, strict=True)):
        wide = expected.double()
        distance = float((actual.double() - wide).norm() / wide.norm().clamp_min(1e-12))
        # NCCL adds up in the dtype of the tensors, one rank after the other; with two ranks that is
        # one rounding, as with puts.
        limit = 1e-2 if actual.dtype.itemsize == 2 else 1e-5
        assert distance <= (0.0 if is_exact else limit), f"{what}: {number}"


def _compare(rank: int, size: int) -> None:
    mesh = mesh_of(rank, size)
    one_sided, gather = dispatchers_of(mesh)
    assert isinstance(one_sided, OneSidedDispatcher)
    automatic = "one_sided" if size <= TOP_K else "all_to_all"
    assert choose_transport(NUM_EXPERTS, TOP_K, mesh).transport == automatic
    assert choose_transport(NUM_EXPERTS, TOP_K, mesh, needs_static=True).transport == "one_sided"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        experts = make_experts(mesh, dtype)
        for number, length in enumerate(LENGTHS):
            for routing in ROUTINGS:
                tokens = Tokens(length, routing, 10 * number + rank, dtype)
                actual = output_and_gradients(tokens, one_sided, experts)
                expected = output_and_gradients(tokens, gather, experts)
                what = f"{dtype}, {length} tokens, {routing}, rank {rank}"
                _assert_near(actual, expected, what, is_exact=size == 2 and dtype != torch.float32)
                for keeps_rows in (False, True):
                    repeated = output_and_gradients(tokens, one_sided, experts, keeps_rows)
                    assert all(map(torch.equal, actual, repeated)), f"{what}, {keeps_rows}"
    mesh.destroy()


def _limit(rank: int, size: int) -> None:
    """Check that puts with too few rows compute and report the same as an all-gather."""
    mesh = mesh_of(rank, size)
    limits = [RowLimit(1.0, mesh), RowLimit(1.0, mesh)]
    dispatchers = dispatchers_of(mesh, *(LayerRows(limit, 0, size) for limit in limits))
    experts = make_experts(mesh)
    exceeding = 0
    for number, length in enumerate(LENGTHS):
        for routing in ROUTINGS:
            tokens = Tokens(length, routing, 10 * number + rank)
            results, needs, were_small = [], [], []
            for dispatcher, limit in zip(dispatchers, limits, strict=True):
                with limit.limit_rows():
                    results.append(output_and_gradients(tokens, dispatcher, experts))
                    finish = limit.start_read()
                    assert finish is not None, "the limit applies"
                    finish()
                were_small.append(limit.was_too_small())
                with limit.measure_rows() as measured:
                    output_and_gradients(tokens, dispatcher, experts)
                needs.append(measured.needs())
            what = f"{length} tokens, {routing}, rank {rank}"
            _assert_near(results[0], results[1], what, is_exact=size == 2)
            assert needs[0] == needs[1], what
            here = sum(layer.rows > limited_rows(1.0, layer.share) for layer in needs[0])
            assert were_small[0] == were_small[1], what
            assert were_small[0] or not here, what
            exceeding += here
    assert exceeding or rank < size - 1, "the limit leaves out some rows of the last rank"
    mesh.destroy()


def _replay(rank: int, size: int) -> None:
    mesh = mesh_of(rank, size)
    one_sided, gather = dispatchers_of(mesh)
    experts, tokens = make_experts(mesh), Tokens(150, "random", rank)
    graph, replayed = captured(
        lambda: output_and_gradients(tokens, one_sided, experts),
        stream=torch.cuda.Stream(),
        capture_error_mode="thread_local",
    )
    # Eager tokens need more memory; the memory of the graph remains.
    output_and_gradients(Tokens(400, "random", rank), one_sided, experts)
    for number, routing in enumerate((*ROUTINGS, "random")):
        new = Tokens(150, routing, 7 * number + rank)
        with torch.no_grad():
            for name in ("hidden", "probabilities", "experts", "outer"):
                getattr(tokens, name).copy_(getattr(new, name))
        graph.replay()
        expected = output_and_gradients(tokens, gather, experts)
        _assert_near(replayed, expected, f"{routing}, rank {rank}", is_exact=size == 2)
    del graph
    torch.cuda.synchronize()
    mesh.destroy()


@on_two_and_four_gpus
def test_outputs_and_gradients_by_puts_equal_those_by_an_all_gather(size):
    run_ranks(_compare, size)


@on_two_and_four_gpus
def test_results_and_needs_of_limited_rows_equal_those_of_an_all_gather(size):
    run_ranks(_limit, size)


@on_two_and_four_gpus
def test_a_captured_graph_of_puts_follows_new_choices_of_experts(size):
    run_ranks(_replay, size)


def _train(rank: int, size: int) -> list[Report]:
    layouts = ({"ep": size, "experts.transport": kind} for kind in (*TRANSPORTS, "auto"))
    return [run_job(gpu_job(MIXTURE, layout, "bf16-mixed", steps=3), size) for layout in layouts]


@pytest.mark.gpu2
def test_losses_by_puts_equal_losses_by_an_all_gather():
    for put, gathered, automatic in run_ranks(_train, 2):
        assert put.losses == gathered.losses == automatic.losses
        assert put.norms == gathered.norms


def _grow_in_capture(rank: int, size: int) -> None:
    mesh = mesh_of(rank, size)
    region = mesh.ep.peer_memory
    region.reserve(mesh.ep.group, 64, mesh.device)
    with (
        pytest.raises(RuntimeError, match="65 bytes are needed"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
    ):
        region.reserve(mesh.ep.group, 65, mesh.device)
    mesh.destroy()


@pytest.mark.gpu2
def test_growth_of_shared_memory_is_refused_while_a_graph_is_captured():
    run_ranks(_grow_in_capture, 2)
