"""A script prints the choices of a fit once, in a table."""

from __future__ import annotations

import re
import socket

from lightning_megatron import MemoryReport
from lightning_megatron.groups.shard_spec import num_elements
from lightning_megatron.models.gpt import GPT
from lightning_megatron.strategy import memory_estimate
from lightning_megatron.strategy.logs import run_table
from tests.fits import GPT2, Job, run_job
from tests.world import run_world
from tests.worlds.user_script import MODELS, run_script


def rows_of(kind: str) -> tuple[dict[str, tuple[str, str]], str]:
    """Return value and reason by subject, from the only table that a script prints, and its errors."""
    run = run_script(kind)
    assert run.returncode == 0, run.stderr
    title = r"^Choices of this fit \(rank 0\):\n"
    (table,) = re.findall(rf"{title}((?:  .*\n)+)", run.stdout + run.stderr, re.MULTILINE)
    table = re.sub(r"\n {9,}", " ", table)  # reasons of several lines
    rows = [re.split(r" {2,}", line.strip()) for line in table.splitlines()]
    by_subject = {subject: (value, reason) for subject, value, reason in rows}
    assert len(by_subject) == len(rows)
    return by_subject, run.stderr


def test_a_script_prints_the_choices_of_a_dense_fit_once() -> None:
    rows, errors = rows_of("dense")
    assert rows == {
        "devices": ("1 x CPU", f"on host {socket.gethostname()}"),
        "layout": ("tp 1, pp 1, dp 1", "one process holds the whole model"),
        "vocabulary": (
            f"{MODELS['dense'].vocab_size} tokens",
            "384 rows of embeddings, a multiple of 128 on each tp rank",
        ),
        "precision": (
            "16-mixed",
            "float16 parameters and activations, float32 main parameters and gradients, no autocast",
        ),
        "fused kernels": ("operators of torch", "cpu: the Triton kernels need a GPU"),
        "attention": ("torch's choice", "cpu: torch chooses among its own kernels"),
    }
    assert errors.count("precision 16-mixed skipped a step") == 1
    assert errors.count("use Trainer(precision='bf16-mixed') or a lower learning rate") == 1


def test_a_script_prints_the_choices_of_experts_once() -> None:
    rows, errors = rows_of("experts")
    assert rows["layout"][0] == "tp 2, pp 1, dp 1, ep 2, etp 1"
    assert rows["links"] == ("inside one host", "gloo")
    sizes = re.search(r"rank 0 holds ([\d,]+) of ([\d,]+) parameters$", rows["layout"][1])
    assert sizes is not None, rows["layout"][1]
    num_local, num_total = (int(number.replace(",", "")) for number in sizes.groups())
    assert num_total == num_elements(GPT(MODELS["experts"]))
    assert num_total / 2 < num_local < num_total
    assert rows["sequence parallel"][0] == "on"
    assert rows["precision"][0] == "bf16-mixed"
    assert rows["products of experts"] == ("loop", "cpu: the host has the group sizes already")
    assert rows["expert transport"][0] == "all_to_all"
    assert "top_k (1) is below ep (2)" in rows["expert transport"][1]
    assert re.search(r"receives [\d,]+ bytes for each of its tokens$", rows["expert transport"][1])
    # A CPU has no faster choice.
    assert "SpeedWarning" not in errors


def show_stages(rank: int, size: int) -> tuple[list[str], list[int]]:
    """Return what a fit shows at its start, and the estimates of its stages after a batch."""
    texts: list[str] = []
    run_table.rank_zero_info = texts.append  # type: ignore[assignment]
    memory_estimate._SHOWN_BY.isEnabledFor = lambda level: True  # type: ignore[method-assign]
    memory = MemoryReport(after_steps=1)
    layout = {"tp": 2, "pp": 2}
    run_job(Job(GPT2, layout, steps=1, callbacks=lambda: [memory], norms=False), size)
    return texts, [report.estimate.peak for report in memory.reports]


def test_start_of_a_fit_is_one_screen_with_the_layout_and_its_memory() -> None:
    (text,), peaks = run_world(show_stages, 4)[0]
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    stages = [line.split() for line in lines if line.startswith("  stage ")]
    assert [stage[:5] for stage in stages] == [
        ["stage", "0", "[0", "1]", "0-1"],
        ["stage", "1", "[2", "3]", "2-3"],
    ]
    assert [stage[-1] for stage in stages] == [f"{peak / 2**20:.2f}" for peak in peaks]
    assert lines[-1].endswith("in MiB, estimated: 4 microbatches of 2 x 16 tokens")
