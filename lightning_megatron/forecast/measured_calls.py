"""Measured times of single operators of one chip, of which a forecast is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.experts.compute.backends import BACKENDS
from lightning_megatron.experts.compute.bundled_launch import launch
from lightning_megatron.experts.compute.choose_backend import choose_backend
from lightning_megatron.layers.attention.flash_kernels import FlashCall, choose_flash
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.layers.parameters.gradient_slot import MatrixProduct
from lightning_megatron.plan.grouped_gemm import Pass

#: Function that is measured.
Call = Callable[[], object]
#: Sizes, and then the time of a call (s).
Row = list[float]
_CONTENT = torch.bfloat16
#: Longest graph of calls (s).
_GRAPH_SECONDS = 0.02


@dataclass(frozen=True)
class CallSizes:
    """Sizes of the operators that are measured, on a kind of device.

    Args:
        rows: Rows of products (tokens).
        features: Rows and columns of weights.
        attention: Batch, heads, heads of keys and values, tokens, and size of a head.
        passes: Sizes of tensors that passes over memory read and write (bytes).
        groups: Number of weights, rows of each, rows and columns of a weight.
        elements: Parameters of an optimizer step.
        seconds: Time for which every call is repeated (s).
    """

    rows: tuple[int, ...]
    features: tuple[tuple[int, int], ...]
    attention: tuple[tuple[int, int, int, int, int], ...]
    passes: tuple[int, ...]
    groups: tuple[tuple[int, int, int, int], ...]
    elements: tuple[int, ...]
    seconds: float


#: Shapes of the layers of Llama, Qwen and mixtures, whole and cut over tp.
ON_GPU = CallSizes(
    rows=(1024, 4096, 8192, 16384),
    features=(
        (1024, 1024),
        (2048, 512),
        (2048, 2048),
        (4096, 1024),
        (6144, 4096),
        (4096, 4096),
        (4096, 2048),
        (28672, 4096),
        (4096, 14336),
        (8192, 8192),
        (131072, 4096),
    ),
    attention=(
        (4, 12, 12, 1024, 64),
        (1, 8, 2, 4096, 128),
        (1, 32, 8, 2048, 128),
        (1, 32, 8, 4096, 128),
        (2, 32, 8, 4096, 128),
        (1, 32, 32, 4096, 64),
        (1, 32, 8, 16384, 128),
        (1, 16, 4, 32768, 128),
    ),
    passes=tuple(2**power for power in (16, 20, 22, 24, 25, 26, 27, 28, 30)),
    groups=(
        (8, 1024, 28672, 4096),
        (8, 1024, 4096, 14336),
        (4, 2048, 28672, 4096),
        (64, 512, 1536, 2048),
        (64, 512, 2048, 768),
        (16, 2048, 1536, 2048),
        (32, 1024, 4096, 7168),
        (16, 256, 1408, 1024),
    ),
    elements=(2**24, 2**27, 2**29),
    seconds=0.15,
)
ON_CPU = CallSizes(
    rows=(64, 128),
    features=((64, 64), (128, 256)),
    attention=((1, 2, 1, 128, 16),),
    passes=(2**16, 2**20),
    groups=((2, 32, 64, 64),),
    elements=(2**16,),
    seconds=0.01,
)


class Stopwatch:
    """Times of calls on a device, without the host's cost of launching them.

    A GPU replays graphs of many calls. Each time follows work for ``seconds``, because a chip that
    is cold or idle has faster clocks than one that trains.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self._seconds = seconds

    def seconds_of(self, call: Call, calls: int | None = None) -> float:
        """Return the mean time of a call (s).

        Args:
            calls: Calls in a graph, and graphs, instead of numbers that depend on the time: ranks
                that communicate need equal ones.
        """
        single = max(1e-7, self.repeated(call, 1 if calls else 3))
        if self.device.type == "cuda":
            in_graph = calls or max(1, min(100, int(_GRAPH_SECONDS / single)))
            replay = captured(call, in_graph)
            self.repeated(replay, 1)
            single = max(1e-7, self.repeated(replay, 1))
            return self._mean(replay, single, calls) / in_graph
        return self._mean(call, single, calls)

    def _mean(self, call: Call, single: float, calls: int | None) -> float:
        times = calls or max(1, int(self._seconds / single))
        self.repeated(call, times)
        return self.repeated(call, times)

    def repeated(self, call: Call, times: int) -> float:
        """Return the mean time of so many calls in a row (s)."""
        self._wait()
        start = time.perf_counter()
        for _ in range(times):
            call()
        self._wait()
        return (time.perf_counter() - start) / times

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def captured(call: Call, calls: int) -> Call:
    """Return the replay of a CUDA graph of some calls."""
    graph = torch.cuda.CUDAGraph()
    # Threads of NCCL ask for events while this one captures.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph.replay


class CallTimes:
    """Measurements of the operators of a training step on one device."""

    def __init__(self, device: torch.device, sizes: CallSizes) -> None:
        self._sizes = sizes
        self._device = device
        self._watch = Stopwatch(device, sizes.seconds)
        self._dtype = _CONTENT if device.type == "cuda" else torch.float32
        # A pass over memory before each product on a GPU: layers alternate between both, which
        # changes the clocks, and leaves little of the factors in the cache.
        between = torch.zeros(sizes.passes[-1] // 32, dtype=torch.uint8, device=device)
        self._pass = partial(torch.bitwise_not, between, out=between)
        self._of_pass = self._watch.seconds_of(self._pass)

    def parts(self) -> dict[str, Callable[[], Any]]:
        """Return the functions that measure, by the name of what they measure."""
        return {
            "products": self.products,
            "sums of products": self.sums_of_products,
            "8-bit products": self.eight_bit_products,
            "attention": self.attention,
            "passes": self.passes,
            "grouped products": self.grouped_products,
            "optimizer": self.optimizer,
            "launches": self.launches,
        }

    def _random(self, *shape: int) -> Tensor:
        # Products of equal numbers draw less power, and are faster.
        return torch.randn(shape, device=self._device, dtype=self._dtype)

    def _shapes(self) -> Iterator[tuple[int, int, int]]:
        for rows in self._sizes.rows:
            for out_features, in_features in self._sizes.features:
                if rows * out_features <= 2**30:
                    yield rows, out_features, in_features

    def _after_a_pass(self, call: Call) -> float:
        if self._device.type != "cuda":
            return self._watch.seconds_of(call)

        def both() -> None:
            self._pass()
            call()

        return max(1e-7, self._watch.seconds_of(both) - self._of_pass)

    def products(self) -> list[Row]:
        """Measure products of rows and a weight: rows, rows of the weight, columns, time."""
        times = []
        for m, n, k in self._shapes():
            x = self._random(m, k)
            weight = self._random(n, k)
            times.append([m, n, k, self._after_a_pass(partial(torch.mm, x, weight.t()))])
        return times

    def sums_of_products(self) -> list[Row]:
        """Measure products that overwrite float32 sums, as weight gradients do."""
        times = []
        for tokens, n, k in self._shapes():
            product = MatrixProduct(self._random(tokens, n), self._random(tokens, k))
            sums = torch.zeros(n, k, device=self._device)
            add = partial(product.add_to, sums, is_empty=True, scale=1.0)
            times.append([n, k, tokens, self._after_a_pass(add)])
        return times

    def eight_bit_products(self) -> list[Row]:
        """Measure products of factors in 8 bits with one scale each."""
        scale = torch.ones((), device=self._device)
        times = []
        for m, n, k in self._shapes():
            left = self._random(m, k).to(torch.float8_e4m3fn)
            right = self._random(n, k).to(torch.float8_e4m3fn).t()
            options: dict[str, Any] = {"out_dtype": _CONTENT, "use_fast_accum": True}
            multiply = partial(torch._scaled_mm, left, right, scale, scale, **options)
            times.append([m, n, k, self._after_a_pass(multiply)])
        return times

    def attention(self) -> list[Row]:
        """Measure causal attention: sizes, time of the forward and of the backward pass."""
        times = []
        for batch, heads, kv_heads, length, head_dim in self._sizes.attention:
            query = self._random(batch, length, heads, head_dim)
            key, value = self._random(2, batch, length, kv_heads, head_dim).unbind()
            rows = query, key, value
            calls = self._passes_of_attention(rows, length, head_dim)
            forward, backward = map(self._after_a_pass, calls)
            times.append([batch, heads, kv_heads, length, head_dim, forward, backward])
        return times

    def _passes_of_attention(
        self, rows: tuple[Tensor, Tensor, Tensor], length: int, head_dim: int
    ) -> tuple[Call, Call]:
        if self._device.type == "cuda":
            kernel = choose_flash(self._device, head_dim, plain=True).kernel
            call = FlashCall(None, None, length, length, True, -1, -1, head_dim**-0.5)
            result = kernel.forward(*rows, call)
            backward = partial(kernel.backward, torch.randn_like(result[0]), rows, result, call)
            return partial(kernel.forward, *rows, call), backward
        query, key, value = (tensor.transpose(1, 2).requires_grad_() for tensor in rows)
        leaves = query, key, value
        forward: Call = partial(
            F.scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=True
        )
        out: Any = forward()
        gradient = partial(torch.autograd.grad, out, leaves, torch.ones_like(out))
        return forward, partial(gradient, retain_graph=True)

    def passes(self) -> list[Row]:
        """Measure passes that read a tensor and write another: bytes of both, time."""
        times = []
        for size in self._sizes.passes:
            count = size // self._dtype.itemsize
            source = torch.zeros(count, dtype=self._dtype, device=self._device)
            target = torch.empty_like(source)
            add = partial(torch.add, source, 1.0, out=target)
            times.append([2 * source.nbytes, self._watch.seconds_of(add)])
        return times

    def grouped_products(self) -> list[Row]:
        """Measure products of even groups: groups, rows of each, rows and columns of a weight, and
        times of output, gradient of the rows, and float32 gradients of the weights.
        """
        times = []
        for groups, rows, n, k in self._sizes.groups:
            name = choose_backend(self._device, self._dtype, groups, k, n).backend
            backend = BACKENDS[name]
            x = self._random(groups * rows, k)
            weights = self._random(groups, n, k)
            grad = self._random(groups * rows, n)
            ends = torch.arange(rows, groups * rows + 1, rows, device=self._device).int()
            calls = [
                partial(backend.output, x, weights, ends),
                partial(backend.input_gradient, grad, weights, ends),
                partial(backend.weight_gradients, grad, x, ends),
            ]
            if name == "bundled":
                sums = torch.zeros(groups, n, k, device=self._device)
                calls[2] = partial(launch, Pass.WEIGHT_GRAD_FP32, sums, grad, x, ends)
            times.append([groups, rows, n, k, *map(self._after_a_pass, calls)])
        return times

    def optimizer(self) -> list[Row]:
        """Measure AdamW steps with float32 moments and main parameters: elements, time."""
        times = []
        for elements in self._sizes.elements:
            *columns, half = torch.zeros(5, elements, device=self._device)
            step = torch.ones((), device=self._device)
            kernels = fused_kernels(half.to(_CONTENT)) if self._device.type == "cuda" else None
            if kernels is None:
                parameter = torch.nn.Parameter(columns[0])
                parameter.grad = columns[1]
                fused = self._device.type == "cuda"
                adam = torch.optim.AdamW([parameter], fused=fused, capturable=fused)
                update: Call = adam.step
            else:
                numbers = torch.full((12,), 0.5, device=self._device)
                rows = [[column] for column in (*columns, step, half.to(_CONTENT))]
                forms = {"has_decay": True, "is_decoupled": True}
                update = partial(kernels.AdamKernel(), *rows, None, numbers, **forms)
            times.append([elements, self._watch.seconds_of(update)])
        return times

    def launches(self) -> dict[str, float]:
        """Measure what the host needs to launch an operator and a graph (s)."""
        one = torch.zeros(8, device=self._device)
        add = partial(torch.add, one, 1.0, out=one)
        add()
        times = {"operator": self._watch.repeated(add, 1000)}
        if self._device.type == "cuda":
            replay = captured(add, 1)
            times["graph"] = self._watch.repeated(replay, 1000)
        return times
