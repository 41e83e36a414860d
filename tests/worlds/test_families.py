"""Hugging Face models that are replaced in place keep their outputs, losses and gradients on several ranks:
decoders, experts, encoders and adapters of peft.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.pipeline.step_run import BackwardPasses
from lightning_megatron.plan.context_transport import ContextLinks
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import build_on_meta, parallelize
from tests.oracles import assert_equal, float32_as_float64, gather_full
from tests.swap.families import ENCODERS, EXPERTS, exact_twin, transformers, twin_of
from tests.swap.parts import (
    check_call,
    check_gradients,
    check_outputs,
    expected_of,
    inputs,
    swapped,
)
from tests.swap.test_encoders import compare as compare_encoders
from tests.swap.test_encoders import loss_and_gradients_under_dropout
from tests.swap.test_language_models import check_generation
from tests.swap.test_low_rank import adapted, compare_adapters
from tests.world import run_world

pytest.importorskip("peft")
KINDS = ("padded left", "packed", "odd")


@dataclass(frozen=True)
class Job:
    """Sizes of a layout, models that are compared with Hugging Face's and with adapters of peft, models
    whose generated tokens are compared, whether tensor-parallel ranks share sequences, the
    transports over cp and ep, and further checks of the mesh.
    """

    sizes: dict[str, Any]
    cases: tuple[str, ...] = ()
    adapts: tuple[str, ...] = ()
    generates: tuple[str, ...] = ()
    shares: bool = False
    context: Any = "auto"
    experts: Any = "auto"
    checks: tuple[Callable[[ParallelMesh], None], ...] = ()


# ---- further checks


def check_dropout(mesh: ParallelMesh) -> None:
    """Check that all ranks and recomputation drop the same elements."""
    for case in ("bert masked", "roberta classes"):
        model = swapped(exact_twin(case), mesh).train()
        first, again, later = (
            loss_and_gradients_under_dropout(case, model, recompute, step)
            for recompute, step in (("none", 7), ("full", 7), ("none", 8))
        )
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True)), case
        assert not torch.equal(first[0], later[0]), f"{case}: another step drops other elements"
        loss = first[0].clone()
        torch.distributed.broadcast(loss, 0)
        assert torch.equal(loss, first[0]), f"{case}: the loss is the same on all ranks"


def check_states(mesh: ParallelMesh) -> None:
    """Compare hidden states of layers and their gradients."""
    tokens = inputs()["whole"]["input_ids"]
    for case in ("llama", "gpt2", "gemma"):
        twin, model = exact_twin(case), swapped(exact_twin(case), mesh)
        theirs, ours = (net(tokens, output_hidden_states=True) for net in (twin, model))
        assert tuple(ours) == ("logits", "hidden_states")
        pairs = zip(ours.hidden_states, theirs.hidden_states, strict=True)
        for layer, pair in enumerate(pairs):
            assert_equal(*pair, f"{case}: hidden states {layer}", 1e-9)
        assert model(tokens).hidden_states is None
        for network in (model, twin):
            vectors = network.get_input_embeddings()(tokens)
            output = network(inputs_embeds=vectors, output_hidden_states=True)
            output.hidden_states[2].square().sum().backward()
        gradients = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
        for name, parameter in model.named_parameters():
            # Weights that our layers store transposed or packed are left out.
            if name in gradients and ("norm" in name or "embed" in name or "wte" in name):
                spec = shard_spec_of(parameter, mesh.tp.rank)
                gradient = gather_full(parameter.grad, spec, mesh, sum_copies=spec.partial)
                assert_equal(gradient, gradients[name], f"{case}: gradient of {name}", 1e-8)


def check_resized_vocabulary(mesh: ParallelMesh, folder: str) -> None:
    """Compare a model built without weights whose vocabulary grew."""
    models = []
    for build in (nullcontext, build_on_meta):
        with build():
            torch.manual_seed(5)
            models.append(transformers.AutoModelForCausalLM.from_pretrained(folder))
            models[-1].resize_token_embeddings(60)
    plain, model = models[0], swapped(models[1], mesh)
    for name, expected in plain.named_parameters():
        parameter = model.get_parameter(name)
        assert_equal(gather_full(parameter, shard_spec_of(parameter), mesh), expected, name)


def check_other_stages(mesh: ParallelMesh) -> None:
    """Check what a stage refuses that does not hold the full model."""
    model, tokens = swapped(exact_twin("llama"), mesh), inputs()["whole"]["input_ids"]
    with pytest.raises(UnsupportedError, match="output_hidden_states cannot be used with pp"):
        model(input_ids=tokens, output_hidden_states=True)
    with pytest.raises(
        UnsupportedError, match="2 pipeline stages cannot be called outside of steps"
    ):
        model(**inputs()["whole"])
    elsewhere = model.lm_head if mesh.pp.is_first else model.model.embed_tokens
    with pytest.raises(AttributeError, match=r"weight' is on another pipeline stage.*named_param"):
        _ = elsewhere.weight


def check_adapters_in_stages(mesh: ParallelMesh) -> None:
    twin, wrapped = (adapted(exact_twin("llama", num_hidden_layers=2)) for _ in range(2))
    root = nn.ModuleDict({"model": wrapped})
    parallelize(root, mesh)
    call = inputs()["odd"]
    with torch.no_grad():
        output = wrapped(**call)
    logits, loss, _ = expected_of(twin, call)
    assert_equal(output.logits, logits, "logits of two stages", 1e-9)
    assert_equal(output.loss, loss, "loss of two stages", 1e-9)


MIXTURES = ("mixtral", "deepseek_v3", "gpt_oss")
#: Decoders with separate and packed projections, shared keys, bounded scores, norms of all heads and
#: slopes; decoders with each kind of router; encoders with each kind of head.
JOBS: dict[int, tuple[Job, ...]] = {
    2: (
        Job(
            {"tp": 2}, ("gpt2", "gemma2", "bloom", "bert masked", "roberta choices"), ("gpt2", "phi3", "bert classes"),
            checks=(check_states, check_dropout),
        ),
        Job(
            {"tp": 2}, ("gpt_bigcode", "llama with one key head", "olmo2", "phi3", "roberta classes", "bert spans"),
            ("llama with one key head", "gpt_neox", "roberta classes", "bert masked"), ("llama",), True,
            checks=(check_states, check_dropout),
        ),
        Job({"pp": 2}, ("gpt2", "gemma3", "mpt", "exaone4"), checks=(check_other_stages,)),
        Job({"cp": 2}, ("bloom",), context="ring"),
        Job({"cp": 2}, ("mpt",), context="all_gather"),
        Job({"cp": 2}, ("bloom", "roberta masked"), context="all_to_all", checks=(check_dropout,)),
        Job({"ep": 2}, adapts=("mixtral",)),
        Job({"tp": 2, "ep": 2, "etp": 1}, adapts=("mixtral",), shares=True),
    ),
    4: (
        Job({"tp": 2, "pp": 2}, ("llama",), generates=("llama",), shares=True, checks=(check_adapters_in_stages,)),
        Job({"pp": 2, "vpp": 2}, ("gpt2",)),
        Job({"pp": 2, "vpp": 2, "shape": "v"}, ("qwen2",)),
        Job({"tp": 2, "ep": 2, "etp": 1}, MIXTURES, generates=("mixtral",), shares=True),
        Job({"tp": 2, "ep": 2, "etp": 2}, ("mixtral",), experts="all_to_all"),
        Job({"pp": 2, "ep": 2}, MIXTURES, generates=("mixtral",)),
        Job({"tp": 4}, ("roberta masked",), ("llama with one key head",), shares=True),
        Job({"cp": 4}, ("roberta masked",), context="ring"),
        Job({"cp": 2, "tp": 2}, ("bert", "roberta masked", "bert classes"), context="ring"),
        Job({"cp": 2, "tp": 2}, ("roberta masked",), shares=True, context="all_gather"),
    ),
}  # fmt: skip


def compare(case: str, mesh: ParallelMesh, job: Job) -> None:
    """Compare calls of a model with Hugging Face's; data ranks have other orders of rows."""
    if case in ENCODERS:
        # Attention dropout needs complete rows.
        changes = {} if mesh.cp.size == 1 else {"attention_probs_dropout_prob": 0.0}
        compare_encoders(case, mesh, ("padded right", "padded left", "odd"), **changes)
        return
    # The padding token occurs in the input, and some families do not train its vector.
    changes = {} if case in EXPERTS else {"pad_token_id": int(inputs()["odd"]["input_ids"][0, 1])}
    changes |= (
        {"num_hidden_layers": 4} if mesh.pp.size > 1 and case not in ("gemma3", "mpt") else {}
    )
    with float32_as_float64() if case in EXPERTS else nullcontext():
        twin = exact_twin(case, **changes)
    model = swapped(exact_twin(case, **changes), mesh)
    for layer in model.gpt.mixtures.values():
        layer.transport = job.experts
    for kind in KINDS:
        roll = mesh.dp.rank
        call = {
            k: x.roll(roll, 0) if isinstance(x, Tensor) else x for k, x in inputs()[kind].items()
        }
        expected, label = expected_of(twin, call), f"{case}, {kind}, {job}"
        if mesh.pp.size == 1:
            check_call(model, mesh, call, expected, label)
            continue
        with torch.no_grad():
            check_outputs(model, call, expected, label)
        if kind == "padded left" and mesh.layout.vpp == 1:
            model.zero_grad()
            results = PipelineExecutor(mesh, model.gpt).run(
                lambda data: model(**data).loss,
                [Microbatch(call, len(call["input_ids"]))],
                BackwardPasses(lambda loss, _: loss),
            )
            assert len(results) == (1 if mesh.pp.is_last else 0)
            for result in results:
                assert_equal(result.detach(), expected[1], f"{label}: loss", 1e-9)
            check_gradients(model, mesh, expected, label)


def check_jobs(rank: int, size: int, folder: str) -> None:
    for job in JOBS[size]:
        layout = ParallelLayout(size, **job.sizes)
        links = ContextLinks.of(job.context, layout, size)
        mesh = ParallelMesh.create(layout, sequence_parallel=job.shares, context=links)
        for case in job.cases:
            compare(case, mesh, job)
        for case in job.adapts:
            compare_adapters(case, mesh)
        for case in job.generates:
            check_generation(mesh, case, num_hidden_layers=4)
        for check in job.checks:
            check(mesh)
        if job.sizes == {"tp": 2} and job.shares:
            check_resized_vocabulary(mesh, folder)
        mesh.destroy()


@pytest.mark.parametrize("size", JOBS)
def test_replaced_models_match_hugging_face_and_peft_in_every_layout(
    size: int, tmp_path: Path
) -> None:
    twin_of("llama").save_pretrained(tmp_path)
    run_world(check_jobs, size, str(tmp_path))
