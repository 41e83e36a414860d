"""A plan that cannot be honoured is refused with the reason, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import build_on_meta, parallelize
from lightning_megatron.swap.decide.automatic import (
    automatic_pipeline_plan,
    automatic_tensor_plan,
    suggest_pipeline_plan,
    suggest_tensor_plan,
)
from lightning_megatron.swap.decide.model_plan import supported_plan
from tests.swap.cases import CLASSIFIER_PLAN, MLP_PLAN, AttentionOnly, Classifier, TiedDecoder, mlp
from tests.swap.families import config_of, transformers
from tests.swap.parts import mesh_of

GPT2 = GPTConfig.gpt2(vocab_size=16, max_seq_length=8, num_layers=1, hidden_size=8, num_heads=2)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def state_of(root: nn.Module) -> dict[str, Any]:
    """Return everything that a swap may change: modules, parameters, values and hooks, by name."""
    modules = dict(root.named_modules(remove_duplicate=False))
    tensors: dict[str, Tensor] = dict(root.named_parameters(remove_duplicate=False))
    tensors |= dict(root.named_buffers(remove_duplicate=False))
    return {
        "modules": {name: (id(part), type(part), part.training) for name, part in modules.items()},
        "attributes": {name: sorted(vars(part)) for name, part in modules.items()},
        "hooks": [dict(getattr(part, kind)) for part in modules.values() for kind in _HOOKS],
        "tensors": {
            name: (id(x), x.requires_grad, x.device, x.dtype, sorted(vars(x)))
            for name, x in tensors.items()
        },
        "values": {name: tensor.tolist() for name, tensor in tensors.items() if not tensor.is_meta},
    }


def refuse(root: nn.Module, mesh: ParallelMesh, plan: Any, match: str, **options: Any) -> None:
    """Check that the swap of a module is refused and leaves the module unchanged."""
    before = state_of(root)
    with pytest.raises((ParallelPlanError, UnsupportedError), match=match):
        parallelize(root, mesh, plan, **options)
    assert state_of(root) == before


def kinds_of(module: nn.Module, plan: dict[str, str] | None, tp: int = 2) -> dict[str, str]:
    return {record.name: record.kind for record in parallelize(module, mesh_of(tp), plan)}


class Residual(nn.TransformerEncoderLayer):
    """A class of users."""


def inside(module: nn.Module) -> nn.Module:
    return nn.Sequential(module)


def changed(module: nn.Module, change: Callable[[Any], object]) -> nn.Module:
    change(module)
    return module


def layer(**options: Any) -> nn.Module:
    return inside(nn.TransformerEncoderLayer(8, 2, 8, **options))


#: Module, plan, and the reason for the refusal.
REFUSED: list[tuple[nn.Module, dict[str, str] | None, str]] = [
    (Classifier(), {"embeding": "vocab"}, "'embeding'.*Did you mean 'embedding'?"),
    (Classifier(), {"embedding": "column"}, "(?s)type Embedding.*nn.Linear.*head.0"),
    (Classifier(), {"encoder.layers.*.linear1": "column"}, "{'encoder.layers.0': 'auto'}"),
    (mlp(), {"0": "colum"}, "'column', 'column_gather', 'column_full', 'qkv'"),
    (mlp(), {"0": "column(2, 1)"}, "which does not exist"),
    (mlp(), {"0": "qkv(3, 1)"}, r"out_features \(16\) of '0' must be a multiple of 5.*3 : 1 : 1"),
    (inside(nn.Linear(4, 15)), {"0": "qkv"}, r"a fused part of out_features \(5\) of '0' must be a multiple of tp \(2\)"),
    (Classifier(num_labels=7), {"head.2": "column_gather"}, r"out_features \(7\) of 'head.2' must .* tp \(2\).*1 or 7"),
    (inside(nn.Linear(9, 4)), {"0": "row"}, r"in_features \(9\) of '0' must be a multiple of tp \(2\).*1, 3 or 9"),
    (inside(nn.TransformerEncoderLayer(12, 3, 24)), None, r"num_heads \(3\) of '0' must be .*Use tp of 1 or 3"),
    (inside(Residual(16, 4, 24)), {"0": "auto"}, "type Residual"),
    (TiedDecoder(), {"embedding": "vocab"}, "'embedding.weight' is 'vocab', 'decoder.weight' is 'replicate'"),
    (TiedDecoder(num_tokens=24), {"embedding": "vocab", "decoder": "column_gather"}, "cut it alike"),
    (nn.Sequential(*[nn.Linear(4, 4)] * 2), {"0": "column_gather"}, "'0' has the kind 'column_gather', '1' has 'replicate'"),
    (changed(mlp(), lambda m: m[0].register_forward_hook(print)), {"0": "column"}, "'0' has hooks"),
    (
        changed(mlp(), lambda m: setattr(m[0], "is_capturable", False)),
        {"0": "column"},
        "'0' has is_capturable = False, which would be lost",
    ),
    (inside(nn.Embedding(8, 4, max_norm=1.0)), {"0": "vocab"}, "max_norm"),
    (inside(nn.MultiheadAttention(8, 2, kdim=4)), None, "kdim"),
    (inside(nn.MultiheadAttention(8, 2, add_zero_attn=True)), None, "add_zero_attn"),
    (layer(activation=nn.PReLU(8)), None, "activation"),
    (nn.TransformerEncoderLayer(8, 2, 8), None, "nothing holds it"),
    (GPT(GPT2), None, "nothing holds it"),
    (
        changed(inside(GPT(GPT2)), lambda m: setattr(m[0], "adapter", nn.Linear(2, 2))),
        None, "its parameters differ from those of its config.*'adapter.bias'",
    ),
    (
        changed(nn.Sequential(GPT(GPT2), nn.Linear(8, 8)), lambda m: setattr(m[1], "weight", m[0].embedding.position.weight)),
        None, "share one weight across the border of a model",
    ),
]  # fmt: skip


def test_plans_that_cannot_be_honoured_are_refused_and_change_nothing():
    for module, plan, reason in REFUSED:
        refuse(module, mesh_of(2), plan, reason)
    refuse(mlp(), mesh_of(2, 2), MLP_PLAN, "pipeline stages")
    # One tensor rank swaps nothing but still checks the plan.
    refuse(Classifier(), mesh_of(), {"embeding": "vocab"}, "'embeding'")
    assert kinds_of(Classifier(), CLASSIFIER_PLAN, tp=1) == {}
    absent = changed(mlp(), lambda m: m.register_module("absent", None))
    assert kinds_of(absent, {"0": "column_gather"}) == {"0": "column_gather"}


class WholeModel(Classifier):
    """Hold layers of all kinds, two of which share a weight, and a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.tied, self.gpt = nn.Linear(8, 7), TiedDecoder(), GPT(GPT2)
        self.register_buffer("count", torch.ones(2))
        self.register_forward_pre_hook(lambda *_: None)


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_refusal_leaves_hugging_face_models_unchanged(on_meta):
    peft = pytest.importorskip("peft")
    config = config_of("llama")

    def build_model() -> Any:
        with build_on_meta() if on_meta else nullcontext():
            model = transformers.AutoModelForCausalLM.from_config(config)
        # This registers a hook that a replaced model does not need.
        model.enable_input_require_grads()
        return model

    adapter = peft.LoraConfig(target_modules=["q_proj"])
    adapted = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapter)
    models = {"replaced": build_model(), "adapted": adapted, "kept": build_model()}
    root = nn.ModuleDict({**models, "odd": nn.Linear(8, 7)})
    refuse(root, mesh_of(2), {"kept": "replicate", "odd": "column"}, "must be a multiple of tp")


# ---- what a plan matches


def test_the_last_pattern_of_a_plan_wins_and_auto_applies_to_all_modules_inside():
    plan = {"*": "column_gather", "5": "vocab", "2": "replicate"}
    gathered = {"0": "column_gather", "3": "column_gather"}
    assert kinds_of(mlp(), plan) == {**gathered, "5": "vocab"}
    assert kinds_of(mlp(), {"0": "replicate", "[03]": "column_gather"}) == gathered
    plan = {"encoder": "auto", "encoder.layers.1": "replicate"}
    assert kinds_of(Classifier(), plan) == {"encoder": "auto", "encoder.layers.0": "auto"}
    assert kinds_of(Classifier(), {"*": "auto", "encoder": "replicate"}) == {}


def test_without_a_plan_encoder_layers_and_attention_of_torch_are_swapped():
    names = ["0.encoder", "0.encoder.layers.0", "0.encoder.layers.1", "1.attention"]
    assert list(kinds_of(nn.Sequential(Classifier(), AttentionOnly()), None)) == names
    assert kinds_of(nn.Sequential(Residual(16, 4, 24), nn.Linear(2, 2)), None) == {}


def test_unsupported_calls_of_a_cut_block_are_refused():
    module = layer(batch_first=True)
    parallelize(module, mesh_of(2))
    with pytest.raises(UnsupportedError, match="is_causal=True needs attn_mask"):
        module[0](torch.randn(2, 3, 8), is_causal=True)


def linear(**sizes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})


def test_automatic_plans_pair_the_layers_of_attention_and_of_mlps():
    def block() -> nn.ModuleDict:
        attention = linear(q=(8, 8), k=(8, 4), v=(8, 4), out=(8, 8))
        mlp = linear(gate=(8, 12), up=(8, 12), down=(12, 8))
        fused = linear(qkv=(8, 24), out=(8, 8), gate_up=(8, 24), down=(12, 8))
        grouped = linear(qkv=(8, 12), out=(8, 8))
        return nn.ModuleDict(
            {"att": attention, "norm": nn.LayerNorm(8), "mlp": mlp, "f": fused, "g": grouped}
        )

    root = nn.ModuleDict({"first": nn.Linear(3, 8), "blocks": nn.ModuleList([block(), block()])})
    full = [f"blocks.*.{name}" for name in ("att.q", "att.k", "att.v", "mlp.gate", "mlp.up")]
    row = ["att.out", "mlp.down", "f.out", "f.down", "g.out"]
    fused = {"f.qkv": "qkv", "f.gate_up": "gate_up", "g.qkv": "qkv(4, 1)"}
    expected = dict.fromkeys(full, "column_full")
    expected |= {f"blocks.*.{name}": kind for name, kind in fused.items()}
    expected |= {f"blocks.*.{name}": "row_split" for name in row}
    assert automatic_tensor_plan(root, mesh_of(tp=2)) == expected
    assert not {"g.qkv", "g.out"} & {
        name.removeprefix("blocks.*.") for name in automatic_tensor_plan(root, mesh_of(tp=4)) or {}
    }


def test_automatic_plans_shard_vocabularies_with_what_shares_their_weight():
    root = nn.ModuleDict({"words": nn.Embedding(50, 8), "places": nn.Embedding(5, 8)})
    root["block"] = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    root["head"] = nn.Linear(8, 50)
    pair = {"block.0": "column_full", "block.2": "row_split"}
    assert automatic_tensor_plan(root, mesh_of(tp=2)) == {**pair, "words": "vocab", "head": "vocab"}
    root["words"].weight = root["head"].weight
    assert automatic_tensor_plan(root, mesh_of(tp=2)) == {**pair, "words": "vocab", "head": "vocab"}
    root.register_parameter("also", root["head"].weight)
    assert automatic_tensor_plan(root, mesh_of(tp=2)) == pair
    assert automatic_tensor_plan(root, mesh_of(tp=1)) is None


def test_automatic_plans_leave_the_choice_where_nothing_or_too_much_is_known():
    assert automatic_tensor_plan(linear(head=(8, 4), odd=(5, 3)), mesh_of(tp=2)) is None
    assert suggest_tensor_plan(linear(head=(8, 4), odd=(5, 3)), 2) == {"head": "column_gather"}
    assert automatic_tensor_plan(nn.Sequential(AttentionOnly()), mesh_of(tp=2)) is None
    mixed = nn.Sequential(AttentionOnly(), linear(a=(8, 4), b=(4, 8)))
    assert automatic_tensor_plan(mixed, mesh_of(tp=2)) == {
        "*": "auto",
        "*.a": "column_full",
        "*.b": "row_split",
    }
    # A layer with two names would need one kind for both.
    shared = nn.Linear(8, 16)
    twice = nn.ModuleDict({"a": shared, "b": nn.Linear(16, 8), "c": nn.Sequential(shared)})
    assert automatic_tensor_plan(twice, mesh_of(tp=2)) is None
    compiled = nn.Sequential(linear(a=(8, 16), b=(16, 8)))
    compiled[0].compile(backend="eager")
    gathered = {"*.a": "column_gather", "*.b": "row_split"}
    assert automatic_tensor_plan(compiled, mesh_of(tp=2)) == gathered
    compiled[0] = torch.compile(linear(a=(8, 16), b=(16, 8)), backend="eager")
    assert automatic_tensor_plan(compiled, mesh_of(tp=2)) is None
    hooked = linear(a=(8, 16), b=(16, 8))
    hooked["a"].register_forward_hook(print)
    assert automatic_tensor_plan(hooked, mesh_of(tp=2)) is None
    sizes = [nn.ModuleList([linear(a=(8, n), b=(n, 8)) for n in (16, 15)])]
    assert automatic_tensor_plan(nn.Sequential(*sizes), mesh_of(tp=2)) == {
        "0.0.a": "column_full",
        "0.0.b": "row_split",
    }


def test_stages_divide_the_one_list_of_blocks_that_is_much_larger_than_others():
    layout = ParallelLayout(2, pp=2)
    blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    root = nn.ModuleDict({"head": nn.Linear(8, 50), "blocks": blocks, "words": nn.Embedding(50, 8)})
    ends = {"head": "last", "words": "first"}
    assert automatic_pipeline_plan(root, layout) == {"blocks": "blocks", **ends}
    assert automatic_pipeline_plan(root, ParallelLayout(1)) is None
    assert automatic_pipeline_plan(root, ParallelLayout(8, pp=8)) is None
    root["more"] = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    assert automatic_pipeline_plan(root, layout) is None
    assert (suggest_pipeline_plan(root, layout) or {})["blocks"] == "blocks"


# ---- plans of Hugging Face models without a table


def model_of(**changes: Any) -> Any:
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
    # No family computes this activation, so the model keeps its own code.
    config = transformers.GraniteConfig(**{**sizes, **changes}, hidden_act="tanh")
    return transformers.GraniteForCausalLM(config)


def test_heads_that_do_not_divide_are_refused():
    llama = transformers.LlamaConfig(hidden_size=36, num_attention_heads=9, num_key_value_heads=3)
    llama.update({"num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 64})
    for model, tp, reason in (
        (model_of(num_attention_heads=8), 4, r"num_key_value_heads \(2\) of 'model' must be a multiple of tp \(4\)"),
        (transformers.LlamaForCausalLM(llama), 2, r"num_attention_heads \(9\) must be a multiple of tp.* 1, 3 or 9"),
    ):  # fmt: skip
        with pytest.raises(ParallelPlanError, match=reason):
            parallelize(nn.ModuleDict({"model": model}), mesh_of(tp))


def test_plan_entries_that_are_not_understood_leave_their_module_uncut():
    model = model_of()
    assert supported_plan(model, 2).kinds["model.layers.0.mlp.gate_proj"] == "column"
    known = model.tp_plan
    for name, kind, part in (
        # Layers of one module are cut together or not at all.
        ("model.layers.*.mlp.up_proj", "packed_colwise", ".mlp."),
        ("model.layers.*.input_layernorm", "colwise", "norm"),
    ):
        model.tp_plan = {**known, name: kind}
        plan = supported_plan(model, 2)
        assert not any(part in uncut for uncut in plan.kinds)
        assert plan.kinds["model.layers.1.self_attn.q_proj"] == "column"
        assert name in str(plan)
    model.tp_plan = dict.fromkeys(known, "packed_colwise")
    root = nn.ModuleDict({"model": model})
    *_, record = parallelize(root, mesh_of(2))
    assert record.local_elements == record.full_elements
    assert "no known plan" in str(record)
