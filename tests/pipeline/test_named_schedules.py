"""A GPT under every named schedule has the losses and gradients of one process, with microbatches
of different lengths and some frozen parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.layered import WORD_EMBEDDING
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.schedule import SCHEDULE_NAMES, ScheduleName, shape_of
from tests.oracles import assert_equal
from tests.sweeps import chosen
from tests.training.runs import Run
from tests.world import run_world

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "max_seq_length": 8,
    "num_layers": 8,
    "hidden_size": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "ffn_hidden_size": 24,
}
KINDS = {
    "tied": GPTConfig.llama(**SIZES, tie_embeddings=True),
    "experts": GPTConfig.llama(
        **SIZES, experts={"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}
    ),
}
#: Length of the sequences of each microbatch.
LENGTHS = (8, 5, 6, 8, 7, 4, 3, 6)
#: Frozen layers: all layers of a stage, and one of another stage.
FROZEN = ("layers.2.", "layers.3.", "layers.4.", "layers.5.", "layers.7.mlp.")
#: Schedule, stages, model, and whether layers are frozen.
ALL_CASES = [
    (*case, number % 3 == 0) for number, case in enumerate(product(SCHEDULE_NAMES, (2, 4), KINDS))
]
CASES = chosen(
    ALL_CASES, *(ALL_CASES[4 * number + number % 4] for number in range(len(SCHEDULE_NAMES)))
)


def make_microbatches() -> list[Microbatch]:
    generator = torch.Generator().manual_seed(5)
    return [
        Microbatch({"tokens": torch.randint(0, 50, (2, length + 1), generator=generator)}, 2)
        for length in LENGTHS
    ]


def step(model: GPT, data: dict[str, Tensor]) -> Tensor:
    tokens = data["tokens"]
    return model(tokens[:, :-1], tokens[:, 1:]).mean()


def build_model(kind: str, mesh: ParallelMesh, freezes: bool) -> GPT:
    model = GPT(KINDS[kind], mesh, seed=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (freezes and name.startswith(FROZEN)))
    return model


def results_of_one_process(kind: str, freezes: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses and gradients of one process with plain autograd."""
    model = build_model(kind, ParallelMesh.single(), freezes)
    losses = [step(model, part.data) for part in make_microbatches()]
    torch.stack(losses).mean().backward()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def layout_of(name: ScheduleName, pp: int, size: int) -> ParallelLayout:
    vpp = 2 if name in ("interleaved", "zb-v", "dualpipe-v") else 1
    return ParallelLayout(size, pp=pp, vpp=vpp, shape=shape_of(name))


def sgd_of_any(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Return an optimizer, even for a stage whose parameters are all frozen."""
    return torch.optim.SGD([{"params": list(parameters)}], lr=0.1)


def check(name: ScheduleName, pp: int, kind: str, freezes: bool, size: int) -> None:
    label = f"{name}, pp {pp}, {kind}, {'some' if freezes else 'none'} frozen"
    mesh = ParallelMesh.create(layout_of(name, pp, size))
    model = build_model(kind, mesh, freezes)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    run = Run(trained, mesh, make=sgd_of_any)
    executor = PipelineExecutor(mesh, model, name)
    expected_losses, expected = results_of_one_process(kind, freezes)
    microbatches = make_microbatches()
    losses = executor.run(
        partial(step, model),
        microbatches,
        backward=True,
        loss_of=lambda loss, _: loss / len(LENGTHS),
        weight_gradients=run.reducer.weight_gradients,
    )
    for loss, twin in zip(losses, expected_losses if mesh.has_loss else (), strict=True):
        assert_equal(loss, twin, f"{label}: loss", 1e-12)
    gradients = run.reducer.unreduced_gradients(set(run.main.trained))
    assert gradients.keys() == set(run.main.trained), label
    for key, gradient in gradients.items():
        twin_key = key
        if KINDS[kind].tie_embeddings and key in (WORD_EMBEDDING, "head.weight"):
            # Copies of a tied weight have parts of its gradient. In a V, there is a single weight.
            assert (mesh.embedding.size == 2) == (shape_of(name) == "loop"), label
            all_reduce_(gradient, mesh.embedding)
            twin_key = WORD_EMBEDDING
        assert_equal(gradient, expected[twin_key], f"{label}: {key}", 1e-12)
    with torch.no_grad():
        validation_losses = executor.run(partial(step, model), microbatches[:3], backward=False)
    for loss, twin in zip(
        validation_losses, expected_losses[:3] if mesh.has_loss else (), strict=True
    ):
        assert_equal(loss, twin, f"{label}: validation", 1e-12)
    mesh.destroy()


def check_all(rank: int, size: int) -> int:
    torch.set_default_dtype(torch.float64)
    for case in CASES:
        check(*case, size)
    return len(CASES)


def test_every_named_schedule_equals_one_process() -> None:
    assert run_world(check_all, 4) == [len(CASES)] * 4


def test_a_tied_embedding_in_a_v_belongs_to_no_single_chunk() -> None:
    with torch.device("meta"):
        for kind, config in KINDS.items():
            mesh = ParallelMesh.single()
            object.__setattr__(mesh, "layout", layout_of("zb-v", 2, 2))
            model = GPT(config, mesh)
            assert (model.head is None) == config.tie_embeddings, kind
            assert model.chunk_of(WORD_EMBEDDING) is None
            assert model.chunk_of("layers.0.mlp.up.weight") == 0
            assert model.chunk_of("layers.7.mlp.up.weight") == 1
            assert model.chunk_of("final_norm.weight") == 1
