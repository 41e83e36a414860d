"""Tests that the fused kernels return the float64 results rounded once on a GPU, and that models on
them agree with torch's operators.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.choose_kernels import choose_kernels
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton, which comes with the CUDA builds of torch", allow_module_level=True)

from tests.kernels.checks import CHECKS, REAL, SMALL, Draw
from tests.kernels.models import KINDS, compare_model

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)

LLAMA = GPTConfig.llama(
    vocab_size=131072, max_seq_length=4096, num_layers=2, hidden_size=4096, num_heads=32, num_kv_heads=8,
    ffn_hidden_size=14336,
)  # fmt: skip
GPT2 = GPTConfig.gpt2(
    vocab_size=50257, max_seq_length=1024, num_layers=2, hidden_size=1536, num_heads=16
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("sizes", [SMALL, REAL], ids=["small", "real"])
@pytest.mark.parametrize("name", list(CHECKS))
def test_kernels_equal_float64_rounded_once(name, sizes, dtype):
    CHECKS[name](Draw(DEVICE, dtype), sizes)
    torch.cuda.empty_cache()


def test_this_gpu_gets_the_fused_kernels():
    choice = choose_kernels(DEVICE)
    assert choice.kernels is not None, choice.reason


def assert_near(actual: Tensor, expected: Tensor, what: str) -> None:
    # Kernels and operators round to half precision at different places: gradients agree as vectors,
    # losses up to a few roundings.
    actual, expected = actual.double(), expected.double()
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    distance = float((actual - expected).norm() / expected.norm().clamp_min(1e-12))
    assert distance < 3e-2, f"{what}: {distance} from torch's operators"


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_tiny_models_on_kernels_agree_with_operators_of_torch(dtype, kind, recompute):
    mesh = ParallelMesh.single(DEVICE, seed=0)
    compare_model(KINDS[kind], mesh, dtype, recompute, assert_near, shape=(3, 16), smoothing=0.1)


@pytest.mark.parametrize(
    ("config", "shape"), [(LLAMA, (1, 4096)), (GPT2, (8, 1024))], ids=["llama", "gpt2"]
)
def test_layers_of_real_size_on_kernels_agree_with_operators_of_torch(config, shape):
    mesh = ParallelMesh.single(DEVICE, seed=0)
    compare_model(config, mesh, torch.bfloat16, "none", assert_near, shape=shape)
    torch.cuda.empty_cache()


def test_a_second_backward_pass_over_the_same_loss_is_refused():
    model = GPT(KINDS["llama"], ParallelMesh.single("cuda", seed=0), seed=0).bfloat16()
    tokens = torch.randint(0, 100, (1, 17), device="cuda")
    loss = model(tokens[:, :-1], tokens[:, 1:].contiguous()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="must run once"):
        loss.backward()
