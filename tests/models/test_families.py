"""GPT equals models of many families of Hugging Face, also for padded and packed batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from tests.oracles import assert_equal, assert_same_gradients, load_full_

transformers = pytest.importorskip("transformers")

B, S, V, D, H, LAYERS = 2, 12, 83, 32, 4, 2
THEIR_SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
OUR_SIZES: dict[str, Any] = {
    "vocab_size": V,
    "max_seq_length": 32,
    "num_layers": LAYERS,
    "hidden_size": D,
    "num_heads": H,
    "ffn_hidden_size": 40,
}
GROUPED_QUERY = {"num_key_value_heads": 2, "rms_norm_eps": 1e-6}


@dataclass(frozen=True)
class Pair:
    """Class of Hugging Face, its settings, and the settings of this package."""

    kind: str
    theirs: dict[str, Any]
    ours: GPTConfig


def rotary(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **numbers}}


def llama(**settings: Any) -> GPTConfig:
    return GPTConfig.llama(
        **OUR_SIZES, **{"num_kv_heads": 2, "norm_eps": 1e-6, "rotary_base": 5000.0} | settings
    )


FACTORS: dict[str, Any] = {
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 5.0],
}
LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
PAIRS = {
    "Mistral": Pair(
        "Mistral",
        GROUPED_QUERY | rotary("default") | {"sliding_window": 4, "head_dim": 6},
        llama(sliding_window=4, head_dim=6),
    ),
    "Qwen2": Pair(
        "Qwen2",
        GROUPED_QUERY | rotary("default") | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        llama(qkv_bias=True, sliding_window=3, window_layers=(False, True)),
    ),
    "Qwen3": Pair("Qwen3", GROUPED_QUERY | rotary("default") | {"head_dim": 10}, llama(qk_norm=True, head_dim=10)),
    "Gemma": Pair(
        "Gemma",
        GROUPED_QUERY
        | rotary("default")
        | {"num_key_value_heads": 1, "head_dim": 12, "hidden_activation": "gelu_pytorch_tanh"},
        llama(
            num_kv_heads=1, head_dim=12, activation="geglu_tanh", norm_offset=1.0, embedding_scale=D**0.5,
            tie_embeddings=True,
        ),
    ),
    "Phi-3": Pair(
        "Phi3",
        GROUPED_QUERY
        | rotary("longrope", **FACTORS, partial_rotary_factor=0.75, original_max_position_embeddings=10)
        | {"original_max_position_embeddings": 10, "sliding_window": 5},
        llama(
            sliding_window=5, rotary_dim=6, rotary_scaling={
                "kind": "longrope", "factor": 3.2, "original_length": 10, "short_factors": (1.0, 1.5, 2.0),
                "long_factors": (2.0, 3.0, 5.0),
            },
        ),
    ),
    "GPT-NeoX": Pair(
        "GPTNeoX",
        rotary("default", partial_rotary_factor=0.5) | {"hidden_act": "gelu", "use_parallel_residual": True},
        GPTConfig.gpt2(
            **OUR_SIZES, position="rotary", rotary_base=5000.0, rotary_dim=4, parallel_residual=True, activation="gelu",
            tie_embeddings=False,
        ),
    ),
    "GPT-NeoX in sequence": Pair(
        "GPTNeoX",
        rotary("default", partial_rotary_factor=1.0) | {"hidden_act": "relu", "use_parallel_residual": False},
        GPTConfig.gpt2(**OUR_SIZES, position="rotary", rotary_base=5000.0, activation="relu", tie_embeddings=False),
    ),
    "Llama, biases, linear": Pair(
        "Llama",
        GROUPED_QUERY | rotary("linear", factor=2.0) | {"attention_bias": True, "mlp_bias": True},
        llama(
            qkv_bias=True, output_bias=True, mlp_bias=True, rotary_scaling={"kind": "linear", "factor": 2.0}
        ),
    ),
    "Llama, llama3": Pair(
        "Llama",
        GROUPED_QUERY | rotary("llama3", factor=4.0, original_max_position_embeddings=16, **LLAMA3),
        llama(rotary_scaling={"kind": "llama3", "factor": 4.0, "original_length": 16}),
    ),
    "Llama, yarn": Pair(
        "Llama",
        GROUPED_QUERY | rotary("yarn", factor=4.0, original_max_position_embeddings=16),
        llama(rotary_scaling={"kind": "yarn", "factor": 4.0, "original_length": 16}),
    ),
}  # fmt: skip


def build_reference(pair: Pair) -> nn.Module:
    """Build a Hugging Face model with random weights and norms in float64."""
    config = getattr(transformers, f"{pair.kind}Config")(**THEIR_SIZES, **pair.theirs)
    reference = getattr(transformers, f"{pair.kind}ForCausalLM")(config).double().eval()
    for index, parameter in enumerate(reference.parameters()):
        generator = torch.Generator().manual_seed(index)
        with torch.no_grad():
            parameter.copy_(
                0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1)
            )
    for module in reference.modules():
        if type(module).__name__.endswith("RMSNorm"):
            # The norm of Hugging Face rounds to float32 for every dtype of the model.
            module.forward = float64_norm(module, 1.0 if pair.kind == "Gemma" else 0.0)
    return reference


def float64_norm(module: Any, offset: float) -> Callable[[Tensor], Tensor]:
    eps = 1e-6
    return lambda x: F.rms_norm(x, x.shape[-1:], module.weight + offset, eps)


def rename_tensors(theirs: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Rename tensors of Hugging Face to the names of this package, and fuse projections."""
    if "gpt_neox.embed_in.weight" in theirs:
        return rename_neox_tensors(theirs)
    ours = {
        "embedding.word.weight": theirs["model.embed_tokens.weight"],
        "final_norm.weight": theirs["model.norm.weight"],
    }
    if not config.tie_embeddings:
        ours["head.weight"] = theirs["lm_head.weight"]
    fused = "model.layers.0.self_attn.qkv_proj.weight" in theirs
    sources = {
        "attention.qkv": ["self_attn.qkv_proj"]
        if fused
        else [f"self_attn.{x}_proj" for x in "qkv"],
        "mlp.gate_up": ["mlp.gate_up_proj"] if fused else ["mlp.gate_proj", "mlp.up_proj"],
        "attention_norm": ["input_layernorm"],
        "mlp_norm": ["post_attention_layernorm"],
        "attention.output": ["self_attn.o_proj"],
        "attention.query_norm": ["self_attn.q_norm"],
        "attention.key_norm": ["self_attn.k_norm"],
        "mlp.down": ["mlp.down_proj"],
    }
    for layer in range(LAYERS):
        for target, parts in sources.items():
            for kind in ("weight", "bias"):
                names = [f"model.layers.{layer}.{part}.{kind}" for part in parts]
                if names[0] in theirs:
                    ours[f"layers.{layer}.{target}.{kind}"] = torch.cat(
                        [theirs[name] for name in names]
                    )
    return ours


def rename_neox_tensors(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    ours = {
        "embedding.word.weight": theirs["gpt_neox.embed_in.weight"],
        "head.weight": theirs["lm_head.weight"],
    }
    sources = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.qkv": "attention.query_key_value",
        "attention.output": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }
    for kind in ("weight", "bias"):
        ours[f"final_norm.{kind}"] = theirs[f"gpt_neox.final_layer_norm.{kind}"]
        for layer in range(LAYERS):
            for target, source in sources.items():
                tensor = theirs[f"gpt_neox.layers.{layer}.{source}.{kind}"]
                if target == "attention.qkv":
                    # Hugging Face stores query, key and value of each head next to each other.
                    tensor = tensor.unflatten(0, (H, 3, -1)).transpose(0, 1).flatten(0, 2)
                ours[f"layers.{layer}.{target}.{kind}"] = tensor
    return ours


@dataclass(frozen=True)
class Batch:
    """Same rows as arguments of both models, and a mask of the positions with labels."""

    theirs: dict[str, Tensor]
    span: AttentionSpan | None
    counts: Tensor


def make_batches() -> dict[str, Batch]:
    all_count = torch.ones(B, S, dtype=torch.bool)
    lengths = torch.tensor([[7], [12]])
    right = torch.arange(S) < lengths
    left = right.flip(1)
    positions = (left.cumsum(1) - 1).clamp(min=0)
    packed = torch.tensor(
        [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 5, 6]]
    )
    return {
        "plain": Batch({}, None, all_count),
        "padded right": Batch({"attention_mask": right.long()}, AttentionSpan(lengths), right),
        "padded left": Batch(
            {"attention_mask": left.long(), "position_ids": positions},
            AttentionSpan(torch.cat((S - lengths, lengths), 1), positions=positions),
            left,
        ),
        "packed": Batch(
            {"position_ids": packed},
            AttentionSpan(torch.tensor([[5, 7, 0], [3, 2, 7]])),
            all_count,
        ),
    }


@pytest.fixture(autouse=True)
def _in_float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("kind", list(make_batches()))
@pytest.mark.parametrize("name", list(PAIRS))
def test_models_of_a_family_equal_hugging_face(name: str, kind: str) -> None:
    pair, batch, mesh = PAIRS[name], make_batches()[kind], ParallelMesh.single()
    reference, model = build_reference(pair), GPT(pair.ours, mesh, seed=1)
    load_full_(model, rename_tensors(dict(reference.named_parameters()), pair.ours))
    tokens, labels = torch.randint(0, V, (2, B, S), generator=torch.Generator().manual_seed(0))
    labels = labels.masked_fill(~batch.counts, -100)

    # With a cache, Hugging Face does not look for several documents in a row.
    expected = reference(input_ids=tokens, use_cache=False, **batch.theirs).logits
    loss = F.cross_entropy(expected.flatten(0, 1), labels.flatten())
    loss.backward()
    mean = model(tokens, labels, span=batch.span).sum() / batch.counts.sum()
    mean.backward()
    logits = model(tokens, span=batch.span)
    assert_equal(logits[batch.counts], expected[batch.counts], "logits")
    assert_equal(mean, loss, "loss")
    gradients = {key: p.grad for key, p in reference.named_parameters() if p.grad is not None}
    assert_same_gradients(model, mesh, rename_tensors(gradients, pair.ours), name)
