"""Layers that are sharded over two and four ranks, in float64, equal layers of torch or of one
process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.block import PostNormBlock, PreNormBlock
from lightning_megatron.layers.embedding import (
    InputEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from lightning_megatron.layers.linear import regions
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.loss.cross_entropy import vocab_parallel_cross_entropy
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.norm import LayerNorm
from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.layers.parameters.weight_gradient_queue import WeightGradientQueue
from lightning_megatron.layers.replicated import TableEmbedding
from lightning_megatron.layers.self_attention import SelfAttention
from lightning_megatron.layers.transformer_engine.engine_scaling import EngineScaling
from lightning_megatron.models.fp8_layers import set_fp8
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.layout import ParallelLayout
from tests.kernels.models import run as run_model
from tests.layers import small_layers
from tests.layers.cut_operators import cut_operators
from tests.layers.fake_engine import installed, output_and_gradients
from tests.layers.noted_casts import CONFIGS, GIVEN, compare_hand_over, given
from tests.layers.small_layers import (
    attach_slots,
    make_cases,
    record_products,
    run_once,
    run_recomputed,
    run_twice,
)
from tests.oracles import assert_equal, assert_same_gradients, load_full_, sequence_part
from tests.recorded import record_starts
from tests.world import run_world

S, B, D, H, V = 8, 2, 16, 4, 150


def run_all(rank: int, size: int) -> None:
    torch.set_default_dtype(torch.float64)
    for tp, sequence_parallel in ((2, False), (2, True), (4, True)):
        layout = ParallelLayout(size, tp=tp)
        mesh = ParallelMesh.create(layout, seed=4, sequence_parallel=sequence_parallel)
        for check in (
            check_linear,
            check_blocks,
            check_embedding_and_head,
            check_padded_rows_are_zero,
            check_slots,
            check_losses,
        ):
            check(mesh)
        if tp == 2:
            check_order(mesh)
            check_engine(mesh)
        mesh.destroy()
    torch.set_default_dtype(torch.float32)
    for sizes in ({"tp": 2}, {"tp": 2, "cp": 2}):
        mesh = ParallelMesh.create(
            ParallelLayout(size, **sizes), seed=0, sequence_parallel=True, overlaps_matmul=True
        )
        check_models_in_8_bits(mesh)
        mesh.destroy()


def test_sharded_layers_equal_layers_of_one_process() -> None:
    run_world(run_all, 4)


def split(values: Tensor, mesh: ParallelMesh) -> Tensor:
    return values.chunk(mesh.tp.size, -1)[mesh.tp.rank]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compare(
    layer: nn.Module,
    reference: Callable[[Tensor], Tensor],
    weights: Mapping[str, Tensor],
    mesh: ParallelMesh,
    inputs: Callable[[Tensor, ParallelMesh], Tensor] = sequence_part,
    outputs: Callable[[Tensor, ParallelMesh], Tensor] = sequence_part,
) -> None:
    """Compare a layer with its torch reference; ``inputs`` and ``outputs`` return the part of a full
    tensor of this rank.
    """
    case_name = f"{type(layer).__name__} tp={mesh.tp.size} sp={mesh.sequence_parallel}"
    load_full_(layer, weights)
    full: Any = draw(S, B, D, seed=1).requires_grad_()
    expected = reference(full)
    grad = draw(*expected.shape, seed=2)
    expected.backward(grad)
    local = inputs(full, mesh).detach().requires_grad_()
    actual = layer(local)
    actual.backward(outputs(grad, mesh))
    assert_equal(actual, outputs(expected, mesh), f"{case_name}: output")
    assert_equal(local.grad, inputs(full.grad, mesh), f"{case_name}: input gradient")
    gradients: Any = {name: weight.grad for name, weight in weights.items()}
    assert_same_gradients(layer, mesh, gradients, case_name)


def whole(full: Tensor, mesh: ParallelMesh) -> Tensor:
    return full


def draw_weights(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Draw the weights of a reference; ``__`` in a keyword stands for a dot."""
    return {
        name.replace("__", "."): draw(*shape, seed=10 + i).mul_(0.3).requires_grad_()
        for i, (name, shape) in enumerate(shapes.items())
    }


def check_linear(mesh: ParallelMesh) -> None:
    for bias in (True, False):
        for layer, inputs, outputs in (
            (ColumnParallelLinear(D, 12, mesh, bias=bias), sequence_part, split),
            (
                ColumnParallelLinear(D, 12, mesh, bias=bias, gather_output=True),
                sequence_part,
                whole,
            ),
            (RowParallelLinear(D, 12, mesh, bias=bias), split, sequence_part),
        ):
            w = draw_weights(weight=(12, D), **({"bias": (12,)} if bias else {}))
            reference = partial(F.linear, weight=w["weight"], bias=w.get("bias"))
            compare(layer, reference, w, mesh, inputs, outputs)


def check_blocks(mesh: ParallelMesh) -> None:
    torch.manual_seed(0)
    for block_class in (PreNormBlock, PostNormBlock):
        is_first = block_class is PreNormBlock
        reference = nn.TransformerEncoderLayer(D, H, 24, 0.0, "gelu", norm_first=is_first)
        block = block_class(
            SelfAttention(D, H, mesh, span=AttentionSpan(causal=False)),
            MLP(D, 24, mesh),
            LayerNorm(D, mesh),
            LayerNorm(D, mesh),
            mesh=mesh,
            layer=1,
        )
        names = {
            "attention.qkv.": "self_attn.in_proj_",
            "attention.output.": "self_attn.out_proj.",
            "mlp.up.": "linear1.",
            "mlp.down.": "linear2.",
            "attention_norm.": "norm1.",
            "mlp_norm.": "norm2.",
        }
        sources = {
            ours + kind: reference.get_parameter(theirs + kind)
            for ours, theirs in names.items()
            for kind in ("weight", "bias")
        }
        compare(block, reference, sources, mesh)


def check_embedding_and_head(mesh: ParallelMesh) -> None:
    layout_name = f"tp={mesh.tp.size} sp={mesh.sequence_parallel}"
    w = draw_weights(word__weight=(V, D), position__weight=(S + 3, D))
    tokens = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(4))
    tokens[0, :2] = torch.tensor([0, V - 1])
    positions = w["position.weight"][:S].unsqueeze(1)
    expected = F.embedding(tokens.t(), w["word.weight"]) + positions
    grad = draw(S, B, D, seed=5)
    expected.backward(grad)
    layer = InputEmbedding(
        VocabParallelEmbedding(V, D, mesh), TableEmbedding(S + 3, D, mesh), mesh=mesh
    )
    load_full_(layer, w)
    actual = layer(tokens)
    actual.backward(sequence_part(grad, mesh))
    assert_equal(actual, sequence_part(expected, mesh), f"embedding {layout_name}")
    gradients: Any = {name: weight.grad for name, weight in w.items()}
    assert_same_gradients(layer, mesh, gradients, f"embedding {layout_name}")
    with pytest.raises(IndexError, match=rf"\[0, {V}\): an id is {V}"):
        layer(torch.full((1, S), V))

    w = draw_weights(weight=(V, D))
    padded = -(-V // (128 * mesh.tp.size)) * 128 * mesh.tp.size
    compare(
        VocabParallelHead(V, D, mesh),
        lambda x: F.pad(F.linear(x, w["weight"]), (0, padded - V)),
        w,
        mesh,
        # Padded columns have no gradient.
        outputs=lambda full, mesh: split(full * (torch.arange(padded) < V), mesh),
    )


def check_padded_rows_are_zero(mesh: ParallelMesh) -> None:
    layer = VocabParallelEmbedding(V, D, mesh)
    initialize_(layer, "cpu", seed=3)
    num_rows = layer.weight.shape[0]
    num_true_rows = min(max(V - mesh.tp.rank * num_rows, 0), num_rows)
    assert num_rows % 128 == 0
    assert bool((layer.weight[num_true_rows:] == 0).all()), "padded rows start at zero"
    assert bool((layer.weight[:num_true_rows] != 0).any(1).all()), "true rows are drawn"


# Gradients that layers add to slots, and weight gradients that wait in a queue.


def compare_slots(layer: nn.Module, x: Tensor, run: Any, what: str, deferred: Any = None) -> None:
    """Compare outputs and gradients with those of autograd. Of the parameters ``deferred`` the weight
    half adds a gradient, if there are halves.
    """
    initialize_(layer, "cpu", seed=3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(20.0)
    plain, queue = copy.deepcopy(layer), WeightGradientQueue()
    gradients, calls = attach_slots(layer, queue=queue)
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
    outputs = [run(module, x_copy) for module, x_copy in zip((plain, layer), inputs, strict=True)]
    assert_equal(outputs[1], outputs[0], f"{what}: output")
    grad = small_layers.draw(*outputs[0].shape, seed=7)
    outputs[0].backward(grad)
    with nullcontext() if deferred is None else queue.open("half"):
        outputs[1].backward(grad)
    if x.is_floating_point():
        assert_equal(inputs[1].grad, inputs[0].grad, f"{what}: input gradient")
    earlier = dict(calls)
    queue.run("half")
    for (name, parameter), twin in zip(layer.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is None, f"{what}: autograd got a gradient of {name}"
        assert calls[name] >= 1, f"{what}: {name} reported no gradient"
        assert (earlier[name] < calls[name]) == (name in (deferred or ())), f"{what}: {name}"
        assert_equal(gradients[name], twin.grad, f"{what}: gradient of {name}")
    late = dict(calls)
    queue.run("half")
    assert calls == late, f"{what}: a weight half ran twice"


def check_slots(mesh: ParallelMesh) -> None:
    for name, layer, x in make_cases(mesh):
        for run in (run_twice, run_recomputed):
            compare_slots(layer, x, run, f"{name} {run.__name__} {mesh.tp.size}")
    for name, layer, x in make_cases(mesh):
        run = run_recomputed if mesh.tp.size == 4 else run_twice
        deferred = set[str]() if "embedding" in name else {"weight", "word.weight"}
        compare_slots(layer, x, run, f"{name} in halves", deferred)
    # On CPUs a pipelined product has one piece, but the layers run its code path.
    pipelined = replace(mesh, tp=replace(mesh.tp, overlaps_matmul=True))
    for name, layer, x in make_cases(pipelined):
        compare_slots(layer, x, run_once, f"{name} pipelined {mesh.tp.size}")


def check_order(mesh: ParallelMesh) -> None:
    """Communication overlaps with products, in a whole backward pass and in both halves."""
    names = ("all_gather", "reduce_scatter", "all_reduce")
    events: list[str] = []
    queue, layer = WeightGradientQueue(), ColumnParallelLinear(D, 12, mesh)
    initialize_(layer, "cpu", seed=0)
    attach_slots(layer, queue=queue)
    x = small_layers.draw(small_layers.local_length(mesh), B, D)
    outputs = [layer(x.clone().requires_grad_()) for _ in range(3)]
    total = "reduce_scatter" if mesh.sequence_parallel else "all_reduce"
    starts, ends = "all_gather starts", "all_gather ends"
    whole = ["input gradient", f"{total} starts", "weight gradient", f"{total} ends"]
    weight_half = ["weight gradient"] * 2
    if mesh.sequence_parallel:
        whole = [starts, *whole[:2], ends, *whole[2:]]
        weight_half = [starts, starts, ends, "weight gradient", ends, "weight gradient"]
    with pytest.MonkeyPatch.context() as patch, record_products(events):
        record_starts(patch, regions, names, events)
        outputs[0].backward(torch.ones_like(outputs[0]))
        assert events == whole, events
        events.clear()
        with queue.open("half"):
            for output in outputs[1:]:
                output.backward(torch.ones_like(output))
        assert events == ["input gradient", f"{total} starts", f"{total} ends"] * 2, events
        events.clear()
        queue.run("half")
    assert events == weight_half, events


# Losses: columns of padding, which some ranks have alone, must never receive probability.


def check_losses(mesh: ParallelMesh) -> None:
    for vocab_size, smoothing, padding in ((9, 0.1, 1e3), (17, 0.1, 0.0), (32, 0.0, 1e3)):
        labels = torch.randint(0, vocab_size, (6, 3), generator=torch.Generator().manual_seed(1))
        labels[0, 0], labels[1, 0], labels[2:4] = vocab_size - 1, 0, -1
        for these in (labels, torch.full_like(labels, -1)):
            check_loss(mesh, vocab_size, smoothing, these, padding)


def check_loss(
    mesh: ParallelMesh, vocab_size: int, smoothing: float, labels: Tensor, padding: float
) -> None:
    what = f"tp={mesh.tp.size} vocabulary={vocab_size} smoothing={smoothing}"
    extra = -vocab_size % (8 * mesh.tp.size)
    full, weight = 5 * draw(6, 3, vocab_size, seed=vocab_size), draw(6, 3).abs()
    expected = F.cross_entropy(
        full.requires_grad_().flatten(0, 1),
        labels.flatten(),
        reduction="none",
        label_smoothing=smoothing,
        ignore_index=-1,
    ).view(6, 3)
    (expected * weight).sum().backward()
    shard = split(F.pad(full.detach(), (0, extra), value=padding), mesh).clone().requires_grad_()
    before = shard.detach().clone()
    losses = vocab_parallel_cross_entropy(
        shard, labels, mesh, vocab_size, smoothing, ignore_index=-1
    )
    (losses * weight).sum().backward()
    assert torch.equal(shard.detach(), before), f"{what}: the input was modified"
    assert_equal(losses, expected, f"{what}: loss")
    gradient: Any = full.grad
    assert_equal(shard.grad, split(F.pad(gradient, (0, extra)), mesh), f"{what}: gradient")


def check_engine(mesh: ParallelMesh) -> None:
    """Layers that use Transformer Engine equal those of this package."""
    with installed():
        for kind, sizes in ((ColumnParallelLinear, (16, 24)), (RowParallelLinear, (32, 8))):
            module: Any = kind(*sizes, mesh)
            with torch.no_grad():
                for seed, parameter in enumerate(module.parameters()):
                    is_sharded = 10 * mesh.tp.rank * (not seed)
                    parameter.copy_(draw(*parameter.shape, seed=seed + is_sharded))
            is_column = kind is ColumnParallelLinear
            length = 2 if mesh.sequence_parallel and is_column else 4
            is_part = mesh.sequence_parallel or not is_column
            seed = mesh.tp.rank if is_part else 5
            hidden = draw(length, 3, sizes[0] if is_column else sizes[0] // 2, seed=seed)
            expected_tensors = output_and_gradients(module, hidden, 7)
            module.scaling = EngineScaling(None, torch.device("cpu"))
            actual_tensors = output_and_gradients(module, hidden, 7)
            for actual, expected in zip(actual_tensors, expected_tensors, strict=True):
                assert_equal(actual, expected, kind.__name__, 1e-12)


# Products in 8 bits, which overlap with communication.

#: Of two layers: forward before two column layers, backward before two row layers.
EXPECTED_CALLS = {"fused_all_gather_scaled_matmul": 8, "fused_scaled_matmul_reduce_scatter": 4}


def train_in_8_bits(mesh: ParallelMesh, kind: str, recompute: Any, emulate: bool) -> Any:
    model = GPT(CONFIGS[kind], mesh, seed=1).double()
    model.recompute = recompute
    set_fp8(model, FP8(emulate=emulate), emulate, mesh.device)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 100, (2, 9), generator=generator)
    return run_model(model, tokens[:, :-1], tokens[:, 1:].contiguous(), 0.0)


def check_models_in_8_bits(mesh: ParallelMesh) -> None:
    """Models whose products overlap with communication equal models whose products do not, and ranks
    hand over the same magnitudes as one process.
    """
    plain = replace(mesh, tp=replace(mesh.tp, overlaps_matmul=False))
    cases = (("llama", "none"), ("gpt2", "none"), ("llama", "full"))
    for kind, recompute in cases[:: 2 if mesh.cp.size > 1 else 1]:
        expected = train_in_8_bits(plain, kind, recompute, emulate=True)
        with cut_operators() as counts:
            actual = train_in_8_bits(mesh, kind, recompute, emulate=False)
        if recompute == "none":
            assert dict(counts) == EXPECTED_CALLS
        assert counts.total() >= sum(EXPECTED_CALLS.values())
        assert actual.keys() == expected.keys()
        for name, value in actual.items():
            assert_equal(value, expected[name], f"{kind}, {recompute}: {name}")
    kind = "llama" if mesh.cp.size == 1 else "gpt2"
    casts = compare_hand_over(CONFIGS[kind], plain, dtype=torch.float64)
    inputs, gradients = GIVEN[kind]
    assert given(casts, "input") == 2 * 2 * [*inputs]
    assert given(casts, "gradient") == 2 * 2 * [*reversed(gradients)]
