"""Measured passes of whole layers: times of their kernels by name, and of the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lightning_megatron.groups.lone_mesh import lone_mesh
from lightning_megatron.half_types import default_dtype
from lightning_megatron.memory.lone_stage import put_into_buffers
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.fp8_layers import set_fp8
from lightning_megatron.models.gpt import GPT
from lightning_megatron.optimizer.reduction import GradientReducer
from lightning_megatron.plan.budget import TrainingShape
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.layout import ParallelLayout

_PASSES = 5


@dataclass(frozen=True)
class MeasuredModel:
    """Model of two layers, and the tokens of a microbatch."""

    config: GPTConfig
    tokens: int
    fp8: FP8 | None = None


def _llama(vocabulary: int, tokens: int, sizes: tuple[int, int, int, int], **more: Any) -> Any:
    hidden, heads, kv_heads, ffn = sizes
    return GPTConfig.llama(
        vocab_size=vocabulary,
        max_seq_length=tokens,
        num_layers=2,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden_size=ffn,
        **more,
    )


def measured_models(on_gpu: bool) -> dict[str, MeasuredModel]:
    """Return the measured models by name: in "small" ones the device waits for the host."""
    small = (128, 4, 2, 256)
    experts = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 64, "aux_loss": 0.01}
    models = {
        "small": MeasuredModel(_llama(512, 128, small), 128),
        "small mixture": MeasuredModel(_llama(512, 128, small, experts=experts), 128),
    }
    if not on_gpu:
        return models
    wide = (4096, 32, 8, 14336)
    many = {"num_experts": 64, "top_k": 8, "ffn_hidden_size": 768, "aux_loss": 0.01}
    gpt2 = GPTConfig.gpt2(
        vocab_size=51200, max_seq_length=4096, num_layers=2, hidden_size=2048, num_heads=16
    )
    eight_bits = FP8("tensorwise")
    return models | {
        "small fp8": MeasuredModel(_llama(512, 128, small), 128, eight_bits),
        "dense": MeasuredModel(_llama(65536, 4096, wide), 4096),
        "fp8": MeasuredModel(_llama(65536, 4096, wide), 4096, eight_bits),
        "mixture": MeasuredModel(
            _llama(65536, 4096, (2048, 32, 4, 6144), head_dim=128, experts=many), 4096
        ),
        "gpt2": MeasuredModel(gpt2, 4096),
    }


class LayerTimes:
    """Measurements of the passes of models of two layers on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def parts(self) -> dict[str, Callable[[], Any]]:
        """Return the functions that measure, by the name of what they measure.

        Those of the host come first: after a profile it needs longer for every launch.
        """
        parts: dict[str, Callable[[], Any]] = {}
        for name, model in measured_models(self._device.type == "cuda").items():
            measure = self.host if name.startswith("small") else self.kernels
            parts[f"model {name}"] = partial(measure, model)
        return parts

    def host(self, measured: MeasuredModel) -> dict[str, Any]:
        """Measure what the host needs for both passes of a model (s)."""
        passes = _Passes.build(measured, self._device)
        for _ in range(2):
            passes.run()
        forward, backward = zip(*(passes.run() for _ in range(_PASSES)), strict=True)
        # The least time: others contain what the host does besides.
        return {"host": [min(forward), min(backward)]}

    def kernels(self, measured: MeasuredModel) -> dict[str, Any]:
        """Measure the kernels of both passes of a model by name: number and time (s)."""
        passes = _Passes.build(measured, self._device)
        for _ in range(2):
            passes.run()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(_PASSES):
                passes.run()
        kernels = {}
        for event in profiled.key_averages():
            if event.self_device_time_total > 0:
                seconds = event.self_device_time_total / 1e6
                kernels[event.key] = [event.count / _PASSES, seconds / _PASSES]
        return {"kernels": kernels}


@dataclass(frozen=True, eq=False)
class _Passes:
    """Forward and backward pass of a model on a device, with the gradient sums of training."""

    model: GPT
    reducer: GradientReducer
    names: set[str]
    tokens: Tensor

    @classmethod
    def build(cls, measured: MeasuredModel, device: torch.device) -> _Passes:
        training = TrainingShape(seq_length=measured.tokens, fp8=measured.fp8)
        mesh = lone_mesh(ParallelLayout(world_size=1), 0, device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with torch.device(device), default_dtype(dtype):
            model = GPT(measured.config, mesh, seed=0)
        if measured.fp8 is not None:
            set_fp8(model, measured.fp8, False, device)
        main = put_into_buffers(model, model.mesh, training)
        reducer = GradientReducer(main)
        reducer.watch(main.buffers)
        vocabulary = measured.config.vocab_size
        tokens = torch.randint(0, vocabulary, (1, measured.tokens), device=device)
        return cls(model, reducer, set(main.names), tokens)

    def run(self) -> tuple[float, float]:
        """Run both passes; return what the host needs for each, until it has issued all (s)."""
        self.reducer.clear(self.names)
        self._wait()
        start = time.perf_counter()
        loss = self.model(self.tokens, labels=self.tokens, sums=True) / self.tokens.numel()
        middle = time.perf_counter()
        self._wait()
        again = time.perf_counter()
        torch.autograd.backward([loss])
        end = time.perf_counter()
        self._wait()
        return middle - start, end - again

    def _wait(self) -> None:
        if self.tokens.is_cuda:
            torch.cuda.synchronize()
