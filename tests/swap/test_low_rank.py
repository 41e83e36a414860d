"""Adapters of peft on replaced models match peft's logits, losses and gradients in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.parameters.gradient_slot import stacked_view
from lightning_megatron.layers.parameters.parameter_stack import ParameterStack
from lightning_megatron.models.layered import join_frozen
from lightning_megatron.swap import build_on_meta, parallelize
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from lightning_megatron.swap.tensors.mapping import TensorsInMemory
from tests.oracles import assert_equal, float32_as_float64, gather_full
from tests.swap.families import ENCODERS, EXPERTS, exact_twin, transformers, twin_of
from tests.swap.parts import check_outputs, expected_of, inputs, logits_of
from tests.swap.test_encoders import inputs as encoder_inputs
from tests.swap.test_encoders import labelled, loss_of

peft = pytest.importorskip("peft")

MESH = ParallelMesh.single()
#: Models with separate, packed, interleaved and transposed projections.
DECODERS = ("llama with one key head", "gpt2", "phi3", "gpt_neox", "bloom", "mpt", "starcoder2")


def adapted(model: nn.Module, **settings: Any) -> Any:
    """Return a model with an adapter of random values."""
    options = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", **settings}
    with warnings.catch_warnings():
        # peft warns about Conv1D, which stores its weight with the input dimension first.
        warnings.filterwarnings("ignore", "fan_in_fan_out")
        config = peft.LoraConfig(**options)
        wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return wrapped


def swapped(wrapped: nn.Module, mesh: ParallelMesh) -> Any:
    """Replace the model inside an adapter."""
    root = nn.ModuleDict({"model": wrapped})
    parallelize(root, mesh)
    assert root["model"] is wrapped
    assert isinstance(wrapped.get_base_model(), ReplacedModel)
    return wrapped


def gradients_of_factors(
    wrapped: Any, twin: Any, mesh: ParallelMesh
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the full gradient of every trained factor and, on the host, the gradient of peft; frozen
    parameters have none.
    """
    model: ReplacedModel = wrapped.get_base_model()
    theirs = {}
    for name, parameter in twin.named_parameters():
        if parameter.grad is not None:
            name = name.removeprefix("base_model.model.").replace(".default.", ".")
            theirs[name.replace(".modules_to_save.", ".")] = parameter.grad.double().cpu()
    adapter, tensors, name_of = model.adapter, {}, str
    if adapter:
        tensors = adapter.class_tensors(model.family.class_tensors(model.body.config))
        name_of = adapter.wrapped_name
    reader = TensorsInMemory(theirs)
    expected = {
        name if ".lora_" in name else name_of(name): tensor.full(reader, torch.float64)
        for name, (tensor, _) in tensors.items()
    }
    assert len(expected) == sum(parameter.requires_grad for parameter in twin.parameters())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == expected.keys()
    gradients = {}
    for name, parameter in trained.items():
        spec = shard_spec_of(parameter, mesh.tp.rank)
        assert parameter.grad is not None, name
        gradient = all_reduce_(parameter.grad, mesh.data).div_(mesh.data.size)
        full = gather_full(gradient, spec, mesh, sum_copies=spec.partial)
        gradients[name] = full, expected[name]
    return gradients


def check_factors(wrapped: Any, twin: Any, mesh: ParallelMesh, label: str) -> None:
    for name, (actual, expected) in gradients_of_factors(wrapped, twin, mesh).items():
        assert_equal(actual, expected, f"{label}: gradient of {name}", 1e-9)


#: Adapters of attention, which models with experts accept.
LINEAR = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def compare_adapters(case: str, mesh: ParallelMesh, **settings: Any) -> None:
    """Compare a model with an adapter with peft."""
    if case in ENCODERS:
        # With this task type, peft trains full classifiers.
        settings = {"task_type": "SEQ_CLS"} if "classes" in case else {}
        twin = adapted(exact_twin(case), **settings)
        wrapped = swapped(adapted(exact_twin(case), **settings), mesh)
        call = labelled(case, encoder_inputs(twin.get_base_model())["padded right"])
        expected, actual = loss_of(twin(**call)), loss_of(wrapped(**call))
        assert_equal(actual, expected, f"{case}, {mesh.layout}: loss", 1e-9)
        expected.backward()
        actual.backward()
        check_factors(wrapped, twin, mesh, f"{case}, {mesh.layout}")
        return
    settings = {**LINEAR, **settings} if case in EXPERTS else settings
    with float32_as_float64() if case in EXPERTS else nullcontext():
        twin = adapted(exact_twin(case), **settings)
    wrapped = swapped(adapted(exact_twin(case), **settings), mesh)
    label = f"{case}, {settings}, {mesh.layout} sp={mesh.sequence_parallel}"
    # Tests of models without adapters cover padding for sequence parallelism and other kinds of
    # batches.
    kinds = [("odd", "none")] if mesh.world.size > 1 else [("padded left", "none"), ("odd", "full")]
    for kind, recompute in kinds:
        # Every data rank has another order of rows.
        call = {name: x.roll(mesh.dp.rank, 0) for name, x in inputs()[kind].items()}
        expected = expected_of(twin, call)
        wrapped.get_base_model().gpt.recompute = recompute
        wrapped.zero_grad()
        check_outputs(wrapped, call, expected, label).backward()
        check_factors(wrapped, twin, mesh, label)
    with wrapped.disable_adapter(), twin.disable_adapter(), torch.no_grad():
        plain = logits_of(twin, {name: x for name, x in call.items() if name != "labels"})
        assert_equal(wrapped(**call).logits, plain, f"{label}: without adapter", 1e-9)
    assert_equal(wrapped(**call).logits, expected[0], f"{label}: with it again", 1e-9)


@pytest.mark.parametrize(
    "case", [*DECODERS, "mixtral", "qwen3_moe", "bert masked", "roberta", "roberta classes"]
)
def test_adapters_match_peft(case):
    compare_adapters(case, MESH)


def test_adapters_with_patterns_and_other_scales_match_peft():
    settings = {"target_modules": ["v_proj", "q_proj", "up_proj"], "use_rslora": True}
    settings |= {"layers_to_transform": [1, 2], "rank_pattern": {"v_proj": 5}}
    settings |= {"alpha_pattern": {"q_proj": 7}, "task_type": "CAUSAL_LM"}
    compare_adapters("llama", MESH, **settings)


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_frozen_weights_that_a_conversion_separates_become_views_of_one_memory_again(case):
    wrapped = swapped(adapted(exact_twin(case), **LINEAR), MESH).float()
    gpt, call = wrapped.get_base_model().gpt, inputs()["whole"]
    separate = wrapped(**call).logits
    stacks = [part for part in gpt.modules() if isinstance(part, ParameterStack)]
    experts = [part for part in gpt.modules() if isinstance(part, GroupedMLP)]
    matrices = [weights for part in experts for weights in part.matrices()]
    assert stacks
    assert bool(experts) == (case == "mixtral")
    for is_joined in (False, True):
        for stack in stacks:
            is_view = stack.concatenate().data_ptr() == stack.parts[0].data_ptr()
            assert is_view == is_joined
        for weights in matrices:
            assert (stacked_view(weights) is not None) == is_joined
        join_frozen([gpt])
    assert torch.equal(wrapped(**call).logits, separate)


def test_lora_dropout_applies_only_to_the_input_of_the_update():
    wrapped = swapped(adapted(exact_twin("llama"), lora_dropout=0.5), MESH)
    call, gpt = inputs()["whole"], wrapped.get_base_model().gpt
    update = gpt.layers["1"].attention.qkv.low_rank["q_proj"]
    # As in peft, the base model is in evaluation mode, and the new layers are in training mode.
    assert (update.training, gpt.training) == (True, False)
    losses, gradients = [], []
    for step in range(4):
        gpt.mesh.random.begin_microbatch(step, 0)
        losses.append(wrapped.train(step < 2)(**call).loss.detach())
    assert losses[0] != losses[1]
    assert losses[2] == losses[3]
    for recompute in ("none", "selective", "full"):
        wrapped.train().zero_grad()
        gpt.recompute = recompute
        gpt.mesh.random.begin_microbatch(9, 0)
        wrapped(**call).loss.backward()
        gradients.append(update.b.weight.grad.clone())
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    x = torch.ones(50, 20, 48, dtype=torch.float64)
    gpt.mesh.random.seek(1)
    with torch.no_grad():
        mean = sum(update.train()(x) for _ in range(20)) / 20
        assert_equal(mean.mean((0, 1)), update.eval()(x)[0, 0], "mean under dropout", 0.02)


def test_adapters_of_models_without_values_start_with_the_values_of_peft(tmp_path):
    twin_of("llama").save_pretrained(tmp_path)
    root = nn.Module()
    torch.manual_seed(1)
    with build_on_meta():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        model.gradient_checkpointing_enable()
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
        root.model = peft.get_peft_model(model, config)
    assert model.device.type == "meta"
    drawn = {n: p.detach().clone() for n, p in root.model.named_parameters() if "lora_" in n}
    parallelize(root, MESH)
    for number, layer in root.model.get_base_model().gpt.layers.items():
        for module, update in (
            ("self_attn.q_proj", layer.attention.qkv.low_rank["q_proj"]),
            ("mlp.down_proj", layer.mlp.down.low_rank["down_proj"]),
        ):
            name = f"base_model.model.model.layers.{number}.{module}.lora_A.default.weight"
            bound = update.a.weight.shape[1] ** -0.5
            assert torch.equal(update.a.weight, drawn[name])
            assert 0.9 * bound < update.a.weight.abs().max() <= bound
            assert not update.b.weight.any()


def test_adapters_computed_from_weights_of_a_model_without_values_match_peft(tmp_path):
    twin_of("llama").save_pretrained(tmp_path)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    twin = peft.get_peft_model(twin_of("llama"), config)
    with build_on_meta():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        wrapped = peft.get_peft_model(model, config)
    swapped(wrapped, MESH)
    call = inputs()["whole"]
    assert_equal(wrapped(**call).logits, logits_of(twin, call), "logits", 1e-4)


def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    next(iter(tensors.values()))[0] = float("nan")
    return tensors


DAMAGES: list[tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], Any, str]] = [
    (dict, None, ""),
    (lambda tensors: {name.replace("layers.", "blocks."): t for name, t in tensors.items()}, CheckpointMismatchError, r"has '.*blocks\.0.* and lacks '.*layers\.0"),
    (lambda tensors: dict(list(tensors.items())[1:]), CheckpointMismatchError, r"and lacks '.*down_proj\.lora_A"),
    (spoil, CorruptDataError, r"must have finite values: .*layers\.0\.mlp\.down_proj\.lora_A"),
]  # fmt: skip


def test_saved_adapters_are_loaded_whole_or_refused(tmp_path):
    twin_of("llama").save_pretrained(tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    for damage, error, message in DAMAGES:
        adapted(twin_of("llama")).save_pretrained(tmp_path / "adapter")
        save_file(damage(load_file(file)), file)
        with build_on_meta(), pytest.raises(error, match=message) if error else nullcontext():
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
            peft.PeftModel.from_pretrained(model, tmp_path / "adapter")


QUERY = {"target_modules": ["q_proj"]}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"use_dora": True}, "its use_dora is True"),
    ("llama", {"bias": "all"}, "its bias is 'all'"),
    ("llama", {"target_modules": ["q_proj", "embed_tokens"]}, "'model.embed_tokens' is a Embedding"),
    ("llama", {"target_modules": ["q_proj", "lm_head"]}, "'lm_head' cannot be adapted"),
    ("mixtral", {**QUERY, "target_parameters": ["mlp.experts.gate_up_proj"]}, "its target_parameters has 'mlp.experts"),
    ("mixtral", {"target_modules": "all-linear"}, "'gate_up_proj'.* because 'all-linear' includes experts"),
    ("mixtral", {**QUERY, "modules_to_save": ["experts"]}, "its modules_to_save has 'model.layers.0.mlp.experts'"),
]  # fmt: skip


def test_adapters_that_replaced_models_cannot_compute_are_refused_by_name():
    for case, settings, message in REFUSED:
        wrapped = adapted(exact_twin(case), **settings)
        with pytest.raises(UnsupportedError, match=message):
            swapped(wrapped, MESH)
    wrapped = adapted(twin_of("llama"))
    wrapped.merge_adapter()
    with pytest.raises(UnsupportedError, match="is merged"):
        swapped(wrapped, MESH)
    wrapped.unmerge_adapter()
    wrapped.add_adapter("second", peft.LoraConfig(**QUERY))
    with pytest.raises(UnsupportedError, match="it has the adapters 'default', 'second'"):
        swapped(wrapped, MESH)
    loha = peft.get_peft_model(twin_of("llama"), peft.LoHaConfig(**QUERY))
    with pytest.raises(UnsupportedError, match="is a Linear"):
        swapped(loha, MESH)
    wrapped = swapped(adapted(twin_of("llama")), MESH)
    with pytest.raises(UnsupportedError, match="merge_and_unload needs the layers of peft"):
        wrapped.merge_and_unload()
