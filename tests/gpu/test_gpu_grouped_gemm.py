"""Tests that every variant of the grouped GEMM equals float64 on a GPU, for all sizes of groups."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from lightning_megatron.kernels.cuda import default_cache, find_library, read_sources
from lightning_megatron.kernels.cuda.load import load_library, reason_not_runnable
from lightning_megatron.plan.grouped_gemm import VARIANTS, Pass, pass_of, workspace_bytes
from tests.gpu.grouped import TAIL, UNTOUCHED, draw

pytestmark = pytest.mark.gpu

PLAIN = [variant for variant in VARIANTS if pass_of(variant) is not Pass.FORWARD_SWIGLU]

#: Sizes of groups, n and k: sizes that no tile divides, empty groups at all positions, many groups,
#: one group, only empty groups.
CASES = {
    "uneven": ([1, 700, 0, 3, 129, 64, 65, 0], 520, 320),
    "tiny": ([i % 7 for i in range(70)], 136, 264),
    "holes": ([0, 128, 0, 256, 0], 256, 256),
    "one": ([777], 512, 1024),
    "single": ([900 if i == 33 else 0 for i in range(40)], 384, 192),
    "many": ([(i * 37) % 40 for i in range(256)], 192, 128),
    "large": ([3000, 10, 1500, 257], 1024, 384),
    "empty": ([0, 0, 0, 0], 256, 128),
}
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
    which: Pass, a: Tensor, b: Tensor, d: Tensor, sizes: list[int], alpha: float = 1.0
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


def operands(which: Pass, sizes: list[int], n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
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


@pytest.mark.parametrize("variant", PLAIN)
@pytest.mark.parametrize(
    ("along_n", "band", "idle_sms"), [(False, 0, 0), (True, 3, 35)], ids=["plain", "banded"]
)
def test_every_variant_of_the_product_equals_float64(
    variant: str, along_n: bool, band: int, idle_sms: int
) -> None:
    which = pass_of(variant)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count - idle_sms
    for name, (sizes, n, k) in CASES.items():
        a, b, d = operands(which, sizes, n, k)
        ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
        workspace = torch.empty(
            workspace_bytes(len(sizes), num_sms), dtype=torch.uint8, device="cuda"
        )
        alpha = 0.375 if which in {Pass.WEIGHT_GRAD_FP32, Pass.WEIGHT_GRAD_ADD} else 1.0
        expected = reference(which, a, b, d, sizes, alpha)
        torch.ops.lm_kernels.grouped_gemm(
            d, a, b, ends, workspace, variant, along_n, band, num_sms, alpha
        )
        rows = sum(sizes)
        if which in {Pass.FORWARD, Pass.DATA_GRAD}:
            assert (d[rows:] == UNTOUCHED).all(), f"{name}: rows of no group were written"
            d, expected = d[:rows], expected[:rows]
        error = (d.double() - expected).norm() / expected.norm().clamp_min(1e-30)
        assert error < TOLERANCE[d.dtype], f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("variant", PLAIN)
def test_a_launch_may_be_the_first_cuda_call_of_a_thread(variant: str) -> None:
    which = pass_of(variant)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    sizes, n, k = CASES["uneven"]
    a, b, expected = operands(which, sizes, n, k)
    actual = expected.clone()
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    workspace = torch.empty(workspace_bytes(len(sizes), num_sms), dtype=torch.uint8, device="cuda")
    run, settings = torch.ops.lm_kernels.grouped_gemm, (variant, False, 0, num_sms)
    run(expected, a, b, ends, workspace, *settings)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(run, actual, a, b, ends, workspace, *settings).result()
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("variant", PLAIN)
def test_a_launch_may_begin_at_any_group(variant: str) -> None:
    which = pass_of(variant)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    for name, (sizes, n, k) in CASES.items():
        a, b, d = operands(which, sizes, n, k)
        ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
        expected = reference(which, a, b, d, sizes)
        workspace = torch.empty(
            workspace_bytes(len(sizes), num_sms), dtype=torch.uint8, device="cuda"
        )
        run, settings = torch.ops.lm_kernels.grouped_gemm, (variant, False, 0, num_sms, 1.0)
        is_operand = which in {Pass.FORWARD, Pass.DATA_GRAD}
        for first in {len(sizes) // 2, len(sizes) - 1} - {0}:
            start, rows = sum(sizes[:first]), sum(sizes)
            result, expected_result = (
                (d.clone(), expected) if is_operand else (d[first:].clone(), expected[first:])
            )
            operands_of_launch = (a, b[first:]) if is_operand else (a, b)
            run(result, *operands_of_launch, ends, workspace, *settings, first)
            if is_operand:
                group_rows = slice(start, rows)
                assert (result[:start] == UNTOUCHED).all(), f"{name}: rows before were written"
                assert (result[rows:] == UNTOUCHED).all(), f"{name}: rows of no group were written"
                result, expected_result = result[group_rows], expected_result[group_rows]
            error = (result.double() - expected_result).norm() / expected_result.norm().clamp_min(
                1e-30
            )
            assert error < TOLERANCE[d.dtype], f"{name} from {first}: relative error {error:.1e}"


def test_wrong_arguments_are_refused() -> None:
    a, b, d = operands(Pass.FORWARD, [8, 8], 64, 64)
    ends = torch.tensor([8, 16], device="cuda").int()
    workspace = torch.empty(workspace_bytes(2, 8), dtype=torch.uint8, device="cuda")
    run, variant = torch.ops.lm_kernels.grouped_gemm, "forward_pingpong_128x128_1x2"
    for message, arguments in {
        "has no variant nothing": (d, a, b, ends, workspace, "nothing"),
        "d has the wrong dtype": (d.float(), a, b, ends, workspace, variant),
        "b must have shape": (d, a, b, ends[:1].clone(), workspace, variant),
        "a must be contiguous": (d, a.t().contiguous().t(), b, ends, workspace, variant),
        "group_ends has the wrong dtype": (d, a, b, ends.long(), workspace, variant),
        "the workspace is too small": (d, a, b, ends, workspace[:1024], variant),
        "a must start at a multiple of 16": (
            d[1:],
            a.flatten()[4:-60].view(-1, 64),
            b,
            ends,
            workspace,
            variant,
        ),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            run(*arguments, False, 0, 8)
    with pytest.raises(RuntimeError, match="only fp32 weight gradients are multiplied by alpha"):
        run(d, a, b, ends, workspace, variant, False, 0, 8, 0.5)


def test_memory_of_weights_and_results_may_have_gaps() -> None:
    sizes, n, k, gap = [1, 70, 0, 129, 64], 136, 264, 2
    ends, num_groups = torch.tensor(sizes, device="cuda").cumsum(0).int(), len(sizes)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    workspace = torch.empty(workspace_bytes(num_groups, num_sms), dtype=torch.uint8, device="cuda")
    for variant in PLAIN:
        which = pass_of(variant)
        a, b, d = operands(which, sizes, n, k)
        is_operand = which in {Pass.FORWARD, Pass.DATA_GRAD}
        stack = b if is_operand else d
        memory = torch.full((num_groups, n + gap, k), 5.0, dtype=stack.dtype, device="cuda")
        memory[:, :n] = stack
        b, d = (memory[:, :n], d) if is_operand else (b, memory[:, :n])
        expected = reference(which, a, b, d, sizes)
        torch.ops.lm_kernels.grouped_gemm(d, a, b, ends, workspace, variant, False, 0, num_sms)
        rows = slice(sum(sizes)) if is_operand else slice(None)
        error = (d[rows].double() - expected[rows]).norm() / expected[rows].norm()
        assert error < TOLERANCE[d.dtype], f"{variant}: relative error {error:.1e}"
        assert (memory[:, n:] == 5).all(), f"{variant}: memory between the weights was written"


@pytest.mark.parametrize("variant", [name for name in PLAIN if name.startswith("weight_grad")])
def test_weight_gradients_of_zero_rows_are_zero_or_leave_the_sums_unchanged(variant: str) -> None:
    which = pass_of(variant)
    a, b, d = (
        tensor[:0] if number < 2 else tensor
        for number, tensor in enumerate(operands(which, [0, 0], 64, 128))
    )
    before = d.clone()
    ends, num_sms = torch.zeros(2, dtype=torch.int32, device="cuda"), 132
    workspace = torch.empty(workspace_bytes(2, num_sms), dtype=torch.uint8, device="cuda")
    torch.ops.lm_kernels.grouped_gemm(d, a, b, ends, workspace, variant, False, 0, num_sms)
    assert torch.equal(d, before if which is Pass.WEIGHT_GRAD_ADD else torch.zeros_like(d))


def test_the_operator_schema_declares_the_written_tensors() -> None:
    a, b, d = operands(Pass.FORWARD, [8, 16], 64, 64)
    ends = torch.tensor([8, 24], device="cuda").int()
    workspace = torch.zeros(workspace_bytes(2, 8), dtype=torch.uint8, device="cuda")
    arguments = (
        d.zero_(),
        a.nan_to_num(),
        b,
        ends,
        workspace,
        "forward_pingpong_128x128_1x2",
        False,
        0,
        8,
    )
    torch.library.opcheck(
        torch.ops.lm_kernels.grouped_gemm.default, arguments, test_utils="test_schema"
    )
