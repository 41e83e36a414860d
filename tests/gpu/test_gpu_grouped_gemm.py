"""Tests that every variant of the grouped GEMM equals float64 on a GPU, for all sizes of groups."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.kernels.cuda import default_cache, find_library, read_sources
from lightning_megatron.kernels.cuda.library import load_library, reason_not_runnable
from lightning_megatron.plan.grouped_gemm import VARIANTS, Pass, pass_of
from tests.gpu.grouped import (
    LAUNCHES,
    TAIL,
    UNTOUCHED,
    assert_close,
    draw,
    ends_of,
    multiprocessors,
    workspace_of,
)

pytestmark = pytest.mark.gpu

PLAIN = [variant for variant in VARIANTS if pass_of(variant) is not Pass.FORWARD_SWIGLU]
#: Passes whose weights are an operand, and whose results are rows.
TO_ROWS = {Pass.FORWARD, Pass.DATA_GRAD}
CASES = {**LAUNCHES, "odd": ([1, 700, 0, 3, 129], 520, 320), "narrow": ([30, 40], 136, 264)}
#: Largest relative error of a result: one rounding to bfloat16, or sums in float32.
TOLERANCE = {torch.bfloat16: 3e-3, torch.float32: 5e-5}


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """Load the library, or skip where it is not built or cannot run."""
    built, reason = find_library(default_cache(), read_sources()), reason_not_runnable()
    if built is None or reason is not None:
        pytest.skip(reason or "needs the built kernels: lightning-megatron kernels build")
    load_library(built.path)


def reference(
    which: Pass, a: Tensor, b: Tensor, d: Tensor, sizes: Sequence[int], alpha: float = 1.0
) -> Tensor:
    """Compute the expected d in float64; elements of no group keep their values."""
    expected = d.double()
    if which is Pass.WEIGHT_GRAD_BF16 or which is Pass.WEIGHT_GRAD_FP32:
        expected.zero_()
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        start += size
        if which is Pass.FORWARD:
            expected[rows] = a[rows].double() @ b[group].double().t()
        elif which is Pass.DATA_GRAD:
            expected[rows] = a[rows].double() @ b[group].double()
        else:
            expected[group] += alpha * (a[rows].double().t() @ b[rows].double())
    return expected


def operands(which: Pass, sizes: Sequence[int], n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a, b and d, with NaN in all elements that a launch must not read, or must overwrite."""
    rows = sum(sizes)
    x, dy = (torch.cat([draw(rows, width), draw(TAIL, width) * torch.nan]) for width in (k, n))
    w = draw(len(sizes), n, k)
    if which is Pass.FORWARD:
        return x, w, torch.full_like(dy, UNTOUCHED)
    if which is Pass.DATA_GRAD:
        return dy, w, torch.full_like(x, UNTOUCHED)
    if which is Pass.WEIGHT_GRAD_ADD:
        return dy, x, w.float()
    dtype = torch.bfloat16 if which is Pass.WEIGHT_GRAD_BF16 else torch.float32
    return dy, x, torch.full(w.shape, torch.nan, dtype=dtype, device="cuda")


def launch(
    variant: str, d: Tensor, a: Tensor, b: Tensor, sizes: Sequence[int], *settings: Any,
    idle_sms: int = 0,
) -> None:  # fmt: skip
    """Write the product to d; settings are whether tiles go along n, band, alpha and first group."""
    along_n, band, alpha, first = settings or (False, 0, 1.0, 0)
    num_sms = multiprocessors() - idle_sms
    workspace = workspace_of(len(sizes), num_sms)
    torch.ops.lm_kernels.grouped_gemm(
        d, a, b, ends_of(sizes), workspace, variant, along_n, band, num_sms, alpha, first
    )


@pytest.mark.parametrize("variant", PLAIN)
@pytest.mark.parametrize(
    ("along_n", "band", "idle_sms"), [(False, 0, 0), (True, 3, 35)], ids=["plain", "banded"]
)
def test_every_variant_of_the_product_equals_float64(variant, along_n, band, idle_sms):
    which = pass_of(variant)
    alpha = 0.375 if which in {Pass.WEIGHT_GRAD_FP32, Pass.WEIGHT_GRAD_ADD} else 1.0
    for name, (sizes, n, k) in CASES.items():
        a, b, d = operands(which, sizes, n, k)
        expected = reference(which, a, b, d, sizes, alpha)
        launch(variant, d, a, b, sizes, along_n, band, alpha, 0, idle_sms=idle_sms)
        rows = sum(sizes)
        if which in TO_ROWS:
            assert (d[rows:] == UNTOUCHED).all(), f"{name}: rows of no group were written"
            d, expected = d[:rows], expected[:rows]
        assert_close(d, expected, TOLERANCE[d.dtype], name)


@pytest.mark.parametrize("variant", PLAIN)
def test_a_launch_may_be_the_first_cuda_call_of_a_thread(variant):
    sizes, n, k = CASES["uneven"]
    a, b, expected = operands(pass_of(variant), sizes, n, k)
    actual, ends, num_sms = expected.clone(), ends_of(sizes), multiprocessors()
    workspace = workspace_of(len(sizes), num_sms)
    run, settings = torch.ops.lm_kernels.grouped_gemm, (variant, False, 0, num_sms)
    run(expected, a, b, ends, workspace, *settings)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(run, actual, a, b, ends, workspace, *settings).result()
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("variant", PLAIN)
def test_a_launch_may_begin_at_any_group(variant):
    which = pass_of(variant)
    for name, (sizes, n, k) in CASES.items():
        a, b, d = operands(which, sizes, n, k)
        expected = reference(which, a, b, d, sizes)
        for first in {len(sizes) // 2, len(sizes) - 1} - {0}:
            what, settings = f"{name} from {first}", (False, 0, 1.0, first)
            if which in TO_ROWS:
                result, start, stop = d.clone(), sum(sizes[:first]), sum(sizes)
                launch(variant, result, a, b[first:], sizes, *settings)
                assert (result[:start] == UNTOUCHED).all(), f"{what}: rows before were written"
                assert (result[stop:] == UNTOUCHED).all(), f"{what}: rows of no group were written"
                result, full = result[start:stop], expected[start:stop]
            else:
                result, full = d[first:].clone(), expected[first:]
                launch(variant, result, a, b, sizes, *settings)
            assert_close(result, full, TOLERANCE[d.dtype], what)


def test_wrong_arguments_are_refused():
    a, b, d = operands(Pass.FORWARD, [8, 8], 64, 64)
    ends, workspace = ends_of([8, 8]), workspace_of(2, 8)
    run, variant = torch.ops.lm_kernels.grouped_gemm, "forward_pingpong_128x128_1x2"
    for message, arguments in {
        "has no variant nothing": (d, a, b, ends, workspace, "nothing"),
        "d has the wrong dtype": (d.float(), a, b, ends, workspace, variant),
        "b must have shape": (d, a, b, ends[:1].clone(), workspace, variant),
        "a must be contiguous": (d, a.t().contiguous().t(), b, ends, workspace, variant),
        "group_ends has the wrong dtype": (d, a, b, ends.long(), workspace, variant),
        "the workspace is too small": (d, a, b, ends, workspace[:1024], variant),
        "a must start at a multiple of 16": (
            d[1:], a.flatten()[4:-60].view(-1, 64), b, ends, workspace, variant,
        ),
    }.items():  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            run(*arguments, False, 0, 8)
    with pytest.raises(RuntimeError, match="only fp32 weight gradients are multiplied by alpha"):
        run(d, a, b, ends, workspace, variant, False, 0, 8, 0.5)


@pytest.mark.parametrize("variant", PLAIN)
def test_memory_of_weights_and_results_may_have_gaps(variant):
    sizes, n, k = [1, 70, 0, 129, 64], 136, 264
    which = pass_of(variant)
    a, b, d = operands(which, sizes, n, k)
    stack = b if which in TO_ROWS else d
    memory = torch.full((len(sizes), n + 2, k), 5.0, dtype=stack.dtype, device="cuda")
    memory[:, :n] = stack
    b, d = (memory[:, :n], d) if which in TO_ROWS else (b, memory[:, :n])
    expected = reference(which, a, b, d, sizes)
    launch(variant, d, a, b, sizes)
    rows = slice(sum(sizes)) if which in TO_ROWS else slice(None)
    assert_close(d[rows], expected[rows], TOLERANCE[d.dtype], variant)
    assert (memory[:, n:] == 5).all(), "memory between the weights was written"


@pytest.mark.parametrize("variant", [name for name in PLAIN if name.startswith("weight_grad")])
def test_weight_gradients_of_zero_rows_are_zero_or_leave_the_sums_unchanged(variant):
    which = pass_of(variant)
    a, b, d = operands(which, [0, 0], 64, 128)
    before = d.clone()
    launch(variant, d, a[:0], b[:0], [0, 0])
    assert torch.equal(d, before if which is Pass.WEIGHT_GRAD_ADD else torch.zeros_like(d))


def test_the_operator_schema_declares_the_written_tensors():
    a, b, d = operands(Pass.FORWARD, [8, 16], 64, 64)
    arguments = (
        d.zero_(),
        a.nan_to_num(),
        b,
        ends_of([8, 16]),
        workspace_of(2, 8).zero_(),
        "forward_pingpong_128x128_1x2",
        False,
        0,
        8,
    )
    operator = torch.ops.lm_kernels.grouped_gemm.default
    torch.library.opcheck(operator, arguments, test_utils="test_schema")
