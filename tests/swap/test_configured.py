"""What configure_model does to a Hugging Face model that is built without its weights counts, or is
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


def new_head(model: Any) -> None:
    torch.manual_seed(3)
    model.lm_head = nn.Linear(48, V, bias=False)


def load_state(model: Any) -> None:
    torch.manual_seed(4)
    model.load_state_dict(
        {name: torch.randn(one.shape) / 10 for name, one in model.state_dict().items()}
    )


def more_tokens(model: Any) -> None:
    torch.manual_seed(5)
    model.resize_token_embeddings(V + 7)


def fewer_tokens(model: Any) -> None:
    model.resize_token_embeddings(V - 2)


def draw_again(model: Any) -> None:
    torch.manual_seed(6)
    nn.init.normal_(model.model.layers[1].mlp.up_proj.weight)


def write_one_of_a_joint_layer(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.copy_(
            model.model.layers[0].self_attn.v_proj.weight
        )


def read(model: Any) -> None:
    assert model.model.norm.weight.abs().mean().item() > 0
    assert model.device.type == "cpu"


def copy(model: Any) -> Any:
    return deepcopy(model)


def init_again(model: Any) -> None:
    model.post_init()
    model.init_weights()
    model.model.layers[0].apply(model._init_weights)


CHANGES = (
    *(
        zero_head,
        scale_data,
        clear_row,
        new_head,
        load_state,
        more_tokens,
        fewer_tokens,
        draw_again,
    ),
    *(write_one_of_a_joint_layer, read, copy, init_again),
)


def stored(case: str, folder: Path) -> Path:
    maker = encoder_of if "bert" in case else twin_of
    maker(case).save_pretrained(folder)
    return folder


def configured(
    folder: Path, change: Callable[[Any], Any], builder: str = "AutoModelForCausalLM"
) -> tuple[Any, Any]:
    """Return the model as Hugging Face has it after a change, and the same without its weights."""
    build = getattr(transformers, builder).from_pretrained
    plain = build(folder)
    plain = change(plain) or plain
    with build_on_meta():
        model = build(folder)
        model = change(model) or model
    return plain, model


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_written_into_a_model_without_weights_counts(change: Any, tmp_path: Path) -> None:
    plain, model = configured(stored("llama", tmp_path), change)
    root = nn.ModuleDict({"model": model})
    parallelize(root, ParallelMesh.single())
    expected = plain(input_ids=TOKENS).logits
    assert_equal(model(input_ids=TOKENS).logits, expected, change.__name__, 1e-4)


def test_only_what_is_used_gets_its_value(tmp_path: Path) -> None:
    _, model = configured(stored("llama", tmp_path), zero_head)
    assert [name for name, one in model.named_parameters() if not one.is_meta] == ["lm_head.weight"]
    with build_on_meta():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        model.requires_grad_(False)
        model.to(torch.bfloat16)
        assert sum(one.numel() for one in model.parameters()) == model.num_parameters()
        assert repr(model)
    assert all(one.is_meta and one.dtype == torch.bfloat16 for one in model.parameters())


@pytest.mark.parametrize("case", ["gpt2", "mixtral", "gpt_neox", "gemma"])
def test_values_of_packed_and_tied_tensors_are_those_of_the_folder(
    case: str, tmp_path: Path
) -> None:
    if case == "mixtral":
        from tests.swap import expert_models

        expert_models.exact_twin_of(case).float().save_pretrained(tmp_path)
    else:
        stored(case, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with build_on_meta():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        values = {name: one.detach().clone() for name, one in model.named_parameters()}
    assert not any(one.is_meta for one in values.values())
    for name, one in plain.named_parameters():
        assert torch.equal(values[name], one), name


def drawn(change: Callable[[Any], Any] | None) -> Any:
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


def test_what_is_written_into_a_model_that_draws_its_weights_counts() -> None:
    plain, read_only, changed = drawn(None), drawn(read), drawn(write_one_of_a_joint_layer)
    for name, one in plain.named_parameters():
        assert torch.equal(read_only.get_parameter(name), one), f"{name}: reading changes nothing"
        written = name == "model.layers.0.self_attn.k_proj.weight"
        values = plain.model.layers[0].self_attn.v_proj.weight if written else one
        assert torch.equal(changed.get_parameter(name), values), name


def check_ranks(rank: int, size: int, folder: str) -> None:
    plain, model = configured(Path(folder), more_tokens)
    mesh = ParallelMesh.create(ParallelLayout(size, tp=size), sequence_parallel=False)
    parallelize(nn.ModuleDict({"model": model}), mesh)
    for name, one in plain.named_parameters():
        parameter = model.get_parameter(name)
        assert_equal(gather_full(parameter, shard_spec_of(parameter), mesh), one, name)
    assert_equal(model(input_ids=TOKENS).logits, plain(input_ids=TOKENS).logits, "logits", 1e-4)


def test_a_resized_vocabulary_is_cut_over_ranks(tmp_path: Path) -> None:
    run_world(check_ranks, 2, str(stored("llama", tmp_path)))


def other_block(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def other_forward(model: Any) -> None:
    model.lm_head.forward = lambda hidden: hidden


def other_setting(model: Any) -> None:
    model.model.layers[1].self_attn.attention_dropout = 0.25


def head_with_bias(model: Any) -> None:
    model.lm_head = nn.Linear(48, V)


def wrong_shape(model: Any) -> None:
    model.lm_head = nn.Linear(48, V + 1, bias=False)


@torch.no_grad()
def other_table(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def tied_by_hand(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def one_block_twice(model: Any) -> None:
    model.model.layers[1] = model.model.layers[0]


def gradient_hook(model: Any) -> None:
    model.model.embed_tokens.weight.register_hook(lambda gradient: gradient * 0)


@pytest.mark.parametrize("has_values", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            other_block,
            r"'model.model.layers.0.mlp.act_fn' is a ReLU, but its class builds a SiLU",
        ),
        (other_forward, r"'model.lm_head' has a forward method of its own"),
        (
            other_setting,
            r"attention_dropout of 'model.model.layers.1.self_attn' is 0.25, but was built as 0.0",
        ),
        (head_with_bias, r"'lm_head.bias' unexpected"),
        (wrong_shape, r"'lm_head.weight'"),
        (other_table, r"the buffer inv_freq of 'model.model.rotary_emb' has other values"),
        (
            tied_by_hand,
            r"output head of 'model' is that of the embedding.*tie_word_embeddings=True",
        ),
        (one_block_twice, r"'model.model.layers.1' is the module 'model.model.layers.0', too"),
        (
            gradient_hook,
            r"'model.model.embed_tokens.weight' has gradient hooks.*on_fit_start",
        ),
    ],
)
def test_what_other_layers_would_not_compute_is_refused(
    change: Any, message: str, has_values: bool, tmp_path: Path
) -> None:
    plain, model = configured(stored("llama", tmp_path), change)
    with pytest.raises((UnsupportedError, CheckpointMismatchError), match=message):
        parallelize(nn.ModuleDict({"model": plain if has_values else model}), ParallelMesh.single())


@pytest.mark.parametrize("has_values", [False, True])
def test_a_tied_head_that_was_given_a_weight_of_its_own_is_refused(
    has_values: bool, tmp_path: Path
) -> None:
    def untie(model: Any) -> None:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())

    plain, model = configured(stored("gpt2", tmp_path), untie)
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
    _, model = configured(
        stored("llama", tmp_path), lambda model: setattr(model.config, key, value)
    )
    with pytest.raises(
        UnsupportedError, match=rf"{key} of the configuration of 'model' changed after"
    ):
        parallelize(nn.ModuleDict({"model": model}), ParallelMesh.single())


@pytest.mark.parametrize("has_values", [False, True])
@pytest.mark.parametrize("case", ["llama", "gemma", "gpt2"])
def test_a_padding_token_that_is_named_afterwards_does_not_change_training(
    case: str, has_values: bool, tmp_path: Path
) -> None:
    token = int(TOKENS[0, 3])
    plain, model = configured(
        stored(case, tmp_path), lambda model: setattr(model.config, "pad_token_id", token)
    )
    found = deepcopy(plain) if has_values else model
    parallelize(nn.ModuleDict({"model": found}), ParallelMesh.single())
    for each in (plain, found):
        each(input_ids=TOKENS, labels=TOKENS).loss.backward()
    expected = plain.get_input_embeddings().weight.grad
    assert expected[token].abs().sum() > 0
    assert_equal(found.get_input_embeddings().weight.grad[:V], expected, case, 1e-4)


@pytest.mark.parametrize("case", ["bert classes", "roberta classes"])
def test_a_new_classifier_may_have_other_labels(case: str, tmp_path: Path) -> None:
    def eight_labels(model: Any) -> None:
        torch.manual_seed(7)
        if case.startswith("bert"):
            model.classifier = nn.Linear(48, 8)
        else:
            model.classifier.out_proj = nn.Linear(48, 8)

    plain, model = configured(
        stored(case, tmp_path), eight_labels, "AutoModelForSequenceClassification"
    )
    parallelize(nn.ModuleDict({"model": model}), ParallelMesh.single())
    expected = plain(input_ids=TOKENS).logits
    assert expected.shape == (2, 8)
    assert_equal(model(input_ids=TOKENS).logits, expected, case, 1e-4)


def test_a_loaded_model_that_keeps_its_own_code_has_all_its_buffers(tmp_path: Path) -> None:
    plain, model = configured(stored("llama", tmp_path), load_state)
    root = nn.ModuleDict({"model": model})
    parallelize(root, ParallelMesh.single(), {"model": "replicate"})
    assert not any(one.is_meta for one in (*model.parameters(), *model.buffers()))
    assert_equal(model(input_ids=TOKENS).logits, plain(input_ids=TOKENS).logits, "logits", 1e-4)


def test_a_model_that_its_table_refuses_can_be_changed_as_always(tmp_path: Path) -> None:
    from tests.swap import expert_models

    positions = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    twin = expert_models.exact_twin_of("deepseek_v3", rope_parameters=positions)
    twin.float().save_pretrained(tmp_path)

    def load_all(model: Any) -> None:
        torch.manual_seed(8)
        model.load_state_dict(
            {name: torch.randn(one.shape) / 10 for name, one in model.state_dict().items()}
        )

    plain, model = configured(tmp_path, load_all)
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
def test_a_damaged_configuration_is_refused_with_its_folder(name: str, tmp_path: Path) -> None:
    path = stored("llama", tmp_path) / "config.json"
    content = DAMAGED[name](json.loads(path.read_text()))
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises((CheckpointMismatchError, CorruptDataError)) as caught, build_on_meta():
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "config.json" in str(caught.value)


def test_a_body_that_is_taken_out_of_its_model_has_the_values_of_the_folder(tmp_path: Path) -> None:
    plain, body = configured(stored("llama", tmp_path), lambda model: model.model)
    parallelize(nn.ModuleDict({"body": body}), ParallelMesh.single())
    for name, parameter in plain.named_parameters():
        assert torch.equal(body.get_parameter(name), parameter), name
    assert_equal(body(TOKENS).last_hidden_state, plain(TOKENS).last_hidden_state, "states", 1e-5)
