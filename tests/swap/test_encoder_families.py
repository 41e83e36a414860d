"""Tensors of every encoder class convert to ours and back bit for bit; files may lack the head or have
another head.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.families import Family, family_of
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.swap import parallelize
from lightning_megatron.swap.hugging_face.encoder_model import HuggingFaceEncoder
from lightning_megatron.swap.pretrained.from_pretrained import build_on_meta
from lightning_megatron.swap.pretrained.replace import build_swapped_model
from lightning_megatron.swap.weights.export import export_folder, foreign_tensors
from lightning_megatron.swap.weights.load import load_from
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder
from tests.swap.encoders import CASES, V, encoder_of, transformers
from tests.swap.parts import mesh_of, replaced

TOKENS = torch.arange(16).view(2, 8)


def family_of_case(case: str) -> Family:
    return family_of(CASES[case][0])


def encoder_on_meta(config: Any, mesh: ParallelMesh) -> Encoder:
    with torch.device("meta"):
        return Encoder(config, mesh)


def full_tensors(model: nn.Module) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in model.named_parameters():
        spec = shard_spec_of(parameter)
        tensors[name] = parameter.new_empty(spec.full_shape)
        spec.copy_to_full(parameter.detach(), tensors[name])
    return tensors


def loaded_encoder(case: str, twin: nn.Module) -> Encoder:
    family = family_of_case(case)
    model = encoder_on_meta(family.config(twin.config.to_dict()), mesh_of())
    load_from(model, twin.state_dict(), family)
    return model


def open_on_meta(architecture: str, folder: Path, **changes: Any) -> Any:
    with build_on_meta():
        return getattr(transformers, architecture).from_pretrained(folder, **changes)


@pytest.mark.parametrize("case", CASES)
def test_a_state_dict_is_restored_bit_for_bit(case: str) -> None:
    twin = encoder_of(case)
    model = loaded_encoder(case, twin)
    back = dict(foreign_tensors(full_tensors(model).items(), family_of_case(case), model.config))
    theirs = dict(twin.named_parameters())
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("case", CASES)
def test_every_rank_reads_its_shard_from_files(case: str, tmp_path: Path) -> None:
    twin, family = encoder_of(case, torch.bfloat16), family_of_case(case)
    twin.save_pretrained(tmp_path)
    folder, full = SafetensorsFolder(tmp_path), full_tensors(loaded_encoder(case, twin))
    config = family.config(folder.config)
    assert config == family.config(twin.config.to_dict()), (
        "the file and the object give the same configuration"
    )
    for tp in (1, 2, 3, 4):
        for pp, pp_rank, tp_rank in [
            (n, p, t) for n in (1, 2) for p in range(n) for t in range(tp)
        ]:
            model = encoder_on_meta(config, mesh_of(tp, pp, tp_rank, pp_rank))
            load_from(model, folder, family)
            for name, parameter in model.named_parameters():
                spec = shard_spec_of(parameter)
                expected = spec.shard(full[spec.tied_to or name].float(), parameter.shape[spec.dim])
                assert torch.equal(parameter, expected), (
                    f"{name} on tp {tp_rank} of {tp}, pp {pp_rank} of {pp}"
                )


def tokens_of(case: str) -> torch.Tensor:
    """Return tokens in the shape that the class expects."""
    return torch.stack((TOKENS, TOKENS.roll(1, 0)), 1) if "choices" in case else TOKENS


@pytest.mark.parametrize("case", CASES)
def test_an_exported_folder_is_loaded_bit_for_bit(case: str, tmp_path: Path) -> None:
    twin, family = encoder_of(case).eval(), family_of_case(case)
    export_folder(
        full_tensors(loaded_encoder(case, twin)).items(),
        family,
        twin.config.to_dict(),
        tmp_path,
        20_000,
    )
    reloaded, report = type(twin).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    expected = twin.state_dict()
    assert reloaded.state_dict().keys() == expected.keys()
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in reloaded.state_dict().items()
    )
    tokens = tokens_of(case)
    assert torch.equal(reloaded.eval()(tokens)[0], twin(tokens)[0])


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("saved", ["", " masked", " classes"])
@pytest.mark.parametrize("built", ["", " masked", " classes"])
def test_every_class_loads_the_files_of_every_class(
    kind: str, saved: str, built: str, tmp_path: Path
) -> None:
    twin, architecture = encoder_of(f"{kind}{saved}"), CASES[f"{kind}{built}"][0]
    twin.save_pretrained(tmp_path)
    model = open_on_meta(architecture, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(3)
    family = family_of(architecture)
    swap = build_swapped_model("model", model, family, ParallelMesh.single())
    note = swap.fill()
    ours = dict(foreign_tensors(full_tensors(swap.layers).items(), family, swap.layers.config))
    theirs = getattr(transformers, architecture).from_pretrained(tmp_path).state_dict()
    prefix = f"{kind}."
    in_file = {name.removeprefix(prefix): tensor for name, tensor in twin.state_dict().items()}
    for name, tensor in ours.items():
        if name.removeprefix(prefix) in in_file:
            assert torch.equal(tensor, theirs[name]), name
            assert repr(name) not in note
        else:
            assert "keep their initial values" in note
            assert torch.isfinite(tensor).all()
    assert bool(note) == any(name.removeprefix(prefix) not in in_file for name in ours)


def test_a_new_head_does_not_depend_on_the_layout(tmp_path: Path) -> None:
    encoder_of("roberta").save_pretrained(tmp_path)
    family = family_of("RobertaForSequenceClassification")
    config = family.config(SafetensorsFolder(tmp_path).config)
    single = encoder_on_meta(config, mesh_of())
    missing = load_from(single, SafetensorsFolder(tmp_path), family, 5)
    assert missing == tuple(
        f"classifier.{layer}.{kind}"
        for layer in ("dense", "out_proj")
        for kind in ("bias", "weight")
    )
    last = encoder_on_meta(config, mesh_of(2, 2, 1, 1))
    assert load_from(last, SafetensorsFolder(tmp_path), family, 5) == missing
    first = encoder_on_meta(config, mesh_of(2, 2, 1, 0))
    assert load_from(first, SafetensorsFolder(tmp_path), family, 5) == missing, (
        "all ranks know the missing tensors"
    )
    assert torch.equal(last.head.dense.weight, single.head.dense.weight)
    assert float(single.head.dense.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert not single.head.output.bias.any()


def test_swap_record_names_the_tensors_of_a_new_head(tmp_path: Path) -> None:
    encoder_of("bert").save_pretrained(tmp_path)
    root = nn.ModuleDict({"model": open_on_meta("BertForSequenceClassification", tmp_path)})
    (record,) = parallelize(root, ParallelMesh.single())
    assert "'classifier.bias', 'classifier.weight' are not in" in record.note


def test_missing_tensors_other_than_a_new_head_are_refused(tmp_path: Path) -> None:
    twin, family = encoder_of("bert"), family_of("BertForSequenceClassification")
    state = {
        name: tensor
        for name, tensor in twin.state_dict().items()
        if "layer.1.output.dense.bias" not in name
    }
    model = encoder_on_meta(family.config(twin.config.to_dict()), mesh_of())
    with pytest.raises(
        CheckpointMismatchError, match=r"'bert.encoder.layer.1.output.dense.bias' missing"
    ):
        load_from(model, state, family, 1)
    with pytest.raises(
        CheckpointMismatchError, match=r"'classifier.bias', 'classifier.weight' missing"
    ):
        load_from(model, twin.state_dict(), family)
    with pytest.raises(CheckpointMismatchError, match=r"'bert.extra' unexpected"):
        load_from(model, {**twin.state_dict(), "extra": torch.ones(2)}, family, 1)


def test_tensor_names_of_earlier_releases_are_read() -> None:
    twin, family = encoder_of("bert masked"), family_of("BertForMaskedLM")
    expected = full_tensors(loaded_encoder("bert masked", twin))
    state = {}
    for name, tensor in twin.state_dict().items():
        state[
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
        ] = tensor
    state["bert.embeddings.position_ids"] = torch.arange(20).unsqueeze(0)
    state["cls.seq_relationship.weight"] = torch.ones(2, 48)
    state["bert.pooler.dense.bias"] = torch.ones(48)
    model = encoder_on_meta(family.config(twin.config.to_dict()), mesh_of())
    load_from(model, state, family)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in full_tensors(model).items())
    state["cls.predictions.decoder.weight"] = state["cls.predictions.decoder.weight"] + 1
    with pytest.raises(
        CheckpointMismatchError, match="a tied output head must equal the embedding"
    ):
        load_from(model, state, family)


def test_bert_without_pooler_is_replaced_and_exported_without_pooler(tmp_path: Path) -> None:
    settings = {**CASES["bert"][1]}
    twin = transformers.BertModel(
        transformers.BertConfig(**settings), add_pooling_layer=False
    ).eval()
    family = family_of("BertModel")
    ours = replaced(deepcopy(twin), family, ParallelMesh.single())
    output = ours(TOKENS, return_dict=False)
    assert len(output) == 1
    assert torch.allclose(output[0], twin(TOKENS)[0], atol=1e-5)
    export_folder(
        full_tensors(ours).items(), family, twin.config.to_dict(), tmp_path, has_class_names=True
    )
    reloaded = transformers.BertModel.from_pretrained(tmp_path, add_pooling_layer=False)
    assert all(
        torch.equal(tensor, reloaded.state_dict()[name])
        for name, tensor in twin.state_dict().items()
    )


def test_the_encoder_inside_a_class_without_a_table_is_not_replaced() -> None:
    model = transformers.BertForPreTraining(transformers.BertConfig(**CASES["bert"][1]))
    root = nn.ModuleDict({"model": model})
    parallelize(root, ParallelMesh.single())
    assert type(model.bert) is transformers.BertModel


def test_an_encoder_inside_a_user_module_is_replaced() -> None:
    user_module = nn.Sequential(nn.ModuleDict({"body": encoder_of("roberta")}))
    parallelize(user_module, ParallelMesh.single())
    assert isinstance(user_module[0]["body"], HuggingFaceEncoder)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("bert", {"is_decoder": True}, "is_decoder of a BERT configuration must be False"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type of a BERT"),
        ("bert", {"hidden_act": "silu"}, "hidden_act must be"),
        ("roberta", {"add_cross_attention": True}, "add_cross_attention of a RoBERTa"),
        ("roberta masked", {"tie_word_embeddings": False}, "tie_word_embeddings of a RoBERTa"),
        ("bert classes", {"problem_type": "ranking"}, "problem_type of a BERT"),
        (
            "bert classes",
            {"num_labels": 7},
            r"num_labels \(7\) must equal the number of labels in id2label",
        ),
        ("bert", {"output_hidden_states": True}, "output_hidden_states of a BERT"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    case: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        family_of_case(case).config(encoder_of(case).config.to_dict() | change)


@pytest.mark.parametrize(
    ("case", "call", "message"),
    [
        ("bert", {"labels": TOKENS}, "takes no labels"),
        ("bert masked", {"output_attentions": True}, "takes no output_attentions"),
        ("bert spans", {"labels": TOKENS}, "takes no labels"),
        ("bert classes", {"start_positions": TOKENS[:, 0]}, "takes no start_positions"),
        ("bert choices", {}, r"takes input_ids of the shape \(batch, choices, tokens\)"),
        ("roberta", {"encoder_hidden_states": TOKENS}, "takes no encoder_hidden_states"),
        (
            "roberta",
            {"attention_mask": torch.ones(2, 8, 8)},
            "attention_mask must have a number for each token",
        ),
        ("bert", {"inputs_embeds": torch.ones(2, 8, 48)}, "either tokens or vectors, .*: both"),
    ],
)
def test_unsupported_arguments_of_calls_are_refused_by_name(
    case: str, call: dict[str, Any], message: str
) -> None:
    model = replaced(encoder_of(case), family_of_case(case), ParallelMesh.single())
    with pytest.raises(UnsupportedError, match=message):
        model(TOKENS, **call)


def test_outputs_have_the_names_order_and_values_of_hugging_face() -> None:
    for case in CASES:
        twin = encoder_of(case).eval()
        model = replaced(encoder_of(case).eval(), family_of_case(case), ParallelMesh.single())
        targets = torch.tensor([1, 0])
        call = {
            "masked": {"labels": TOKENS},
            "classes": {"labels": targets},
            "choices": {"labels": targets},
            "spans": {"start_positions": targets, "end_positions": targets},
        }.get(case.split()[-1], {})
        tokens = tokens_of(case)
        theirs, ours = twin(tokens, **call), model(tokens, **call)
        assert isinstance(ours, type(theirs)), case
        assert tuple(theirs) == tuple(ours), case
        for expected, actual in zip(theirs.to_tuple(), ours.to_tuple(), strict=True):
            assert torch.allclose(expected, actual, atol=1e-4), case
        assert torch.equal(ours[0], ours[next(iter(ours))])
        assert model.config is not None
        assert model.body.config.vocab_size == V


@pytest.mark.parametrize("pp_rank", [0, 1])
@pytest.mark.parametrize(
    "case", ["bert masked", "bert classes", "roberta masked", "roberta classes"]
)
def test_frozen_encoders_stay_frozen_after_replacement(case: str, pp_rank: int) -> None:
    twin = encoder_of(case)
    twin.base_model.requires_grad_(False)
    model = replaced(twin, family_of_case(case), mesh_of(2, 2, 0, pp_rank))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    base = f"{twin.base_model_prefix}."
    heads = {name for name, _ in model.named_parameters() if not name.startswith(base)}
    # A tied weight belongs to the embedding, and BERT's pooler to the encoder.
    assert trained == heads - {"cls.predictions.decoder.weight", "lm_head.decoder.weight"}
    assert bool(heads) == bool(pp_rank)


def test_arguments_of_from_pretrained_change_the_configuration(tmp_path: Path) -> None:
    encoder_of("roberta").save_pretrained(tmp_path)
    model = open_on_meta(
        "RobertaForSequenceClassification", tmp_path, num_labels=7, hidden_dropout_prob=0.3
    )
    assert all(parameter.is_meta for parameter in model.parameters())
    replaced(model, family_of("RobertaForSequenceClassification"), ParallelMesh.single())
    config = model.body.config
    assert (config.num_labels, config.hidden_dropout, config.head_dropout) == (7, 0.3, 0.3)
    assert model(TOKENS).logits.shape == (2, 7)
    without_pooler = open_on_meta("RobertaModel", tmp_path, add_pooling_layer=False)
    assert without_pooler.pooler is None
    assert not any(parameter.is_meta for parameter in without_pooler.parameters()), (
        "Hugging Face handles other arguments"
    )
