"""README: every layout reproduces the losses of one process, with all its ways to save memory or
time.

Losses of all steps, norms of the whole gradient and final weights must match to 1e-10 in float64.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
from torch import Tensor

from lightning_megatron import FP8, CudaGraphs, GPTConfig
from tests.fits import (
    EXPERTS,
    GPT2,
    LLAMA,
    LLAMA_SIZES,
    MIXTURE,
    SIZES,
    Job,
    Language,
    Report,
    check_equal,
    differences,
    run_job,
    run_jobs_on,
)

DROPOUT = GPTConfig.gpt2(**SIZES, hidden_dropout=0.2, attention_dropout=0.1)
#: A vocabulary that four ranks do not divide, and fewer key heads than ranks.
WINDOWS = GPTConfig.llama(
    **{**LLAMA_SIZES, "vocab_size": 301}, sliding_window=5, qk_norm=True, tie_embeddings=True
)
ALIBI = GPTConfig.gpt2(**SIZES, position="alibi", norm_position="post")
BALANCED = GPTConfig.llama(
    **LLAMA_SIZES,
    experts={**EXPERTS, "shared_ffn_hidden_size": 16, "layers": [False, True, False, True]},
)
BIASED = GPTConfig.llama(**LLAMA_SIZES, experts={**EXPERTS, "linear_bias": True})
LATE_EXPERTS = GPTConfig.llama(
    **LLAMA_SIZES, experts={**EXPERTS, "layers": [False, False, True, True]}
)
WIDE = GPTConfig.llama(**{**LLAMA_SIZES, "ffn_hidden_size": 64})
SEGMENTS, FULL = (CudaGraphs(mode, warmup_steps=1) for mode in ("segments", "full"))
EIGHT_BITS = {"fp8": FP8("tensorwise", emulate=True, parameters="fp8"), "microbatch_size": 1}
V = {"pp": 2, "vpp": 2}


class Counting(Language):
    """Take the mean over unequal numbers of labels in the samples, none in some, and smooth."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        assert self.model is not None
        labels = batch["labels"].masked_fill(
            batch["labels"] % 5 <= batch["labels"][:, :1] % 5, -100
        )
        num_tokens = (labels != -100).sum()
        loss = self.model(batch["tokens"], labels, 0.1, sums=True) / num_tokens
        self.log("loss", loss)
        return {"loss": loss, "num_tokens": num_tokens}


#: Jobs of four processes. Unless the layout divides the data, two microbatches make a step.
JOBS = {
    "tp4": Job(GPT2, {"tp": 4, "sequence_parallel": False, "microbatch_size": 4}),
    "tp4 +sp, windows": Job(WINDOWS, {"tp": 4, "microbatch_size": 4}),
    "tp2 +sp, exchanges beside products": Job(LLAMA, {"tp": 2, "linear.overlap": True}),
    "pp4, recomputed": Job(DROPOUT, {"pp": 4, "recompute": "full"}),
    "pp2 tp2, alibi": Job(ALIBI, {"pp": 2, "tp": 2}),
    "tp2 dp2, dropout": Job(DROPOUT, {"tp": 2, "microbatch_size": 1}),
    "pp2 tp2, means over tokens": Job(
        partial(Counting, LLAMA), {"pp": 2, "tp": 2, "microbatch_size": 1}
    ),
    "interleaved, many buckets": Job(
        GPT2, {**V, "optimizer.bucket_size": 500, "optimizer.overlap_parameters": True}
    ),
    "gpipe": Job(GPT2, {"pp": 2, "schedule": "gpipe"}),
    "zb-h1": Job(GPT2, {"pp": 4, "schedule": "zb-h1"}),
    "zb-v": Job(LLAMA, {**V, "schedule": "zb-v", "recompute": "selective"}),
    "dualpipe-v": Job(GPT2, {**V, "schedule": "dualpipe-v", "microbatch_size": 1}),
    "dp4, microbatches compared": Job(
        LLAMA, {"job.check_microbatches": True, "microbatch_size": 1}
    ),
    "dp4, optimizer not sharded": Job(GPT2, {"optimizer.zero": 0}),
    "cp4 ring": Job(LLAMA, {"cp": 4, "context.transport": "ring"}),
    "cp2 tp2, all-to-all": Job(LLAMA, {"cp": 2, "tp": 2, "context.transport": "all_to_all"}),
    "ep4, biases": Job(BIASED, {"ep": 4}),
    "ep2 tp2, etp1": Job(BALANCED, {"ep": 2, "tp": 2, "etp": 1}),
    "ep2 pp2 zb-v": Job(MIXTURE, {**V, "ep": 2, "schedule": "zb-v", "recompute": "experts"}),
    "fp8, weights in 8 bits": Job(WIDE, {"tp": 2, **EIGHT_BITS}),
    "fp8, stages": Job(WIDE, {"pp": 2, **EIGHT_BITS}),
    "float32": Job(GPT2, {"tp": 2, "pp": 2}, precision="32-true"),
}
#: Jobs whose steps are replayed; each must equal the same job without graphs bit for bit.
GRAPHS = {
    "segments, pp2": Job(LLAMA, {**V, "cuda_graphs": SEGMENTS}),
    "segments, ep2 tp2": Job(MIXTURE, {"ep": 2, "tp": 2, "cuda_graphs": SEGMENTS}),
    "segments, ep2 pp2, one stage without experts": Job(
        LATE_EXPERTS,
        {
            **{
                "ep": 2,
                "pp": 2,
                "pipeline.stage_layers": [2, 2],
                "experts.transport": "all_gather",
            },
            "cuda_graphs": SEGMENTS,
        },
    ),
    "full, tp2": Job(DROPOUT, {"tp": 2, "cuda_graphs": FULL}),
}


def eager(job: Job) -> Job:
    return replace(job, strategy={**job.strategy, "cuda_graphs": None})


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Report]]:
    eager_jobs = {f"{name}, eager": eager(job) for name, job in GRAPHS.items()}
    return run_jobs_on(4, JOBS | GRAPHS | eager_jobs)


@cache
def twin(model, precision, has_eight_bits) -> Report:
    """Train in this process, in 8 bits under the strategy."""
    return run_job(Job(model, EIGHT_BITS if has_eight_bits else None, precision))


@pytest.mark.parametrize("name", JOBS)
def test_every_layout_trains_as_one_process(name, reports):
    job = JOBS[name]
    expected = twin(job.model, job.precision, "fp8" in job.strategy)
    check_equal(reports[name], expected, 1e-5 if job.precision == "32-true" else 1e-10)


@pytest.mark.parametrize("name", GRAPHS)
def test_replayed_steps_equal_eager_steps_bit_for_bit(name, reports):
    for replayed, expected in zip(reports[name], reports[f"{name}, eager"], strict=True):
        assert differences(replayed, expected) == []
