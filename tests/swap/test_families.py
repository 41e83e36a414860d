"""Tensors of every Hugging Face family convert to ours and back bit for bit, in full, in shards and
through files, and keep their names.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.families import Family, family_of
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.swap import build_on_meta, parallelize
from lightning_megatron.swap.hugging_face.class_tensors import (
    ClassTensors,
    class_name_in,
    class_states,
    in_class_order,
    state_from_class,
    to_class_names,
    to_package_names,
)
from lightning_megatron.swap.pretrained.replace import build_swapped_model
from lightning_megatron.swap.tensors.packed import pack
from lightning_megatron.swap.weights import safetensors_writer
from lightning_megatron.swap.weights.export import export_folder, write_adapter
from lightning_megatron.swap.weights.load import full_tensors as full_tensors_in
from lightning_megatron.swap.weights.load import load_from, reader_of
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder
from tests.swap.families import (
    ALL,
    CASES,
    ENCODERS,
    EXPERTS,
    config_of,
    exact_twin,
    family_of_case,
    our_config_of,
    transformers,
    twin_of,
)
from tests.swap.parts import expert_mesh_of, full_tensors, in_class_tree, mesh_of, part_on_meta

safetensors_torch = pytest.importorskip("safetensors.torch")
TOKENS = torch.arange(16).view(2, 8)


def tokens_of(case: str) -> Tensor:
    """Return tokens in the shape that the class expects."""
    return torch.stack((TOKENS, TOKENS.roll(1, 0)), 1) if "choices" in case else TOKENS


def assert_same(actual: Any, expected: Any, what: str) -> None:
    assert actual.keys() == expected.keys(), what
    assert all(torch.equal(actual[name], expected[name]) for name in expected), what


def own(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module without second names of tied parameters."""
    buffers = {n: b for n, b in model.named_buffers() if n in model.state_dict()}
    return {name: tensor.detach() for name, tensor in model.named_parameters()} | buffers


@pytest.mark.parametrize("case", ALL)
def test_every_family_is_loaded_cut_exported_and_named_bit_for_bit(case, tmp_path):
    dtype = torch.bfloat16 if case in [*CASES, *ENCODERS][::2] else torch.float32
    twin, family = twin_of(case, dtype).eval(), family_of_case(case)
    twin.save_pretrained(tmp_path / "theirs")
    folder = SafetensorsFolder(tmp_path / "theirs")
    assert folder.dtype == dtype
    config = family.config(folder.config)
    assert config == family.config(twin.config.to_dict()), "the file and the object are the same"
    # Every tensor of the module, and of its files, is read once and restored.
    counts = Counter(source.name for entry in family.tensors(config) for source in entry.sources)
    assert case not in EXPERTS or set(counts.values()) == {1}
    assert counts.keys() >= set(reader_of(folder, family).names()) - {"lm_head.weight"}
    full = dict(full_tensors_in(twin.state_dict(), family, config, dtype))
    assert_same(dict(full_tensors_in(folder, family, config, dtype)), full, "files")
    back: dict[str, Tensor] = {}
    for entry in family.tensors(config):
        back |= entry.split(full[entry.target])
    assert_same(pack(back, family.packed), own(twin), "back")
    check_shards(folder, family, config, full)
    check_export(full, family, twin, tmp_path / "ours", tokens_of(case), dtype)
    check_names(case, twin)


def check_shards(folder: Any, family: Family, config: Any, full: dict[str, Tensor]) -> None:
    """Read the shards of all ranks of some layouts from files."""
    keys, layers = getattr(config, "kv_heads", config.num_heads), config.num_layers
    legal = [n for n in (2, 3, 6) if config.num_heads % n == 0 and (keys % n == 0 or n % keys == 0)]
    has_experts = getattr(config, "experts", None) is not None
    for tp, pp in ((1, 1), (1, layers)) if has_experts else ((legal[-1], 1), (2, layers)):
        for pp_rank, tp_rank in product(range(pp), range(tp)):
            part = part_on_meta(config, mesh_of(tp, pp, tp_rank, pp_rank))
            load_from(part, folder, family)
            for name, parameter in part.named_parameters():
                spec = shard_spec_of(parameter)
                expected = spec.shard(full[spec.tied_to or name].float(), parameter.shape[spec.dim])
                where = f"{name} on tp {tp_rank} of {tp}, pp {pp_rank} of {pp}"
                assert torch.equal(parameter, expected), where


def check_export(
    full: dict[str, Tensor], family: Family, twin: Any, path: Path, tokens: Tensor, dtype: Any
) -> None:
    """Export a folder of several files, and load it by transformers."""
    config = twin.config.to_dict()
    tensors = in_class_tree(full.items(), family, family.config(config))
    export_folder(tensors, family, config, path, 20_000, dtype)
    assert len(list(path.glob("*.safetensors"))) > 2
    reloaded, report = type(twin).from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    assert_same(reloaded.state_dict(), twin.state_dict(), "exported")
    assert {tensor.dtype for tensor in reloaded.parameters()} == {dtype}
    if twin.config.model_type not in EXPERTS:  # fused experts need larger sizes
        assert torch.equal(reloaded.eval()(tokens)[0], twin(tokens)[0])


def check_names(case: str, twin: Any) -> None:
    """Replace a copy, and convert its parameters to tensors of the class, in its order, and back."""
    root = nn.ModuleDict({"model": deepcopy(twin)})
    parallelize(root, ParallelMesh.single())
    model: Any = root["model"]
    theirs = {f"model.{name}": p.detach() for name, p in twin.named_parameters()}
    if case not in EXPERTS:
        assert repr(model) == repr(twin)
        assert [f"model.{name}" for name, _ in model.named_parameters()] == list(theirs)
        both_names = dict(twin.named_parameters(remove_duplicate=False))
        assert set(model.state_dict()) == set(both_names)
    if case in CASES:
        assert [name for name, _ in model.named_modules()] == [n for n, _ in twin.named_modules()]
        pairs = zip(model.modules(), twin.modules(), strict=True)
        assert all(isinstance(ours, type(their)) for ours, their in pairs)
        for options in ({}, {"exclude_embeddings": True}):
            assert model.num_parameters(**options) == twin.num_parameters(**options)
    models = ClassTensors.of_module(root)
    ours = {  # as checkpoints store them, without padding of the vocabulary
        name: p.detach()[: (shard_spec_of(p).full_shape or p.shape)[0]]
        for name, p in root.named_parameters()
    }
    assert list(dict.fromkeys(class_name_in(models, name) for name in ours)) == list(theirs)
    order = in_class_order(models, ["first", *reversed(ours), "last"])
    in_order = list(dict.fromkeys(class_name_in(models, name) for name in order))
    assert in_order == ["first", *theirs, "last"]
    assert_same(class_states(models, "exp_avg", ours), theirs, "states of the class")
    for name, parameter in ours.items():
        state = theirs[class_name_in(models, name)]
        restored = state_from_class(models[0], name, "exp_avg", state, state.shape)
        assert torch.equal(restored, parameter), name


# ---- loading


def test_loading_keeps_the_dtype_and_memory_of_parameters():
    twin, family = twin_of("llama", torch.float64), family_of("llama")
    model = GPT(family.config(twin.config.to_dict()), seed=1).bfloat16()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    load_from(model, twin.state_dict(), family)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert torch.equal(model.final_norm.weight, twin.model.norm.weight.bfloat16())


def loaded(case: str, state: Any, mesh: Any = None, **changes: Any) -> dict[str, Tensor]:
    """Return the tensors of a model of a case after it was loaded from a state."""
    model = part_on_meta(our_config_of(case, **changes), mesh or mesh_of())
    load_from(model, state, family_of_case(case))
    return full_tensors(model) if mesh is None else {}


def test_names_and_further_tensors_of_earlier_files_are_read():
    twin = twin_of("gpt2")
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(3)}
    without_head = twin.transformer.state_dict() | masks
    assert_same(loaded("gpt2", without_head), loaded("gpt2", twin.state_dict()), "gpt2")

    theirs = twin_of("gpt_neox").state_dict()
    state = {name.replace("lm_head", "embed_out"): tensor for name, tensor in theirs.items()}
    state["gpt_neox.layers.1.attention.rotary_emb.inv_freq"] = torch.ones(2)
    assert_same(loaded("gpt_neox", state), loaded("gpt_neox", theirs), "gpt_neox")
    state["lm_head.weight"] = state["embed_out.weight"]
    message = "'embed_out.weight' and 'lm_head.weight' are two"
    with pytest.raises(CheckpointMismatchError, match=message):
        loaded("gpt_neox", state)

    theirs = twin_of("bert masked").state_dict()
    state = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): tensor
        for name, tensor in theirs.items()
    }
    state["bert.embeddings.position_ids"] = torch.arange(20).unsqueeze(0)
    state["cls.seq_relationship.weight"] = torch.ones(2, 48)
    state["bert.pooler.dense.bias"] = torch.ones(48)
    assert_same(loaded("bert masked", state), loaded("bert masked", theirs), "bert")
    state["cls.predictions.decoder.weight"] = state["cls.predictions.decoder.weight"] + 1
    with pytest.raises(CheckpointMismatchError, match=TIED):
        loaded("bert masked", state)


TIED = "a tied output head must equal the embedding"


def stack_of(*shape: int) -> dict[str, Tensor]:
    return {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(shape)}


EXPERT = "model.layers.0.block_sparse_moe.experts"
#: Case, changed tensors of the state, and the error.
OTHER_TENSORS: list[tuple[str, dict[str, Tensor | None], str]] = [
    ("llama", {"model.norm.weight": None}, "'model.norm.weight' missing"),
    ("llama", {"model.extra.weight": torch.ones(2)}, "'model.extra.weight' unexpected"),
    ("llama", {"model.norm.weight": torch.ones(5)}, r"'model.norm.weight' \(5,\) instead of \(48,\)"),
    ("llama", {"lm_head.weight": None}, "'lm_head.weight' missing"),
    ("llama", {"model.norm.weight": torch.ones(48, device="meta")}, "is on the meta device"),
    ("mixtral", stack_of(5, 41, 24), r"'model.layers.0.mlp.experts.gate_up_proj' has shape \(5, 41, 24\)"),
    ("mixtral", stack_of(4, 40, 24), rf"'{EXPERT}.4.w1.weight'.* missing"),
    ("mixtral", stack_of(6, 40, 24), rf"'{EXPERT}.5.w1.weight'.* unexpected"),
    ("mixtral", stack_of(5, 38, 24), r"w1.weight' \(19, 24\) instead of \(20, 24\)"),
    ("mixtral", {f"{EXPERT}.2.w2.weight": torch.zeros(24, 20)}, "down_proj' and '.*w2.weight' are two names of"),
]  # fmt: skip


def test_tensors_of_another_model_are_refused():
    for case, changes, message in OTHER_TENSORS:
        state = {**twin_of(case).state_dict(), **changes}
        with pytest.raises(CheckpointMismatchError, match=message):
            loaded(case, {name: tensor for name, tensor in state.items() if tensor is not None})
    # The model determines the table, so its biases are missing among the tensors.
    message = r"'model.layers.0.mlp.down_proj.bias'.* missing"
    with pytest.raises(CheckpointMismatchError, match=message):
        loaded("llama", twin_of("llama").state_dict(), mlp_bias=True)


def test_a_tied_head_that_differs_from_the_embedding_is_refused():
    state = twin_of("qwen3").state_dict()
    separate = state | {"lm_head.weight": state["lm_head.weight"].clone()}
    loaded("qwen3", separate, mesh_of(2))
    separate["lm_head.weight"][40] += 1
    with pytest.raises(CheckpointMismatchError, match=TIED):
        loaded("qwen3", separate)


# ---- heads of encoders


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_every_class_loads_the_files_of_every_class(kind, tmp_path):
    for saved, built in product(("", " masked", " classes"), repeat=2):
        twin, architecture = twin_of(f"{kind}{saved}"), ENCODERS[f"{kind}{built}"][0]
        twin.save_pretrained(tmp_path)
        with build_on_meta():
            model = getattr(transformers, architecture).from_pretrained(tmp_path)
        assert all(parameter.is_meta for parameter in model.parameters())
        family = family_of(architecture)
        swap = build_swapped_model("model", model, family, ParallelMesh.single())
        note = swap.fill()
        tensors, ours = full_tensors(swap.layers), {}
        for entry in family.tensors(swap.layers.config):
            ours |= entry.split(tensors[entry.target])
        in_file = {n.removeprefix(f"{kind}."): t for n, t in twin.state_dict().items()}
        for name, tensor in ours.items():
            known = in_file.get(name.removeprefix(f"{kind}."))
            assert (repr(name) in note) == (known is None)
            assert torch.isfinite(tensor).all() if known is None else torch.equal(tensor, known)
        assert bool(note) == ("keep their initial values" in note)


def test_a_new_head_does_not_depend_on_the_layout(tmp_path):
    twin_of("roberta").save_pretrained(tmp_path)
    family, folder = family_of("RobertaForSequenceClassification"), SafetensorsFolder(tmp_path)
    config, missing, heads = family.config(folder.config), set(), []
    for mesh in (mesh_of(), mesh_of(2, 2, 1, 1), mesh_of(2, 2, 1, 0)):
        model = part_on_meta(config, mesh)
        missing.add(load_from(model, folder, family, may_lack=True))
        heads.append(model.head)
    parts = ("dense.bias", "dense.weight", "out_proj.bias", "out_proj.weight")
    assert missing == {tuple(f"classifier.{part}" for part in parts)}, "known to all ranks"
    assert torch.equal(heads[0].dense.weight, heads[1].dense.weight)
    assert float(heads[0].dense.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert not heads[0].output.bias.any()


def test_missing_tensors_other_than_a_new_head_are_refused():
    state, family = twin_of("bert").state_dict(), family_of("BertForSequenceClassification")
    model = part_on_meta(family.config(config_of("bert").to_dict()), mesh_of())
    bias = "encoder.layer.1.output.dense.bias"
    for tensors, may_lack, message in (
        ({name: t for name, t in state.items() if name != bias}, True, f"'bert.{bias}' missing"),
        (state, False, r"'classifier.bias', 'classifier.weight' missing"),
        ({**state, "extra": torch.ones(2)}, True, r"'bert.extra' unexpected"),
    ):
        with pytest.raises(CheckpointMismatchError, match=message):
            load_from(model, tensors, family, may_lack=may_lack)


def test_a_family_and_a_model_with_other_parameters_are_refused():
    family, config = family_of("gemma2"), our_config_of("gemma2")
    state = twin_of("gemma2").state_dict()
    plain = {name: tensor for name, tensor in state.items() if "feedforward" not in name}
    names: Any = family.tensors
    partial = replace(family, tensors=replace(names, mlp_norm="", mlp_output_norm=""))
    wide = replace(family, tensors=lambda config: names(replace(config, num_kv_heads=None)))
    query = {n: t.repeat(2, 1) if ".k_proj" in n or ".v_proj" in n else t for n, t in state.items()}
    for tensors, kind, changes, message in (
        (plain, family, {}, "'model.layers.0.post_feedforward_layernorm.weight'.* missing"),
        (plain, partial, {}, "'layers.0.mlp_norm.weight'.* has none, and none of"),
        (state, family, {"norm_position": "pre"}, "'layers.0.attention_output_norm.weight'"),
        (query, wide, {}, "'layers.0.attention.qkv.weight' of a .* its source"),
    ):
        model = part_on_meta(replace(config, **changes), mesh_of())
        with pytest.raises(CheckpointMismatchError, match=message):
            load_from(model, tensors, kind)


# ---- experts


@pytest.mark.parametrize("is_packed", [False, True])
def test_every_rank_gets_its_part_of_its_experts(is_packed, tmp_path):
    twin, family = exact_twin("mixtral"), family_of("mixtral")
    twin.save_pretrained(tmp_path, save_original_format=not is_packed)
    folder, config = SafetensorsFolder(tmp_path), family.config(twin.config.to_dict())
    full = dict(full_tensors_in(twin.state_dict(), family, config, torch.float64))
    for ep_rank, etp_rank in product(range(2), range(2)):
        part = part_on_meta(config, expert_mesh_of(2, 2, ep_rank, etp_rank))
        load_from(part, folder, family)
        for name, parameter in part.named_parameters():
            spec = shard_spec_of(parameter)
            expected = spec.shard(full[name], parameter.shape[spec.dim])
            assert torch.equal(parameter, expected.float()), name


def test_expert_biases_stay_in_float32_beside_bfloat16_weights(tmp_path):
    family, config = family_of("deepseek_v3"), our_config_of("deepseek_v3")
    tensors = {e.target: torch.randn(e.shape).bfloat16() for e in family.tensors(config)}
    biases = {name: torch.randn(6) for name in tensors if name.endswith("router.expert_bias")}
    assert len(biases) == 2
    tensors |= biases
    theirs = config_of("deepseek_v3").to_dict()
    in_tree = in_class_tree(tensors.items(), family, config)
    export_folder(in_tree, family, theirs, tmp_path, dtype=torch.bfloat16)
    folder = SafetensorsFolder(tmp_path)
    assert folder.dtype_of("model.layers.1.mlp.gate.e_score_correction_bias") == torch.float32
    model = part_on_meta(config, ParallelMesh.single()).bfloat16()
    load_from(model, folder, family)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor[: len(tensors[name])], tensors[name]), name
    full = dict(full_tensors_in(folder, family, config, torch.bfloat16))
    assert all(torch.equal(full[name], bias) for name, bias in biases.items())


def test_a_gpt_built_before_parallelize_keeps_its_expert_biases():
    experts = ExpertsConfig(
        num_experts=4, top_k=2, ffn_hidden_size=8, scoring="sigmoid", expert_bias=True
    )
    source: Any = GPT(replace(our_config_of("llama", num_hidden_layers=1), experts=experts), seed=1)
    bias = source.layers["0"].mlp.router.expert_bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    root: Any = nn.ModuleDict({"model": source})
    parallelize(root, ParallelMesh.single())
    assert root["model"] is not source
    assert torch.equal(root["model"].layers["0"].mlp.router.expert_bias, bias)


def test_state_dicts_for_other_strategies_have_the_tensors_of_the_class():
    # Shares of the step, which routers with a balancing loss of a step count, are left out.
    twin = twin_of("mixtral", expert_settings={"aux_loss": 0.1, "aux_loss_scope": "global"})
    root = nn.ModuleDict({"model": twin})
    expected = root.state_dict()
    parallelize(root, ParallelMesh.single())
    ours = root.state_dict()
    assert len([name for name in ours if name.endswith("step_shares")]) == 2
    models = {"model": {"architecture": "MixtralForCausalLM", "config": twin.config.to_dict()}}
    theirs = to_class_names(ClassTensors.from_checkpoint(models), ours)
    assert_same(theirs, expected, "of the class")
    assert to_package_names(root, theirs).keys() == ours.keys()


def test_bert_without_pooler_is_replaced_and_exported_without_pooler(tmp_path):
    config, options = transformers.BertConfig(**ENCODERS["bert"][1]), {"add_pooling_layer": False}
    twin = transformers.BertModel(config, **options).eval()
    root: Any = nn.ModuleDict({"model": deepcopy(twin)})
    parallelize(root, ParallelMesh.single())
    (hidden,) = root["model"](TOKENS, return_dict=False)
    assert torch.allclose(hidden, twin(TOKENS)[0], atol=1e-5)
    family, tensors = family_of("BertModel"), full_tensors(root["model"]).items()
    export_folder(tensors, family, config.to_dict(), tmp_path)
    reloaded = transformers.BertModel.from_pretrained(tmp_path, **options)
    assert_same(reloaded.state_dict(), twin.state_dict(), "reloaded")


# ---- optimizer states of the class


def states_of(case: str, state_of: Callable[[Tensor], Tensor]) -> tuple[Any, dict[str, Any]]:
    root = nn.ModuleDict({"model": twin_of(case)})
    parallelize(root, ParallelMesh.single())
    states = {name: state_of(parameter.detach()) for name, parameter in root.named_parameters()}
    return ClassTensors.of_module(root), states


def test_states_that_no_tensor_of_the_class_can_have_are_refused():
    models, steps = states_of("mixtral", lambda _: torch.tensor(3.0))
    assert all(step == 3 for step in class_states(models, "step", steps).values())
    expert = next(name for name in steps if name.endswith("gate_up_proj.2"))
    with pytest.raises(UnsupportedError, match=rf"'step' is .* and 2.0 for '{expert}'"):
        class_states(models, "step", steps | {expert: torch.tensor(2.0)})
    models, states = states_of("mixtral", lambda parameter: parameter)
    del states["model.model.layers.1.mlp.experts.down_proj.4"]
    with pytest.raises(CheckpointMismatchError, match=r"'.*experts.down_proj.4' of .* missing"):
        class_states(models, "exp_avg", states)
    models, rows = states_of("gpt2", lambda parameter: parameter.sum(-1))
    norm, name = "model.transformer.ln_f.weight", "model.transformer.h.0.attn.c_attn.weight"
    assert class_states(models, "row", {norm: rows[norm]})
    with pytest.raises(UnsupportedError, match=rf"'row' of '{name}' has shape"):
        class_states(models, "row", rows)
    with pytest.raises(UnsupportedError, match=r"an element-wise optimizer such as AdamW"):
        state_from_class(models[0], name, "row", torch.ones(48), (48, 144))


# ---- export

SIZES = {"vocab_size": 53, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3}
CONFIG = transformers.GPT2Config(**SIZES).to_dict()
GPT2 = family_of("gpt2")


def tensors_of_gpt2() -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors, and check that nothing holds the previous tensor."""
    previous: weakref.ref[Tensor] | None = None
    for entry in GPT2.class_tensors(GPT2.config(CONFIG)):
        assert previous is None or previous() is None, f"memory before {entry.target}"
        full = torch.randn(entry.shape)
        previous = weakref.ref(full)
        yield entry.target, full
        del full


def test_files_keep_their_maximum_size_and_the_index_lists_all_tensors(tmp_path):
    export_folder(tensors_of_gpt2(), GPT2, CONFIG, tmp_path, 16_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    names = [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    assert [path.name for path in files] == names
    stored = {path.name: safetensors_torch.load_file(path) for path in files}
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in stored.values()]
    assert max(sizes) <= 16_000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, part in stored.items() for name in part}
    assert index["metadata"]["total_size"] == sum(sizes)
    # A tensor larger than the maximum gets its own file.
    export_folder(tensors_of_gpt2(), GPT2, CONFIG, tmp_path / "one", 1)
    assert len(list((tmp_path / "one").glob("*.safetensors"))) == len(index["weight_map"])


def test_an_exported_configuration_has_the_dtype_and_names_no_code(tmp_path):
    foreign = {"auto_map": {"AutoConfig": "code.Config"}, "_name_or_path": "here"}
    config = {**CONFIG, **foreign, "torch_dtype": "float64"}
    export_folder(tensors_of_gpt2(), GPT2, config, tmp_path, dtype=torch.float16)
    assert SafetensorsFolder(tmp_path).dtype == torch.float16
    written = json.loads((tmp_path / "config.json").read_text())
    added = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "dtype": "float16"}
    expected = json.loads(json.dumps(CONFIG)) | added
    expected.pop("_name_or_path")
    assert written == expected


def test_an_export_names_wrong_tensors_and_leaves_no_files(tmp_path, monkeypatch):
    table, norm = GPT2.class_tensors(GPT2.config(CONFIG)), "transformer.ln_f.weight"
    ours = {entry.target: torch.randn(entry.shape) for entry in table}
    without_norm = {name: t for name, t in ours.items() if name != norm}
    unknown = {"layers.9.mlp.down.weight": torch.ones(2)}
    for tensors, message in (
        (without_norm.items(), f"'{norm}' missing"),
        ((ours | unknown).items(), "'layers.9.mlp.down.weight' is unknown"),
        ((ours | {norm: torch.ones(64)}).items(), r"has \(64,\) instead of \(24,\)"),
        ([*ours.items(), *ours.items()], "given twice"),
    ):
        with pytest.raises(CheckpointMismatchError, match=message):
            export_folder(tensors, GPT2, CONFIG, tmp_path, 2_000)
        assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_writer, "sync_file", Mock(side_effect=OSError("full")))
        with pytest.raises(OSError, match="full"):
            write_adapter(tmp_path / "adapter_model.safetensors", ours)
    assert not list(tmp_path.iterdir())
    export_folder(ours.items(), GPT2, CONFIG, tmp_path)
    with pytest.raises(UnsupportedError, match="a folder without weights"):
        export_folder(ours.items(), GPT2, CONFIG, tmp_path)
