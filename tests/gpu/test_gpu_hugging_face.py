"""Tests that replaced Hugging Face models on GPUs agree with the original models, for full, padded
and packed rows, and for windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from tests.gpu.shared_gpu import gpu_of
from tests.oracles import full_gradients
from tests.swap.families import twin_of
from tests.swap.parts import expected_gradients
from tests.swap.test_language_models import expected_of
from tests.world import run_world

pytest.importorskip("transformers")

V, B, S = 1000, 3, 256
_SIZES = {"vocab_size": V, "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 3}
_SIZES |= {"num_attention_heads": 8, "max_position_embeddings": 512}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_LONG |= {"short_factor": [1.5] * 16, "long_factor": [2.5] * 16}
#: Changes of the small cases: heads of 64 elements, which every kernel supports.
LARGER: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": V, "n_positions": 512, "n_embd": 512, "n_head": 8},
    "llama": {**_SIZES, "num_key_value_heads": 4},
    "mistral": {**_SIZES, "num_key_value_heads": 4, "sliding_window": 48},
    "qwen2": {**_SIZES, "num_key_value_heads": 4, "sliding_window": 100},
    "qwen3": {**_SIZES, "num_key_value_heads": 4, "head_dim": 64},
    "gemma": {**_SIZES, "num_key_value_heads": 4, "head_dim": 64},
    "phi3": {**_SIZES, "num_key_value_heads": 4, "rope_parameters": _LONG, "sliding_window": 60},
    "gpt_neox": _SIZES,
}
#: Function from the gradients of Hugging Face's model to actual and expected gradients by name.
Gradients: TypeAlias = Callable[[Mapping[str, Tensor]], dict[str, tuple[Tensor, Tensor]]]
#: Largest distance of a tensor from float32's by dtype, relative to the norm.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 4e-2}


def make_calls(device: torch.device) -> dict[str, dict[str, Any]]:
    """Return arguments of a call for every kind of row."""
    tokens = torch.randint(1, V, (B, S), generator=torch.Generator().manual_seed(1)).to(device)
    left, right = (torch.ones(B, S, dtype=torch.long, device=device) for _ in range(2))
    left[2, :70], right[1, 200:] = 0, 0
    packed = torch.cat([torch.arange(96), torch.arange(160)]).expand(B, S).to(device)
    # The first token after padding has no predecessor.
    follows_token = left.roll(1, 1) * left
    follows_token[:, 0] = left[:, 0]
    return {
        "whole": {"input_ids": tokens, "labels": tokens},
        "padded right": {
            "input_ids": tokens, "attention_mask": right, "labels": tokens.masked_fill(right == 0, -100),
        },
        "padded left": {
            "input_ids": tokens, "attention_mask": left, "labels": tokens.masked_fill(follows_token == 0, -100),
            "position_ids": (left.cumsum(-1) - 1).clamp(min=0),
        },
        "packed": {
            "input_ids": tokens, "position_ids": packed, "labels": tokens, "use_cache": False,
        },
        "odd": {"input_ids": tokens[:, :193], "labels": tokens[:, :193]},
    }  # fmt: skip


def larger_twin(case: str, device: torch.device) -> nn.Module:
    """Return Hugging Face's model in float32, with weights of the usual magnitude."""
    twin = twin_of(case, attn_implementation="sdpa", **LARGER[case]).eval().to(device)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.mul_(0.03)
            if parameter.dim() == 1 and "norm" in name and "weight" in name:
                parameter.add_(0.0 if case == "gemma" else 1.0)
    return twin


def check_distance(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    actual, expected = actual.detach().double(), expected.detach().double()
    distance = float((actual - expected).norm() / expected.norm().clamp_min(1e-12))
    assert distance < tolerance, f"{what}: {distance:.1e} of its norm away"


def check_calls(
    twin: Any, model: Any, mesh: ParallelMesh, dtype: torch.dtype, name: str, gradients: Gradients
) -> None:
    """Compare logits, losses and gradients for every kind of row."""
    tolerance = TOLERANCE[dtype]
    for kind, call in make_calls(mesh.device).items():
        what = f"{name}, {kind}, {dtype}, tp={mesh.tp.size} sp={mesh.sequence_parallel}"
        logits, loss, theirs = expected_of(twin, call)
        model.zero_grad()
        output = model(**call)
        is_token = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
        check_distance(output.logits[is_token], logits[is_token], tolerance, f"{what}: logits")
        check_distance(output.loss, loss, tolerance, f"{what}: loss")
        output.loss.backward()
        for key, (actual, expected) in gradients(theirs).items():
            check_distance(actual.cpu(), expected, 2 * tolerance, f"{what}: gradient of {key}")


def compare(case: str, mesh: ParallelMesh, dtype: torch.dtype) -> None:
    root = nn.ModuleDict({"model": larger_twin(case, mesh.device).to(dtype)})
    parallelize(root, mesh)
    model: Any = root["model"]

    def gradients(theirs: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        wide = {name: gradient.double().cpu() for name, gradient in theirs.items()}
        expected, actual = expected_gradients(model, wide), full_gradients(model, mesh)
        assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
        # Biases of keys do not change the softmax, so their gradients consist of rounding errors.
        return {
            name: (gradient, expected[name])
            for name, gradient in actual.items()
            if gradient.double().norm().cpu() + expected[name].norm() > 1e-4
        }

    check_calls(larger_twin(case, mesh.device), model, mesh, dtype, case, gradients)


#: Models whose low-rank updates are compared.
ADAPTED = ("llama", "phi3")


def compare_adapters(case: str, mesh: ParallelMesh) -> None:
    pytest.importorskip("peft")
    from tests.swap.test_low_rank import adapted, gradients_of_factors, swapped

    twin, other = (adapted(larger_twin(case, mesh.device), r=16, lora_alpha=4) for _ in range(2))
    wrapped = swapped(other, mesh)
    check_calls(
        twin,
        wrapped,
        mesh,
        torch.float32,
        f"{case} with adapters",
        # The twin has its gradients after the call, so the given ones are not needed.
        lambda theirs: gradients_of_factors(wrapped, twin, mesh),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", list(LARGER))
def test_models_on_one_gpu_agree_with_hugging_face(case, dtype):
    compare(case, ParallelMesh.single("cuda", seed=0), dtype)


@pytest.mark.gpu
def test_adapters_on_one_gpu_agree_with_peft():
    for case in ADAPTED:
        compare_adapters(case, ParallelMesh.single("cuda", seed=0))


def _compare_on_two_gpus(rank: int, size: int) -> None:
    for sequence_parallel in (False, True):
        mesh = ParallelMesh.create(
            ParallelLayout(size, tp=size), device=gpu_of(rank), sequence_parallel=sequence_parallel
        )
        for case in LARGER:
            for dtype in TOLERANCE:
                compare(case, mesh, dtype)
        for case in ADAPTED:
            compare_adapters(case, mesh)
        mesh.destroy()


@pytest.mark.gpu2
def test_models_on_two_gpus_agree_with_hugging_face():
    run_world(_compare_on_two_gpus, 2, backend="nccl")
