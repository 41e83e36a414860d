"""Encoders have the same weights, outputs and gradients on two ranks as in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.init import initialize_
from lightning_megatron.plan.context_transport import ContextLinks
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from tests.models.flash_stand_in import flash_stand_in
from tests.models.test_encoder import (
    LABELS,
    assert_same,
    build_encoder,
    rows_with_lengths,
    rows_with_mask,
    run,
)
from tests.oracles import assert_equal, full_weights
from tests.world import run_world

#: Sizes, whether ranks share sequences, transport over cp, and heads.
JOBS: tuple[tuple[dict[str, int], bool, Any, tuple[str, ...]], ...] = (
    ({"tp": 2}, False, "auto", ("none", "masked_lm", "pretraining")),
    ({"tp": 2}, True, "auto", ("pooler", "classifier", "span")),
    ({"cp": 2}, False, "all_to_all", ("pretraining",)),
    ({"cp": 2}, False, "ring", ("pretraining", "span")),
    ({"cp": 2}, False, "all_gather", ("span",)),
)


def check_jobs(rank: int, size: int) -> None:
    for sizes, shares, transport, heads in JOBS:
        layout = ParallelLayout(size, **sizes)
        links = ContextLinks.of(transport, layout, size)
        mesh = ParallelMesh.create(layout, sequence_parallel=shares, context=links)
        for head in heads:
            single, label = build_encoder(head=head), f"{head}, {sizes}, {shares}, {transport}"
            labels = LABELS if head in ("masked_lm", "pretraining") else None
            expected = run(single, rows_with_mask(), labels)
            model = build_encoder(mesh, head=head)
            with flash_stand_in() as spans:
                actual = run(model, rows_with_lengths(), labels)
            assert spans
            if mesh.cp.size > 1:  # gradients are means over data ranks
                actual, expected = (
                    {name: x for name, x in results.items() if "gradient" not in name}
                    for results in (actual, expected)
                )
            assert_same(actual, expected, label)
            check_weights(mesh, head)
        mesh.destroy()


def check_weights(mesh: ParallelMesh, head: str) -> None:
    """Check the initial weights of models that are cut when built, filled later, and cut later."""
    single = build_encoder(head=head)
    weights = full_weights(single, ParallelMesh.single())
    with torch.device("meta"):
        late: Any = build_encoder(mesh, head=head)
    initialize_(late, mesh.device, 3)
    models = [build_encoder(mesh, head=head), late]
    if mesh.tp.size > 1:
        root: Any = nn.ModuleDict({"model": single})
        (record,) = parallelize(root, mesh)
        assert (record.source, record.target) == ("Encoder", "Encoder")
        models.append(root["model"])
    for model in models:
        for name, weight in full_weights(model, mesh).items():
            assert_equal(weight, weights[name], f"{head}: {name} does not depend on the layout")


def test_encoders_on_two_ranks_equal_those_of_one_process() -> None:
    run_world(check_jobs, 2)
