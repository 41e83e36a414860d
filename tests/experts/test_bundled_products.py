"""Launches of the bundled kernels, computed by stand-ins that check their arguments, and the choice
of these kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.compute import backends
from lightning_megatron.experts.compute import choose_backend as choosing
from lightning_megatron.experts.compute.choose_backend import (
    BackendChoice,
    LayerBackends,
    choose_backend,
)
from lightning_megatron.experts.compute.grouped_linear import grouped_linear, grouped_swiglu
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.kernels.cuda import BuiltLibrary
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, set_slot, slot_of
from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.grouped_gemm import Pass, choose_variant

NUM_ROWS, OUT, IN = 16, 24, 16
ENDS = torch.tensor([3, 3, 9, 12], dtype=torch.int32)


class Kernels:
    """Compute a launch by a product for each group, and refuse arguments that the kernels refuse."""

    def __init__(self) -> None:
        self.launches: list[tuple[Pass, Tensor]] = []

    def __call__(
        self,
        pass_: Pass,
        result: Tensor,
        a: Tensor,
        b: Tensor,
        ends: Tensor,
        alpha: float = 1.0,
        first_group: int = 0,
    ) -> Tensor:
        self.launches.append((pass_, result))
        stack = b if pass_ in {Pass.FORWARD, Pass.DATA_GRAD} else result
        num_groups, n, k = stack.shape
        choose_variant(pass_, a.shape[0], num_groups, n, k)
        assert a.is_contiguous()
        assert alpha == 1 or pass_ in {Pass.WEIGHT_GRAD_FP32, Pass.WEIGHT_GRAD_ADD}
        assert stack.stride()[1:] == (k, 1)
        assert stack is result or stack.stride(0) % k == 0
        assert num_groups == len(ends) - first_group
        for group, (start, stop) in enumerate(pairwise([0, *ends.tolist()][first_group:])):
            rows = slice(start, stop)
            if pass_ is Pass.FORWARD:
                result[rows] = a[rows] @ b[group].t()
            elif pass_ is Pass.DATA_GRAD:
                result[rows] = a[rows] @ b[group]
            elif pass_ is Pass.WEIGHT_GRAD_ADD:
                result[group] += alpha * (a[rows].float().t() @ b[rows].float())
            else:
                result[group] = alpha * (a[rows].float().t() @ b[rows].float()).to(result.dtype)
        return result

    @property
    def passes(self) -> list[Pass]:
        return [pass_ for pass_, _ in self.launches]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    stand_in = Kernels()
    monkeypatch.setattr(backends, "launch", stand_in)
    return stand_in


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def make_weights(memory: Tensor, step: int) -> list[nn.Parameter]:
    return [nn.Parameter(memory[e * step : e * step + OUT * IN].view(OUT, IN)) for e in range(4)]


def product_of(grad: Tensor, rows: Tensor) -> Tensor:
    groups = pairwise([0, *ENDS.tolist()])
    return torch.stack([grad[i:j].float().t() @ rows[i:j].float() for i, j in groups])


@pytest.mark.parametrize("step", [OUT * IN, OUT * IN + 2 * IN, OUT * IN + 8])
def test_outputs_and_gradients_equal_those_of_the_loop(kernels, step):
    memory, output_gradient = draw(4 * step), draw(NUM_ROWS, OUT, seed=1)
    last = int(ENDS[-1])
    results = []
    for backend in ("bundled", "loop"):
        rows, weights = draw(NUM_ROWS, IN, seed=2).requires_grad_(), make_weights(memory, step)
        output = grouped_linear(rows, weights, ENDS, backend)
        grads = torch.autograd.grad(output, (rows, *weights), output_gradient)
        results.append((output[:last], grads[0][:last], *grads[1:]))
    assert kernels.passes == [Pass.FORWARD, Pass.WEIGHT_GRAD_BF16, Pass.DATA_GRAD]
    for bundled_result, loop_result in zip(*results, strict=True):
        assert torch.allclose(bundled_result.float(), loop_result.float(), atol=2e-2, rtol=1e-2)


def test_one_launch_writes_all_slots_and_later_launches_add_to_them(kernels):
    step = OUT * IN + 40
    weights, notices = make_weights(draw(4 * step), step), []
    sums = torch.full((4 * step,), torch.nan)
    for number, weight in enumerate(weights):
        view = sums[number * step : number * step + OUT * IN].view(OUT, IN)
        set_slot(weight, GradientSlot(view, lambda number=number: notices.append(number)))
    expected = torch.zeros(4, OUT, IN)
    for seed in range(3):
        rows, output_gradient = draw(NUM_ROWS, IN, seed=seed), draw(NUM_ROWS, OUT, seed=seed + 5)
        rows[int(ENDS[-1]) :] = torch.nan
        grouped_linear(rows, weights, ENDS, "bundled").backward(output_gradient)
        expected += product_of(output_gradient, rows)
    gradient_passes = [pass_ for pass_ in kernels.passes if pass_ is not Pass.FORWARD]
    assert gradient_passes == [Pass.WEIGHT_GRAD_FP32, Pass.WEIGHT_GRAD_ADD, Pass.WEIGHT_GRAD_ADD]
    assert notices == [0, 1, 2, 3] * 3
    for number, weight in enumerate(weights):
        slot = slot_of(weight)
        assert slot is not None
        assert torch.allclose(slot.gradient, expected[number], atol=1e-5)
        assert weight.grad is None
    assert sums.view(4, step)[:, OUT * IN :].isnan().all(), "memory between the slots was written"


@pytest.mark.parametrize("scales", [[0.5] * 4, [0.5, 0.5, 2.0, 0.5]], ids=["one", "several"])
def test_gradients_are_multiplied_by_the_scale_of_their_slots(kernels, scales):
    weights, sums = make_weights(draw(4 * OUT * IN), OUT * IN), torch.full((4, OUT, IN), torch.nan)
    for weight, part, scale in zip(weights, sums, scales, strict=True):
        set_slot(weight, GradientSlot(part, lambda: None, scale=scale))
    rows, output_gradient = draw(NUM_ROWS, IN, seed=2), draw(NUM_ROWS, OUT, seed=1)
    for _ in range(2):
        grouped_linear(rows, weights, ENDS, "bundled").backward(output_gradient)
    is_one_scale = len(set(scales)) == 1
    assert (Pass.WEIGHT_GRAD_ADD in kernels.passes) == is_one_scale
    expected = 2 * torch.tensor(scales).view(-1, 1, 1) * product_of(output_gradient, rows)
    absolute, relative = (1e-5, 1e-5) if is_one_scale else (5e-2, 2e-2)
    assert torch.allclose(sums, expected, atol=absolute, rtol=relative)


@pytest.mark.parametrize("case", ["apart", "half", "some hold a sum", "one refuses"])
def test_slots_that_one_launch_cannot_write_get_separate_gradients(kernels, case):
    weights = make_weights(draw(4 * OUT * IN), OUT * IN)
    stack = torch.zeros(4, OUT, IN, dtype=torch.bfloat16 if case == "half" else torch.float32)
    refusing = weights[3] if case == "one refuses" else None
    for weight, part in zip(weights, stack, strict=True):
        memory, accepts = part.clone() if case == "apart" else part, weight is not refusing
        set_slot(
            weight, GradientSlot(memory, lambda: None, accepts=lambda accepts=accepts: accepts)
        )
    if case == "some hold a sum":
        slot_of(weights[0]).is_empty = False
    rows, output_gradient = draw(NUM_ROWS, IN, seed=2), draw(NUM_ROWS, OUT, seed=1)
    grouped_linear(rows, weights, ENDS, "bundled").backward(output_gradient)
    assert kernels.passes == [Pass.FORWARD, Pass.WEIGHT_GRAD_BF16]
    for weight, expected in zip(weights, product_of(output_gradient, rows), strict=True):
        gradient = slot_of(weight).gradient.float()
        assert torch.allclose(gradient, expected * (weight is not refusing), atol=5e-2)


def test_weights_that_change_before_the_backward_pass_are_refused(kernels):
    weights, sums = make_weights(draw(4 * OUT * IN), OUT * IN), torch.zeros(4, OUT, IN)
    for weight, part in zip(weights, sums, strict=True):
        set_slot(weight, GradientSlot(part, lambda: None))
    output = grouped_linear(draw(NUM_ROWS, IN).requires_grad_(), weights, ENDS, "bundled")
    with torch.no_grad():
        weights[2].mul_(2)
    with pytest.raises(RuntimeError, match="weights must not change between a forward"):
        output.sum().backward()


def test_clones_are_computed_by_a_second_launch_over_the_same_rows(kernels):
    results = []
    for backend in ("bundled", "loop"):
        gradients, notices = torch.full((2, OUT, IN), torch.nan), list[int]()
        clones = draw(2, OUT, IN, seed=7), gradients
        memory, sums = draw(2 * OUT * IN), torch.full((2, OUT, IN), torch.nan)
        weights = make_weights(torch.cat([memory, memory]), OUT * IN)[:2]
        for number, weight in enumerate(weights):
            notify = partial(notices.append, number)
            set_slot(weight, GradientSlot(sums[number], notify))
        rows = draw(NUM_ROWS, IN, seed=2).requires_grad_()
        output = grouped_linear(rows, weights, ENDS, backend, clones=clones)
        for _ in range(2):
            output.backward(draw(NUM_ROWS, OUT, seed=1), retain_graph=True)
        assert not notices, "the gradients of clones are missing"
        assert rows.grad is not None
        last = int(ENDS[-1])
        results.append((output[:last], rows.grad[:last], sums, gradients))
    two_data_gradients = [Pass.DATA_GRAD, Pass.DATA_GRAD]
    assert kernels.passes == [
        Pass.FORWARD,
        Pass.FORWARD,
        Pass.WEIGHT_GRAD_FP32,
        Pass.WEIGHT_GRAD_FP32,
        *two_data_gradients,
        Pass.WEIGHT_GRAD_ADD,
        Pass.WEIGHT_GRAD_FP32,
        *two_data_gradients,
    ]
    for bundled_result, loop_result in zip(*results, strict=True):
        assert torch.allclose(bundled_result.float(), loop_result.float(), atol=5e-2, rtol=2e-2)


# Choice of these kernels.


GPU, BF16 = torch.device("cuda", 0), torch.bfloat16


def build_experts(activation: str) -> GroupedMLP:
    config = ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=OUT)
    module = GroupedMLP(IN, config, ParallelMesh.single(), activation=activation)  # type: ignore[arg-type]
    wrapped = nn.ModuleDict({"experts": module})
    initialize_(wrapped, "cpu", 0)
    return wrapped["experts"].bfloat16()


def test_without_the_kernels_a_fused_swiglu_is_not_chosen_and_is_refused():
    rows, weights = draw(NUM_ROWS, IN), [draw(2 * OUT, IN)]
    backends_of_layer = build_experts("swiglu")._backends(rows, weights, [draw(IN, OUT)], False)
    assert backends_of_layer == LayerBackends("loop", "loop", fuses_swiglu=False)
    with pytest.raises(UnsupportedError, match="half type on a GPU with Triton.*bfloat16 on cpu"):
        grouped_swiglu(rows, weights, torch.ones(NUM_ROWS), ENDS[:1])


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that the GPU is an H100 and that a built library can be loaded."""
    library = BuiltLibrary(Path("/cache/liblm_kernels.so"), "13.0", "4.2", 1.0)
    monkeypatch.setattr(choosing, "reason_not_runnable", lambda index: None)
    monkeypatch.setattr(choosing, "find_library", lambda cache, sources: library)
    monkeypatch.setattr(choosing, "load_library", lambda path: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    clear_caches()
    yield
    clear_caches()


def clear_caches() -> None:
    choose_backend.cache_clear()
    choosing._load.cache_clear()


def choose_on_gpu(
    dtype: torch.dtype = BF16, num_groups: int = 4, n: int = 64, k: int = 64
) -> BackendChoice:
    return choose_backend(GPU, dtype, num_groups, k, n)


def test_built_kernels_are_preferred_and_the_choice_is_logged_once(caplog):
    with caplog.at_level("INFO", logger=choosing.__name__):
        assert choose_on_gpu().backend == choose_on_gpu().backend == "bundled"
    assert [record.getMessage() for record in caplog.records] == [
        f"grouped products by bundled: {choose_on_gpu().reason}"
    ]


def test_other_gpus_libraries_sizes_and_types_use_the_kernel_of_torch_or_the_loop(monkeypatch):
    for arguments, backend, reason in (
        ({"dtype": torch.float32}, "loop", "made for bfloat16"),
        ({"n": 60}, "loop", "out_features (60) must make rows of whole 16 bytes"),
        ({"k": 4}, "loop", "in_features (4) must make rows of whole 16 bytes"),
        ({"num_groups": 1025}, "grouped_mm", "1024"),
    ):
        choice = choose_on_gpu(**arguments)
        assert choice.backend == backend
        assert reason in choice.reason
    choice = choose_backend(torch.device("cpu"), BF16, 4, 64, 64)
    assert choice.backend == "loop"
    assert "cpu: the host has the group sizes already" in choice.reason
    monkeypatch.setattr(choosing, "find_library", lambda cache, sources: None)
    clear_caches()
    assert choose_on_gpu().backend == "grouped_mm"
    assert "Build one: lightning-megatron kernels build" in choose_on_gpu().reason
    monkeypatch.setattr(choosing, "reason_not_runnable", lambda index: f"GPU {index} is another")
    for capability, backend, reason in (
        ((10, 0), "grouped_mm", "GPU 0 is another"),
        ((8, 0), "loop", "needs compute capability 9.0, not 8.0"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, now=capability: now)
        clear_caches()
        assert choose_on_gpu().backend == backend
        assert reason in choose_on_gpu().reason
