"""Steps that count tokens take the mean over the tokens of all ranks in every layout, also with
experts and with losses in chunks.

In the main table each step ignores different labels: those of complete ranks, of complete
microbatches and once all labels; the twin is a plain loop in one process without Lightning.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron import GPT, CausalLM, CudaGraphs, GPTConfig
from tests.fits import (
    BATCH,
    GPT2,
    LLAMA_SIZES,
    MIXTURE,
    Job,
    Language,
    Module,
    Report,
    check_equal,
    differences,
    gpt_twin,
    joined,
    run_job,
    run_jobs_on,
)
from tests.oracles import assert_equal

STEPS, LENGTH, V = 5, 12, 60
CONFIG = GPTConfig.llama(
    vocab_size=V, max_seq_length=LENGTH, num_layers=4, hidden_size=16, num_heads=4, num_kv_heads=2,
    ffn_hidden_size=24, tie_embeddings=True,
)  # fmt: skip
#: Samples of each step that have no label. A rank of dp=4 has samples r and r + 4; microbatches
#: hold two samples.
EMPTY = (
    {1, 5},  # one rank of four
    {4, 6, 7},  # the last microbatch of one rank alone, and of one rank of two
    set(range(8)),  # all
    set(range(1, 8)),  # all but one sample
    {2, 3, 6},  # a microbatch in the middle, one rank of four
)


class Texts(Dataset):
    """Padded sequences of different lengths; some labels inside are ignored as well, and some
    samples have no label.
    """

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, V, (LENGTH + 1,), generator=generator)
        length = int(torch.randint(2, LENGTH + 1, (), generator=generator))
        labels = tokens[1:].masked_fill(torch.rand(LENGTH, generator=generator) < 0.3, -100)
        step, sample = divmod(index, BATCH)
        labels[0 if sample in EMPTY[step] else length :] = -100
        inputs = tokens[:-1].clone()
        inputs[length:] = 0
        return {"tokens": inputs, "labels": labels}


class Counting(Language):
    """Return means over tokens, which are NaN for microbatches without labels."""

    def counted(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        assert self.model is not None, "configure_model ran"
        num_tokens = (batch["labels"] != -100).sum()
        loss = self.model(batch["tokens"], batch["labels"]).sum() / num_tokens
        return {"loss": loss, "num_tokens": num_tokens}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        result = self.counted(batch)
        self.log("train_loss", result["loss"], sync_dist=True)
        self.log("epoch_loss", result["loss"], on_step=False, on_epoch=True, sync_dist=True)
        self.log("both", result["loss"], on_step=True, on_epoch=True, sync_dist=True)
        return result

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        result = self.counted(batch)
        self.log("val_loss", result["loss"], sync_dist=True)
        return {"num_tokens": result["num_tokens"]}


class SeededCausalLM(CausalLM):
    """The package's own module with the same optimizer and initial weights."""

    configure_optimizers = Module.configure_optimizers

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT(CONFIG, mesh=self.device_mesh, seed=1234)


ZBV = {"pp": 2, "vpp": 2, "schedule": "zb-v"}
#: Layout, number of accumulated batches, and module. Ranks that share rows count each token once,
#: also if a rank has no label: Megatron-LM scaled losses and gradients by cp (issues 673 and 906),
#: or took the mean of nothing (1764).
CASES: dict[str, tuple[dict[str, Any], int, Any]] = {
    "tp2+sp dp2": ({"tp": 2}, 1, Counting),
    "zb-v dp2": (ZBV, 1, Counting),
    "cp2 tp2+sp ring": ({"cp": 2, "tp": 2, "context.transport": "ring"}, 1, Counting),
    "tp2 pp2, accumulated": ({"tp": 2, "pp": 2, "sequence_parallel": False}, 2, Counting),
    "dp4, zero 0, accumulated": ({"optimizer.zero": 0, "microbatch_size": 1}, 2, Counting),
    "cp2 dp2, CausalLM": ({"cp": 2}, 1, SeededCausalLM),
}
LLAMA_TIED = GPTConfig.llama(**LLAMA_SIZES, tie_embeddings=True)
#: A chunk of 7 divides neither the sequences nor the microbatches; "forward" computes the gradients
#: of summed losses in the forward pass.
SUMMED: dict[str, tuple[GPTConfig, dict[str, Any]]] = {
    "experts, pp2 vpp2": (MIXTURE, {"pp": 2, "vpp": 2, "microbatch_size": 1}),
    "experts, zb-v ep2": (MIXTURE, {**ZBV, "ep": 2, "recompute": "experts", "microbatch_size": 1}),
    "chunks, tp2": (GPT2, {"tp": 2, "loss_chunk": 7}),
    "forward, zb-v tp2": (LLAMA_TIED, {**ZBV, "tp": 2, "loss_chunk": "forward"}),
    "forward, cp2 gpipe": (
        GPT2,
        {"cp": 2, "pp": 2, "schedule": "gpipe", "loss_chunk": "forward"},
    ),
}
CHUNKED: dict[str, dict[str, Any]] = {
    "tp4": {"tp": 4, "sequence_parallel": False},
    "cp2 pp2, recomputed": {"cp": 2, "pp": 2, "recompute": "full"},
}


class Summed(Language):
    """Ignore some labels, and return the number of remaining labels with the mean loss."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        assert self.model is not None, "configure_model ran"
        labels = batch["labels"].masked_fill(batch["labels"] % 5 < batch["labels"][:, :1] % 5, -100)
        num_tokens = (labels != -100).sum()
        loss = self.model(batch["tokens"], labels, sums=True) / num_tokens
        self.log("train_loss", loss, sync_dist=True)
        return {"loss": loss, "num_tokens": num_tokens}


class SummedWhole(Language):
    """Return the mean of summed losses, which a graph can capture."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.model is not None, "configure_model ran"
        return self.model(batch["tokens"], batch["labels"], sums=True) / batch["labels"].numel()


def job_of(layout: dict[str, Any], accumulate: int, module: Any) -> Job:
    return Job(
        partial(module, CONFIG), layout, data=Texts, validation=Texts, steps=-1,
        batch=BATCH // accumulate,
        trainer={"max_epochs": 1, "accumulate_grad_batches": accumulate, "num_sanity_val_steps": 0},
    )  # fmt: skip


@cache
def plain_loop(parts: int) -> Report:
    """Train in a plain loop; report the losses of each of the ``parts`` of a global batch."""
    report, model = Report(), GPT(CONFIG, seed=1234).double()
    module: Any = model
    settings = Module.configure_optimizers(module)
    optimizer, schedule = settings["optimizer"], settings["lr_scheduler"]["scheduler"]
    total, count = 0.0, 0
    for step in range(STEPS):
        losses, valid = token_losses(model, range(step * BATCH, (step + 1) * BATCH))
        for part, mask in zip(losses.detach().chunk(parts), valid.chunk(parts), strict=True):
            report.losses.append(float(part.sum() / mask.sum()) if mask.any() else 0.0)
        total, count = total + float(losses.detach().sum()), count + int(valid.sum())
        optimizer.zero_grad()
        (losses.sum() / max(int(valid.sum()), 1)).backward()
        report.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        losses, valid = token_losses(model, range(STEPS * BATCH))
    report.metrics = {"epoch_loss": total / count, "val_loss": float(losses.sum() / valid.sum())}
    report.outcomes = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    return report


def token_losses(model: GPT, samples: range) -> tuple[Tensor, Tensor]:
    """Return the loss of every token from the logits, and which tokens count."""
    rows = [Texts()[index] for index in samples]
    tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels"))
    logits = model(tokens).flatten(0, 1)
    flat = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")
    return flat.view_as(labels), labels != -100


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Report]]:
    jobs = {name: job_of(*case) for name, case in CASES.items()}
    for name, (config, layout) in SUMMED.items():
        jobs[name] = Job(partial(Summed, config), layout, steps=2)
    for name, layout in CHUNKED.items():
        jobs[f"chunked, {name}"] = Job(GPT2, {**layout, "loss_chunk": 7}, steps=2)
    captured = {"cuda_graphs": CudaGraphs("full", warmup_steps=1)}
    for name, graphs in {"graphs": captured, "eager": {}}.items():
        layout = {"cp": 2, "loss_chunk": "forward", **graphs}
        jobs[name] = Job(partial(SummedWhole, GPT2), layout, steps=4)
    return run_jobs_on(4, jobs)


@pytest.mark.parametrize("name", CASES)
def test_every_layout_takes_the_mean_over_all_tokens(name: str, reports: Any) -> None:
    _, accumulate, module = CASES[name]
    expected = plain_loop(accumulate)
    assert expected.norms[2] == 0.0
    names = ["val_loss"] if module is SeededCausalLM else ["val_loss", "epoch_loss"]
    for report in reports[name]:
        assert report.losses == pytest.approx(expected.losses, rel=0, abs=1e-10)
        assert report.norms == pytest.approx(expected.norms, rel=0, abs=1e-10)
        for metric in names:
            assert report.metrics[metric] == pytest.approx(expected.metrics[metric], abs=1e-10)
        if module is Counting:
            assert report.metrics["both_epoch"] == pytest.approx(report.metrics["epoch_loss"])
            assert report.metrics["both_step"] == pytest.approx(report.losses[-1])
    weights = joined(reports[name])
    assert weights.keys() == expected.outcomes.keys()
    for key, weight in weights.items():
        # The vocabulary's padding belongs to no full tensor.
        assert_equal(weight, expected.outcomes[key].narrow(0, 0, weight.shape[0]), key)


@cache
def summed_twin(config: GPTConfig, size: int) -> Report:
    return run_job(Job(partial(Summed, config), {"microbatch_size": size}, steps=2))


@pytest.mark.parametrize("name", SUMMED)
def test_counted_steps_train_as_one_process(name: str, reports: Any) -> None:
    config, layout = SUMMED[name]
    # Losses of routers are weighted by the counted tokens of each microbatch.
    check_equal(reports[name], summed_twin(config, layout.get("microbatch_size", 8)))


@pytest.mark.parametrize("name", CHUNKED)
def test_losses_in_chunks_train_as_one_process_that_stores_logits(name: str, reports: Any) -> None:
    check_equal(reports[f"chunked, {name}"], gpt_twin(GPT2, 2), 1e-12)


def test_graphs_have_the_bits_of_eager_steps(reports: Any) -> None:
    for captured, eager in zip(reports["graphs"], reports["eager"], strict=True):
        assert captured.graphs[-1]
        assert differences(captured, eager) == []
