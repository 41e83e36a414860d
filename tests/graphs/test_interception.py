"""Calls inside plain code are intercepted from outside, and graphs begin and end at them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.graphs.chunk_parts import chunk_parts
from lightning_megatron.graphs.interception import Interception, intercepted, interceptions_of
from lightning_megatron.graphs.observation import Observation
from lightning_megatron.graphs.user_hooks import find_refusal
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.layers.block import PreNormBlock
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.recomputation import Recomputation
from tests.graphs.trained import SIZES, Case, assert_equal_bits, train

LLAMA = GPTConfig.llama(**SIZES, num_kv_heads=2, ffn_hidden_size=24)
EXPERTS = ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=16, shared_ffn_hidden_size=8)
ROUTED = replace(LLAMA, experts=EXPERTS)


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def reasons_of(model: GPT, *scopes: str) -> dict[str, str]:
    places = interceptions_of(model, 0, scopes or ("all",))
    return {place.name: place.reason for place in places if place.reason is not None}


def chain(*modules: nn.Module) -> list[Interception]:
    return [
        Interception(module, "_compiled_call_impl", str(number), tuple(module.parameters()))
        for number, module in enumerate(modules)
    ]


def test_calls_of_modules_and_methods_are_intercepted_inside_the_block_only():
    class Doubles(nn.Module):
        def forward(self, x: int) -> int:
            return 2 * self.more(x)

        def more(self, x: int) -> int:
            return x + 1

    module, seen = Doubles(), []
    places = [
        Interception(module, "_compiled_call_impl", "module"),
        Interception(module, "more", "method"),
    ]

    def on_call(place: Interception, original: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((place.name, args))
        return original(*args, **kwargs)

    attributes = dict(vars(module))
    with intercepted(places, on_call):
        assert module(3) == 8
    assert seen == [("module", (3,)), ("method", (3,))]
    assert vars(module) == attributes
    assert module(3) == 8
    assert len(seen) == 2


def test_a_graph_begins_where_a_bucket_is_first_read():
    first, second, third, fourth = (nn.Linear(2, 2) for _ in range(4))

    def begins(order: list[nn.Module], *buckets: list[nn.Parameter]) -> list[int]:
        def run(x: Any) -> Any:
            for module in order:
                x = module(x)
            return x

        part: Any = SimpleNamespace(run=run, interceptions=chain(*dict.fromkeys(order)))
        observation = Observation(part, RandomStreams(0), buckets)
        observation.observe(torch.ones(1, 2), "key")
        return sorted(observation.begins())

    # Buckets are filled in the order of the backward pass.
    buckets = [
        [fourth.weight, fourth.bias, third.weight],
        [third.bias, second.weight, second.bias],
        [first.weight, first.bias],
    ]
    order = [first, second, third, fourth]
    assert begins(order, *buckets) == [1, 2]
    assert begins(order, sum(buckets, [])) == []
    # A shared parameter counts where it is first read.
    order = [second, first, second, first]
    assert begins(order, list(first.parameters()), list(second.parameters())) == [1]
    assert begins(order, list(third.parameters())) == []


def test_calls_with_hooks_outside_of_scopes_or_with_sizes_on_the_host_are_held_by_no_graph():
    model = GPT(ROUTED, ParallelMesh.single(), seed=1)
    assert reasons_of(model) == {}
    outside = reasons_of(model, "attention", "experts")
    assert {name: outside[name] for name in ("embedding", "head", "layers.0.mlp.route")} == {
        "embedding": "scope embedding is not chosen",
        "head": "scope head is not chosen",
        "layers.0.mlp.route": "scope router is not chosen",
    }
    assert not {"layers.0.attention", "layers.0.mlp.compute"} & set(outside)

    def look(*_: Any) -> None: ...

    layers: Any = model.layers
    layers["1"].attention.qkv.register_forward_hook(look)
    layers["2"].register_forward_hook(look)
    layers["3"].mlp.router.register_forward_hook(look)
    hooks = reasons_of(model)
    assert set(hooks) == {"layers.1.attention", "layers.2", "layers.3.mlp.route"}
    assert all(reason.startswith("hook ") for reason in hooks.values())


class ReadsHost(PreNormBlock):
    """A user's block whose decision no graph can hold."""

    is_capturable = False

    def forward(self, hidden: torch.Tensor, rotary: Any = None, span: Any = None) -> torch.Tensor:
        factor = 2.0 if hidden.detach().abs().mean().item() > 0.01 else 1.0
        return super().forward(hidden * factor, rotary, span)


def test_a_users_block_that_is_not_capturable_runs_between_graphs_with_eager_bits():
    def spoil(model: GPT) -> None:
        model.layers["1"].__class__ = ReadsHost
        model.layers["3"].mlp.is_capturable = False

    expected, actual = (
        train(Case(LLAMA), ParallelMesh.single(), graphs=graphs, spoil=spoil)
        for graphs in (False, True)
    )
    assert actual.runner is not None
    assert actual.runner.failure is None, actual.runner.failure
    assert_equal_bits(actual, expected, "a block that reads on the host")
    # Three graphs of each pass, for the first microbatch of a step and for others.
    assert actual.runner.num_graphs == 2 * 2 * 3
    reasons = dict.fromkeys(("layers.1", "layers.3.mlp"), "is_capturable is False")
    assert reasons_of(actual.model) == reasons
    assert "layers.1 must run eagerly" in (find_refusal(actual.model) or "")


def test_a_layer_that_is_not_a_block_says_so():
    model = GPT(LLAMA, ParallelMesh.single(), seed=1)
    model.layers["1"] = nn.Linear(16, 16)
    assert reasons_of(model) == {"layers.1": "the layer is not a block of this package"}


def test_a_chunk_is_divided_where_recomputed_layers_begin_and_end(monkeypatch):
    model = GPT(LLAMA, ParallelMesh.single(), seed=1)

    def parts() -> list[tuple[tuple[int, ...], bool, bool, bool]]:
        return [
            (part.layers, part.has_embedding, part.has_head, part.keeps_inputs)
            for part in chunk_parts(model, 0, ("all",))
        ]

    assert parts() == [((0, 1, 2, 3), True, True, False)]
    model.recompute = Recomputation(("full",), layers=2)
    assert parts() == [
        ((), True, False, False),
        ((0, 1), False, False, True),
        ((2, 3), False, True, False),
    ]
    model.recompute = "full"
    assert parts() == [
        ((), True, False, False),
        ((0, 1, 2, 3), False, False, True),
        ((), False, True, False),
    ]
    # The last stage of a pipeline may have the head alone, and a stage in the middle no layer.
    monkeypatch.setattr(model, "layers_of_chunk", [()])
    monkeypatch.setattr(model, "is_first_stage", lambda chunk=0: False)
    assert parts() == [((), False, True, False)]
    monkeypatch.setattr(model, "is_last_stage", lambda chunk=0: False)
    assert parts() == []


def test_parts_that_no_graph_holds_run_between_graphs_with_eager_bits():
    seen: list[int] = []

    def hook(model: GPT) -> None:
        layers: Any = model.layers
        layers["0"].mlp.register_forward_hook(lambda *_: seen.append(0))
        layers["2"].register_forward_hook(lambda *_: seen.append(2))
        layers["3"].attention.register_forward_pre_hook(lambda *_: seen.append(3))

    dropout = GPTConfig.gpt2(**SIZES, hidden_dropout=0.2, attention_dropout=0.3)
    for config in (dropout, ROUTED):
        expected, actual = (
            train(Case(config), ParallelMesh.single(), graphs=graphs, spoil=hook)
            for graphs in (False, True)
        )
        assert actual.runner is not None
        assert actual.runner.failure is None, actual.runner.failure
        assert_equal_bits(actual, expected, str(config))
        # Four graphs of each pass, for the first microbatch of a step and for others.
        assert actual.runner.num_graphs == 2 * 2 * 4
    # Two trainings of each model, of five steps with three microbatches.
    assert [seen.count(number) for number in (0, 2, 3)] == [2 * 2 * 5 * 3] * 3


def test_a_call_whose_results_change_their_shapes_between_graphs_is_an_error():
    def spoil(model: GPT) -> None:
        mlp: Any = model.layers["1"].mlp
        run = mlp.forward
        calls: list[int] = []

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            calls.append(0)
            output = run(hidden)
            return output if len(calls) < 12 else output[:, :1].expand_as(output).clone()[:1]

        mlp.forward = forward
        mlp.register_forward_hook(lambda *_: None)

    with pytest.raises(RuntimeError, match="must give results of the shapes of its first run"):
        train(Case(LLAMA), ParallelMesh.single(), graphs=True, spoil=spoil)


def test_a_replayed_step_waits_for_all_parameters_those_of_eager_calls_too():
    scopes: list[tuple[str, ...]] = [("all",), ("attention",), ("mlp", "head")]
    for recompute in ("none", "full"):
        for chosen in scopes:
            case = Case(LLAMA, scopes=chosen, recompute=recompute)
            actual = train(case, ParallelMesh.single(), graphs=True)
            assert actual.runner is not None
            assert actual.runner.failure is None, actual.runner.failure
            left = set(actual.model.parameters()) - actual.waited
            assert not left, (recompute, chosen, len(left))
