"""Tests that the fused product with SwiGLU equals float64 on a GPU, and that its gradients equal
those of separate launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_megatron.experts.compute.backends import Bundled
from lightning_megatron.experts.compute.choose_backend import LayerBackends, reason_against_swiglu
from lightning_megatron.experts.compute.grouped_linear import (
    grouped_linear,
    grouped_swiglu,
    weighted_activation,
)
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, set_slot
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.grouped_gemm import VARIANTS, Pass, pass_of
from tests.gpu.grouped import (
    LAUNCHES,
    SIZES,
    TAIL,
    UNTOUCHED,
    assert_close,
    captured,
    draw,
    ends_of,
    experts_of,
    multiprocessors,
    poisoned,
    workspace_of,
)

pytestmark = pytest.mark.gpu

SWIGLU = [variant for variant in VARIANTS if pass_of(variant) is Pass.FORWARD_SWIGLU]
CASES = {**LAUNCHES, "small": (list(range(20)), 208, 136), "narrow": ([30, 40], 16, 64)}
E, N, K, R = 6, 272, 320, 700
#: Relative errors of one rounding to bfloat16, and between two computations that round at different
#: places.
HALF, TWICE = 4e-3, 2e-3


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    """Skip where the kernels are not built or cannot run, or there is no Triton."""
    reason = reason_against_swiglu(torch.device("cuda", 0), torch.bfloat16, E, K, N)
    if reason is not None:
        pytest.skip(reason)
    if fused_kernels(draw(1, K)) is None:
        pytest.skip("needs triton, which comes with the CUDA builds of torch")


def product(rows: Tensor, weights: Tensor, sizes: Sequence[int]) -> Tensor:
    bounds = pairwise([0, *torch.tensor(sizes).cumsum(0).tolist()])
    pairs = zip(weights, bounds, strict=True)
    return torch.cat([rows[i:j].double() @ w.double().t() for w, (i, j) in pairs])


def swiglu(gate_up: Tensor, probabilities: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return F.silu(gate) * up * probabilities.double().unsqueeze(-1)


def drawn_rows(sizes: Sequence[int], num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Draw rows and their probabilities, with NaN in rows of no group."""
    probabilities = torch.rand(num_rows, device="cuda")
    return poisoned(draw(num_rows, width), sizes), poisoned(probabilities, sizes)


def untouched(num_rows: int, n: int) -> tuple[Tensor, Tensor]:
    """Return memory for a result and a product."""
    result, kept = (
        torch.full((num_rows, width), UNTOUCHED, device="cuda") for width in (n // 2, n)
    )
    return result.bfloat16(), kept.bfloat16()


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not stored"])
@pytest.mark.parametrize("variant", SWIGLU)
@pytest.mark.parametrize(
    ("along_n", "band", "idle_sms", "gap"),
    [(False, 0, 0, 0), (True, 3, 35, 2)],
    ids=["plain", "banded"],
)
def test_every_variant_of_the_fused_product_equals_float64(
    variant, along_n, band, idle_sms, gap, keeps
):
    num_sms = multiprocessors() - idle_sms
    for name, (sizes, n, k) in CASES.items():
        num_rows, last = sum(sizes) + TAIL, sum(sizes)
        rows, probabilities = drawn_rows(sizes, num_rows, k)
        memory = torch.full((len(sizes), n + gap, k), torch.nan, device="cuda").bfloat16()
        memory[:, :n] = draw(len(sizes), n, k, scale=2 / k**0.5)
        weights, workspace = memory[:, :n], workspace_of(len(sizes), num_sms)
        result, kept = untouched(num_rows, n)
        torch.ops.lm_kernels.grouped_swiglu(
            result,
            kept if keeps else None,
            rows,
            weights,
            probabilities,
            ends_of(sizes),
            workspace,
            variant,
            along_n,
            band,
            num_sms,
        )
        assert (result[last:] == UNTOUCHED).all(), f"{name}: rows of no group were written"
        rest = kept[last if keeps else 0 :]
        assert (rest == UNTOUCHED).all(), f"{name}: a product that is not kept was written"
        inner = product(rows, weights, sizes)
        if keeps:
            assert_close(kept[:last], inner, HALF, f"{name}: product")
            inner = kept[:last].double()
        expected = swiglu(inner.bfloat16(), probabilities[:last])
        assert_close(result[:last], expected, HALF, f"{name}: result")
        if keeps:  # each element has one rounding, and float32 errors of exp and of a quotient
            assert ((result[:last] - expected).abs() <= 5e-3 * expected.abs() + 1e-30).all(), name


@pytest.mark.parametrize("variant", SWIGLU)
def test_a_launch_of_the_last_groups_writes_their_part_of_a_full_launch_alone(variant):
    num_sms = multiprocessors()
    for name, (sizes, n, k) in CASES.items():
        num_rows, stop = sum(sizes) + TAIL, sum(sizes)
        rows, probabilities = drawn_rows(sizes, num_rows, k)
        weights, ends = draw(len(sizes), n, k, scale=2 / k**0.5), ends_of(sizes)
        results = []
        for first in (0, len(sizes) // 2, len(sizes) - 1):
            written, start = untouched(num_rows, n), sum(sizes[:first])
            torch.ops.lm_kernels.grouped_swiglu(
                *written,
                rows,
                weights[first:],
                probabilities,
                ends,
                workspace_of(len(sizes), num_sms),
                variant,
                False,
                0,
                num_sms,
                first,
            )
            results.append(written)
            what = f"{name}, from group {first}"
            for actual, full in zip(written, results[0], strict=True):
                assert torch.equal(actual[start:stop], full[start:stop]), what
                assert (actual[:start] == UNTOUCHED).all(), f"{what}: rows before were written"
                assert (actual[stop:] == UNTOUCHED).all(), f"{what}: rows behind were written"


def product_and_swiglu(
    rows: Tensor, weights: Sequence[Tensor], probabilities: Tensor, ends: Tensor, fused: bool
) -> Tensor:
    if fused:
        return grouped_swiglu(rows, weights, probabilities, ends)[0]
    inner = grouped_linear(rows, weights, ends, "bundled")
    return weighted_activation(inner, probabilities, ends, "swiglu")[0]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_equal_those_of_separate_product_and_activation(sizes):
    last, ends = sum(sizes), ends_of(sizes)
    weights = [draw(N, K, scale=0.1).requires_grad_() for _ in range(E)]
    rows, probabilities = (tensor.requires_grad_() for tensor in drawn_rows(sizes, R, K))
    outer = poisoned(draw(R, N // 2), sizes)
    results = []
    for fused in (True, False):
        output = product_and_swiglu(rows, weights, probabilities, ends, fused)
        inputs = (rows, probabilities, *weights)
        grad_rows, grad_probabilities, *grads = torch.autograd.grad(output, inputs, outer)
        of_rows = [tensor[:last] for tensor in (output, grad_rows, grad_probabilities)]
        results.append([*of_rows, torch.stack(grads)])
    names = ("output", "rows", "probabilities", "weights")
    for actual, expected, what in zip(*results, names, strict=True):
        assert actual.isfinite().all(), what
        assert_close(actual, expected.double(), TWICE, what)
    assert last or not results[0][3].any()


@pytest.mark.parametrize("gap", [0, 2 * K, 64], ids=["dense", "whole rows", "any"])
def test_slots_get_the_same_sums_from_fused_and_separate_launches(gap):
    step, sums = N * K + gap, []
    memory = draw(E * step, scale=0.1)
    for fused in (True, False):
        weights = [nn.Parameter(memory[e * step : e * step + N * K].view(N, K)) for e in range(E)]
        total = torch.full((E, step), torch.nan, device="cuda")
        for weight, part in zip(weights, total, strict=True):
            set_slot(weight, GradientSlot(part[: N * K].view(N, K), lambda: None))
        torch.manual_seed(0)
        for sizes in (SIZES[1], SIZES[0], SIZES[2], SIZES[3]):
            rows, outer = poisoned(draw(R, K), sizes), poisoned(draw(R, N // 2), sizes)
            probabilities, ends = torch.rand(R, device="cuda"), ends_of(sizes)
            product_and_swiglu(rows, weights, probabilities, ends, fused).backward(outer)
        sums.append(total[:, : N * K])
        assert total[:, N * K :].isnan().all(), "memory between the slots was written"
    assert_close(sums[0], sums[1].double(), TWICE, "sums")


def test_without_gradients_the_product_is_not_stored():
    sizes, num_rows = [400, 0, 1332, 4, 508, 556], 2800
    rows, weights, ends = draw(num_rows, K), draw(E, N, K).unbind(), ends_of(sizes)
    probabilities = torch.rand(num_rows, device="cuda")
    leaves = [weight.requires_grad_() for weight in weights]
    expected, _ = grouped_swiglu(rows, leaves, probabilities, ends)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        actual, _ = grouped_swiglu(rows, weights, probabilities, ends)
    peak = torch.cuda.max_memory_allocated() - before
    assert torch.equal(actual, expected.detach())
    assert peak < num_rows * N * rows.itemsize, "the product was allocated"


def test_one_graph_of_swiglu_serves_all_sizes_of_groups():
    weights, ends = draw(E, N, K, scale=0.1), ends_of(SIZES[0])
    rows, probabilities = draw(R, K), torch.rand(R, device="cuda")

    def step() -> tuple[Tensor, Tensor | None, Tensor]:
        result, kept = Bundled.swiglu(rows, weights, probabilities, ends, keep=True)
        return result, kept, Bundled.swiglu(rows, weights, probabilities, ends, keep=False)[0]

    graph, (result, kept, alone) = captured(step)
    assert kept is not None
    for sizes in (*SIZES, *reversed(SIZES)):
        last = sum(sizes)
        for old, new in zip((rows, probabilities), drawn_rows(sizes, R, K), strict=True):
            old.copy_(new)
        ends.copy_(ends_of(sizes))
        graph.replay()
        assert_close(kept[:last], product(rows, weights, sizes), HALF, "product")
        assert_close(result[:last], swiglu(kept[:last], probabilities[:last]), HALF, "result")
        assert torch.equal(result[:last], alone[:last])


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_experts_with_one_launch_equal_experts_with_two_launches(recompute, monkeypatch):
    module = experts_of(K, ExpertsConfig(num_experts=E, top_k=2, ffn_hidden_size=N // 2))
    rows, probabilities = draw(R, K).requires_grad_(), torch.rand(R, device="cuda").requires_grad_()
    sizes = SIZES[0]
    leaves = (rows, probabilities, *module.parameters())
    launch, launches, results = Bundled.swiglu, [], []

    def counted(*args: Tensor, keep: bool) -> tuple[Tensor, Tensor | None]:
        launches.append(keep)
        return launch(*args, keep=keep)

    monkeypatch.setattr(Bundled, "swiglu", staticmethod(counted))
    separate_launches = LayerBackends("bundled", "bundled", fuses_swiglu=False)
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(GroupedMLP, "_backends", lambda *_: separate_launches)
        run = partial(checkpoint, module, use_reentrant=True) if recompute else module
        output = run(rows, probabilities, ends_of(sizes))
        output[: sum(sizes)].float().square().sum().backward()
        results.append([output.detach()[: sum(sizes)], *(leaf.grad for leaf in leaves)])
        for leaf in leaves:
            leaf.grad = None
    assert launches == ([False, True] if recompute else [True])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected.double(), 2 * TWICE, "one launch against two")


def test_wrong_arguments_of_swiglu_are_refused():
    ends, rows, weights = ends_of([8, 8]), draw(16, 64), draw(2, 64, 64)
    probabilities, workspace = torch.rand(16, device="cuda"), workspace_of(2, 8)
    result, kept = draw(16, 32), draw(16, 64)
    run, settings = torch.ops.lm_kernels.grouped_swiglu, (False, 0, 8)
    arguments = (result, kept, rows, weights, probabilities, ends, workspace, SWIGLU[0])
    for message, number, wrong in (
        ("d must have shape", 0, kept),
        ("kept must have shape", 1, result),
        ("kept has the wrong dtype", 1, kept.float()),
        ("probabilities has the wrong dtype", 4, probabilities.bfloat16()),
        (
            "probabilities must be one for each of 16 rows: there are 8",
            4,
            probabilities[:8].clone(),
        ),
        ("is a variant of the other operator", 7, "forward_pingpong_128x128_1x2"),
        ("has no variant nothing", 7, "nothing"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(*arguments[:number], wrong, *arguments[number + 1 :], *settings)
    narrow_result, narrow_weights = draw(16, 20), draw(2, 40, 64)
    with pytest.raises(RuntimeError, match=r"n \(40\) must be a multiple of 16"):
        run(
            narrow_result,
            None,
            rows,
            narrow_weights,
            probabilities,
            ends,
            workspace,
            SWIGLU[0],
            *settings,
        )


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not stored"])
def test_the_schema_of_swiglu_declares_the_written_tensors(keeps):
    sizes, num_sms = [8, 24], 8
    arguments = (
        draw(32, 32).zero_(),
        draw(32, 64).zero_() if keeps else None,
        draw(32, 64),
        draw(2, 64, 64),
        torch.rand(32, device="cuda"),
        ends_of(sizes),
        workspace_of(2, num_sms).zero_(),
        SWIGLU[0],
        False,
        0,
        num_sms,
    )
    operator = torch.ops.lm_kernels.grouped_swiglu.default
    torch.library.opcheck(operator, arguments, test_utils="test_schema")
