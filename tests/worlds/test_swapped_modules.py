"""Modules of torch, of users and of Hugging Face that a plan cuts over two ranks match the full modules in
training and evaluation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.linear.sequence_shard import SequenceShard
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from lightning_megatron.swap.apply import rejoin
from tests.oracles import assert_equal, assert_same_gradients
from tests.swap import cases
from tests.world import run_world

SHAPES: dict[str, dict[str, Any]] = {
    "post-norm batch-first relu": {},
    "pre-norm gelu": {"norm_first": True, "activation": "gelu"},
    "sequence-first without biases": {"batch_first": False, "bias": False, "activation": nn.SiLU()},
}
GPT_SIZES: dict[str, Any] = {"vocab_size": 21, "max_seq_length": 8, "hidden_size": 16}
GPT_SIZES |= {"num_heads": 4, "num_layers": 2}


def swapped_copy_of(build: Any, mesh: ParallelMesh, plan: Any = None) -> tuple[Any, Any, list[Any]]:
    """Return a module, its swapped copy and the records of the swap."""
    module = cases.build_in_float64(build)
    ours = copy.deepcopy(module)
    return module, ours, parallelize(ours, mesh, plan)


def compare_training(
    claim: str, theirs: nn.Module, ours: nn.Module, call: Callable[[nn.Module], Tensor], num_steps: int = 2,
    inputs: tuple[Tensor, ...] = (),
) -> None:  # fmt: skip
    """Take SGD steps with both modules and compare outputs, gradients and weights."""
    for _ in range(num_steps):
        outputs, grads = [], []
        for module in (theirs, ours):
            module.zero_grad()
            output = call(module)
            weights = torch.linspace(-1.0, 2.0, output.numel(), dtype=output.dtype)
            (output * weights.view(output.shape) + output.square()).mean().backward()
            outputs.append(output.detach())
            grads.append([x.grad.clone() for x in inputs])
            for x in inputs:
                x.grad = None
        assert_equal(outputs[1], outputs[0], f"{claim}: outputs")
        for actual, expected in zip(grads[1], grads[0], strict=True):
            assert_equal(actual, expected, f"{claim}: gradients of inputs")
        compare_parameters(claim, theirs, ours)
        for parameter in (*theirs.parameters(), *ours.parameters()):
            if parameter.grad is not None:
                parameter.data -= 0.1 * parameter.grad
    compare_parameters(f"{claim}: after training", theirs, ours, with_grads=False)


def compare_parameters(claim: str, theirs: Any, ours: nn.Module, with_grads: bool = True) -> None:
    """Compare this rank's weights and gradients with their parts of those of the full module."""
    for name, parameter in ours.named_parameters():
        spec = shard_spec_of(parameter)
        full = theirs.get_parameter(name if spec.tied_to is None else f"model.{spec.tied_to}")
        pairs = [(parameter, full)]
        if with_grads and full.grad is not None:
            assert parameter.grad is not None, f"{name} got no gradient"
            pairs.append((parameter.grad, full.grad))
        for actual, expected in pairs:
            unpadded = expected.detach().narrow(spec.dim, 0, spec.full_shape[spec.dim])
            part = spec.shard(unpadded, parameter.shape[spec.dim])
            assert_equal(actual, part, f"{claim}: {name}")


def token_rows(num_rows: int = 3, length: int = 6, num_tokens: int = 21) -> Tensor:
    """Return token ids that include both ends of the vocabulary."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, num_tokens, (num_rows, length), generator=generator)
    ids[0, 0], ids[-1, -1] = num_tokens - 1, 0
    return ids


def padding(length: int = 6) -> Tensor:
    """Return a padding mask whose rows end at different places."""
    return torch.arange(length)[None] >= torch.tensor([length, length - 2, 3])[:, None]


def causal(length: int = 6) -> Tensor:
    """Return the causal mask as floating-point numbers."""
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)


def normal(*shape: int, seed: int = 2, grad: bool = False) -> Tensor:
    """Return reproducible normal numbers in float64."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.requires_grad_(grad)


def linear_layers(mesh: ParallelMesh) -> None:
    theirs, ours, records = swapped_copy_of(cases.mlp, mesh, cases.MLP_PLAN)
    assert [record.kind for record in records] == ["column", "row", "column_gather", "vocab"]
    x = normal(4, 3, 12, grad=True)
    compare_training("linear layers", theirs, ours, lambda module: module(x), inputs=(x,))


def classifiers_and_masks(mesh: ParallelMesh) -> None:
    ids, hidden = token_rows(), padding()
    for claim, shape in SHAPES.items():
        build = partial(cases.Classifier, **shape)
        theirs, ours, _ = swapped_copy_of(build, mesh, cases.CLASSIFIER_PLAN)
        compare_training(f"classifier, {claim}", theirs, ours, lambda module: module(ids))
        theirs.eval(), ours.eval()
        for mask in ({}, {"src_key_padding_mask": hidden}):
            with torch.no_grad():
                assert_equal(ours(ids, **mask), theirs(ids, **mask), f"evaluation, {claim}")
    # One mask for each sequence and head, none of which hides all tokens.
    per_head = normal(12, 6, 6) > 0.7
    per_head[:, :, 0] = False
    soft = torch.zeros(3, 6).double().masked_fill(hidden, -2.0)
    choices: list[dict[str, Any]] = [
        {"mask": causal()}, {"mask": causal(), "is_causal": True}, {"mask": causal() < 0}, {"mask": per_head},
        {"mask": causal() < 0, "src_key_padding_mask": hidden, "is_causal": True}, {"src_key_padding_mask": soft},
    ]  # fmt: skip
    for number, choice in enumerate(choices):
        theirs, ours, _ = swapped_copy_of(cases.Classifier, mesh)
        claim, call = f"mask {number}", lambda m, c=choice: m(ids, **c)
        compare_training(claim, theirs, ours, call, num_steps=1)


def attention(mesh: ParallelMesh) -> None:
    x, memory = normal(3, 6, 16, grad=True), normal(3, 5, 16, seed=3, grad=True)
    row, hidden = normal(6, 16, grad=True), padding()
    soft = hidden[1].double() * -1.0
    by_head: dict[str, Any] = {"average_attn_weights": False, "attn_mask": causal()}
    calls: dict[str, tuple[Callable[[Any], Tensor], tuple[Tensor, ...]]] = {
        "with average weights": (lambda m: m(x, x, x, key_padding_mask=hidden), (x,)),
        "with weights by head": (lambda m: m(x, x, x, **by_head), (x,)),
        "without weights": (lambda m: m(x, x, x, need_weights=False), (x,)),
        "to a memory": (lambda m: m(x, memory, memory), (x, memory)),
        "unbatched": (
            lambda m: m(row, row, row, attn_mask=causal(), key_padding_mask=soft), (row,)
        ),
    }  # fmt: skip
    for claim, (call, inputs) in calls.items():
        theirs, ours, _ = swapped_copy_of(partial(cases.AttentionOnly, batch_first=True), mesh)
        compare_training(f"attention {claim}", theirs, ours, call, num_steps=1, inputs=inputs)
    target = normal(3, 4, 16, seed=5, grad=True)
    plan = {"*": "auto", "*decoder*linear1": "column", "*decoder*linear2": "row"}
    theirs, ours, _ = swapped_copy_of(cases.Translator, mesh, plan)
    inputs = (x, target)
    compare_training("parts of the decoder", theirs, ours, lambda m: m(x, target), inputs=inputs)
    masked = torch.zeros(3, 6, dtype=torch.bool)
    masked[1, 4:] = True
    masks = {"src_key_padding_mask": masked, "memory_key_padding_mask": masked}
    for claim, shape in SHAPES.items():
        theirs, ours, records = swapped_copy_of(partial(cases.Translator, **shape), mesh)
        kinds = [record.target for record in records if "decoder" in record.name]
        assert kinds == ["ParallelDecoderLayer"] * 2, kinds
        call = partial(lambda m: m(x, target, **masks))
        compare_training(f"translator, {claim}", theirs, ours, call, inputs=inputs)


def shared_weights(mesh: ParallelMesh) -> None:
    plan = {"embedding": "vocab", "decoder": "vocab"}
    theirs, ours, _ = swapped_copy_of(cases.TiedDecoder, mesh, plan)
    assert ours.decoder.weight is ours.embedding.weight, "the weight must stay shared"
    compare_training("tied decoder", theirs, ours, lambda module: module(token_rows()))

    def build() -> nn.Module:
        block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        return nn.Sequential(block, nn.LayerNorm(8), block)

    theirs, ours, records = swapped_copy_of(build, mesh, {"[02].0": "column", "[02].2": "row"})
    assert ours[0] is ours[2], "a block used twice stays one block"
    assert len(records) == 2, "and is swapped once"
    compare_training("a block used twice", theirs, ours, lambda module: module(normal(3, 8)))


def frozen_layers(mesh: ParallelMesh) -> None:
    def build() -> nn.Module:
        module = cases.Classifier()
        module.encoder.layers[0].requires_grad_(False)
        module.encoder.layers[1].eval()
        return module

    theirs, ours, _ = swapped_copy_of(build, mesh, cases.CLASSIFIER_PLAN)
    first, second = ours.encoder.layers
    assert not any(p.requires_grad for p in first.parameters()), "frozen weights stay frozen"
    assert (first.linear1.training, second.linear1.training) == (True, False)
    compare_training("frozen layer", theirs, ours, lambda module: module(token_rows()))


def dropout(mesh: ParallelMesh) -> None:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.3, batch_first=True)
        return nn.Sequential(layer, nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 16))

    plan = {"0": "auto", "1": "column", "2": "dropout", "3": "row"}
    _, ours, _ = swapped_copy_of(build, mesh, plan)
    x = normal(3, 6, 16)
    mesh.random.begin_microbatch(0, 0)
    before = torch.get_rng_state()
    first = ours(x)
    assert torch.equal(before, torch.get_rng_state()), "the default generator is left alone"
    for output in all_gather_objects(first.detach(), mesh.tp):
        assert_equal(first, output, "outputs under dropout agree on all ranks")
    first.square().sum().backward()
    grads = [p.grad.clone() for p in ours.parameters()]
    ours.zero_grad()
    mesh.random.begin_microbatch(0, 0)
    hidden = x.clone().requires_grad_()
    for block in ours:
        hidden = checkpoint(block, hidden, use_reentrant=False)
    assert_equal(hidden, first, "dropout under checkpointing: outputs")
    hidden.square().sum().backward()
    for parameter, grad in zip(ours.parameters(), grads, strict=True):
        assert_equal(parameter.grad, grad, "dropout under checkpointing: gradients")
    kept = (ours[2](torch.ones(64).double()) != 0).double()
    others = [m for rank, m in enumerate(all_gather_objects(kept, mesh.tp)) if rank != mesh.tp.rank]
    assert not any(torch.equal(kept, m) for m in others), "masks between column and row differ"
    mesh.random.begin_microbatch(1, 0)
    assert not torch.equal(first, ours(x)), "another step drops other elements"
    assert torch.equal(ours.eval()(x), ours(x)), "evaluation drops nothing"


class NextTokenLoss(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.model = GPT(config, seed=3)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(ids)[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")


def full_gpt(mesh: ParallelMesh) -> None:
    # Under sequence parallelism, gradients of norms are parts of a sum that only the training loop
    # adds up.
    mesh = replace(mesh, sequence_parallel=False)
    for kind in (GPTConfig.gpt2, GPTConfig.llama):
        theirs, ours, records = swapped_copy_of(partial(NextTokenLoss, kind(**GPT_SIZES)), mesh)
        claim = f"{kind.__name__} built whole"
        compare_parameters(claim, theirs, ours, with_grads=False)
        if mesh.pp.size == 1:
            compare_training(claim, theirs, ours, lambda module: module(token_rows()))
        else:
            assert records[0].local_elements < records[0].full_elements, "a stage holds a part"
        assert parallelize(ours, mesh) == [], "a model on the mesh is left alone"


def different_seeds(mesh: ParallelMesh) -> None:
    module = cases.build_in_float64(cases.Classifier, seed=mesh.rank)
    theirs = cases.build_in_float64(cases.Classifier, seed=0)
    module.register_buffer("flags", torch.tensor([True, mesh.rank == 0]))
    parallelize(module, mesh, cases.CLASSIFIER_PLAN)
    compare_parameters("all ranks take the first one's values", theirs, module, with_grads=False)
    assert bool(module.flags.all()), "buffers as well"


def second_fit(mesh: ParallelMesh) -> None:
    plan = cases.CLASSIFIER_PLAN | {"gpt": "auto"}

    def build() -> nn.Module:
        module: Any = cases.Classifier()
        module.gpt = NextTokenLoss(GPTConfig.gpt2(**GPT_SIZES))
        return module

    theirs, ours, _ = swapped_copy_of(build, mesh, plan)
    new_mesh = ParallelMesh.create(mesh.layout, sequence_parallel=True, seed=1)
    rejoin(ours, new_mesh)
    assert parallelize(ours, new_mesh, plan) == [], "nothing is left to swap"
    block = ours.encoder.layers[0].linear1
    assert block.mesh.random is new_mesh.random, "the block draws from the new streams"
    compare_training("second fit", theirs, ours, lambda module: module(token_rows()), num_steps=1)
    with pytest.raises(UnsupportedError, match="the layout that it was sharded for"):
        rejoin(ours, replace(new_mesh, layout=ParallelLayout(4), random=mesh.random))
    new_mesh.destroy()


SEQUENCE_PLAN = {"words": "vocab", "*.norm": "sequence", "*.drop": "sequence", "*.up": "column"}
SEQUENCE_PLAN |= {"*.down": "row", "*.heads": "partial", "norm": "sequence", "head": "vocab"}


class Block(nn.Module):
    """Add results of each position, and results across positions, to the hidden states."""

    def __init__(self, rms: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8) if rms else nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.heads, self.drop = nn.LayerNorm(4), nn.Dropout(0.0)
        self.scale, self.mix = nn.Parameter(torch.rand(8)), nn.Linear(6, 6)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        inner = self.up(self.norm(hidden))
        inner = F.gelu(self.heads(inner.unflatten(-1, (-1, 4))).flatten(-2))
        hidden = hidden + self.drop(self.down(inner)) * self.scale * mask
        assert hidden.shape == (2, 6, 8), "the shape is that of the full sequence"
        return hidden + self.mix(hidden.transpose(1, 2)).transpose(1, 2) / hidden.shape[1]


class Mixer(nn.Module):
    """Predict tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(Block(rms) for rms in (False, True))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, mask = self.words(tokens), (tokens > 2).to(torch.float64)[..., None]
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(self.norm(hidden))


def shared_sequences(mesh: ParallelMesh) -> None:
    twin, model, _ = swapped_copy_of(Mixer, mesh, SEQUENCE_PLAN)
    tokens = token_rows(2, 6, 11)
    results = [network(tokens) for network in (twin, model)]
    assert type(results[1]) is Tensor
    normed, shares = model.norm(normal(2, 6, 8)), mesh.sequence_parallel
    assert isinstance(normed, SequenceShard) == shares
    assert not shares or normed.part.shape == (2, 6 // mesh.tp.size, 8)
    assert_equal(results[1], results[0], "logits", 1e-9)
    for result in results:
        result.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    assert_same_gradients(model, mesh, gradients, "shared sequences")
    if shares:
        sizes_of_shared_sequences(normed)
        refusals_of_shared_sequences(mesh)


def sizes_of_shared_sequences(shard: Tensor) -> None:
    with patch.object(SequenceShard, "gather_full", side_effect=AssertionError("sizes are known")):
        assert (shard.size(-2), shard.size(dim=1), shard.shape[1]) == (6, 6, 6)
        assert (len(shard), shard.numel(), shard.nelement()) == (2, 96, 96)


def refusals_of_shared_sequences(mesh: ParallelMesh) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)).double()
    plan = {"mlp.0": "column", "mlp.1": "sequence", "mlp.2": "row"}
    parallelize(nn.ModuleDict({"mlp": model}), mesh, plan)
    with pytest.raises(UnsupportedError, match="'mlp.1' of the kind 'sequence' must get the same"):
        model(normal(2, 6, 8))
    norm = nn.ModuleDict({"norm": nn.LayerNorm(8).double()})
    parallelize(norm, mesh, {"norm": "sequence"})
    with pytest.raises(ValueError, match="must be a multiple of tp"):
        norm["norm"](normal(2, 5, 8))
    shard = norm["norm"](normal(2, 6, 8))
    with pytest.raises(UnsupportedError, match="must not be written in place"):
        shard += 1.0


CHECKS = (
    linear_layers,
    classifiers_and_masks,
    attention,
    shared_weights,
    dropout,
    frozen_layers,
    full_gpt,
    different_seeds,
    second_fit,
    shared_sequences,
)
#: Layout, whether ranks share sequences, and checks.
JOBS: tuple[tuple[dict[str, int], bool, tuple[Callable[[ParallelMesh], None], ...]], ...] = (
    ({"tp": 2}, True, CHECKS),
    ({"tp": 2}, False, (shared_sequences,)),
    ({"pp": 2}, False, (full_gpt,)),
)


def check_jobs(rank: int, size: int) -> None:
    for sizes, shares, checks in JOBS:
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes), sequence_parallel=shares)
        for check in checks:
            check(mesh)
        mesh.destroy()


def test_swapped_modules_match_their_originals() -> None:
    run_world(check_jobs, 2)
