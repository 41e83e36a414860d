"""Swapped modules match their originals in training and evaluation, at tp 2 and 4."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from lightning_megatron.swap.rejoin import rejoin
from tests.swap import cases
from tests.swap.cases import Comparison, compare_parameters, compare_training, swapped_copy_of
from tests.world import run_world

SHAPES: dict[str, dict[str, object]] = {
    "post-norm batch-first relu": {},
    "pre-norm gelu": {"norm_first": True, "activation": "gelu"},
    "sequence-first": {"batch_first": False},
    "without biases": {"bias": False, "activation": nn.SiLU()},
}


def linear_layers(comparison: Comparison, mesh: ParallelMesh) -> None:
    theirs, ours, records = swapped_copy_of(cases.mlp, mesh, cases.MLP_PLAN)
    assert [record.kind for record in records] == ["column", "row", "column_gather", "vocab"], (
        records
    )
    x = cases.normal(4, 3, 12, grad=True)
    compare_training(
        comparison, "linear layers", theirs, ours, lambda module: module(x), inputs=(x,)
    )


def classifiers(comparison: Comparison, mesh: ParallelMesh) -> None:
    ids = cases.tokens()
    for claim, shape in SHAPES.items():
        theirs, ours, _ = swapped_copy_of(
            partial(cases.Classifier, **shape), mesh, cases.CLASSIFIER_PLAN
        )
        compare_training(
            comparison, f"classifier, {claim}", theirs, ours, lambda module: module(ids)
        )


def masks(comparison: Comparison, mesh: ParallelMesh) -> None:
    ids, causal, padding = cases.tokens(), cases.causal(), cases.padding()
    # One mask for each sequence and head, none of which hides all tokens.
    per_head = cases.normal(12, 6, 6) > 0.7
    per_head[:, :, 0] = False
    choices = {
        "causal": {"mask": causal},
        "causal, promised": {"mask": causal, "is_causal": True},
        "boolean causal": {"mask": causal < 0},
        "padding": {"src_key_padding_mask": padding},
        "padding and causal, promised": {
            "mask": causal < 0,
            "src_key_padding_mask": padding,
            "is_causal": True,
        },
        "one mask for each head": {"mask": per_head},
        "numbers for padding": {
            "src_key_padding_mask": torch.zeros(3, 6).double().masked_fill(padding, -2.0)
        },
    }
    for claim, choice in choices.items():
        theirs, ours, _ = swapped_copy_of(cases.Classifier, mesh)
        compare_training(
            comparison, f"mask, {claim}", theirs, ours, lambda m, c=choice: m(ids, **c), num_steps=1
        )


def evaluation(comparison: Comparison, mesh: ParallelMesh) -> None:
    ids, padding = cases.tokens(), cases.padding()
    scattered = padding.flip(1)
    for claim, shape in SHAPES.items():
        theirs, ours, _ = swapped_copy_of(
            partial(cases.Classifier, **shape), mesh, cases.CLASSIFIER_PLAN
        )
        for module in (theirs, ours):
            module.eval()
        for mask in ({}, {"src_key_padding_mask": padding}, {"src_key_padding_mask": scattered}):
            with torch.no_grad():
                comparison.add(f"evaluation, {claim}", ours(ids, **mask), theirs(ids, **mask))
            comparison.add(
                f"evaluation with gradients, {claim}", ours(ids, **mask), theirs(ids, **mask)
            )
        with torch.no_grad():
            hidden = (
                cases.normal(3, 6, 16) if shape.get("batch_first", True) else cases.normal(6, 3, 16)
            )
            layer = (
                module.encoder.layers[1](hidden, src_key_padding_mask=padding)
                for module in (ours, theirs)
            )
            comparison.add(f"one layer in evaluation, {claim}", *layer)
        for module in (theirs, ours):
            module.train()
        comparison.add(f"training after evaluation, {claim}", ours(ids), theirs(ids))


def attention(comparison: Comparison, mesh: ParallelMesh) -> None:
    x, memory = cases.normal(3, 6, 16, grad=True), cases.normal(3, 5, 16, seed=3, grad=True)
    row, padding = cases.normal(6, 16, grad=True), cases.padding()
    calls = {
        "with average weights": lambda m: m(x, x, x, key_padding_mask=padding),
        "with weights by head": lambda m: m(
            x, x, x, average_attn_weights=False, attn_mask=cases.causal()
        ),
        "without weights": lambda m: m(x, x, x, need_weights=False),
        "to a memory": lambda m: m(x, memory, memory),
        "unbatched": lambda m: m(
            row, row, row, attn_mask=cases.causal(), key_padding_mask=padding[1].double() * -1.0
        ),
    }
    for claim, call in calls.items():
        theirs, ours, _ = swapped_copy_of(partial(cases.AttentionOnly, batch_first=True), mesh)
        inputs = (row,) if claim == "unbatched" else (x, memory) if claim == "to a memory" else (x,)
        compare_training(
            comparison, f"attention {claim}", theirs, ours, call, num_steps=1, inputs=inputs
        )
    target = cases.normal(3, 4, 16, seed=5, grad=True)
    theirs, ours, _ = swapped_copy_of(
        cases.Translator,
        mesh,
        {"*": "auto", "*decoder*linear1": "column", "*decoder*linear2": "row"},
    )
    compare_training(
        comparison,
        "encoder and parts of the decoder",
        theirs,
        ours,
        lambda m: m(x, target),
        inputs=(x, target),
    )
    hidden = torch.zeros(3, 6, dtype=torch.bool)
    hidden[1, 4:] = True
    for claim, shape in SHAPES.items():
        theirs, ours, records = swapped_copy_of(partial(cases.Translator, **shape), mesh)
        kinds = [record.target for record in records if "decoder" in record.name]
        assert kinds == ([] if mesh.tp.size == 1 else ["ParallelDecoderLayer"] * 2), kinds
        compare_training(
            comparison,
            f"encoder and decoder, {claim}",
            theirs,
            ours,
            lambda m: m(x, target, src_key_padding_mask=hidden, memory_key_padding_mask=hidden),
            inputs=(x, target),
        )


def shared_weights(comparison: Comparison, mesh: ParallelMesh) -> None:
    theirs, ours, _ = swapped_copy_of(
        cases.TiedDecoder, mesh, {"embedding": "vocab", "decoder": "vocab"}
    )
    assert ours.decoder.weight is ours.embedding.weight, "the weight must stay shared"
    compare_training(
        comparison, "tied decoder", theirs, ours, lambda module: module(cases.tokens())
    )

    def build() -> nn.Module:
        block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        return nn.Sequential(block, nn.LayerNorm(8), block)

    theirs, ours, records = swapped_copy_of(build, mesh, {"[02].0": "column", "[02].2": "row"})
    assert ours[0] is ours[2], "a block used twice stays one block"
    assert len(records) == 2, "and is swapped once"
    compare_training(
        comparison, "a block used twice", theirs, ours, lambda module: module(cases.normal(3, 8))
    )


def frozen_and_bfloat16(comparison: Comparison, mesh: ParallelMesh) -> None:
    def build() -> nn.Module:
        module = cases.Classifier()
        module.encoder.layers[0].requires_grad_(False)
        module.encoder.layers[1].eval()
        return module

    theirs, ours, _ = swapped_copy_of(build, mesh, cases.CLASSIFIER_PLAN)
    assert all(not p.requires_grad for p in ours.encoder.layers[0].parameters()), (
        "frozen weights stay frozen"
    )
    assert not ours.encoder.layers[1].linear1.training, "a layer in evaluation stays there"
    assert ours.encoder.layers[0].linear1.training, "a layer in training stays there"
    compare_training(
        comparison, "frozen layer", theirs, ours, lambda module: module(cases.tokens())
    )
    bfloat16_module = cases.mlp().to(torch.bfloat16)
    parallelize(bfloat16_module, mesh, cases.MLP_PLAN)
    assert {p.dtype for p in bfloat16_module.parameters()} == {torch.bfloat16}, "the dtype is kept"
    with torch.device("meta"):
        meta_module = nn.Sequential(cases.mlp())
    parallelize(meta_module, mesh, {"*.0": "column", "*.2": "row"})
    assert meta_module[0][0].weight.is_meta, "meta weights stay on the meta device"
    assert meta_module[0][0].weight.shape[0] == 16 // mesh.tp.size, "and are cut"


def dropout(comparison: Comparison, mesh: ParallelMesh) -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.TransformerEncoderLayer(16, 4, 24, dropout=0.3, batch_first=True),
            nn.Linear(16, 64),
            nn.Dropout(0.5),
            nn.Linear(64, 16),
        )

    _, ours, _ = swapped_copy_of(
        build, mesh, {"0": "auto", "1": "column", "2": "dropout", "3": "row"}
    )
    x = cases.normal(3, 6, 16)
    mesh.random.begin_microbatch(0, 0)
    before = torch.get_rng_state()
    first = ours(x)
    assert torch.equal(before, torch.get_rng_state()), "the default generator is left alone"
    for peer_output in all_gather_objects(first.detach(), mesh.tp):
        comparison.add("outputs under dropout agree on all ranks", first.detach(), peer_output)
    first.square().sum().backward()
    grads = [p.grad.clone() for p in ours.parameters()]
    ours.zero_grad()
    mesh.random.begin_microbatch(0, 0)
    hidden = x.clone().requires_grad_()
    for block in ours:
        hidden = checkpoint(block, hidden, use_reentrant=False)
    comparison.add("dropout under checkpointing: outputs", hidden.detach(), first.detach())
    hidden.square().sum().backward()
    for parameter, grad in zip(ours.parameters(), grads, strict=True):
        comparison.add("dropout under checkpointing: gradients", parameter.grad, grad)
    kept_elements = (ours[2](torch.ones(64).double()) != 0).double()
    different = all(
        not torch.equal(kept_elements, peer_elements)
        for rank, peer_elements in enumerate(all_gather_objects(kept_elements, mesh.tp))
        if rank != mesh.tp.rank
    )
    assert different, "masks between column and row differ by rank"
    mesh.random.begin_microbatch(1, 0)
    assert not torch.equal(first, ours(x)), "another step drops other elements"
    assert torch.equal(ours.eval()(x), ours(x)), "evaluation drops nothing"


class NextTokenLoss(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.model = GPT(config, seed=3)

    def forward(self, ids: Tensor) -> Tensor:
        return cases.losses_of(self.model, ids)


def full_gpt(comparison: Comparison, mesh: ParallelMesh) -> None:
    # Under sequence parallelism, gradients of norms are parts of a sum that only the training loop
    # adds up.
    mesh = replace(mesh, sequence_parallel=False)
    sizes = {
        "vocab_size": 21,
        "max_seq_length": 8,
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 4,
    }
    for kind in (GPTConfig.gpt2, GPTConfig.llama):
        theirs, ours, records = swapped_copy_of(partial(NextTokenLoss, kind(**sizes)), mesh)
        claim = f"{kind.__name__} built whole"
        assert ours.model.mesh is mesh, "the model is on the mesh"
        assert "mesh=self.device_mesh" in str(records[0]), records[0]
        compare_parameters(comparison, claim, theirs, ours, with_grads=False)
        if mesh.pp.size == 1:
            compare_training(comparison, claim, theirs, ours, lambda module: module(cases.tokens()))
        else:
            assert records[0].local_elements < records[0].full_elements, "a stage holds a part"
            head = dict(ours.named_parameters()).get("model.head.weight")
            assert (head is not None) == mesh.pp.is_last, "the last stage has the head"
        assert parallelize(ours, mesh) == [], "a model on the mesh is left alone"


def different_seeds(comparison: Comparison, mesh: ParallelMesh) -> None:
    module = cases.build_in_float64(cases.Classifier, seed=mesh.rank)
    theirs = cases.build_in_float64(cases.Classifier, seed=0)
    module.register_buffer("flags", torch.tensor([True, mesh.rank == 0]))
    parallelize(module, mesh, cases.CLASSIFIER_PLAN)
    compare_parameters(
        comparison,
        "ranks with different seeds take the first one's values",
        theirs,
        module,
        with_grads=False,
    )
    assert bool(module.flags.all()), "buffers as well"


def second_fit(comparison: Comparison, mesh: ParallelMesh) -> None:
    plan = cases.CLASSIFIER_PLAN | {"gpt": "auto"}

    def build() -> nn.Module:
        module = cases.Classifier()
        module.gpt = NextTokenLoss(
            GPTConfig.gpt2(
                vocab_size=21, max_seq_length=8, num_layers=1, hidden_size=16, num_heads=4
            )
        )
        return module

    theirs, ours, _ = swapped_copy_of(build, mesh, plan)
    layout = mesh.layout
    new_mesh = ParallelMesh.create(layout, sequence_parallel=True, seed=1)
    rejoin(ours, new_mesh)
    assert parallelize(ours, new_mesh, plan) == [], "nothing is left to swap"
    assert ours.gpt.model.mesh is new_mesh, "the model is on the new mesh"
    block = ours.encoder.layers[0].linear1
    assert block.mesh.random is new_mesh.random, "the block draws from the new streams"
    assert block.mesh.tp.group is new_mesh.tp.group, "the block talks over the new groups"
    assert not block.mesh.sequence_parallel, "the block still sees whole sequences"
    compare_training(
        comparison, "second fit", theirs, ours, lambda module: module(cases.tokens()), num_steps=1
    )
    with pytest.raises(UnsupportedError, match="the layout that it was sharded for"):
        rejoin(ours, replace(new_mesh, layout=ParallelLayout(4), random=mesh.random))
    new_mesh.destroy()


CASES = (
    linear_layers,
    classifiers,
    masks,
    evaluation,
    attention,
    shared_weights,
    frozen_and_bfloat16,
    dropout,
    full_gpt,
    different_seeds,
    second_fit,
)


def compare_everything(rank: int, size: int) -> dict[str, float]:
    largest: dict[str, float] = {}
    for tp in (2, 4):
        mesh = ParallelMesh.create(ParallelLayout(size, tp=tp), sequence_parallel=True)
        for case in CASES:
            comparison = Comparison()
            case(comparison, mesh)
            largest |= {
                f"tp={tp}, {claim}": difference
                for claim, difference in comparison.differences.items()
            }
        mesh.destroy()
    for layout in (ParallelLayout(size, pp=2, tp=2), ParallelLayout(size, pp=2)):
        mesh, comparison = ParallelMesh.create(layout), Comparison()
        full_gpt(comparison, mesh)
        largest |= {
            f"tp={layout.tp} pp=2, {claim}": difference
            for claim, difference in comparison.differences.items()
        }
        mesh.destroy()
    return largest


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    """Return the largest difference over all ranks, by claim."""
    ranks = run_world(compare_everything, 4)
    return {claim: max(rank_differences[claim] for rank_differences in ranks) for claim in ranks[0]}


@pytest.mark.parametrize("layout", ["tp=2,", "tp=4,", "tp=2 pp=2,", "tp=1 pp=2,"])
def test_swapped_modules_match_their_originals(differences: dict[str, float], layout: str) -> None:
    layout_differences = {
        claim: difference for claim, difference in differences.items() if claim.startswith(layout)
    }
    assert layout_differences, "nothing was compared"
    assert not {
        claim: difference
        for claim, difference in layout_differences.items()
        if not difference < 1e-10
    }
