"""The benchmark of experts in 8 bits computes the products that it times, and survives failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import expert_eight_bits
from benchmarks.eight_bit_products import (
    EightBits,
    cast_lines,
    cast_transposed_weights,
    cast_weights,
    given,
)
from benchmarks.expert_eight_bits import (
    ALONE,
    BF16,
    CASTS,
    LAYER_KINDS,
    SHAPES,
    WEIGHTS,
    ExpertShape,
    Measured,
    layer_table,
    measure,
    measure_pass,
    padded_sizes,
    parser,
    pass_table,
    run_case,
)
from benchmarks.grouped_problem import PASSES, Problem, draw, relative_error
from lightning_megatron.plan.grouped_gemm import Pass

SIZES = [32, 16, 64]
_torch_product = torch._scaled_grouped_mm


def by_group(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    *,
    offs: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """Stand-in, with torch's checks, for ``torch._scaled_grouped_mm``, which has no CPU version."""
    operands = [operand.to("meta") for operand in (left, right, left_scale, right_scale)]
    options = {"out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
    shape = _torch_product(*operands, offs=offs.to("meta"), **options).shape
    bounds = [0, *offs.tolist()]
    parts = []
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        a, b = left.double(), right.double()
        if right.dim() == 3:
            a = (a * left_scale[:, None])[start:stop]
            b = b[expert] * right_scale[expert]
        else:
            assert stop > start, "the kernel needs tokens of every expert"
            assert (stop - start) % 16 == 0, "the kernel loads 16 tokens at once"
            a = a[:, start:stop] * left_scale.view(len(offs), -1)[expert][:, None]
            b = b[start:stop] * right_scale.view(len(offs), -1)[expert]
        parts.append(a @ b)
    product = torch.cat(parts) if right.dim() == 3 else torch.stack(parts)
    assert product.shape == shape
    return product.to(out_dtype)


def once(
    variants: Mapping[str, Callable[[], object]], *arguments: object
) -> dict[str, list[float]]:
    """Timer that calls each variant once."""
    for call in variants.values():
        call()
    return {name: [2.0, 1.0, 3.0] for name in variants}


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", by_group)
    torch.manual_seed(0)


@pytest.fixture
def problem() -> Problem:
    return draw(len(SIZES), 32, 48, SIZES, "cpu")


@pytest.mark.parametrize("which", PASSES)
def test_products_in_8_bits_match_bfloat16_up_to_rounding(which: Pass, problem: Problem) -> None:
    bits = EightBits(problem)
    assert 1e-3 < relative_error(problem, which, lambda: bits.product(which)) < 6e-2
    with_casts = relative_error(problem, which, lambda: bits.product_with_casts(which))
    assert with_casts == relative_error(problem, which, lambda: bits.product(which, fast=False))


def test_products_in_8_bits_are_exact_for_numbers_of_8_bits() -> None:
    sizes, k, n = [16, 48], 32, 16
    rows, grad, weights = (
        torch.randint(-3, 4, shape).bfloat16() for shape in ((64, k), (64, n), (2, n, k))
    )
    # Rows and columns whose largest number is 448 have the scale 1.
    for matrix in (rows, grad, weights.view(-1, k)):
        matrix[0] = matrix[:, 0] = 448
    for weight in weights:
        weight[0] = 448
    exact = Problem(rows, grad, weights, torch.zeros(2, n, k), sizes)
    bits = EightBits(exact)
    for which in PASSES:
        assert relative_error(exact, which, lambda which=which: bits.product(which)) < 2e-3, which


def test_casts_have_the_scales_of_their_rows(problem: Problem) -> None:
    rows, columns = map(given, cast_lines(problem.rows, rows=True, columns=True))
    for (values, scale), matrix in ((rows, problem.rows), (columns, problem.rows.t())):
        assert values.is_contiguous()
        largest = (values.double() * scale).abs().amax(1)
        torch.testing.assert_close(largest, matrix.double().abs().amax(1), rtol=1e-6, atol=0)
    weights = problem.weights.double()
    values, scale = cast_weights(problem.weights)
    torch.testing.assert_close(values.double() * scale[..., None], weights, rtol=0.07, atol=1e-3)
    values, scale = cast_transposed_weights(problem.weights)
    assert values.is_contiguous()
    assert scale.is_contiguous()
    transposed = weights.transpose(1, 2)
    torch.testing.assert_close(values.double() * scale[..., None], transposed, rtol=0.07, atol=1e-3)
    largest = weights.abs().amax((0, 1)) / 448
    assert all(torch.allclose(expert_scale.double(), largest, rtol=1e-6) for expert_scale in scale)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("skewed", [False, True])
def test_groups_are_positive_multiples_of_16_with_all_rows(name: str, skewed: bool) -> None:
    shape = SHAPES[name]
    sizes = padded_sizes(shape, skewed, torch.Generator().manual_seed(0))
    assert len(sizes) == shape.experts
    assert sum(sizes) == shape.rows
    assert all(size > 0 and size % 16 == 0 for size in sizes)
    assert (max(sizes) > 2 * min(sizes)) == skewed


def test_flops_count_both_products_forward_and_backward() -> None:
    shape = ExpertShape(experts=3, hidden=32, width=48, rows=112)
    for name, (k, n) in shape.products.items():
        assert shape.flops(name) == draw(3, k, n, SIZES, "cpu").flops
    assert shape.layer_flops == 3 * (2 * 112 * 32 * 96 + 2 * 112 * 48 * 32)
    assert SHAPES["Qwen3-30B-A3B, 32 experts"].flops("down") == 2 * 32768 * 768 * 2048


def test_a_pass_is_timed_in_every_variant(problem: Problem) -> None:
    for which in PASSES:
        row = measure_pass(problem, which, "loop", 1, once)
        has_weights = which in (Pass.FORWARD, Pass.DATA_GRAD)
        assert row.times.keys() == {BF16, ALONE, CASTS} | ({WEIGHTS} if has_weights else set())
        assert set(row.times.values()) == {2.0}
        assert row.errors[BF16] < 5e-3 < row.errors[ALONE] < 6e-2
        assert not row.failures


def test_a_failing_variant_does_not_stop_the_other_variants(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> Tensor:
        raise RuntimeError("no kernel | for this\nat line 1")

    monkeypatch.setattr(torch, "_scaled_grouped_mm", fail)
    row = measure_pass(problem, Pass.FORWARD, "loop", 1, once)
    assert row.times.keys() == {BF16, WEIGHTS}
    text = pass_table([("down (48, 32)", row)])
    assert "| failed: RuntimeError: no kernel / for this |  | failed" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1

    def broken(*args: object) -> dict[str, list[float]]:
        raise RuntimeError("lost")

    row = measure("forward", 1, {BF16: lambda: None}, 1, broken)
    assert row.failures == {BF16: "RuntimeError: lost"}
    assert not row.times


def test_tables_have_rates_and_speeds() -> None:
    row = Measured("forward", 10**12, {BF16: 2.0, ALONE: 1.0, CASTS: 4.0}, {}, {BF16: 2e-3})
    assert pass_table([("down (48, 32)", row)]).splitlines()[2] == (
        "| down (48, 32) | forward | 2.000 | 500 | 1.000 | 1000 | 4.000 | 250 | 2.00 | 0.50 |  "
        "| 2.0e-03 |  |"
    )
    layer = Measured("", 10**12, {LAYER_KINDS[0]: 2.0, LAYER_KINDS[2]: 1.0}, {})
    lines = layer_table(layer).splitlines()
    assert lines[4] == "| 8 bits, casts of tokens | 1.000 | 1000 | 2.00 |"
    assert len({line.count("|") for line in lines}) == 1


def test_a_case_has_all_passes_and_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ExpertShape(experts=3, hidden=32, width=48, rows=192)
    monkeypatch.setitem(SHAPES, "tiny", shape)
    used: list[str] = []

    def record_variants(variants: Mapping[str, Any], *arguments: object) -> dict[str, list[float]]:
        used.extend(variants)
        return once(variants)

    text = run_case("tiny", True, 1, "cpu", record_variants)
    rows = [line for line in text.splitlines() if line.startswith(("| gate+up", "| down"))]
    assert len(rows) == 2 * len(PASSES)
    assert "failed" not in text
    assert used[-len(LAYER_KINDS) :] == list(LAYER_KINDS)
    assert "bf16 down: loop, cpu: the host has the group sizes already" in text


def test_a_layer_casts_the_operands_of_its_variant(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = draw(len(SIZES), 48, 32, SIZES, "cpu")
    fast: list[bool] = []

    def record_product(*operands: Tensor, use_fast_accum: bool, **options: Any) -> Tensor:
        fast.append(use_fast_accum)
        return by_group(*operands, use_fast_accum=use_fast_accum, **options)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", record_product)
    variants = expert_eight_bits.layer_calls([problem, down], "loop")
    assert tuple(variants) == LAYER_KINDS
    casts: list[bool] = []

    def record_cast(matrix: Tensor, *, rows: bool, columns: bool) -> Any:
        casts.append(matrix.shape[0] == sum(SIZES))
        return cast_lines(matrix, rows=rows, columns=columns)

    monkeypatch.setattr("benchmarks.eight_bit_products.cast_lines", record_cast)
    counts = {}
    for name, call in variants.items():
        casts.clear()
        fast.clear()
        call()
        counts[name] = casts.count(True), casts.count(False), tuple(fast)
    all_fast = (True,) * 6
    first = LAYER_KINDS[1]
    assert counts[LAYER_KINDS[0]] == (0, 0, ())
    assert counts[first][2] == all_fast
    assert counts[LAYER_KINDS[2]] == (4, 0, all_fast)
    assert counts[LAYER_KINDS[3]] == (4, 4, all_fast)
    assert counts[LAYER_KINDS[4]] == (4, 0, (True, True, False, False, False, False))


def test_all_cases_are_measured_by_default() -> None:
    options = parser().parse_args([])
    assert options.shapes == list(SHAPES)
    assert options.groups == ["equal", "skewed"]
    assert (options.first, options.out) == (0, None)
    assert parser().parse_args(["--shapes", "Mixtral-8x7B"]).shapes == ["Mixtral-8x7B"]


def test_a_lost_gpu_leaves_the_other_cases_to_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[list[str]] = []

    def call(line: list[str]) -> int:
        lines.append(line)
        return 0

    monkeypatch.setattr(expert_eight_bits, "run_case", lambda name, *arguments: f"table of {name}")
    monkeypatch.setattr(expert_eight_bits, "gpu_is_lost", lambda: True)
    monkeypatch.setattr("subprocess.call", call)
    out = tmp_path / "out.md"
    monkeypatch.setattr("sys.argv", ["benchmark", "--first", "1", "--out", str(out)])
    with pytest.raises(SystemExit, match="0"):
        expert_eight_bits.main()
    assert out.read_text() == "table of Qwen3-30B-A3B, 128 experts\n"
    assert "table of" in capsys.readouterr().out
    module, *options = lines[0][2:]
    assert module == "benchmarks.expert_eight_bits"
    restarted = parser().parse_args(options)
    assert (restarted.first, restarted.out, restarted.rounds) == (2, out, 10)
    assert restarted.shapes == list(SHAPES)
