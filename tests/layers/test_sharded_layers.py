"""Outputs, input gradients and parameter gradients of every layer equal those of torch.nn in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention import SelfAttention
from lightning_megatron.layers.block import TransformerBlock
from lightning_megatron.layers.embedding import (
    InputEmbedding,
    PositionEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from lightning_megatron.layers.init import initialize_
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.rotary import apply_rotary, rotary_tables
from lightning_megatron.plan.layout import ParallelLayout
from tests.oracles import assert_equal, assert_same_gradients, load_full_, sequence_part
from tests.world import run_world

S, B, D, H, V = 8, 2, 16, 4, 150

LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def full_tensor(tensor: Tensor, mesh: ParallelMesh) -> Tensor:
    return tensor


def feature_part(tensor: Tensor, mesh: ParallelMesh) -> Tensor:
    return tensor.chunk(mesh.tp.size, -1)[mesh.tp.rank]


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
        compare(
            ColumnParallelLinear(D, 12, mesh, bias=bias), reference, w, mesh, outputs=feature_part
        )
        w = draw_weights(weight=(12, D), **({"bias": (12,)} if bias else {}))
        reference = lambda x, w=w: F.linear(x, w["weight"], w.get("bias"))  # noqa: E731
        compare(RowParallelLinear(D, 12, mesh, bias=bias), reference, w, mesh, inputs=feature_part)
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
        outputs=lambda full, mesh: feature_part(full * (torch.arange(padded) < V), mesh),
    )


def check_padded_rows_are_zero(mesh: ParallelMesh) -> None:
    layer = VocabParallelEmbedding(V, D, mesh)
    initialize_(layer, "cpu", seed=3)
    num_rows = layer.weight.shape[0]
    num_true_rows = min(max(V - mesh.tp.rank * num_rows, 0), num_rows)
    assert num_rows % 128 == 0
    assert bool((layer.weight[num_true_rows:] == 0).all()), "padded rows start at zero"
    assert bool((layer.weight[:num_true_rows] != 0).any(1).all()), "true rows are drawn"


def check_all(rank: int, size: int) -> None:
    torch.set_default_dtype(torch.float64)
    for tp, sequence_parallel in LAYOUTS:
        mesh = ParallelMesh.create(
            ParallelLayout(world_size=4, tp=tp), sequence_parallel=sequence_parallel
        )
        checks: list[Callable[[Any], None]] = [
            check_linear,
            check_norms,
            check_mlps,
            check_attention,
            check_blocks,
            check_embedding_and_head,
            check_padded_rows_are_zero,
        ]
        for check in checks:
            check(mesh)
        mesh.destroy()


def test_every_layer_equals_its_torch_reference_in_every_layout() -> None:
    run_world(check_all, 4)


def test_norms_of_bfloat16_keep_the_dtype_and_use_float32_statistics() -> None:
    mesh = ParallelMesh.single()
    wide = 300 * draw(4, 2, 64).bfloat16()
    for norm, reference in (
        (LayerNorm(64, mesh), nn.LayerNorm(64)),
        (RMSNorm(64, mesh), nn.RMSNorm(64, eps=1e-5)),
    ):
        initialize_(norm, "cpu", seed=0)
        actual = norm.bfloat16()(wide)
        assert actual.dtype == torch.bfloat16
        assert_equal(actual.float(), reference(wide.float()), type(norm).__name__, tolerance=5e-3)


def test_gather_output_with_fused_ranges_is_refused() -> None:
    mesh = ParallelMesh.single()
    qkv = SelfAttention(8, 2, mesh).qkv
    with pytest.raises(ValueError, match="equal parts"):
        ColumnParallelLinear(8, 24, mesh, ranges=qkv.weight.shard_spec.ranges, gather_output=True)


def test_positions_past_the_table_are_refused() -> None:
    with pytest.raises(
        ParallelPlanError, match=r"seq_length \(9\) must not exceed max_seq_length \(8\)"
    ):
        PositionEmbedding(8, 4, ParallelMesh.single())(5, offset=4)
