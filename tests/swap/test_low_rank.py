"""Adapters of peft on replaced models match peft's logits, losses and gradients in every layout."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import build_on_meta, parallelize
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from lightning_megatron.swap.tensors.mapping import TensorsInMemory
from tests.oracles import assert_equal, gather_full
from tests.swap.encoders import CASES as ENCODERS
from tests.swap.families import CASES as DECODERS
from tests.swap.families import transformers, twin_of
from tests.swap.parts import check_call
from tests.swap.test_encoders import exact_encoder, labelled, loss_of
from tests.swap.test_encoders import inputs as encoder_inputs
from tests.swap.test_language_models import exact_twin, expected_of, inputs, logits_of
from tests.world import run_world

peft = pytest.importorskip("peft")

LLAMA = "llama with one key head"


def adapted(model: nn.Module, **settings: Any) -> Any:
    """Return a model with an adapter of random values."""
    config = peft.LoraConfig(
        **{"r": 3, "lora_alpha": 5, "target_modules": "all-linear", **settings}
    )
    with warnings.catch_warnings():
        # peft warns about Conv1D, which stores its weight with the input dimension first.
        warnings.filterwarnings("ignore", "fan_in_fan_out")
        wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return wrapped


def swapped(wrapped: nn.Module, mesh: ParallelMesh) -> Any:
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
    theirs = {
        name.removeprefix("base_model.model."): parameter.grad
        for name, parameter in twin.named_parameters()
    }
    theirs = {name: grad.double().cpu() for name, grad in theirs.items() if grad is not None}
    theirs = {
        name.replace(".default.", ".").replace(".modules_to_save.", "."): grad
        for name, grad in theirs.items()
    }
    class_tensors = (
        model.adapter.class_tensors(model.family.class_tensors(model.body.config))
        if model.adapter
        else {}
    )
    reader = TensorsInMemory(theirs)
    name_of = model.adapter.wrapped_name if model.adapter else str
    expected = {
        name if ".lora_" in name else name_of(name): tensor.full(reader, torch.float64)
        for name, (tensor, _) in class_tensors.items()
    }
    assert len(expected) == sum(parameter.requires_grad for parameter in twin.parameters())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == expected.keys()
    gradients = {}
    for name, parameter in trained.items():
        spec = shard_spec_of(parameter, mesh.tp.rank)
        assert parameter.grad is not None, name
        gradients[name] = (
            gather_full(parameter.grad, spec, mesh, sum_copies=spec.partial),
            expected[name],
        )
    return gradients


def check_gradients(wrapped: Any, twin: Any, mesh: ParallelMesh, label: str) -> None:
    for name, (actual, expected) in gradients_of_factors(wrapped, twin, mesh).items():
        assert_equal(actual, expected, f"{label}: gradient of {name}", 1e-9)


def compare_decoders(case: str, mesh: ParallelMesh, **settings: Any) -> None:
    twin, wrapped = (
        adapted(exact_twin(case), **settings),
        swapped(adapted(exact_twin(case), **settings), mesh),
    )
    label = f"{case}, {settings}, tp={mesh.tp.size} sp={mesh.sequence_parallel}"
    # Tests of models without adapters cover padding for sequence parallelism and other kinds of
    # batches.
    for kind, recompute in (
        (("odd", "none"),) if mesh.tp.size > 1 else (("padded left", "none"), ("odd", "full"))
    ):
        call = inputs()[kind]
        logits, loss, _ = expected_of(twin, call)
        wrapped.get_base_model().gpt.recompute = recompute
        check_call(wrapped, call, logits, loss, label)
        check_gradients(wrapped, twin, mesh, label)
    with wrapped.disable_adapter(), twin.disable_adapter(), torch.no_grad():
        unlabelled = {name: tensor for name, tensor in call.items() if name != "labels"}
        expected = logits_of(twin, unlabelled)
        assert_equal(wrapped(**call).logits, expected, f"{label}: without adapter", 1e-9)
    assert_equal(wrapped(**call).logits, logits, f"{label}: with it again", 1e-9)


def compare_encoders(case: str, mesh: ParallelMesh) -> None:
    # With this task type, peft trains full classifiers.
    settings = {"task_type": "SEQ_CLS"} if "classes" in case else {}
    twin = adapted(exact_encoder(case), **settings)
    wrapped = swapped(adapted(exact_encoder(case), **settings), mesh)
    call = labelled(case, encoder_inputs(twin.get_base_model())["padded right"])
    label = f"{case}, tp={mesh.tp.size} sp={mesh.sequence_parallel}"
    expected, output = twin(**call), wrapped(**call)
    expected.loss = expected.get("loss")
    assert_equal(loss_of(output), loss_of(expected), f"{label}: loss", 1e-9)
    loss_of(expected).backward()
    loss_of(output).backward()
    check_gradients(wrapped, twin, mesh, label)


def test_adapters_on_one_process_match_peft() -> None:
    for case in DECODERS:
        compare_decoders(case, ParallelMesh.single())
    for case in ENCODERS:
        compare_encoders(case, ParallelMesh.single())
    settings = {
        "target_modules": ["v_proj", "q_proj", "up_proj"],
        "use_rslora": True,
        "layers_to_transform": [1, 2],
    }
    settings |= {
        "rank_pattern": {"v_proj": 5},
        "alpha_pattern": {"q_proj": 7},
        "task_type": "CAUSAL_LM",
    }
    compare_decoders("llama", ParallelMesh.single(), **settings)


class LowRankUpdate(nn.Module):
    """Add an update of low rank to a layer, as users write it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def compare_user_updates(mesh: ParallelMesh) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(
        LowRankUpdate(nn.Linear(8, 8)), nn.GELU(), LowRankUpdate(nn.Linear(8, 8))
    ).double()
    root, x = deepcopy(twin), torch.randn(3, 8, dtype=torch.float64)
    parallelize(root, mesh, {"0.base": "column_gather", "2.base": "row_split"})
    assert root[0].base.weight.shape[0] == 8 // mesh.tp.size
    for model in (twin, root):
        model(x).square().sum().backward()
    for name, parameter in root.named_parameters():
        if parameter.requires_grad:
            assert_equal(parameter.grad, twin.get_parameter(name).grad, name, 1e-9)


def check_stages(size: int) -> None:
    mesh = ParallelMesh.create(ParallelLayout(size, tp=2, pp=2), sequence_parallel=True)
    twin, wrapped = (adapted(exact_twin("llama", num_hidden_layers=2)) for _ in range(2))
    swapped(wrapped, mesh)
    call = inputs()["odd"]
    logits, loss, _ = expected_of(twin, call)
    with torch.no_grad():
        output = wrapped(**call)
    assert_equal(output.logits, logits, "logits of two stages", 1e-9)
    assert_equal(output.loss, loss, "loss of two stages", 1e-9)
    mesh.destroy()


def check_ranks(rank: int, size: int) -> None:
    check_stages(size)
    for tp in (2, 4):
        for sequence_parallel in (False, True):
            mesh = ParallelMesh.create(
                ParallelLayout(size, tp=tp), sequence_parallel=sequence_parallel
            )
            if tp == 4:
                compare_decoders(LLAMA, mesh)
                mesh.destroy()
                continue
            for case in (LLAMA, "gpt_neox") if sequence_parallel else ("gpt2", "phi3"):
                compare_decoders(case, mesh)
            compare_encoders("roberta classes" if sequence_parallel else "bert classes", mesh)
            compare_encoders("bert masked", mesh)
            compare_user_updates(mesh)
            mesh.destroy()


def test_adapters_on_several_ranks_match_peft() -> None:
    run_world(check_ranks, 4)


def test_lora_dropout_applies_only_to_the_input_of_the_update() -> None:
    wrapped = swapped(adapted(exact_twin("llama"), lora_dropout=0.5), ParallelMesh.single())
    call = inputs()["whole"]
    update = wrapped.get_base_model().gpt.layers["1"].attention.qkv.low_rank["q_proj"]
    # As in peft, the base model is in evaluation mode, and the new layers are in training mode.
    assert update.training
    assert not wrapped.get_base_model().gpt.training
    losses = []
    for step in range(4):
        wrapped.get_base_model().gpt.mesh.random.begin_microbatch(step, 0)
        losses.append(wrapped.train(step < 2)(**call).loss.detach())
    assert losses[0] != losses[1]
    assert losses[2] == losses[3]
    gradients = []
    for recompute in ("none", "selective", "full"):
        wrapped.train().zero_grad()
        wrapped.get_base_model().gpt.recompute = recompute
        wrapped.get_base_model().gpt.mesh.random.begin_microbatch(9, 0)
        wrapped(**call).loss.backward()
        gradients.append(update.b.weight.grad.clone())
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    update.train()
    x = torch.ones(50, 20, 48, dtype=torch.float64)
    wrapped.get_base_model().gpt.mesh.random.seek(1)
    with torch.no_grad():
        mean = sum(update(x) for _ in range(20)) / 20
        assert_equal(mean.mean((0, 1)), update.eval()(x)[0, 0], "mean under dropout", 0.02)


def test_adapters_of_models_without_values_start_with_the_values_of_peft(tmp_path: Path) -> None:
    twin_of("llama").save_pretrained(tmp_path)
    root = nn.Module()
    torch.manual_seed(1)
    with build_on_meta():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        model.gradient_checkpointing_enable()
        root.model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
        )
    assert model.device.type == "meta"
    drawn = {
        name: p.detach().clone() for name, p in root.model.named_parameters() if "lora_" in name
    }
    parallelize(root, ParallelMesh.single())
    layers = root.model.get_base_model().gpt.layers
    for layer in range(3):
        for module, update in (
            ("self_attn.q_proj", layers[str(layer)].attention.qkv.low_rank["q_proj"]),
            ("mlp.down_proj", layers[str(layer)].mlp.down.low_rank["down_proj"]),
        ):
            name, bound = (
                f"base_model.model.model.layers.{layer}.{module}",
                update.a.weight.shape[1] ** -0.5,
            )
            assert torch.equal(update.a.weight, drawn[f"{name}.lora_A.default.weight"])
            assert 0.9 * bound < update.a.weight.abs().max() <= bound
            assert not update.b.weight.any()


def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("layers.", "blocks."): tensor for name, tensor in tensors.items()}


def drop(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(list(tensors.items())[1:])


def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    next(iter(tensors.values()))[0] = float("nan")
    return tensors


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (dict, None, ""),
        (rename, CheckpointMismatchError, r"has '.*blocks\.0.* and lacks '.*layers\.0"),
        (drop, CheckpointMismatchError, r"and lacks '.*layers\.0\.mlp\.down_proj\.lora_A"),
        (spoil, CorruptDataError, r"must have finite values: .*layers\.0\.mlp\.down_proj\.lora_A"),
    ],
)
def test_saved_adapters_are_loaded_whole_or_refused(
    damage: Any, error: type[Exception] | None, message: str, tmp_path: Path
) -> None:
    twin_of("llama").save_pretrained(tmp_path)
    adapted(twin_of("llama")).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(damage(load_file(file)), file)
    with build_on_meta(), pytest.raises(error, match=message) if error else nullcontext():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        peft.PeftModel.from_pretrained(model, tmp_path / "adapter")


def test_models_that_a_plan_replicates_keep_the_layers_of_peft(tmp_path: Path) -> None:
    twin = twin_of("llama").eval()
    twin.save_pretrained(tmp_path)
    root, call = nn.Module(), inputs()["whole"]
    with build_on_meta():
        root.model = adapted(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    parallelize(root, ParallelMesh.single(), {"*": "replicate"})
    assert torch.equal(root.model(**call).logits, adapted(twin)(**call).logits)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "its use_dora is True"),
        ({"bias": "all"}, "its bias is 'all'"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "'model.embed_tokens' is a Embedding"),
        ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head' cannot be adapted"),
        ({"trainable_token_indices": [1]}, "its trainable_token_indices is"),
    ],
)
def test_adapter_settings_beyond_lora_are_refused_by_name(
    settings: dict[str, Any], message: str
) -> None:
    root = nn.ModuleDict({"model": adapted(twin_of("llama"), **settings)})
    with pytest.raises(UnsupportedError, match=message):
        parallelize(root, ParallelMesh.single())


def test_merged_adapters_second_adapters_and_other_types_are_refused() -> None:
    wrapped = adapted(twin_of("llama"))
    wrapped.merge_adapter()
    with pytest.raises(UnsupportedError, match="is merged"):
        parallelize(nn.ModuleDict({"model": wrapped}), ParallelMesh.single())
    wrapped.unmerge_adapter()
    wrapped.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match="it has the adapters 'default', 'second'"):
        parallelize(nn.ModuleDict({"model": wrapped}), ParallelMesh.single())
    loha = peft.get_peft_model(twin_of("llama"), peft.LoHaConfig(target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match="is a Linear"):
        parallelize(nn.ModuleDict({"model": loha}), ParallelMesh.single())
    wrapped = swapped(adapted(twin_of("llama")), ParallelMesh.single())
    with pytest.raises(
        UnsupportedError, match=r"merge_and_unload needs the layers of peft.*convert"
    ):
        wrapped.merge_and_unload()
