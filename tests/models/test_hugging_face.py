"""GPT has the logits, loss and gradients of Hugging Face models with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from tests.oracles import assert_equal, assert_same_gradients, load_full_
from tests.world import run_world

transformers = pytest.importorskip("transformers")

B, S, V, D, LAYERS = 2, 10, 83, 24, 3


def build_gpt2() -> tuple[nn.Module, GPTConfig]:
    config = transformers.GPT2Config(
        vocab_size=V,
        n_positions=16,
        n_embd=D,
        n_layer=LAYERS,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    reference = transformers.GPT2LMHeadModel(config)
    ours = GPTConfig.gpt2(
        vocab_size=V, max_seq_length=16, num_layers=LAYERS, hidden_size=D, num_heads=4
    )
    return reference, ours


def build_llama(num_kv_heads: int, tied: bool) -> tuple[nn.Module, GPTConfig]:
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=40,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=16,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
    )
    reference = transformers.LlamaForCausalLM(config)
    # The norm of Hugging Face rounds to float32 for every dtype; the norm of torch keeps float64,
    # which the comparison needs.
    for module in reference.modules():
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(module, name, nn.RMSNorm(D, eps=1e-6))
    ours = GPTConfig.llama(
        vocab_size=V,
        max_seq_length=16,
        num_layers=LAYERS,
        hidden_size=D,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        ffn_hidden_size=40,
        norm_eps=1e-6,
        rotary_base=5000.0,
        tie_embeddings=tied,
    )
    return reference, ours


def rename_gpt2_tensors(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of GPT-2 to the names of this package; its linear weights are transposed."""
    ours = {
        "embedding.word.weight": theirs["transformer.wte.weight"],
        "embedding.position.weight": theirs["transformer.wpe.weight"],
    }
    names = {"ln_1": "attention_norm", "ln_2": "mlp_norm"}
    linears = {
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.output",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    }
    for layer in range(LAYERS):
        for kind in ("weight", "bias"):
            for source, target in names.items():
                ours[f"layers.{layer}.{target}.{kind}"] = theirs[
                    f"transformer.h.{layer}.{source}.{kind}"
                ]
            for source, target in linears.items():
                ours[f"layers.{layer}.{target}.{kind}"] = theirs[
                    f"transformer.h.{layer}.{source}.{kind}"
                ].t()
    for kind in ("weight", "bias"):
        ours[f"final_norm.{kind}"] = theirs[f"transformer.ln_f.{kind}"]
    return ours


def rename_llama_tensors(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of Llama to the names of this package, and fuse projections."""
    ours = {
        "embedding.word.weight": theirs["model.embed_tokens.weight"],
        "final_norm.weight": theirs["model.norm.weight"],
    }
    if "lm_head.weight" in theirs:
        ours["head.weight"] = theirs["lm_head.weight"]
    for layer in range(LAYERS):
        source, target = f"model.layers.{layer}", f"layers.{layer}"
        fused = {
            "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        }
        plain = {
            "attention_norm": ["input_layernorm"],
            "mlp_norm": ["post_attention_layernorm"],
            "attention.output": ["self_attn.o_proj"],
            "mlp.down": ["mlp.down_proj"],
        }
        for name, parts in (fused | plain).items():
            ours[f"{target}.{name}.weight"] = torch.cat(
                [theirs[f"{source}.{part}.weight"] for part in parts]
            )
    return ours


def compare(
    reference: nn.Module, config: GPTConfig, rename: Any, mesh: ParallelMesh, case_name: str
) -> None:
    reference = reference.double().eval()
    model = GPT(config, mesh, seed=1)
    load_full_(model, rename(dict(reference.named_parameters())))
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, V, (2, B, S), generator=generator)
    labels[1, 3:5] = -100

    expected = reference(input_ids=tokens).logits
    loss = F.cross_entropy(expected.flatten(0, 1), labels.flatten())
    loss.backward()
    losses = model(tokens, labels)
    mean = losses.sum() / (labels != -100).sum()
    mean.backward()
    assert_equal(model(tokens), expected, f"{case_name}: logits")
    assert_equal(mean, loss, f"{case_name}: loss")
    assert_same_gradients(
        model, mesh, rename({name: p.grad for name, p in reference.named_parameters()}), case_name
    )


def check_models(rank: int, size: int) -> None:
    torch.set_default_dtype(torch.float64)
    meshes = [ParallelMesh.single()]
    if size > 1:
        layout = ParallelLayout(world_size=size, tp=size)
        meshes = [ParallelMesh.create(layout, sequence_parallel=sp) for sp in (False, True)]
    for mesh in meshes:
        layout_name = f"tp={mesh.tp.size} sp={mesh.sequence_parallel}"
        torch.manual_seed(0)
        compare(*build_gpt2(), rename_gpt2_tensors, mesh, f"GPT-2 {layout_name}")
        for num_kv_heads, tied in ((4, False), (2, True), (1, False)):
            compare(
                *build_llama(num_kv_heads, tied),
                rename_llama_tensors,
                mesh,
                f"Llama kv={num_kv_heads} {layout_name}",
            )


def test_models_in_one_process_equal_hugging_face() -> None:
    before = torch.get_default_dtype()
    try:
        check_models(0, 1)
    finally:
        torch.set_default_dtype(before)


def test_tensor_parallel_models_equal_hugging_face() -> None:
    run_world(check_models, 2)
