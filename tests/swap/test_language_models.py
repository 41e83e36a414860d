"""Hugging Face models replaced in place keep their logits, losses and gradients in one process."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from copy import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.families import family_of
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.swap import parallelize
from lightning_megatron.swap.hugging_face.packed_rows import PackedRow, span_of
from tests.oracles import assert_equal, float32_as_float64
from tests.swap.families import CASES, EXPERTS, WITH_SLOPES, V, config_of, exact_twin, twin_of
from tests.swap.parts import (
    B,
    S,
    check_call,
    check_gradients,
    expected_of,
    inputs,
    logits_of,
    swapped,
)

MESH = ParallelMesh.single()


@pytest.mark.parametrize("case", [*CASES, *EXPERTS])
def test_every_family_has_the_logits_loss_and_gradients_of_hugging_face(case):
    calls: dict[str, Any] = inputs()
    # The padding token occurs in the input, and some families do not train its vector.
    changes = {} if case in EXPERTS else {"pad_token_id": int(calls["whole"]["input_ids"][0, 1])}
    twin, model = exact_twin(case, **changes), swapped(exact_twin(case, **changes))
    for kind, call in calls.items():
        check_call(model, MESH, call, expected_of(twin, call), f"{case}, {kind}")
    if case not in EXPERTS:
        vectors = twin.get_input_embeddings()(calls["whole"]["input_ids"]).detach()
        expected = logits_of(twin, {"inputs_embeds": vectors})
        assert_equal(model(inputs_embeds=vectors).logits, expected, f"{case}: vectors", 1e-9)


_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
_YARN |= {"original_max_position_embeddings": 16}
_LONG = {"rope_type": "longrope", "short_factor": [1.5, 1.0], "long_factor": [2.5, 3.0]}
_LONG |= {"factor": 2.0, "original_max_position_embeddings": 16}
CHANGED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"hidden_act": "gelu_pytorch_tanh", "rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    ("llama", {"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9}}),
    ("llama", {"rope_parameters": {**_YARN, "attention_factor": 1.3, "beta_fast": 8, "truncate": False}}),
    ("llama", {"rope_parameters": _LONG}),
    ("qwen2", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    ("qwen2", {"use_sliding_window": False}),
    ("qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}),
    ("gpt2", {"activation_function": "gelu", "scale_attn_weights": False, "n_inner": 31}),
    ("gpt2", {"activation_function": "relu", "tie_word_embeddings": False}),
    ("gpt_bigcode", {"scale_attn_weights": False, "tie_word_embeddings": False}),
    ("gemma", {"attention_bias": True, "hidden_act": "gelu", "tie_word_embeddings": False}),
    ("gpt_neox", {"hidden_act": "relu", "tie_word_embeddings": True, "layer_norm_eps": 1e-3}),
    ("mistral", {"sliding_window": None, "head_dim": 6, "rms_norm_eps": 1e-3}),
    ("phi3", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma3", {"use_bidirectional_attention": True, "sliding_window": 6}),
    ("gemma3", {"final_logit_softcapping": 1.5, "layer_types": ["full_attention"] * 3}),
    ("glm4", {"attention_bias": True, "rope_parameters": {"partial_rotary_factor": 1.0}}),
    ("olmo3", {"attention_bias": True, "sliding_window": 64}),
    ("exaone4", {"sliding_window": 64}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3, "head_dim": 4}),
    ("smollm3", {"use_sliding_window": False, "no_rope_layers": [0, 0, 1]}),
    ("starcoder2", {"hidden_act": "relu", "head_dim": 6, "tie_word_embeddings": False}),
    ("bloom", {"n_head": 6, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
    ("mpt", {"attn_config": {"softmax_scale": 0.2}, "n_heads": 3}),
    ("granite", {"attention_bias": True, "mlp_bias": False, "embedding_multiplier": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CHANGED)))
def test_changed_settings_have_the_logits_of_hugging_face(number):
    case, changes = CHANGED[number]
    changes = {**changes, "attn_implementation": "eager"}
    twin, model = twin_of(case, **changes).eval(), twin_of(case, **changes).eval()
    with torch.no_grad():
        for network in (twin, model):
            # The values are large enough to make attention scores differ.
            for name, parameter in network.named_parameters():
                parameter.mul_(0.3).add_(float(name.endswith("norm.weight")))
        swapped(model)
        tokens = torch.randint(0, V, (2, 40), generator=torch.Generator().manual_seed(0))
        # Positions beyond the original length use the long factors.
        for length in (40, 16, 17) if "rope_parameters" in changes or case == "phi3" else (40,):
            expected, actual = (network(tokens[:, :length]).logits for network in (twin, model))
            error = float((actual - expected).abs().max() / expected.abs().max())
            assert error < 2e-5, f"{case}, {changes}: off by {error}"


def check_generation(mesh: ParallelMesh, case: str, **changes: Any) -> None:
    """Compare generation, where every data rank continues other prompts, which end at other times."""
    changes |= {"pad_token_id": 0, "eos_token_id": 7}
    make, rank = exact_twin if case in EXPERTS else twin_of, mesh.dp.rank
    with float32_as_float64() if case in EXPERTS else nullcontext():
        twin = make(case, **changes).eval()
    model = swapped(make(case, **changes), mesh).eval()
    generator = torch.Generator().manual_seed(3 + rank)
    prompts = torch.randint(8, V, (2, 5 + rank), generator=generator)
    mask = torch.ones_like(prompts)
    mask[0, : 0 if case in EXPERTS else 2] = 0
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "top_k": 7}):
        outputs = []
        for network in (twin, model):
            torch.manual_seed(5 + rank)
            call = {"input_ids": prompts, "attention_mask": mask, "max_new_tokens": 7, **options}
            with float32_as_float64() if network is twin and case in EXPERTS else nullcontext():
                outputs.append(network.generate(**call))
        assert torch.equal(*outputs), f"{case}, {options}, {mesh.layout}, rank {mesh.rank}"


@pytest.mark.parametrize("case", WITH_SLOPES)
def test_slopes_over_padding_between_tokens_match_hugging_face(case):
    call = inputs()["whole"]
    mask = torch.ones(B, S, dtype=torch.long)
    mask[0, 3:5], mask[1, :2], mask[1, 6], mask[2, 8:] = 0, 0, 0, 0
    ignored = mask * F.pad(mask, (1, 0), value=1)[:, :-1] == 0
    call |= {"attention_mask": mask, "labels": call["labels"].masked_fill(ignored, -100)}
    check_call(swapped(exact_twin(case)), MESH, call, expected_of(exact_twin(case), call), case)


def test_padding_uses_a_mask_only_where_lengths_do_not_suffice():
    mask, scattered = torch.tensor([[1, 1, 1, 0], [1] * 4]), torch.tensor([[1, 0, 1, 0], [1] * 4])
    labels, gaps = torch.tensor([[5, 6, -100, -100], [1, 2, 3, -100]]), torch.arange(4)[None] * 2
    plain, shape = PackedRow(), mask.shape
    assert span_of(mask, None, plain, shape, labels) is span_of(mask, None, plain, shape) is None
    left = span_of(mask.flip(1), None, plain, shape, labels.flip(1))
    assert left is not None
    assert (left.mask, left.lengths.tolist()) == (None, [[1, 3], [0, 4]])
    span = span_of(scattered, None, plain, shape)
    assert span is not None
    assert span.lengths is None
    assert torch.equal(span.mask, scattered.bool()[:, None, None])
    span = span_of(None, gaps, PackedRow(by_positions="minimum"), gaps.shape)
    assert span is not None
    assert span.lengths is None, "the positions begin no further sequence"
    with pytest.raises(UnsupportedError, match="either attention_mask or cu_seq_lens_q: both"):
        span_of(mask, None, PackedRow(torch.tensor([0, 2, 4])), shape)


def test_outputs_are_read_by_position_and_copied_and_lose_their_logits_in_the_backward_pass():
    model, call = swapped(exact_twin("llama")), inputs()["whole"]
    output, late = model(**call), model(**call)
    loss, logits = output.to_tuple()[:2]
    assert output[0] is loss
    assert output[1] is logits is output.logits
    assert all(a is b for a, b in zip(output[:2], output.values(), strict=False))
    copied = copy(output)
    assert type(copied).__module__.startswith("transformers")
    assert copied.logits is logits
    late.loss.backward()
    with pytest.raises(RuntimeError, match="before the backward pass of the loss"):
        _ = late.logits


# ---- experts


def test_the_balancing_loss_of_one_layer_has_the_gradients_of_hugging_face():
    coefficient, call = 0.3, inputs()["whole"]
    with float32_as_float64():
        twin = exact_twin("mixtral", num_hidden_layers=1, output_router_logits=True)
        twin.router_aux_loss_coef = coefficient
        output = twin(**call)
        output.loss.backward()
    # Hugging Face counts every choice of a token separately; our loss is 1 for balanced experts.
    settings = {"aux_loss": 2 * coefficient}
    model = swapped(exact_twin("mixtral", num_hidden_layers=1, expert_settings=settings)).train()
    loss = model(**call).loss
    assert_equal(loss, output.loss - coefficient * output.aux_loss, "main loss", 1e-9)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    check_gradients(model, MESH, (output.logits, loss, gradients), "with a balancing loss")


def test_the_balancing_loss_of_all_layers_is_refused_with_the_setting_to_use_instead():
    for case, weight in (("mixtral", "0.02"), ("qwen3_moe", "0.03")):
        config = config_of(case, output_router_logits=True, router_aux_loss_coef=0.02).to_dict()
        # Both models have two layers of experts; tokens choose two or three experts.
        with pytest.raises(UnsupportedError, match=f"expert_settings .* {{'aux_loss': {weight}}}"):
            family_of(EXPERTS[case][0]).config(config)


@pytest.mark.parametrize("case", ["mistral", "mixtral"])
def test_compiled_blocks_match_eager_blocks(case):
    eager, compiled = (swapped(exact_twin(case, num_hidden_layers=2)) for _ in range(2))
    torch.compiler.reset()
    for block in compiled.model.layers:
        block.compile(backend="aot_eager")
    tokens = torch.randint(
        eager.config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0)
    )
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    for call in ({}, {"attention_mask": mask}) if case == "mistral" else ({},):
        losses = [
            model(input_ids=tokens, labels=tokens, **call).loss for model in (eager, compiled)
        ]
        assert_equal(losses[1], losses[0], case)
        for model, loss in zip((eager, compiled), losses, strict=True):
            model.zero_grad()
            loss.backward()
        pairs = zip(eager.named_parameters(), compiled.parameters(), strict=True)
        for (name, expected), actual in pairs:
            assert_equal(actual.grad, expected.grad, f"{case}, {sorted(call)}: {name}")


@pytest.mark.parametrize("part", ["whole", "block", "wrapped"])
def test_model_compiled_before_its_replacement_is_refused(part):
    model = twin_of("llama")
    if part == "wrapped":
        model = torch.compile(model, backend="eager")
    else:
        (model if part == "whole" else model.model.layers[1]).compile(backend="eager")
    with pytest.raises(UnsupportedError, match="was compiled.*Compile the new modules in on_fit"):
        parallelize(nn.ModuleDict({"model": model}), ParallelMesh.single())


def test_models_are_built_on_meta_if_transformers_is_imported_inside_the_block():
    code = """
import sys
from lightning_megatron.swap import build_on_meta
with build_on_meta():
    assert "transformers.modeling_utils" not in sys.modules
    from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    model = AutoModelForCausalLM.from_config(config)
assert model.lm_head.weight.is_meta
assert not AutoModelForCausalLM.from_config(config).lm_head.weight.is_meta
"""
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
