"""Dropout masks are functions of the numbers of an element; norms and positions of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.layers.fused.dropout import hidden_dropout, keep_mask, philox
from lightning_megatron.layers.linear.linear import ColumnParallelLinear
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.layers.recompute import replayed
from lightning_megatron.layers.replicated import TableEmbedding
from lightning_megatron.layers.self_attention import SelfAttention
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.context import ContextCut
from lightning_megatron.plan.mask_numbers import MaskNumbers, PlaceCut, dimension_of_rows
from tests.oracles import assert_equal

CPU = torch.device("cpu")
HALF = 2**30


def streams_of(samples: tuple[int, int, int], step: int = 3, layer: int = 2) -> RandomStreams:
    streams = RandomStreams(5)
    streams.begin_microbatch(step, 0, samples)
    streams.seek(layer)
    return streams


def mask(
    shape: tuple[int, ...],
    samples: tuple[int, int, int] = (0, 1, 0),
    *,
    streams: RandomStreams | None = None,
    purpose: str = "hidden",
    threshold: int = HALF,
    **numbers: object,
) -> Tensor:
    """Return which elements of ``(seq, batch, heads, features)`` are kept."""
    sizes = {"places": 0, "samples": 1, "heads": 2}
    dimensions = {name: dimension_of_rows(shape, dim) for name, dim in sizes.items()}
    key = (streams or streams_of(samples)).mask_key(purpose, shape[1])
    rows = MaskNumbers(**dimensions, **numbers)
    assert MaskNumbers.of_integers(rows.as_integers) == rows
    return keep_mask(key, (shape[0] * shape[1] * shape[2], shape[3]), rows, threshold, CPU).view(
        shape
    )


PUBLISHED = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]  # fmt: skip


def test_words_are_those_of_the_published_generator():
    for counter, key, words in PUBLISHED:
        tensors = (tuple(map(torch.tensor, values)) for values in (counter, key))
        assert tuple(int(word) for word in philox(*tensors)) == words


def test_shards_have_the_mask_of_the_whole_activation():
    whole = mask((12, 6, 4, 300))
    for first, stop in ((0, 100), (100, 300), (128, 160), (299, 300)):
        part = mask((12, 6, 4, stop - first), first_feature=first)
        assert torch.equal(part, whole[..., first:stop])
    assert torch.equal(mask((12, 6, 2, 300), first_head=2), whole[:, :, 2:])
    assert torch.equal(mask((12, 2, 4, 300), (2, 1, 2)), whole[:, 2:4])
    assert torch.equal(mask((12, 3, 4, 300), (1, 2, 3)), whole[:, 1::2])
    for rank in range(3):
        held = ContextCut(3, 12).positions(rank)
        for shard in range(2):
            cut = PlaceCut.of(2, (shard, 2), (rank, 3))
            part = mask((2, 6, 4, 300), cut=cut)
            assert torch.equal(part, whole[held[2 * shard : 2 * shard + 2]])
    odd = PlaceCut.of(3, (0, 1), (1, 2))
    assert torch.equal(mask((3, 6, 4, 300), cut=odd), whole[3:6])


def test_masks_differ_between_steps_layers_draws_and_purposes():
    streams = streams_of((0, 1, 0))
    masks = [mask((8, 2, 1, 40), streams=streams) for _ in range(2)]
    masks.append(mask((8, 2, 1, 40), purpose="attention"))
    masks += [mask((8, 2, 1, 40), streams=streams_of((0, 1, 0), *at)) for at in ((4, 2), (3, 1))]
    assert len({tuple(each.flatten().tolist()) for each in masks}) == len(masks)


def test_elements_are_kept_independently_with_the_given_probability():
    kept = mask((256, 8, 1, 512), threshold=round(0.1 * 2**31)).double().squeeze(2)
    spread = (0.09 / kept.numel()) ** 0.5
    assert abs(float(kept.mean()) - 0.9) < 5 * spread
    centred = kept - 0.9
    for dim in range(3):
        neighbours = (centred * centred.roll(1, dim)).mean() / 0.09
        assert abs(float(neighbours)) < 5 * kept.numel() ** -0.5


SIZES: dict[str, Any] = {"vocab_size": 40, "max_seq_length": 8, "num_layers": 2, "hidden_size": 16}
DROPPING = {"hidden_dropout": 0.3, "attention_dropout": 0.3}


def test_only_training_with_dropout_draws_and_every_call_draws_new_masks(monkeypatch):
    tokens, mesh = torch.zeros(1, 4, dtype=torch.long), ParallelMesh.single()
    model = GPT(GPTConfig.gpt2(**SIZES, num_heads=4, **DROPPING), mesh, seed=1)
    assert not torch.equal(model(tokens), model(tokens))
    monkeypatch.setattr(mesh.random, "fork", lambda name: pytest.fail(f"stream {name} was opened"))
    monkeypatch.setattr(mesh.random, "mask_key", lambda *draw: pytest.fail(f"{draw} was drawn"))
    assert torch.equal(model.eval()(tokens), model(tokens))
    GPT(GPTConfig.gpt2(**SIZES, num_heads=4), mesh, seed=1).train()(tokens)


def test_recomputation_restores_the_position_of_the_streams():
    mesh = ParallelMesh.single()
    mesh.random.begin_microbatch(1, 1)
    x = torch.ones(4, 1, 4, requires_grad=True)
    y = replayed(lambda t: hidden_dropout(t, 0.5, True, mesh) * t, mesh.random, 0, x)
    mesh.random.begin_microbatch(1, 2)
    position = mesh.random.position
    y.sum().backward()
    assert mesh.random.position == position


def test_norms_of_bfloat16_keep_the_dtype_and_use_float32_statistics():
    mesh = ParallelMesh.single()
    wide = 300 * torch.randn(4, 2, 64).bfloat16()
    for norm, reference in (
        (LayerNorm(64, mesh), nn.LayerNorm(64)),
        (RMSNorm(64, mesh), nn.RMSNorm(64, eps=1e-5)),
    ):
        initialize_(norm, "cpu", seed=0)
        actual = norm.bfloat16()(wide)
        assert actual.dtype == torch.bfloat16
        assert_equal(actual.float(), reference(wide.float()), type(norm).__name__, tolerance=5e-3)


def test_gather_output_with_fused_ranges_is_refused():
    mesh = ParallelMesh.single()
    qkv = SelfAttention(8, 2, mesh).qkv
    with pytest.raises(ValueError, match="equal parts"):
        ColumnParallelLinear(8, 24, mesh, ranges=qkv.weight.shard_spec.ranges, gather_output=True)


def test_positions_past_the_table_are_refused():
    with pytest.raises(
        ParallelPlanError, match=r"seq_length \(9\) must not exceed max_seq_length \(8\)"
    ):
        TableEmbedding(8, 4, ParallelMesh.single())(9)
