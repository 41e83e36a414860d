"""Tests that captured passes of single tokens have the logits and tokens of eager passes."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_megatron import GPT, GenerationSettings, GPTConfig, generate
from lightning_megatron.generation import token_pass
from lightning_megatron.generation.prompts import PromptRows
from lightning_megatron.generation.token_pass import TokenPass, reason_against_capture
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.key_value_cache import KeyValueCache
from lightning_megatron.layers.fused.choose_kernels import choose_kernels
from lightning_megatron.plan.layout import ParallelLayout
from tests.gpu.ranks import on_two_and_four_gpus, run_ranks
from tests.gpu.shared_gpu import gpu_of
from tests.kernels.models import KINDS
from tests.kernels.pass_checks import check_fused_pass
from tests.oracles import relative_difference

pytestmark = pytest.mark.gpu
SIZES = {"num_layers": 4, "hidden_size": 256, "num_heads": 8}
MODELS = {
    "llama": GPTConfig.llama(vocab_size=997, max_seq_length=512, num_kv_heads=2, **SIZES),
    "window": GPTConfig.llama(vocab_size=997, max_seq_length=512, sliding_window=24, **SIZES),
    "gpt2": GPTConfig.gpt2(vocab_size=997, max_seq_length=512, **SIZES),
}
PROMPTS = [[*range(5, 45)], [7, 3, 5], [*range(100, 117)]]


def model_of(case: str, dtype: torch.dtype, mesh: ParallelMesh | None = None) -> GPT:
    mesh = mesh or ParallelMesh.single("cuda")
    gpt = GPT(MODELS[case], mesh=mesh, seed=3).to(mesh.device, dtype)
    with torch.no_grad():
        for parameter in gpt.parameters():
            # Logits differ so much that no rounding changes the most likely token.
            parameter.mul_(3.0)
    assert reason_against_capture(gpt, 64) is None
    return gpt


@pytest.mark.parametrize("case", MODELS)
def test_captured_passes_generate_the_tokens_of_eager_passes(case):
    gpt = model_of(case, torch.float32)
    for prompts in (PROMPTS, PROMPTS[:1]):
        for sampling in ({}, {"sample": True, "top_k": 20, "seed": 5}):
            settings: dict[str, Any] = {"max_new_tokens": 80, **sampling}
            captured = generate(gpt, prompts, GenerationSettings(**settings))
            expected = generate(gpt, prompts, GenerationSettings(**settings, cuda_graph=False))
            assert captured == expected
            assert len(set(captured[0])) > 3
            stop: dict[str, Any] = {"stop_tokens": (captured[0][30],), **settings}
            ended = generate(gpt, prompts, GenerationSettings(**stop))
            assert ended == generate(gpt, prompts, GenerationSettings(**stop, cuda_graph=False))
            assert len(ended[0]) <= 31


@pytest.mark.parametrize("case", MODELS)
@torch.no_grad()
def test_captured_passes_in_bfloat16_have_the_logits_of_eager_passes(case):
    gpt = model_of(case, torch.bfloat16).eval()
    device = torch.device("cuda")
    length = max(map(len, PROMPTS))
    sizes = {"num_rows": len(PROMPTS), "length": length}
    new_tokens = torch.randint(1, 997, (60, len(PROMPTS)), device=device)
    results = []
    for is_captured in (True, False):
        cache = KeyValueCache(length + len(new_tokens))
        rows = PromptRows.of(PROMPTS, device, **sizes)
        tokens, span = rows.prefill_inputs(cache)
        gpt.logits_at(tokens, length - 1, span)
        cache.advance(length)
        run_captured = TokenPass(gpt, cache, rows.padding, len(PROMPTS))
        logits = []
        for tokens in new_tokens:
            rows = rows.appended(tokens)
            if is_captured:
                logits.append(run_captured(tokens).clone())
            else:
                last, span = rows.decode_inputs(cache)
                logits.append(gpt.logits_at(last, 0, span))
            cache.advance(1)
        results.append(torch.stack(logits))
    assert relative_difference(*results) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "window", "qwen"])
def test_fused_passes_have_the_logits_of_full_rows(kind, dtype):
    assert check_fused_pass(KINDS[kind], ParallelMesh.single("cuda"), dtype).is_captured


def _fused_passes(rank: int, size: int) -> None:
    """Check captured passes of one row that tensor-parallel ranks share."""
    mesh = ParallelMesh.create(ParallelLayout(size, tp=size), device=gpu_of(rank))
    kernels = choose_kernels(mesh.device).kernels
    assert kernels is not None
    with mock.patch.object(
        kernels, "send_vector_product", side_effect=kernels.send_vector_product
    ) as send:
        for case in ("llama", "window"):
            config = dataclasses.replace(MODELS[case], num_kv_heads=4)
            # A graph that is kept would prevent the destruction of its communicator.
            assert check_fused_pass(config, mesh, torch.bfloat16).is_captured
    assert send.call_count == 2 * 2 * 2 * SIZES["num_layers"]
    mesh.destroy()


@on_two_and_four_gpus
def test_fused_passes_of_tensor_parallel_ranks_have_the_logits_of_full_rows(size):
    run_ranks(_fused_passes, size, needs_nccl="ranks write into each other's memory")


def _equal_tokens(rank: int, size: int) -> None:
    """Check that captured passes of all models generate the tokens of eager passes."""
    mesh = ParallelMesh.create(ParallelLayout(size, tp=size), device=gpu_of(rank))
    original = token_pass.CudaBackend.capture
    for case in MODELS:
        gpt = model_of(case, torch.float32, mesh)
        successes: list[bool] = []

        # A graph that is kept would prevent the destruction of its communicator.
        def capture(*args: Any, successes: list[bool] = successes) -> Any:
            result = original(*args)
            successes.append(True)
            return result

        with mock.patch.object(token_pass.CudaBackend, "capture", capture):
            captured_tokens = generate(gpt, PROMPTS, GenerationSettings(80))
        assert successes == [True], "the capture has succeeded"
        eager = generate(gpt, PROMPTS, GenerationSettings(80, cuda_graph=False))
        assert captured_tokens == eager, case
    mesh.destroy()


@pytest.mark.gpu2
def test_captured_passes_of_tensor_parallel_ranks_generate_eager_tokens():
    run_ranks(_equal_tokens, 2, needs_nccl="a capture on several ranks has collectives in it")
