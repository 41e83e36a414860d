"""Changes that configure_model makes to a Hugging Face model built without weights take effect or are
refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import build_on_meta, parallelize
from tests.oracles import assert_equal, gather_full
from tests.swap.encoders import encoder_of
from tests.swap.families import V, twin_of
from tests.world import run_world

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(0, V - 2, (2, 8), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def zero_head(model: Any) -> None:
    model.lm_head.weight.zero_()


def scale_data(model: Any) -> None:
    model.lm_head.weight.data.mul_(3)


@torch.no_grad()
def clear_row(model: Any) -> None:
    model.get_input_embeddings().weight[3] = 0.0


def replace_head(model: Any) -> None:
    torch.manual_seed(3)
    model.lm_head = nn.Linear(48, V, bias=False)


def load_state(model: Any) -> None:
    torch.manual_seed(4)
    model.load_state_dict(
        {name: torch.randn(tensor.shape) / 10 for name, tensor in model.state_dict().items()}
    )


def add_tokens(model: Any) -> None:
    torch.manual_seed(5)
    model.resize_token_embeddings(V + 7)


def remove_tokens(model: Any) -> None:
    model.resize_token_embeddings(V - 2)


def redraw_weights(model: Any) -> None:
    torch.manual_seed(6)
    nn.init.normal_(model.model.layers[1].mlp.up_proj.weight)


def write_key_projection(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.copy_(
            model.model.layers[0].self_attn.v_proj.weight
        )


def read_weights(model: Any) -> None:
    assert model.model.norm.weight.abs().mean().item() > 0
    assert model.device.type == "cpu"


def copy_model(model: Any) -> Any:
    return deepcopy(model)


def reinitialize(model: Any) -> None:
    model.post_init()
    model.init_weights()
    model.model.layers[0].apply(model._init_weights)


CHANGES = (
    *(
        zero_head,
        scale_data,
        clear_row,
        replace_head,
        load_state,
        add_tokens,
        remove_tokens,
        redraw_weights,
    ),
    *(write_key_projection, read_weights, copy_model, reinitialize),
)


def saved_folder(case: str, folder: Path) -> Path:
    maker = encoder_of if "bert" in case else twin_of
    maker(case).save_pretrained(folder)
    return folder


def changed_with_and_without_weights(
    folder: Path, change: Callable[[Any], Any], builder: str = "AutoModelForCausalLM"
) -> tuple[Any, Any]:
    """Return two models after the same change: built with weights, and built without weights."""
    build = getattr(transformers, builder).from_pretrained
    plain = build(folder)
    plain = change(plain) or plain
    with build_on_meta():
        model = build(folder)
        model = change(model) or model
    return plain, model


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_model_without_weights_take_effect(change: Any, tmp_path: Path) -> None:
    plain, model = changed_with_and_without_weights(saved_folder("llama", tmp_path), change)
    root = nn.ModuleDict({"model": model})
    parallelize(root, ParallelMesh.single())
    expected = plain(input_ids=TOKENS).logits
    assert_equal(model(input_ids=TOKENS).logits, expected, change.__name__, 1e-4)


def test_only_changed_parameters_are_materialized(tmp_path: Path) -> None:
    _, model = changed_with_and_without_weights(saved_folder("llama", tmp_path), zero_head)
    assert [name for name, parameter in model.named_parameters() if not parameter.is_meta] == [
        "lm_head.weight"
    ]
    with build_on_meta():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        model.requires_grad_(False)
        model.to(torch.bfloat16)
        assert sum(parameter.numel() for parameter in model.parameters()) == model.num_parameters()
        assert repr(model)
    assert all(
        parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in model.parameters()
    )


@pytest.mark.parametrize("case", ["gpt2", "mixtral", "gpt_neox", "gemma"])
def test_values_read_from_packed_and_tied_tensors_match_the_folder(
    case: str, tmp_path: Path
) -> None:
    if case == "mixtral":
        from tests.swap import expert_models

        expert_models.exact_twin_of(case).float().save_pretrained(tmp_path)
    else:
        saved_folder(case, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with build_on_meta():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert not any(parameter.is_meta for parameter in values.values())
    for name, parameter in plain.named_parameters():
        assert torch.equal(values[name], parameter), name


def randomly_initialized(change: Callable[[Any], Any] | None) -> Any:
    torch.manual_seed(11)
    config = twin_of("llama").config
    torch.manual_seed(11)
    root = nn.ModuleDict()
    with build_on_meta():
        root["model"] = transformers.AutoModelForCausalLM.from_config(config)
        if change is not None:
            change(root["model"])
    torch.manual_seed(11)
    parallelize(root, ParallelMesh.single())
    return root["model"]


def test_values_written_into_a_randomly_initialized_model_are_kept() -> None:
    plain, read_only, changed = (
        randomly_initialized(None),
        randomly_initialized(read_weights),
        randomly_initialized(write_key_projection),
    )
    for name, parameter in plain.named_parameters():
        assert torch.equal(read_only.get_parameter(name), parameter), (
            f"{name}: reading changes nothing"
        )
        written = name == "model.layers.0.self_attn.k_proj.weight"
        values = plain.model.layers[0].self_attn.v_proj.weight if written else parameter
        assert torch.equal(changed.get_parameter(name), values), name


def check_ranks(rank: int, size: int, folder: str) -> None:
    plain, model = changed_with_and_without_weights(Path(folder), add_tokens)
    mesh = ParallelMesh.create(ParallelLayout(size, tp=size), sequence_parallel=False)
    parallelize(nn.ModuleDict({"model": model}), mesh)
    for name, expected in plain.named_parameters():
        parameter = model.get_parameter(name)
        assert_equal(gather_full(parameter, shard_spec_of(parameter), mesh), expected, name)
    assert_equal(model(input_ids=TOKENS).logits, plain(input_ids=TOKENS).logits, "logits", 1e-4)


def test_a_resized_vocabulary_is_cut_over_ranks(tmp_path: Path) -> None:
    run_world(check_ranks, 2, str(saved_folder("llama", tmp_path)))


def replace_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def replace_forward(model: Any) -> None:
    model.lm_head.forward = lambda hidden: hidden


def change_dropout(model: Any) -> None:
    model.model.layers[1].self_attn.attention_dropout = 0.25


def add_head_bias(model: Any) -> None:
    model.lm_head = nn.Linear(48, V)


def enlarge_head(model: Any) -> None:
    model.lm_head = nn.Linear(48, V + 1, bias=False)


@torch.no_grad()
def change_rotary_table(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def tie_head(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def repeat_block(model: Any) -> None:
    model.model.layers[1] = model.model.layers[0]


def add_gradient_hook(model: Any) -> None:
    model.model.embed_tokens.weight.register_hook(lambda gradient: gradient * 0)


@pytest.mark.parametrize("has_values", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            replace_activation,
            r"'model.model.layers.0.mlp.act_fn' is a ReLU, but its class builds a SiLU",
        ),
        (replace_forward, r"'model.lm_head' has a forward method of its own"),
        (
            change_dropout,
            r"attention_dropout of 'model.model.layers.1.self_attn' is 0.25, but was built as 0.0",
        ),
        (add_head_bias, r"'lm_head.bias' unexpected"),
        (enlarge_head, r"'lm_head.weight'"),
        (change_rotary_table, r"the buffer inv_freq of 'model.model.rotary_emb' has other values"),
        (
            tie_head,
            r"output head of 'model' is that of the embedding.*tie_word_embeddings=True",
        ),
        (repeat_block, r"'model.model.layers.1' is the module 'model.model.layers.0', too"),
        (
            add_gradient_hook,
            r"'model.model.embed_tokens.weight' has gradient hooks.*on_fit_start",
        ),
    ],
)
def test_changes_that_replaced_layers_cannot_compute_are_refused(
    change: Any, message: str, has_values: bool, tmp_path: Path
) -> None:
    plain, model = changed_with_and_without_weights(saved_folder("llama", tmp_path), change)
    with pytest.raises((UnsupportedError, CheckpointMismatchError), match=message):
        parallelize(nn.ModuleDict({"model": plain if has_values else model}), ParallelMesh.single())


@pytest.mark.parametrize("has_values", [False, True])
def test_tied_head_with_a_new_separate_weight_is_refused(has_values: bool, tmp_path: Path) -> None:
    def untie(model: Any) -> None:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())

    plain, model = changed_with_and_without_weights(saved_folder("gpt2", tmp_path), untie)
    with pytest.raises(
        UnsupportedError, match=r"is not that of the embedding.*tie_word_embeddings=False"
    ):
        parallelize(nn.ModuleDict({"model": plain if has_values else model}), ParallelMesh.single())


@pytest.mark.parametrize(
    ("key", "value"),
    [("rms_norm_eps", 0.1), ("hidden_act", "gelu"), ("attention_dropout", 0.5), ("head_dim", 6)],
)
def test_a_configuration_that_changes_after_the_model_was_built_is_refused(
    key: str, value: Any, tmp_path: Path
) -> None:
    _, model = changed_with_and_without_weights(
        saved_folder("llama", tmp_path), lambda model: setattr(model.config, key, value)
    )
    with pytest.raises(
        UnsupportedError, match=rf"{key} of the configuration of 'model' changed after"
    ):
        parallelize(nn.ModuleDict({"model": model}), ParallelMesh.single())


@pytest.mark.parametrize("has_values", [False, True])
@pytest.mark.parametrize("case", ["llama", "gemma", "gpt2"])
def test_padding_token_set_after_construction_does_not_change_training(
    case: str, has_values: bool, tmp_path: Path
) -> None:
    token = int(TOKENS[0, 3])
    plain, model = changed_with_and_without_weights(
        saved_folder(case, tmp_path), lambda model: setattr(model.config, "pad_token_id", token)
    )
    ours = deepcopy(plain) if has_values else model
    parallelize(nn.ModuleDict({"model": ours}), ParallelMesh.single())
    for network in (plain, ours):
        network(input_ids=TOKENS, labels=TOKENS).loss.backward()
    expected = plain.get_input_embeddings().weight.grad
    assert expected[token].abs().sum() > 0
    assert_equal(ours.get_input_embeddings().weight.grad[:V], expected, case, 1e-4)


@pytest.mark.parametrize("case", ["bert classes", "roberta classes"])
def test_new_classifier_may_have_another_number_of_labels(case: str, tmp_path: Path) -> None:
    def eight_labels(model: Any) -> None:
        torch.manual_seed(7)
        if case.startswith("bert"):
            model.classifier = nn.Linear(48, 8)
        else:
            model.classifier.out_proj = nn.Linear(48, 8)

    plain, model = changed_with_and_without_weights(
        saved_folder(case, tmp_path), eight_labels, "AutoModelForSequenceClassification"
    )
    parallelize(nn.ModuleDict({"model": model}), ParallelMesh.single())
    expected = plain(input_ids=TOKENS).logits
    assert expected.shape == (2, 8)
    assert_equal(model(input_ids=TOKENS).logits, expected, case, 1e-4)


def test_model_that_keeps_its_own_code_has_values_in_all_its_tensors(tmp_path: Path) -> None:
    plain, model = changed_with_and_without_weights(saved_folder("llama", tmp_path), load_state)
    root = nn.ModuleDict({"model": model})
    parallelize(root, ParallelMesh.single(), {"model": "replicate"})
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert_equal(model(input_ids=TOKENS).logits, plain(input_ids=TOKENS).logits, "logits", 1e-4)


def test_model_refused_by_its_table_keeps_a_loaded_state_dict(tmp_path: Path) -> None:
    from tests.swap import expert_models

    positions = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    twin = expert_models.exact_twin_of("deepseek_v3", rope_parameters=positions)
    twin.float().save_pretrained(tmp_path)

    def load_all(model: Any) -> None:
        torch.manual_seed(8)
        model.load_state_dict(
            {name: torch.randn(value.shape) / 10 for name, value in model.state_dict().items()}
        )

    plain, model = changed_with_and_without_weights(tmp_path, load_all)
    parallelize(nn.ModuleDict({"model": model}), ParallelMesh.single())
    assert any(name.endswith("e_score_correction_bias") for name in plain.state_dict())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


DAMAGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "not UTF-8": lambda config: b"\xff\xfe" + json.dumps(config).encode(),
    "cut": lambda config: json.dumps(config)[:-20].encode(),
    "a list": lambda config: b"[1, 2]",
    "nested deeply": lambda config: b'{"a": ' * 5000 + b"1" + b"}" * 5000,
    "text for a number": lambda config: {**config, "hidden_size": "many"},
    "a list for a number": lambda config: {**config, "num_hidden_layers": [2]},
    "huge": lambda config: {**config, "vocab_size": 10**400},
    "negative": lambda config: {**config, "intermediate_size": -3},
    "no heads": lambda config: {**config, "num_attention_heads": 0},
    "an unknown activation": lambda config: {**config, "hidden_act": {"a": 1}},
    "nothing for a size": lambda config: {**config, "hidden_size": None},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_configuration_is_refused_with_the_name_of_its_folder(
    name: str, tmp_path: Path
) -> None:
    path = saved_folder("llama", tmp_path) / "config.json"
    content = DAMAGED[name](json.loads(path.read_text()))
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises((CheckpointMismatchError, CorruptDataError)) as caught, build_on_meta():
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "config.json" in str(caught.value)


def test_body_taken_out_of_its_model_has_the_values_of_the_folder(tmp_path: Path) -> None:
    plain, body = changed_with_and_without_weights(
        saved_folder("llama", tmp_path), lambda model: model.model
    )
    parallelize(nn.ModuleDict({"body": body}), ParallelMesh.single())
    for name, parameter in plain.named_parameters():
        assert torch.equal(body.get_parameter(name), parameter), name
    assert_equal(body(TOKENS).last_hidden_state, plain(TOKENS).last_hidden_state, "states", 1e-5)
