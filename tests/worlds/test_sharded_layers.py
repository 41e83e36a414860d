"""Layers that are sharded over two and four ranks, in float64, equal layers of torch or of one
process.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers import regions
from lightning_megatron.layers.attention import SelfAttention
from lightning_megatron.layers.block import TransformerBlock
from lightning_megatron.layers.chunked_loss import chunked_cross_entropy
from lightning_megatron.layers.dropout import hidden_dropout
from lightning_megatron.layers.embedding import (
    InputEmbedding,
    PositionEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from lightning_megatron.layers.fp8 import fp8_regions, weight_products
from lightning_megatron.layers.fp8 import scaling as scaling_module
from lightning_megatron.layers.fp8.magnitude import find_magnitude, no_magnitude
from lightning_megatron.layers.fp8.operand import Operand, needed
from lightning_megatron.layers.fp8.overlapped_products import gathered_product, scattered_product
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.gradient_slot import GradientSlot, set_slot
from lightning_megatron.layers.init import initialize_
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.loss import vocab_parallel_cross_entropy
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.rotary import apply_rotary, rotary_tables
from lightning_megatron.layers.summed_loss import summed_cross_entropy
from lightning_megatron.layers.transformer_engine.engine_scaling import EngineScaling
from lightning_megatron.layers.weight_gradient_queue import WeightGradientQueue
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.fp8_layers import set_fp8
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.layout import ParallelLayout
from tests.kernels.models import run as run_model
from tests.layers import small_layers
from tests.layers.cut_operators import cut_operators
from tests.layers.fake_engine import installed, output_and_gradients
from tests.layers.noted_casts import CONFIGS, GIVEN, compare_hand_over, given, spread
from tests.layers.small_layers import (
    FORMS,
    attach_slots,
    make_cases,
    record_products,
    run_once,
    run_recomputed,
    run_twice,
    stored_losses,
)
from tests.oracles import assert_equal, assert_same_gradients, load_full_, sequence_part
from tests.recorded import record_starts
from tests.sweeps import chosen
from tests.world import run_world

S, B, D, H, V = 8, 2, 16, 4, 150
SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "max_seq_length": 8,
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
}
DROPPING = {"hidden_dropout": 0.3, "attention_dropout": 0.3}


def run_all(rank: int, size: int) -> None:
    torch.set_default_dtype(torch.float64)
    for tp, sequence_parallel in ((2, False), (2, True), (4, True)):
        layout = ParallelLayout(size, tp=tp)
        mesh = ParallelMesh.create(layout, seed=4, sequence_parallel=sequence_parallel)
        checks = [
            *(check_linear, check_norms, check_mlps, check_attention, check_blocks),
            *(check_embedding_and_head, check_padded_rows_are_zero),
            *(check_slots, check_halves, check_losses, check_chunks_and_sums, check_masks),
        ]
        if tp == 2:
            checks += [check_order, check_recomputation, check_engine]
        for check in checks:
            check(mesh)
        mesh.destroy()
    torch.set_default_dtype(torch.float32)
    for sizes in ({"tp": 2}, {"tp": 2, "cp": 2}):
        mesh = ParallelMesh.create(
            ParallelLayout(size, **sizes), seed=0, sequence_parallel=True, overlaps_matmul=True
        )
        check_models_in_8_bits(mesh)
        check_magnitudes(mesh)
        if mesh.cp.size == 1:
            check_products_in_8_bits(mesh)
            check_order_in_8_bits(mesh)
        mesh.destroy()


def test_sharded_layers_equal_layers_of_one_process() -> None:
    run_world(run_all, 4)


def split(values: Tensor, mesh: ParallelMesh) -> Tensor:
    return values.chunk(mesh.tp.size, -1)[mesh.tp.rank]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def full_tensor(tensor: Tensor, mesh: ParallelMesh) -> Tensor:
    return tensor


def compare(
    layer: nn.Module,
    reference: Callable[[Tensor], Tensor],
    weights: Mapping[str, Tensor],
    mesh: ParallelMesh,
    *,
    inputs: Callable[[Tensor, ParallelMesh], Tensor] = sequence_part,
    outputs: Callable[[Tensor, ParallelMesh], Tensor] = sequence_part,
    width: int = D,
) -> None:
    """Compare a layer with its torch reference; ``inputs`` and ``outputs`` return the part of a full
    tensor of this rank.
    """
    case_name = f"{type(layer).__name__} tp={mesh.tp.size} sp={mesh.sequence_parallel}"
    load_full_(layer, weights)
    full = draw(S, B, width, seed=1).requires_grad_()
    expected = reference(full)
    grad = draw(*expected.shape, seed=2)
    expected.backward(grad)

    local = inputs(full, mesh).detach().requires_grad_()
    actual = layer(local)
    actual.backward(outputs(grad, mesh))
    assert_equal(actual, outputs(expected, mesh), f"{case_name}: output")
    assert full.grad is not None
    assert local.grad is not None
    assert_equal(local.grad, inputs(full.grad, mesh), f"{case_name}: input gradient")
    assert_same_gradients(
        layer, mesh, {name: gradient_of(weight) for name, weight in weights.items()}, case_name
    )


def gradient_of(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def draw_weights(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Draw the weights of a reference; ``__`` in a keyword stands for a dot."""
    return {
        name.replace("__", "."): draw(*shape, seed=10 + i).mul_(0.3).requires_grad_()
        for i, (name, shape) in enumerate(shapes.items())
    }


def check_linear(mesh: ParallelMesh) -> None:
    for bias in (True, False):
        w = draw_weights(weight=(12, D), **({"bias": (12,)} if bias else {}))
        reference = lambda x, w=w: F.linear(x, w["weight"], w.get("bias"))  # noqa: E731
        compare(ColumnParallelLinear(D, 12, mesh, bias=bias), reference, w, mesh, outputs=split)
        w = draw_weights(weight=(12, D), **({"bias": (12,)} if bias else {}))
        reference = lambda x, w=w: F.linear(x, w["weight"], w.get("bias"))  # noqa: E731
        compare(RowParallelLinear(D, 12, mesh, bias=bias), reference, w, mesh, inputs=split)
    w = draw_weights(weight=(12, D), bias=(12,))
    compare(
        ColumnParallelLinear(D, 12, mesh, gather_output=True),
        lambda x: F.linear(x, w["weight"], w["bias"]),
        w,
        mesh,
        outputs=full_tensor,
    )


def check_norms(mesh: ParallelMesh) -> None:
    w = draw_weights(weight=(D,), bias=(D,))
    compare(LayerNorm(D, mesh), lambda x: F.layer_norm(x, (D,), w["weight"], w["bias"]), w, mesh)
    v = draw_weights(weight=(D,))
    compare(LayerNorm(D, mesh, bias=False), lambda x: F.layer_norm(x, (D,), v["weight"]), v, mesh)
    u = draw_weights(weight=(D,))
    compare(RMSNorm(D, mesh), lambda x: F.rms_norm(x, (D,), u["weight"], 1e-5), u, mesh)


def check_mlps(mesh: ParallelMesh) -> None:
    for activation, approximate in (("gelu", "none"), ("gelu_tanh", "tanh")):
        w = draw_weights(up__weight=(24, D), up__bias=(24,), down__weight=(D, 24), down__bias=(D,))

        def reference(
            x: Tensor, w: dict[str, Tensor] = w, approximate: str = approximate
        ) -> Tensor:
            inner = F.gelu(F.linear(x, w["up.weight"], w["up.bias"]), approximate=approximate)
            return F.linear(inner, w["down.weight"], w["down.bias"])

        compare(MLP(D, 24, mesh, activation=activation), reference, w, mesh)
    w = draw_weights(gate_up__weight=(48, D), down__weight=(D, 24))

    def gated(x: Tensor) -> Tensor:
        gate, up = F.linear(x, w["gate_up.weight"]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, w["down.weight"])

    compare(MLP(D, 24, mesh, activation="swiglu", bias=False), gated, w, mesh)


def check_attention(mesh: ParallelMesh) -> None:
    for causal in (True, False):
        w = draw_weights(
            qkv__weight=(3 * D, D), qkv__bias=(3 * D,), output__weight=(D, D), output__bias=(D,)
        )

        def reference(x: Tensor, w: dict[str, Tensor] = w, causal: bool = causal) -> Tensor:
            hidden, _ = F.multi_head_attention_forward(
                x, x, x, D, H, w["qkv.weight"], w["qkv.bias"], None, None, False, 0.0,
                w["output.weight"], w["output.bias"], need_weights=False, is_causal=causal,
                attn_mask=nn.Transformer.generate_square_subsequent_mask(S) if causal else None,
            )  # fmt: skip
            return hidden

        compare(SelfAttention(D, H, mesh, causal=causal), reference, w, mesh)
    for num_kv_heads in (1, 2):
        w = draw_weights(qkv__weight=((H + 2 * num_kv_heads) * 6, D), output__weight=(D, H * 6))
        layer = SelfAttention(D, H, mesh, num_kv_heads=num_kv_heads, head_dim=6, bias=False)
        tables = rotary_tables(S, 6, dtype=torch.float64)
        rotated = _LayerWithTables(layer, tables)
        compare(
            rotated,
            lambda x, w=w, g=num_kv_heads, t=tables: grouped_attention(x, w, g, t),
            {f"layer.{k}": v for k, v in w.items()},
            mesh,
        )


class _LayerWithTables(nn.Module):
    def __init__(self, layer: nn.Module, tables: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.layer, self.tables = layer, tables

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.tables)


def grouped_attention(
    x: Tensor, w: Mapping[str, Tensor], groups: int, tables: tuple[Tensor, Tensor]
) -> Tensor:
    """Attend with repeated key/value heads, by plain matrix products."""
    parts = F.linear(x, w["qkv.weight"]).split([H * 6, groups * 6, groups * 6], -1)
    q, k, v = (part.unflatten(-1, (-1, 6)) for part in parts)
    q, k = apply_rotary(q, tables), apply_rotary(k, tables)
    k, v = (t.repeat_interleave(H // groups, 2) for t in (k, v))
    scores = torch.einsum("sbhk,tbhk->bhst", q, k) / 6**0.5
    scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
    mixed = torch.einsum("bhst,tbhk->sbhk", scores.softmax(-1), v)
    return F.linear(mixed.flatten(2), w["output.weight"])


def check_blocks(mesh: ParallelMesh) -> None:
    torch.manual_seed(0)
    for position in ("pre", "post"):
        reference = nn.TransformerEncoderLayer(D, H, 24, 0.0, "gelu", norm_first=position == "pre")
        block = TransformerBlock(
            SelfAttention(D, H, mesh, causal=False),
            MLP(D, 24, mesh),
            LayerNorm(D, mesh),
            LayerNorm(D, mesh),
            mesh=mesh,
            layer=1,
            norm_position=position,
        )
        sources = {
            "attention.qkv.weight": reference.self_attn.in_proj_weight,
            "attention.qkv.bias": reference.self_attn.in_proj_bias,
            **{
                f"attention.output.{k}": getattr(reference.self_attn.out_proj, k)
                for k in ("weight", "bias")
            },
            **{f"mlp.up.{k}": getattr(reference.linear1, k) for k in ("weight", "bias")},
            **{f"mlp.down.{k}": getattr(reference.linear2, k) for k in ("weight", "bias")},
            **{f"attention_norm.{k}": getattr(reference.norm1, k) for k in ("weight", "bias")},
            **{f"mlp_norm.{k}": getattr(reference.norm2, k) for k in ("weight", "bias")},
        }
        compare(block, reference, sources, mesh)


def check_embedding_and_head(mesh: ParallelMesh) -> None:
    layout_name = f"tp={mesh.tp.size} sp={mesh.sequence_parallel}"
    w = draw_weights(word__weight=(V, D), position__weight=(S + 3, D))
    tokens = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(4))
    tokens[0, :2] = torch.tensor([0, V - 1])
    expected = F.embedding(tokens.t(), w["word.weight"]) + w["position.weight"][
        2 : S + 2
    ].unsqueeze(1)
    grad = draw(S, B, D, seed=5)
    expected.backward(grad)
    layer = InputEmbedding(
        VocabParallelEmbedding(V, D, mesh), PositionEmbedding(S + 3, D, mesh), mesh=mesh
    )
    load_full_(layer, w)
    actual = layer(tokens, offset=2)
    actual.backward(sequence_part(grad, mesh))
    assert_equal(actual, sequence_part(expected, mesh), f"embedding {layout_name}")
    assert_same_gradients(
        layer, mesh, {k: gradient_of(v) for k, v in w.items()}, f"embedding {layout_name}"
    )
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

#: Parameters whose gradients the weight half adds, by the name of the layer in `make_cases`.
DEFERRED = {
    "column": {"weight"},
    "row": {"weight"},
    "gathered column": {"weight"},
    "head": {"weight"},
    "tied": {"word.weight"},
}


def compare_slots(layer: nn.Module, x: Tensor, run: Any, what: str, deferred: Any = None) -> None:
    """Compare outputs and gradients with those of autograd.

    Args:
        layer: A layer, whose parameters get slots.
        x: Its input.
        run: Runs the layer.
        what: Name of the case.
        deferred: Parameters of which the weight half adds a gradient, if there are halves.
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
    # On CPUs a pipelined product has one piece, but the layers run its code path.
    pipelined = replace(mesh, tp=replace(mesh.tp, overlaps_matmul=True))
    for name, layer, x in make_cases(pipelined):
        compare_slots(layer, x, run_once, f"{name} pipelined {mesh.tp.size}")


def check_halves(mesh: ParallelMesh) -> None:
    for name, layer, x in make_cases(mesh):
        run = run_recomputed if mesh.tp.size == 4 else run_twice
        compare_slots(layer, x, run, f"{name} in halves", DEFERRED.get(name, set()))


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
    assert full.grad is not None
    assert_equal(gradient_of(shard), split(F.pad(full.grad, (0, extra)), mesh), f"{what}: gradient")


#: Factors of the losses of three microbatches, such as a loss scale over a number of tokens.
SCALES = (1.0, -3.0, 0.125)
#: Forms of logits, smoothing of labels, and tokens of a chunk.
LOSS_CASES = chosen(
    list(itertools.product(FORMS, (0.0, 0.1), (1, 7, 24, 100))),
    (FORMS[0], 0.1, 7),
    (FORMS[1], 0.0, 100),
    (FORMS[2], 0.1, 24),
)


def check_chunks_and_sums(mesh: ParallelMesh) -> None:
    """Losses without stored logits, by chunks of tokens or as a sum, equal those of stored logits."""
    for kind, function in (("chunked", chunked_cross_entropy), ("summed", summed_cross_entropy)):
        for vocab_size, slot_scale in ((9, None), (21, 0.5)):
            for form, smoothing, chunk in LOSS_CASES:
                options = {"form": form, "vocab_size": vocab_size, "label_smoothing": smoothing}
                expected = losses_and_gradients(mesh, kind, stored_losses, None, options)
                options["chunk"] = chunk
                actual = losses_and_gradients(mesh, kind, function, slot_scale, options)
                expected[2] *= slot_scale or 1.0
                for name, a, b in zip(("loss", "hidden", "weight"), actual, expected, strict=True):
                    what = f"tp={mesh.tp.size} {kind} {options}: {name}"
                    assert_equal(a, b, what, tolerance=1e-12)


def losses_and_gradients(
    mesh: ParallelMesh, kind: str, function: Any, slot_scale: float | None, options: dict[str, Any]
) -> list[Tensor]:
    """Run all forward passes before the first backward pass, as in a pipeline."""
    vocab_size, num = options["vocab_size"], 3
    head = VocabParallelHead(vocab_size, D, mesh, multiple=8)
    initialize_(head, "cpu", seed=2)
    with torch.no_grad():
        head.weight.mul_(20.0)
        head.weight[max(vocab_size - mesh.tp.rank * len(head.weight), 0) :] = 100.0
    seed = 10 + mesh.tp.rank if mesh.sequence_parallel else 10
    hidden = draw(small_layers.local_length(mesh), num, D, seed=seed).requires_grad_()
    labels = torch.randint(0, vocab_size, (S, num), generator=torch.Generator().manual_seed(1))
    labels[0, 0], labels[1, 0], labels[2:4] = vocab_size - 1, 0, -100
    calls: list[int] = []
    slot = torch.full_like(head.weight, torch.nan)
    if slot_scale is not None:
        set_slot(head.weight, GradientSlot(slot, lambda: calls.append(1), scale=slot_scale))
    batches = [labels, labels.flip(0), torch.full_like(labels, -100)]
    losses = [function(hidden, head.weight, batch, mesh, **options) for batch in batches]
    if kind == "chunked":
        losses = [loss * draw(S, num, seed=5).abs() for loss in losses]
    totals = [loss.sum() for loss in losses]
    for factor, total in zip(SCALES, totals, strict=True):
        (total * factor).backward()
    assert len(calls) == (0 if slot_scale is None else num), "each gradient is reported once"
    weight_gradient = slot if slot_scale is not None else gradient_of(head.weight)
    return [torch.stack(totals).detach(), gradient_of(hidden), weight_gradient.clone()]


# Dropout: masks are those of one process, and recomputation repeats them.


def draw_mask(mesh: ParallelMesh) -> Tensor:
    """Drop elements of the residual stream, and return which were dropped in whole rows."""
    shares = mesh.tp.size if mesh.sequence_parallel else 1
    dropped = hidden_dropout(torch.ones(8 // shares, 2, 33), 0.5, True, mesh) == 0
    return torch.cat(all_gather_objects(dropped, mesh.tp)[:shares])


def draw_attention_mask(mesh: ParallelMesh) -> Tensor:
    """Drop attention weights of a layer whose heads compute the same, and return where weights of
    all heads were dropped.
    """
    model = GPT(GPTConfig.gpt2(**SMALL, attention_dropout=0.5), mesh, seed=1)
    core = model.layers["0"].attention._core
    value = torch.eye(8).view(8, 1, 1, 8).expand(8, 2, 4 // mesh.tp.size, 8)
    dropped = core(torch.zeros_like(value), torch.zeros_like(value), value) == 0
    return torch.cat(all_gather_objects(dropped, mesh.tp), -1)


def draw_masks(mesh: ParallelMesh) -> list[Tensor]:
    mesh.random.begin_microbatch(3, 1, (4, 1, 2))
    mesh.random.seek(2)
    return [draw_mask(mesh), draw_mask(mesh), draw_attention_mask(mesh)]


def check_masks(mesh: ParallelMesh) -> None:
    before = torch.get_rng_state()
    first, second, weights = draw_masks(mesh)
    assert not torch.equal(first, second), "a layer's draws follow one another"
    assert torch.equal(torch.get_rng_state(), before), "default generators are left alone"
    for actual, expected in zip(
        (first, second, weights), draw_masks(ParallelMesh.single(seed=4)), strict=True
    ):
        assert torch.equal(actual, expected), "masks are those of one process"
    heads = weights.unflatten(-1, (4, 8)).unbind(-2)
    assert not torch.equal(heads[0], heads[3]), "heads drop different weights"


def train(mesh: ParallelMesh, config: GPTConfig, recompute: str) -> list[Tensor]:
    """Run two microbatches forward, then both backward, and return losses and gradients."""
    model = GPT(config, mesh, seed=1)
    model.recompute = recompute
    tokens = torch.randint(0, 40, (2, 2, 8), generator=torch.Generator().manual_seed(2))
    losses = []
    for number in range(2):
        mesh.random.begin_microbatch(5, number)
        losses.append(model(tokens[number], tokens[number]).mean())
    for loss in losses:
        loss.backward()
    assert losses[0] != losses[1]
    return [loss.detach() for loss in losses] + [p.grad for p in model.parameters()]


def check_recomputation(mesh: ParallelMesh) -> None:
    config = GPTConfig.gpt2(**SMALL, **DROPPING)
    if mesh.sequence_parallel:
        config = GPTConfig.llama(**SMALL, **DROPPING, norm_position="post")
    expected_tensors = train(mesh, config, "none")
    for recompute in ("selective", "full"):
        for actual, expected in zip(train(mesh, config, recompute), expected_tensors, strict=True):
            assert torch.equal(actual, expected), f"{recompute} sp={mesh.sequence_parallel}"


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


def train_in_8_bits(
    mesh: ParallelMesh, kind: str, recompute: Any, emulate: bool
) -> dict[str, Tensor]:
    """Return losses and gradients of a model in 8 bits."""
    model = GPT(CONFIGS[kind], mesh, seed=1).double()
    model.recompute = recompute
    set_fp8(model, FP8(emulate=emulate), emulate, mesh.device)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 100, (2, 9), generator=generator)
    return run_model(model, tokens[:, :-1], tokens[:, 1:].contiguous(), 0.0)


def check_models_in_8_bits(mesh: ParallelMesh) -> None:
    """Models whose products overlap with communication equal models whose products do not."""
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


def check_products_in_8_bits(mesh: ParallelMesh) -> None:
    """Both overlapped products equal products of full matrices."""
    scaling, size, rank = Scaling(FP8(emulate=True), emulate=True), mesh.tp.size, mesh.tp.rank

    def rows(matrix: Tensor) -> Operand:
        return needed(scaling.cast_input(matrix, rows=True, columns=False).rows)

    full_left, right = rows(spread(8 * size, 32)), rows(spread(48, 32, seed=1))
    local = Operand(full_left.values.chunk(size)[rank].contiguous(), full_left.scale)
    expected = full_left.numbers(torch.float64) @ right.numbers(torch.float64).t()
    left = rows(spread(8 * size, 32, seed=2 + rank))
    partial = left.numbers(torch.float64) @ right.numbers(torch.float64).t()
    expected_sum = all_reduce_(partial, mesh.tp).chunk(size)[rank]
    for emulate in (True, False):
        with cut_operators() as counts:
            arguments = mesh, torch.float64
            gathered, actual = gathered_product(local, right, *arguments, emulate=emulate)
            assert torch.equal(
                gathered.values.view(torch.uint8), full_left.values.view(torch.uint8)
            )
            assert torch.equal(gathered.scale, full_left.scale)
            assert_equal(actual, expected, f"gathered, {emulate}")
            scattered = scattered_product(left, right, *arguments, emulate=emulate)
            assert_equal(scattered, expected_sum, f"scattered, {emulate}")
        # Emulated products do not overlap with communication.
        assert counts.total() == (0 if emulate else 2)


def check_order_in_8_bits(mesh: ParallelMesh) -> None:
    """The backward pass of a column layer overlaps the all-gather of its inputs with a product."""
    hidden = spread(8, 32, seed=mesh.tp.rank).requires_grad_()
    weight = spread(48, 32, seed=9).requires_grad_()
    scaling = Scaling(FP8(emulate=True), emulate=True)
    plain = replace(mesh, tp=replace(mesh.tp, overlaps_matmul=False))
    output = fp8_regions.fp8_column_linear(hidden, weight, None, plain, scaling)
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (scaling_module, "one_shot_all_reduce_"),
            (weight_products, "start_gathering"),
            (fp8_regions, "product"),
            (fp8_regions, "start_summing"),
            (weight_products, "transposed"),
        ):
            function = getattr(module, name)

            def record(*args: Any, name: str = name, function: Any = function, **rest: Any) -> Any:
                calls.append(name)
                return function(*args, **rest)

            patch.setattr(module, name, record)
        output.backward(torch.ones_like(output))
    order = ["one_shot_all_reduce_", "start_gathering", "product", "start_summing", "transposed"]
    assert calls == order


def check_magnitudes(mesh: ParallelMesh) -> None:
    """Ranks hand over the same magnitudes as one process."""
    kind = "llama" if mesh.cp.size == 1 else "gpt2"
    plain = replace(mesh, tp=replace(mesh.tp, overlaps_matmul=False))
    casts = compare_hand_over(CONFIGS[kind], plain, dtype=torch.float64)
    inputs, gradients = GIVEN[kind]
    assert given(casts, "input") == 2 * 2 * [*inputs]
    assert given(casts, "gradient") == 2 * 2 * [*reversed(gradients)]
    scaling, matrix = Scaling(FP8(emulate=True), emulate=True), spread(16, 32, seed=mesh.rank)
    find_magnitude(matrix, magnitude := no_magnitude(matrix))
    before = magnitude.clone()
    axes: dict[str, Any] = {"rows": True, "columns": False, "row_axes": (mesh.cp, mesh.tp)}
    actual = needed(scaling.cast_input(matrix, **axes, bits=magnitude).rows)
    expected = needed(scaling.cast_input(matrix, **axes).rows)
    assert torch.equal(actual.scale, expected.scale)
    # Another layer that reads the matrix may have other axes.
    assert torch.equal(magnitude, before)
