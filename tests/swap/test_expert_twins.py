"""Hugging Face models with experts that are replaced in place keep their logits, losses and gradients
in every expert grid.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.families import family_of
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from lightning_megatron.swap.hugging_face.causal_lm import HuggingFaceLM
from lightning_megatron.swap.weights.load import full_tensors, load_from
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder
from tests.oracles import assert_equal, float32_as_float64
from tests.swap.expert_models import CASES, config_of, exact_twin_of
from tests.swap.families import V
from tests.swap.parts import check_call, expected_gradients, expert_mesh_of, name_of_values
from tests.swap.test_language_models import Reference, expected_of, inputs
from tests.sweeps import chosen
from tests.world import run_world

pytest.importorskip("transformers")

#: Layout, whether its ranks share sequences, and how tokens are sent to their experts.
GRIDS: tuple[tuple[dict[str, Any], bool, str], ...] = (
    ({"ep": 4}, False, "auto"),
    ({"ep": 4}, False, "all_to_all"),
    ({"tp": 2, "ep": 2, "etp": 1}, True, "auto"),
    ({"tp": 2, "ep": 2, "etp": 2}, False, "all_to_all"),
)
#: Models that several ranks compare; one process compares all models.
GRID_CASES = chosen(list(CASES), "mixtral", "deepseek_v3", "gpt_oss")

#: Kinds of calls that several ranks compare; one process compares all kinds.
GRID_KINDS = ("padded left", "packed", "odd")


def inputs_of(rank: int) -> dict[str, dict[str, Any]]:
    """Return calls of every kind, with another order of rows on every data rank."""
    return {
        kind: {key: x.roll(rank, 0) if isinstance(x, Tensor) else x for key, x in call.items()}
        for kind, call in inputs().items()
    }


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Reference]]:
    """Return logits, losses and gradients of Hugging Face's models."""
    with float32_as_float64():
        twins = {case: exact_twin_of(case) for case in CASES}
        return {
            case: {
                kind: expected_of(twin, call_of_hugging_face(case, call))
                for kind, call in inputs().items()
            }
            for case, twin in twins.items()
        }


def call_of_hugging_face(case: str, call: dict[str, Any]) -> dict[str, Any]:
    """Return a call for Hugging Face's model; the class of gpt-oss needs masks that separate packed
    sequences.
    """
    if case != "gpt_oss" or call.get("use_cache", True):
        return call
    sequence = (call["position_ids"].diff(prepend=call["position_ids"][:, :1] - 1) != 1).cumsum(-1)
    index = torch.arange(sequence.shape[-1])
    distance = index[:, None] - index
    attends = (sequence[:, :, None] == sequence[:, None]) & (distance >= 0)
    window = config_of(case).sliding_window
    masks = {"full_attention": attends, "sliding_attention": attends & (distance < window)}
    lowest = torch.finfo(torch.float64).min
    added = {
        name: torch.zeros(mask.shape, dtype=torch.float64).masked_fill_(~mask, lowest)[:, None]
        for name, mask in masks.items()
    }
    return {**call, "attention_mask": added}


def replaced(
    case: str, mesh: ParallelMesh, transport: Any = "auto", **changes: Any
) -> HuggingFaceLM:
    root = nn.ModuleDict({"model": exact_twin_of(case, **changes)})
    parallelize(root, mesh)
    model = root["model"]
    assert isinstance(model, HuggingFaceLM)
    for layer in model.gpt.mixtures().values():
        layer.transport = transport
    return model


def assert_same_parts(
    model: HuggingFaceLM, mesh: ParallelMesh, expected: dict[str, Tensor], label: str
) -> None:
    """Compare the gradients of this rank's parameters, averaged over the data ranks as in training."""
    for name, parameter in model.named_parameters():
        spec, gradient = shard_spec_of(parameter), parameter.grad
        assert gradient is not None, f"{label}: {name} has no gradient"
        all_reduce_(gradient, mesh.replica_axis(spec.is_expert)).div_(mesh.data.size)
        if spec.partial:
            all_reduce_(gradient, mesh.tp)
        part = spec.shard(expected[name_of_values(name, parameter)], gradient.shape[spec.dim])
        assert_equal(gradient, part, f"{label}: gradient of {name}", 1e-9)


def compare(
    case: str, mesh: ParallelMesh, expected: dict[str, Reference], transport: str = "auto"
) -> None:
    model = replaced(case, mesh, transport)
    calls = inputs_of(mesh.dp.rank)
    for kind in GRID_KINDS if mesh.world.size > 1 else calls:
        call = calls[kind]
        label = f"{case}, {kind}, {mesh.layout}, {transport}"
        logits, loss, gradients = expected[kind]
        logits = logits.roll(mesh.dp.rank, 0)
        check_call(model, call, logits, loss, label)
        assert_same_parts(model, mesh, expected_gradients(model, gradients), label)


def compare_stages(case: str, mesh: ParallelMesh, expected: dict[str, Reference]) -> None:
    model, call = replaced(case, mesh), inputs_of(mesh.dp.rank)["padded left"]
    _, loss, gradients = expected["padded left"]
    microbatch = Microbatch(call, len(call["input_ids"]))
    results = PipelineExecutor(mesh, model.gpt).run(
        lambda data: model(**data).loss, [microbatch], backward=True, loss_of=lambda loss, _: loss
    )
    assert len(results) == (1 if mesh.pp.is_last else 0)
    for result in results:
        assert_equal(result.detach(), loss, f"{case}: loss", 1e-9)
    assert_same_parts(model, mesh, expected_gradients(model, gradients), f"{case}, {mesh.layout}")


def check_generation(mesh: ParallelMesh) -> None:
    """Compare generation, where every data rank continues other prompts, which end at other times."""
    changes = {"pad_token_id": 0, "eos_token_id": 7}
    with float32_as_float64():
        twin = exact_twin_of("mixtral", **changes)
    model = replaced("mixtral", mesh, **changes).eval()
    rank = mesh.dp.rank
    prompts = torch.randint(
        8, V, (1 + rank % 2, 3 + rank), generator=torch.Generator().manual_seed(rank)
    )
    for options in ({}, {"num_beams": 2}, {"do_sample": True, "top_k": 5})[
        : 3 if mesh.pp.size > 1 else 1
    ]:
        outputs = []
        for network in (twin, model):
            torch.manual_seed(5 + rank)
            with float32_as_float64() if network is twin else nullcontext():
                outputs.append(
                    network.generate(input_ids=prompts, max_new_tokens=3 * rank + 4, **options)
                )
        assert torch.equal(*outputs), f"{options}, {mesh.layout}, rank {mesh.rank}"


def check_grids(rank: int, size: int, file: str) -> None:
    references = torch.load(file)
    for sizes, shares_sequence, transport in chosen(GRIDS, *GRIDS[2:]):
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes), sequence_parallel=shares_sequence)
        for case, expected in references.items():
            if case == "mixtral" or transport == "auto":
                compare(case, mesh, expected, transport)
        check_generation(mesh)
        mesh.destroy()
    mesh = ParallelMesh.create(ParallelLayout(size, pp=2, ep=2))
    for case, expected in references.items():
        compare_stages(case, mesh, expected)
    check_generation(mesh)
    mesh.destroy()


def test_expert_models_on_one_process_match_hugging_face(
    references: dict[str, dict[str, Reference]],
) -> None:
    for case, expected in references.items():
        compare(case, ParallelMesh.single(), expected)
    check_generation(ParallelMesh.single())


def test_expert_models_in_every_expert_grid_match_hugging_face(
    references: dict[str, dict[str, Reference]], tmp_path: Path
) -> None:
    torch.save({case: references[case] for case in GRID_CASES}, tmp_path / "references.pt")
    run_world(check_grids, 4, str(tmp_path / "references.pt"))


def test_the_balancing_loss_of_one_layer_has_the_gradients_of_hugging_face() -> None:
    coefficient, call = 0.3, inputs()["whole"]
    with float32_as_float64():
        twin = exact_twin_of("mixtral", num_hidden_layers=1, output_router_logits=True)
        twin.router_aux_loss_coef = coefficient
        output = twin(**call)
        output.loss.backward()
    # Hugging Face counts every choice of a token separately; our loss is 1 for balanced experts.
    settings = {"aux_loss": 2 * coefficient}
    model = replaced(
        "mixtral", ParallelMesh.single(), num_hidden_layers=1, expert_settings=settings
    ).train()
    loss = model(**call).loss
    assert_equal(loss, output.loss - coefficient * output.aux_loss, "main loss", 1e-9)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    assert_same_parts(
        model, model.gpt.mesh, expected_gradients(model, gradients), "with a balancing loss"
    )


def test_the_balancing_loss_of_all_layers_is_refused_with_the_setting_to_use_instead() -> None:
    for case, weight in (("mixtral", "0.02"), ("qwen3_moe", "0.03")):
        config = config_of(case, output_router_logits=True, router_aux_loss_coef=0.02).to_dict()
        # Both models have two layers of experts; tokens choose two or three experts.
        with pytest.raises(
            UnsupportedError,
            match=f"expert_settings of the configuration to {{'aux_loss': {weight}}}",
        ):
            family_of(CASES[case][0]).config(config)


def test_valid_expert_settings_are_used_and_invalid_ones_are_refused() -> None:
    config = config_of(
        "mixtral", expert_settings={"aux_loss": 0.02, "z_loss": 0.001, "aux_loss_scope": "global"}
    )
    gpt_config = family_of("mixtral").config(config.to_dict())
    assert isinstance(gpt_config, GPTConfig)
    assert gpt_config.experts == ExpertsConfig(
        num_experts=5,
        top_k=2,
        ffn_hidden_size=20,
        aux_loss=0.02,
        z_loss=0.001,
        aux_loss_scope="global",
    )
    for settings in ({"top_k": 1}, 0.02):
        with pytest.raises(
            UnsupportedError,
            match="expert_settings of a configuration must be a mapping with some of",
        ):
            family_of("mixtral").config(config_of("mixtral", expert_settings=settings).to_dict())


class ListingFolder(SafetensorsFolder):
    """Record the names and the number of elements of all reads."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read_names: set[str] = set()
        self.num_elements = 0

    def read(self, name: str, slices: Any = None) -> Tensor:
        part = super().read(name, slices)
        self.read_names.add(name)
        self.num_elements += part.numel()
        return part


@pytest.mark.parametrize("is_packed", [False, True])
def test_every_rank_reads_only_its_part_of_its_experts(is_packed: bool, tmp_path: Path) -> None:
    twin = exact_twin_of("mixtral")
    twin.save_pretrained(tmp_path, save_original_format=not is_packed)
    family = family_of("mixtral")
    full = dict(
        full_tensors(twin.state_dict(), family, family.config(twin.config.to_dict()), torch.float64)
    )
    for ep_rank, etp_rank in [(ep, etp) for ep in range(2) for etp in range(2)]:
        mesh = expert_mesh_of(2, 2, ep_rank, etp_rank)
        folder = ListingFolder(tmp_path)
        with torch.device("meta"):
            part = GPT(family.config(folder.config), mesh)
        load_from(part, folder, family)
        num_expert_elements = 0
        for name, parameter in part.named_parameters():
            spec = shard_spec_of(parameter)
            assert torch.equal(
                parameter.double(), spec.shard(full[name], parameter.shape[spec.dim])
            ), name
            num_expert_elements += parameter.numel() if spec.is_expert else 0
        experts = {
            name.split(".experts.")[1][0]
            for name in folder.read_names
            if ".experts." in name and not is_packed
        }
        assert experts == (set() if is_packed else {str(2 * ep_rank), str(2 * ep_rank + 1)})
        assert num_expert_elements == 4 * 2 * 3 * 24 * 10
        dense = sum(tensor.numel() for name, tensor in full.items() if ".experts." not in name)
        assert folder.num_elements == dense + num_expert_elements
