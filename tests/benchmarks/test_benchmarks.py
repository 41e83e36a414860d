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

from benchmarks import cards, recipe_speeds
from benchmarks.forecast import CASES
from benchmarks.grouped_gemm import PASSES, calls, draw, relative_error
from benchmarks.loss import operands, variants
from benchmarks.measure import option_parser
from benchmarks.shapes import SHAPES, seen_length
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


def test_speeds_of_a_recipe_are_measured_with_made_up_data(tmp_path, monkeypatch, capsys):
    given = f"--tiny --steps 2 --warmup 1 --microbatches 1 --out {tmp_path} --recipes"
    monkeypatch.setattr(sys, "argv", ["speeds", *given.split(), "llama3_8b_sft_1gpu"])
    recipe_speeds.main()
    last = capsys.readouterr().out.splitlines()[-3]
    cells = [cell.strip() for cell in last.split("|")[1:-1]]
    assert cells[:3] == ["`llama3_8b_sft_1gpu`", "1", ""]
    assert float(cells[3]) > 0
    # 512 tokens of a step, in milliseconds.
    assert int(cells[4].replace(",", "")) == pytest.approx(512e3 / float(cells[3]), abs=1)


@pytest.mark.parametrize("name", ["gpt_oss_20b_lora", "moonlight_16b"])
def test_a_card_trains_its_work_and_prints_both_rows(name, tmp_path, capsys):
    cards.main([name, *f"--tiny --steps 1 --warmup 1 --microbatches 1 --out {tmp_path}".split()])
    lines = capsys.readouterr().out.splitlines()
    rows = [
        line.split("|")[2:-1] for line in lines if line.startswith(("| published", "| measured"))
    ]
    published, measured = ([cell.strip() for cell in row] for row in rows)
    card = cards.CARDS[name]
    assert published[2:4] == [f"{card.published.tokens:,.0f}", str(card.published.tflops)]
    milliseconds = float(measured[1])
    num_tokens = 128 * card.strategy["microbatch_size"]
    assert int(measured[2].replace(",", "")) == pytest.approx(
        1e3 * num_tokens / milliseconds, abs=1
    )


def test_cards_count_flops_as_the_published_rows_do():
    for name, card in cards.CARDS.items():
        job = cards.Job.of(cards.arguments_of([name]))
        flops = job.gpt.flops_per_token(seen_length(job.lengths))
        # Conversations of the published rows have other lengths.
        counted = 1e12 * card.published.tflops / card.published.tokens
        assert counted == pytest.approx(flops, rel=0.015), name


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
