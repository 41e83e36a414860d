"""A swap is refused only in its first two steps, which leave the module unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import build_on_meta, parallelize
from lightning_megatron.swap.apply import build, install
from lightning_megatron.swap.decide.swap_plan import SwapOptions, decide
from tests.swap.families import twin_of
from tests.swap.parts import mesh_of
from tests.world import run_world

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_load_state_dict_pre_hooks"),
)
PLAN = {
    "*.layers.0": "column",
    "*.layers.2": "row",
    "*.encoder": "auto",
    "*.words": "vocab",
    "*.head": "vocab",
}


class Model(nn.Module):
    """Hold layers of all kinds, two of which share a weight, and a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.odd = nn.Linear(8, 7)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
        )
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("count", torch.ones(2))
        self.gpt = GPT(
            GPTConfig.gpt2(
                vocab_size=16, max_seq_length=8, num_layers=1, hidden_size=8, num_heads=2
            )
        )
        self.register_forward_pre_hook(lambda *_: None)


def state_of(root: nn.Module) -> dict[str, Any]:
    """Return everything that a swap may change: modules, parameters, values and hooks, by name."""
    modules = dict(root.named_modules(remove_duplicate=False))
    tensors: dict[str, Tensor] = {
        **dict(root.named_parameters(remove_duplicate=False)),
        **dict(root.named_buffers(remove_duplicate=False)),
    }
    return {
        "modules": {name: (id(part), type(part), part.training) for name, part in modules.items()},
        "attributes": {name: sorted(vars(part)) for name, part in modules.items()},
        "hooks": {
            (name, kind): dict(getattr(part, kind))
            for name, part in modules.items()
            for kind in _HOOKS
        },
        "tensors": {
            name: (
                id(tensor),
                tensor.requires_grad,
                tensor.device,
                tensor.dtype,
                sorted(vars(tensor)),
            )
            for name, tensor in tensors.items()
        },
        "values": {name: tensor.tolist() for name, tensor in tensors.items() if not tensor.is_meta},
    }


def refuse(root: nn.Module, mesh: ParallelMesh, plan: Any, match: str, **options: Any) -> None:
    """Check that the swap of a module is refused and leaves the module unchanged."""
    before = state_of(root)
    with pytest.raises((ParallelPlanError, UnsupportedError), match=match):
        parallelize(root, mesh, plan, **options)
    assert state_of(root) == before


@pytest.mark.parametrize(
    ("plan", "options", "match"),
    [
        ({"*.head": "diagonal"}, {}, "the kind 'diagonal'"),
        ({"*.tail": "column"}, {}, "matches no module"),
        ({"*.words": "column"}, {}, "of type Embedding"),
        (None, {"pipeline_plan": {"*.head": "blocks"}}, "has this kind"),
    ],
)
def test_an_error_while_deciding_leaves_the_module_unchanged(
    plan: Any, options: dict[str, Any], match: str
) -> None:
    refuse(nn.ModuleDict({"root": Model()}), mesh_of(tp=2), {**PLAN, **plan} if plan else None, match,
           **options)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"*.odd": "column"}, "must be a multiple of tp"),
        ({"*.head": "replicate"}, "share one weight must cut it alike"),
    ],
)
def test_an_error_while_building_leaves_the_module_unchanged(changes: Any, match: str) -> None:
    refuse(nn.ModuleDict({"root": Model()}), mesh_of(tp=2), {**PLAN, **changes}, match)


def test_the_refusal_of_a_block_with_hooks_leaves_the_module_unchanged() -> None:
    root = nn.ModuleDict({"root": Model()})
    root["root"].head.register_forward_hook(lambda *_: None)
    refuse(root, mesh_of(tp=2), PLAN, "has hooks")


def test_the_refusal_of_a_changed_gpt_leaves_the_module_unchanged() -> None:
    root = nn.ModuleDict({"root": Model()})
    root["root"].gpt.extra = nn.Linear(2, 2)
    refuse(root, mesh_of(tp=2), PLAN, "its parameters differ from those of its config")


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_refusal_leaves_hugging_face_models_unchanged(on_meta: bool) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    config = twin_of("llama").config

    def build_model() -> Any:
        model = transformers.LlamaForCausalLM(config)
        if on_meta:
            with build_on_meta():
                model = transformers.AutoModelForCausalLM.from_config(config)
        # This registers a hook that a replaced model does not need.
        model.enable_input_require_grads()
        return model

    root = nn.ModuleDict(
        {
            "replaced": build_model(),
            "adapted": peft.get_peft_model(
                transformers.LlamaForCausalLM(config), peft.LoraConfig(target_modules=["q_proj"])
            ),
            "kept": build_model(),
            "odd": nn.Linear(8, 7),
        }
    )
    plan = {"kept": "replicate", "odd": "column"}
    refuse(root, mesh_of(tp=2), plan, "must be a multiple of tp")


def test_only_the_install_step_changes_the_module() -> None:
    root = nn.ModuleDict({"root": Model()})
    before = state_of(root)
    plan = decide(root, mesh_of(tp=2), SwapOptions(PLAN))
    assert state_of(root) == before
    swaps = build(plan)
    assert state_of(root) == before
    records = install(plan, swaps)
    assert [record.name for record in records] == [
        *("root.words", "root.layers.0", "root.layers.2", "root.encoder"),
        *("root.encoder.layers.0", "root.encoder.layers.1", "root.head", "root.gpt"),
    ]
    assert root["root"].head.weight is root["root"].words.weight
    assert state_of(root)["modules"] != before["modules"]


def refuse_on_ranks(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    mesh = ParallelMesh.create(ParallelLayout(size, tp=size))
    root = nn.ModuleDict({"root": Model()})
    refuse(root, mesh, {**PLAN, "*.odd": "column"}, "must be a multiple of tp")


def test_a_refusal_leaves_the_different_values_of_ranks_unchanged() -> None:
    run_world(refuse_on_ranks, 2)
