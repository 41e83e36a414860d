"""Changes that configure_model makes to a Hugging Face model built without weights take effect or are
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.swap import build_on_meta, parallelize
from tests.oracles import assert_equal
from tests.swap.families import V, exact_twin, transformers, twin_of

TOKENS = torch.randint(0, V - 2, (2, 8), generator=torch.Generator().manual_seed(0))
AUTO = transformers.AutoModelForCausalLM


def zero_head(model: Any) -> None:
    nn.init.zeros_(model.lm_head.weight)


@torch.no_grad()
def clear_row(model: Any) -> None:
    model.get_input_embeddings().weight[3] = 0.0


def load_state(model: Any) -> None:
    state = model.state_dict()
    model.load_state_dict({name: torch.randn(t.shape) / 10 for name, t in state.items()})


@torch.no_grad()
def write_key_projection(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight.copy_(attention.v_proj.weight)


def read_weights(model: Any) -> None:
    assert model.model.norm.weight.abs().mean().item() > 0
    assert model.device.type == "cpu"


CHANGES: tuple[Callable[[Any], Any], ...] = (
    zero_head,
    clear_row,
    load_state,
    write_key_projection,
    read_weights,
    deepcopy,
    lambda model: model.lm_head.weight.data.mul_(3),
    lambda model: setattr(model, "lm_head", nn.Linear(48, V, bias=False)),
    lambda model: model.resize_token_embeddings(V + 7),
    lambda model: model.init_weights(),
)


def saved_folder(case: str, folder: Path) -> Path:
    twin_of(case).save_pretrained(folder)
    return folder


def changed_with_and_without_weights(
    folder: Path, change: Callable[[Any], Any], library: Any = AUTO
) -> tuple[Any, Any]:
    """Return two models after the same change: built with weights, and built without weights."""
    models = []
    for context in (nullcontext(), build_on_meta()):
        with context:
            model = library.from_pretrained(folder)
            torch.manual_seed(3)
            changed = change(model)
            models.append(changed if isinstance(changed, transformers.PreTrainedModel) else model)
    return models[0], models[1]


def parallelized(model: Any, plan: dict[str, str] | None = None) -> Any:
    root = nn.ModuleDict({"model": model})
    parallelize(root, ParallelMesh.single(), plan)
    return root["model"]


def test_changes_of_a_model_without_weights_take_effect(tmp_path):
    saved_folder("llama", tmp_path)
    for number, change in enumerate(CHANGES):
        plain, model = changed_with_and_without_weights(tmp_path, change)
        expected = plain(input_ids=TOKENS).logits
        actual = parallelized(model)(input_ids=TOKENS).logits
        assert_equal(actual, expected, f"change {number}", 1e-4)


def test_only_changed_parameters_are_materialized(tmp_path):
    _, model = changed_with_and_without_weights(saved_folder("llama", tmp_path), zero_head)
    assert [n for n, p in model.named_parameters() if not p.is_meta] == ["lm_head.weight"]
    with build_on_meta():
        model = AUTO.from_pretrained(tmp_path)
        model.requires_grad_(False)
        model.to(torch.bfloat16)
        assert sum(parameter.numel() for parameter in model.parameters()) == model.num_parameters()
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.parametrize("case", ["gpt2", "mixtral", "gpt_neox"])
def test_values_read_from_packed_and_tied_tensors_match_the_folder(case, tmp_path):
    saved_folder(case, tmp_path)
    plain = AUTO.from_pretrained(tmp_path)
    with build_on_meta():
        model = AUTO.from_pretrained(tmp_path)
        values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert not any(parameter.is_meta for parameter in values.values())
    for name, parameter in plain.named_parameters():
        assert torch.equal(values[name], parameter), name


def randomly_initialized(change: Callable[[Any], Any] | None) -> Any:
    config = twin_of("llama").config
    torch.manual_seed(11)
    with build_on_meta():
        model = AUTO.from_config(config)
        if change is not None:
            change(model)
    torch.manual_seed(11)
    return parallelized(model)


def test_values_written_into_a_randomly_initialized_model_are_kept():
    changes = (None, read_weights, write_key_projection)
    plain, read_only, changed = map(randomly_initialized, changes)
    for name, parameter in plain.named_parameters():
        assert torch.equal(read_only.get_parameter(name), parameter), f"{name}: reading is free"
        written = name == "model.layers.0.self_attn.k_proj.weight"
        values = plain.model.layers[0].self_attn.v_proj.weight if written else parameter
        assert torch.equal(changed.get_parameter(name), values), name


# ---- refusals


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.ReLU()), "mlp.act_fn' is a ReLU, but its class builds a SiLU"),
    (lambda model: setattr(model.lm_head, "forward", lambda hidden: hidden), "'model.lm_head' has a forward method of its own"),
    (lambda model: setattr(model.model.layers[1].self_attn, "attention_dropout", 0.25), "layers.1.self_attn' is 0.25, but was built as 0.0"),
    (lambda model: setattr(model, "lm_head", nn.Linear(48, V)), "'lm_head.bias' unexpected"),
    (lambda model: model.model.rotary_emb.inv_freq.data.mul_(0.5), "inv_freq of 'model.model.rotary_emb' has other values"),
    (lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight), "that of the embedding.*tie_word_embeddings=True"),
    (lambda model: model.model.layers.__setitem__(1, model.model.layers[0]), "is the module 'model.model.layers.0', too"),
    (lambda model: model.model.embed_tokens.weight.register_hook(torch.zeros_like), "embed_tokens.weight' has gradient hooks.*on_fit_start"),
]  # fmt: skip


def test_changes_that_replaced_layers_cannot_compute_are_refused(tmp_path):
    saved_folder("llama", tmp_path)
    for change, message in REFUSED:
        for model in changed_with_and_without_weights(tmp_path, change):
            with pytest.raises((UnsupportedError, CheckpointMismatchError), match=message):
                parallelized(model)
    # Only a model without weights still depends on its configuration.
    with build_on_meta():
        model = AUTO.from_pretrained(tmp_path)
        model.config.rms_norm_eps = 0.1
    with pytest.raises(UnsupportedError, match="rms_norm_eps of the configuration of 'model'"):
        parallelized(model)


# ---- further models


def test_new_classifier_may_have_another_number_of_labels(tmp_path):
    plain, model = changed_with_and_without_weights(
        saved_folder("bert classes", tmp_path),
        lambda model: setattr(model, "classifier", nn.Linear(48, 8)),
        transformers.AutoModelForSequenceClassification,
    )
    expected = plain(input_ids=TOKENS).logits
    assert expected.shape == (2, 8)
    assert_equal(parallelized(model)(input_ids=TOKENS).logits, expected, "logits", 1e-4)


def test_arguments_of_from_pretrained_change_the_configuration(tmp_path):
    saved_folder("roberta", tmp_path)
    changes = {"num_labels": 7, "hidden_dropout_prob": 0.3}
    with build_on_meta():
        model = transformers.RobertaForSequenceClassification.from_pretrained(tmp_path, **changes)
        without_pooler = transformers.RobertaModel.from_pretrained(
            tmp_path, add_pooling_layer=False
        )
    assert all(parameter.is_meta for parameter in model.parameters())
    config = parallelized(model).body.config
    assert (config.num_labels, config.hidden_dropout, config.head_dropout) == (7, 0.3, 0.3)
    assert model(TOKENS).logits.shape == (2, 7)
    # Hugging Face handles other arguments.
    assert without_pooler.pooler is None
    assert not any(parameter.is_meta for parameter in without_pooler.parameters())


@pytest.mark.parametrize("is_pretrained", [True, False])
def test_a_model_that_the_plan_keeps_gets_its_values(is_pretrained, tmp_path):
    # configure_model builds every model of a known family without values.
    twin = twin_of("mixtral", torch.bfloat16)
    twin.save_pretrained(tmp_path)

    def build() -> Any:
        torch.manual_seed(3)
        if is_pretrained:
            return AUTO.from_pretrained(tmp_path)
        return AUTO.from_config(twin.config, dtype=torch.bfloat16)

    expected = build()
    with build_on_meta():
        model = build()
    assert all(parameter.is_meta for parameter in model.parameters())
    model.model.norm.weight.requires_grad_(False)
    torch.manual_seed(3)
    assert parallelized(model, {"*": "replicate"}) is model
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["model.norm.weight"]
    actual, theirs = (m.state_dict() | dict(m.named_buffers()) for m in (model, expected))
    assert actual.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in actual.items())


def test_a_body_taken_out_of_its_model_has_the_values_of_the_folder(tmp_path):
    saved_folder("mixtral", tmp_path)
    plain, body = changed_with_and_without_weights(tmp_path, lambda model: model.model)
    parallelized(body)
    for name, parameter in plain.named_parameters():
        assert torch.equal(body.get_parameter(name), parameter), name
    assert_equal(body(TOKENS).last_hidden_state, plain(TOKENS).last_hidden_state, "states", 1e-5)


def test_models_that_keep_their_own_code_keep_a_loaded_state_dict(tmp_path):
    # A model that its table refuses.
    positions = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    exact_twin("deepseek_v3", rope_parameters=positions).float().save_pretrained(tmp_path)
    plain, model = changed_with_and_without_weights(tmp_path, load_state)
    root = nn.ModuleDict({"model": model})
    with pytest.raises(UnsupportedError, match="rope_type .* must be .*: it is 'dynamic'"):
        parallelize(root, ParallelMesh.single(), needs_tables=True)
    (record,) = parallelize(root, ParallelMesh.single())
    assert root["model"] is model
    assert "rope_type of the configuration must be" in str(record)
    assert any(name.endswith("e_score_correction_bias") for name in plain.state_dict())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
