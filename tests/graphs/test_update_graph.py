"""The graph of the update is captured after eager updates, and again after a change on any rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.graphs.update_graph import Update, UpdateGraph
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from tests.tape import TapeBackend


class Parameters:
    """Add a rate, summed over the ranks, to a parameter, and count the calls of Python."""

    def __init__(self, mesh: ParallelMesh, fails: bool = False) -> None:
        self.mesh, self.fails, self.num_calls = mesh, fails, 0
        self.rate, self.value = torch.zeros(()), torch.zeros(3)

    def update(self, form: str = "", reason: str | None = None) -> Update[Tensor]:
        return Update(form, self.value, self.value.data_ptr, (self.run,), reason)

    def run(self) -> Tensor:
        self.num_calls += 1
        total = all_reduce_(self.rate.clone(), self.mesh.world)
        if self.fails and self.mesh.launcher.recorder is not None:
            raise RuntimeError("no memory")
        self.value.add_(total)
        return total


def graph_of(
    parameters: Parameters, messages: list[str] | None = None, **settings: Any
) -> UpdateGraph[Tensor]:
    """Return a graph that is captured in the third update."""
    mesh = parameters.mesh
    say = [].append if messages is None else messages.append
    chosen = CudaGraphs("segments", **{"warmup_steps": 2, "optimizer": True, **settings})
    return UpdateGraph(TapeBackend(mesh.launcher), mesh, chosen, say, say)


def run(
    graph: UpdateGraph[Tensor], parameters: Parameters, number: int = 1, **options: Any
) -> list[bool]:
    """Update with the rate 1, 2, 3, ..., and return for each update whether Python ran."""
    ran = []
    for _ in range(number):
        before = parameters.num_calls
        parameters.rate += 1
        result = graph.run(parameters.update(**options))
        assert float(result) == float(parameters.rate) * parameters.mesh.world.size
        ran.append(parameters.num_calls > before)
    return ran


def test_the_third_update_is_captured_and_later_ones_are_replayed():
    parameters = Parameters(ParallelMesh.single())
    messages: list[str] = []
    graph = graph_of(parameters, messages)
    assert run(graph, parameters, 5) == [True, True, True, False, False]
    assert parameters.value.tolist() == [15.0] * 3
    assert graph.num_graphs == 1
    assert messages == [
        "CUDA graphs (optimizer): the update of the parameters, with norm and clipping, in 1 graph."
    ]
    graph.release()
    assert run(graph, parameters, 4) == [True, True, True, False]
    graph.close()
    assert run(graph, parameters, 4) == [True] * 4
    assert graph.num_graphs == 0


def test_an_update_of_another_form_or_of_other_tensors_runs_eagerly_and_is_captured_later():
    parameters = Parameters(ParallelMesh.single())
    graph = graph_of(parameters)
    run(graph, parameters, 4)
    assert run(graph, parameters, form="other") == [True]
    assert run(graph, parameters) == [False]
    assert run(graph, parameters, 4, form="other") == [True, True, False, False]
    assert run(graph, parameters, 4) == [True, True, True, False]
    old, parameters.value = parameters.value, torch.zeros(3)
    assert run(graph, parameters) == [True]
    assert graph.num_graphs == 0
    assert run(graph, parameters, 3) == [True, True, False]
    assert parameters.value.tolist() == [15.0 + 16 + 17 + 18] * 3
    assert old.tolist() == [105.0] * 3


@pytest.mark.parametrize("check", [False, True])
def test_changed_addresses_are_found_only_with_check(check):
    parameters = Parameters(ParallelMesh.single())
    graph = graph_of(parameters, check=check)
    run(graph, parameters, 4)
    parameters.value.data = torch.zeros(3)
    assert run(graph, parameters) == [check]
    assert parameters.value.tolist() == [5.0 if check else 0.0] * 3


def test_an_update_that_cannot_be_repeated_runs_eagerly_and_is_logged_once():
    parameters, messages = Parameters(ParallelMesh.single()), list[str]()
    graph = graph_of(parameters, messages)
    assert run(graph, parameters, 5, reason="a reason") == [True] * 5
    assert messages == ["CUDA graphs: the update of the parameters runs eagerly: a reason."]


def test_each_part_of_an_update_has_a_graph_and_a_call_of_the_host_follows():
    mesh = ParallelMesh.single()
    value, factor = torch.zeros(()), torch.ones(())
    calls: list[tuple[int, float]] = []
    doubled: Tensor | None = None

    def first():
        nonlocal doubled
        doubled = factor * 2
        return doubled

    def second():
        value.add_(doubled)

    def follow(number):
        calls.append((number, float(value)))

    graph = graph_of(Parameters(mesh))
    for number in range(5):
        factor.fill_(number + 1.0)
        update = Update("", value, value.data_ptr, (first, second), None, follow)
        result = graph.run(update)
        assert float(result) == 2.0 * (number + 1)
    assert graph.num_graphs == 2
    # The sums of 2, 4, 6, 8 and 10, after the first and after the second part of each update.
    sums = [0.0, 2.0, 6.0, 12.0, 20.0, 30.0]
    assert calls == [(n, sums[step + n]) for step in range(5) for n in (0, 1)]
