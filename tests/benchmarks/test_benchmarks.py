"""Benchmarks start, and what turns their measurements into published numbers is right."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.grouped_gemm import PASSES, calls, draw, relative_error
from benchmarks.loss import operands, variants
from benchmarks.measure import option_parser
from benchmarks.memory import CASES
from benchmarks.shapes import SHAPES
from benchmarks.step_profile import Kernel, analyse, find_steps
from benchmarks.train_shapes import add_training, parser, training_line
from lightning_megatron import GPT, GPTConfig, MegatronStrategy
from lightning_megatron.plan import ParallelLayout
from lightning_megatron.strategy.options.sizes import check_batch_size
from tests.fits import SIZES

PROGRAMS = [
    path.stem
    for path in sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))
    if 'if __name__ == "__main__"' in path.read_text()
]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_every_program_starts_and_explains_its_options(monkeypatch, capsys):
    assert len(PROGRAMS) >= 14
    for name in PROGRAMS:
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        try:
            with pytest.raises(SystemExit, match="0"):
                runpy.run_module(f"benchmarks.{name}", run_name="__main__")
        except ModuleNotFoundError as error:
            assert "lightning_megatron" not in str(error), name  # noqa: PT017
            continue
        assert "--help" in capsys.readouterr().out, name


def test_a_program_passes_its_options_on_to_each_training():
    program = option_parser("")
    add_training(program)
    own = '{"vpp": 2, "pipeline": {"stage_layers": [1, 2]}}'
    args = program.parse_args(["--model", "tiny", "--forced-balance", "--options", own])
    line = training_line(args, {"schedule": "zb-v"}, layout="pp2", batch=8)
    given = parser().parse_args(line)
    expected = {"model": "tiny", "layout": "pp2", "batch": 8, "forced_balance": True}
    assert vars(given) == {**vars(parser().parse_args([])), **expected, "options": given.options}
    assert json.loads(given.options) == {**json.loads(own), "schedule": "zb-v"}


_LATENT = {"key_value_rank": 12, "plain_dim": 10, "rotary_dim": 6, "value_dim": 8}


@pytest.mark.parametrize(
    "options", [{"num_kv_heads": 2}, {"latent_attention": {**_LATENT, "query_rank": 20}}]
)
def test_flops_per_token_equal_the_counted_flops(options):
    config = GPTConfig.llama(
        **{**SIZES, "num_layers": 2, "ffn_hidden_size": 40, "max_seq_length": 16}, **options
    )
    tokens = torch.zeros(1, 16, dtype=torch.long)
    # This kernel multiplies all pairs, of which causal attention needs half, and padded values.
    math_kernel = sdpa_kernel(SDPBackend.MATH)
    with math_kernel, FlopCounterMode(display=False) as counter, torch.no_grad():
        GPT(config, seed=1)(tokens, tokens)
    pairs = config.num_layers * 2 * 16 * config.num_heads
    needed = pairs * (config.head_size + config.value_size) / 2
    counted = counter.get_total_flops() / 16 - pairs * 2 * config.head_size + needed
    assert 3 * counted == pytest.approx(config.flops_per_token(16), rel=1e-12)


NCCL = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_NTN"
ADAM = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>"
SDPA = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16"


def test_time_is_divided_among_work_communication_and_idle_time():
    spans = [(GEMM, 1, 5), (SDPA, 5, 6), (NCCL, 4, 8), (ADAM, 9, 9.5), (GEMM, 11, 12)]
    kernels = [Kernel(name, 1e3 * start, 1e3 * stop, 7) for name, start, stop in spans]
    analysis = analyse(kernels, [(0, 10_000), (10_000, 20_000)])
    kinds = {"matmul": 2.5, "communication": 2.0, "attention": 0.5, "optimizer": 0.25}
    assert analysis["step_ms"] == pytest.approx(10.0)
    assert analysis["kinds_ms"] == pytest.approx(kinds)
    # Of 4 ms of communication, 2 ms run beside the product and attention.
    assert analysis["communication_ms"] == pytest.approx(2.0)
    assert analysis["exposed_ms"] == pytest.approx(1.0)
    assert analysis["idle_ms"] == pytest.approx((1.0 + 1.0 + 0.5 + 1.0 + 8.0) / 2)
    # A step reaches from one optimizer step to the next.
    names = [GEMM, ADAM, ADAM, GEMM, NCCL, GEMM, "_update", "_advance", GEMM, ADAM]
    row = [Kernel(name, 10.0 * index, 10.0 * index + 5, 7) for index, name in enumerate(names)]
    assert find_steps(row) == [(10.0, 60.0), (60.0, 90.0)]


def test_timed_variants_compute_the_same_values():
    torch.manual_seed(0)
    problem = draw(4, 32, 48, [5, 20, 0, 7], "cpu")
    for which in PASSES:
        for name, call in calls(problem, which, ours="loop").items():
            assert relative_error(problem, which, call) < 1e-2, name
    hidden, head, labels = operands(48, 16, 40, "cpu")
    for smoothing in (0.0, 0.1):
        outcomes = {}
        for name in ("torch", "stored", "chunks of 10", "chunks of 10, forward"):
            loss = variants(10, smoothing)[0][name](hidden, head, labels, smoothing)
            outcomes[name] = loss, *torch.autograd.grad(loss, (hidden, head))
        for results in outcomes.values():
            torch.testing.assert_close(results, outcomes["torch"])


def test_the_strategy_accepts_every_case_of_the_table_of_memory():
    for case in CASES.values():
        options = MegatronStrategy(microbatch_size=case.microbatch, **case.options).options
        layout = ParallelLayout(case.devices, **options.sizes())
        config = SHAPES[case.model]
        config = GPTConfig(**{**vars(config), "num_layers": case.layers or config.num_layers})
        config.check_layout(layout, options.shards_sequence, config.max_seq_length)
        check_batch_size(case.batch, options, layout)
