"""Published rows of fine-tuning and pre-training, and the same work on the GPUs of this machine.

    python -m benchmarks.cards qwen3_8b_lora
    python -m benchmarks.cards qwen3_30b_lora --devices 2 --options '{"microbatch_size": 2}'
    python -m benchmarks.cards gpt_oss_20b_lora --estimate-only
    python -m benchmarks.cards moonlight_16b --tiny

A card has the shape of a model, the length of its rows, its adapters and the microbatches of a row
that NVIDIA publishes for H100s. Weights are random, and bfloat16 from the first. Rows of
fine-tuning hold conversations of random tokens, two thirds of which have labels; other rows are one
document of random tokens. Tokens go to the experts that the untrained router chooses. Steps run in
a row, without waits of the host.

The table has the published row above the measured one, which has the strategy's estimate of its
memory, too. The FLOPs of both are those of a training of all weights: where weights are frozen,
neither program computes the third of them that is their gradients. Conditions and differences
follow. ``--tiny`` shrinks the model, and trains on the CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import FLOP_RULE, QUIET, Measure, heading, merged, option_parser
from benchmarks.recipe_speeds import CONFIGS, MODELS, shrunk, write_folder
from benchmarks.shapes import document_lengths, seen_length
from lightning_megatron import HuggingFaceCausalLM, LoraSettings, MegatronStrategy, Profile
from lightning_megatron.families import family_of
from lightning_megatron.memory.estimate import estimate_memory
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.budget import GIB, StageMemory
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.callbacks.memory_report import MemoryReport
from lightning_megatron.strategy.memory_estimate import shape_before_run
from lightning_megatron.strategy.optimization.precision import MegatronPrecision

#: Rows of NVIDIA's pages, as of commit 067f987 of Megatron-Bridge (2026-08-22).
_CARD = "examples/model_verification_cards/{}/card.yaml, {}"
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_BFLOAT16_SUMS = {"gradient_dtype": "bfloat16", "moments_dtype": "bfloat16"}
#: One eager step, and the capture in the next one.
_SEGMENTS = {"mode": "segments", "warmup_steps": 1}
TITLES = ("row", "GPUs", "ms a step", "tokens/s/GPU", "TFLOP/s/GPU", "peak GiB", "estimate GiB")


@dataclass(frozen=True)
class Published:
    """Row that NVIDIA publishes.

    Args:
        gpus: Number and kind of the GPUs.
        tokens: Tokens per second and GPU.
        tflops: Model TFLOP/s per GPU.
        conditions: Settings of the row.
        source: File and date.
        step_ms: Time of a step (ms); None if it is not published.
    """

    gpus: str
    tokens: float
    tflops: float
    conditions: str
    source: str
    step_ms: float | None = None


@dataclass(frozen=True)
class Card:
    """Published row, and the training that repeats its work.

    Args:
        model: Name in ``MODELS``, or of a published configuration.
        published: The row.
        length: Tokens of a row.
        rows: Rows of a step and data-parallel rank.
        devices: Number of GPUs on which the whole model is trained here.
        packs: Whether rows hold conversations.
        lora: Adapters; None trains all weights.
        joined: Rows that lie end to end in a sample. Attention ends with a conversation, so the
            work is the same.
        strategy: Arguments of the strategy.
        two: Further arguments on two GPUs.
        differs: What differs from the published row besides GPUs, data and weights.
    """

    model: str
    published: Published
    length: int
    rows: int
    devices: int = 1
    packs: bool = False
    lora: LoraSettings | None = None
    joined: int = 1
    strategy: dict[str, Any] = field(default_factory=dict)
    two: dict[str, Any] = field(default_factory=dict)
    differs: str = "nothing"


CARDS: dict[str, Card] = {
    "moonlight_16b": Card(
        "Moonlight-16B-A3B",
        Published(
            "16 H100",
            22_528,
            386.6,
            "ep 8, HybridEP, microbatches of 2 rows, 32 a step, real data, natural routing",
            _CARD.format("moonlight-16b-a3b", "2026-07-22"),
            11_636.4,
        ),
        length=4096,
        rows=32,
        devices=2,
        strategy={"microbatch_size": 1, "optimizer": _BFLOAT16_SUMS, "cuda_graphs": _SEGMENTS},
        two={"ep": 2, "experts": {"rows": 1.25}},
        differs="gradient sums and moments in bfloat16",
    ),
    "qwen3_30b_lora": Card(
        "qwen3_30b_a3b",
        Published(
            "4 H100",
            733.1,
            13.84,
            "tp 4, ep 4, DeepEP, adapters of rank 8 on qkv and output, 32 packed rows a step",
            _CARD.format("qwen3-30b-a3b", "2026-07-21"),
            22_347.6,
        ),
        length=2048,
        rows=32,
        packs=True,
        lora=LoraSettings(r=8, alpha=16, target_modules=_ATTENTION),
        strategy={"microbatch_size": 4},
        differs="the whole model on each GPU, and microbatches of four rows",
    ),
    "gpt_oss_20b_lora": Card(
        "gpt_oss_20b",
        Published(
            "1 H100",
            5_171.5,
            113.24,
            "adapters of rank 32 on qkv, output and experts, 128 packed rows a step",
            _CARD.format("gpt-oss-20b", "2026-08-09"),
            50_689.9,
        ),
        length=2048,
        rows=128,
        packs=True,
        lora=LoraSettings(r=32, alpha=32, target_modules=_ATTENTION),
        strategy={"microbatch_size": 4},
        differs="microbatches of four rows; no adapters of experts, which this package lacks",
    ),
    "qwen3_8b_lora": Card(
        "qwen3_8b",
        Published(
            "1 H100",
            8_429.3,
            387.43,
            "adapters of rank 8 on qkv and output, 32 packed rows a step in microbatches of 1",
            _CARD.format("qwen3-8b", "2026-07-19"),
            7_774.8,
        ),
        length=2048,
        rows=32,
        packs=True,
        lora=LoraSettings(r=8, alpha=16, target_modules=_ATTENTION),
        strategy={"microbatch_size": 1},
        joined=4,
        differs="microbatches of four rows, which lie end to end",
    ),
    "qwen3_8b_sft": Card(
        "qwen3_8b",
        Published(
            "4 H100",
            2_206.8,
            101.63,
            "tp 4, all weights, 32 packed rows a step in microbatches of 1",
            _CARD.format("qwen3-8b", "2026-07-19"),
            7_424.2,
        ),
        length=2048,
        rows=32,
        devices=2,
        packs=True,
        strategy={"microbatch_size": 2, "optimizer": _BFLOAT16_SUMS, "cuda_graphs": _SEGMENTS},
        differs="dp instead of tp; gradient sums and moments in bfloat16",
    ),
    "qwen3_8b": Card(
        "qwen3_8b",
        Published(
            "16 H100",
            10_456.3,
            512.7,
            "dp 16, microbatches of 1 row, 64 a step, real data",
            _CARD.format("qwen3-8b", "2026-07-21"),
            25_070.3,
        ),
        length=4096,
        rows=16,
        devices=2,
        strategy={"microbatch_size": 1, "optimizer": _BFLOAT16_SUMS, "cuda_graphs": _SEGMENTS},
        differs="fewer microbatches; gradient sums and moments in bfloat16",
    ),
    "llama3_8b_fp8": Card(
        "llama3_8b",
        Published(
            "8 H100",
            14_451,
            744,
            "FP8 with tensorwise scales, dp 8, microbatches of 1 row, 16 a step",
            "docs/performance-summary-archive.md",
        ),
        length=8192,
        rows=16,
        devices=2,
        strategy={
            "microbatch_size": 1,
            "fp8": {"recipe": "tensorwise", "parameters": "fp8"},
            "optimizer": _BFLOAT16_SUMS,
            "cuda_graphs": _SEGMENTS,
        },
        differs="gradient sums and moments in bfloat16",
    ),
}


class Rows(Dataset):
    """Rows of reproducible random tokens: one document each, or conversations of these lengths."""

    def __init__(self, vocab_size: int, lengths: Sequence[int], num_rows: int) -> None:
        self.vocab_size = vocab_size
        self.lengths = lengths
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        size = (sum(self.lengths) + 1,)
        tokens = torch.randint(0, self.vocab_size, size, generator=generator)
        row = {"tokens": tokens[:-1], "labels": tokens[1:]}
        if len(self.lengths) == 1:
            return row
        places = torch.cat([torch.arange(length) for length in self.lengths])
        # The first third of a conversation asks, and its last token has no next one.
        ends = torch.cat([torch.full((length,), length) for length in self.lengths])
        is_answer = (places >= ends // 3) & (places < ends - 1)
        return {**row, "labels": row["labels"].where(is_answer, -100), "position_ids": places}


@dataclass(frozen=True)
class Job:
    """Training of a card with the options of the command line.

    Args:
        card: The card.
        config: Configuration of the model in the form of Hugging Face.
        devices: Number of ranks.
        samples: Samples of a step and data-parallel rank.
        joined: Rows of the card that lie end to end in a sample.
        strategy: Arguments of the strategy.
        is_tiny: Whether it trains on the CPU.
    """

    card: Card
    config: dict[str, Any]
    devices: int
    samples: int
    joined: int
    strategy: dict[str, Any]
    is_tiny: bool

    @classmethod
    def of(cls, args: argparse.Namespace) -> Job:
        """Return the job of a command line."""
        card = CARDS[args.name]
        config = dict((CONFIGS | MODELS)[card.model])
        if args.tiny:
            config = shrunk(config) | {"vocab_size": 512, "pad_token_id": None}
        if args.layers:
            config["num_hidden_layers"] = args.layers
            if config.get("layer_types"):
                config["layer_types"] = config["layer_types"][: args.layers]
        joined = args.joined or card.joined
        if joined > 1 and not card.packs:
            raise SystemExit(f"--joined needs rows of conversations: {args.name} has none.")
        devices = args.devices or (1 if args.tiny else card.devices)
        two = card.two if devices == 2 else {}
        strategy = merged(card.strategy, two, json.loads(args.options))
        if args.tiny:
            # Graphs, products in 8 bits and moments in bfloat16 need a GPU.
            strategy |= {"cuda_graphs": None, "fp8": None, "optimizer": {}}
        size = strategy["microbatch_size"]
        samples = args.microbatches * size if args.microbatches else card.rows // joined
        return cls(card, config, devices, samples, joined, strategy, args.tiny)

    @property
    def lengths(self) -> list[int]:
        """Return the lengths of the documents of a sample (tokens)."""
        length = 128 if self.is_tiny else self.card.length
        return self.joined * (document_lengths(length) if self.card.packs else [length])

    @property
    def gpt(self) -> GPTConfig:
        """Return the configuration of the model that computes."""
        plain = transformers.AutoConfig.for_model(**self.config).to_dict()
        model = family_of(self.config["model_type"]).config(plain)
        assert isinstance(model, GPTConfig), "all cards are those of decoders"
        return model

    @property
    def precision(self) -> Any:
        """Return the precision of the Trainer."""
        return "32-true" if self.is_tiny else "bf16-mixed"

    def estimate(self) -> StageMemory:
        """Estimate the memory of a GPU, of adapters without what they keep."""
        options = MegatronStrategy(**self.strategy).options
        size = self.strategy["microbatch_size"]
        shape = replace(
            shape_before_run(options, MegatronPrecision(self.precision), "cuda"),
            seq_length=sum(self.lengths),
            microbatch_size=size,
            num_microbatches=self.samples // size,
            recompute=options.recompute or "none",
        )
        if self.card.lora is not None:
            shape = replace(shape, gradient_bytes=0, main_bytes=0, state_bytes=0)
        layout = ParallelLayout(self.devices, **options.sizes())
        (memory,) = estimate_memory(self.gpt, layout, shape)
        return memory

    def module(self, folder: Path) -> HuggingFaceCausalLM:
        """Return the module, whose configuration is written to a folder."""
        write_folder(folder, self.config)
        dtype: Any = "float32" if self.is_tiny else "bfloat16"
        return HuggingFaceCausalLM(
            str(folder), from_scratch=True, dtype=dtype, lora=self.card.lora, learning_rate=1e-4
        )

    def train(self, args: argparse.Namespace) -> dict[str, Any]:
        """Train, and return the figures; empty on other ranks than the first."""
        out = Path(args.out)
        lengths = self.lengths
        measure = Measure(
            str(out / f"{args.name}.json"),
            args.name,
            warmup=args.warmup,
            steps=args.steps,
            in_a_row=True,
            seq_length=seen_length(lengths),
        )
        report = MemoryReport()
        steps = args.warmup + args.steps
        profile = Profile(steps, 1, str(out / args.name), host=self.is_tiny)
        # The check of microbatches runs the first batch and would raise the measured peak.
        unchecked = merged({"job": {"check_microbatches": False}}, self.strategy)
        trainer = Trainer(
            accelerator="cpu" if self.is_tiny else "cuda",
            devices=self.devices,
            strategy=MegatronStrategy(**unchecked),
            precision=self.precision,
            gradient_clip_val=1.0,
            max_steps=steps + args.profile,
            callbacks=[report, measure, *([profile] if args.profile else [])],
            **QUIET,
        )
        num_rows = (steps + args.profile) * self.samples * self.devices
        data = Rows(self.config["vocab_size"], lengths, num_rows)
        module = self.module(out / "models" / f"{args.name}_{self.config['num_hidden_layers']}")
        on_gpu = not self.is_tiny
        trainer.fit(
            module, DataLoader(data, self.samples, num_workers=2 * on_gpu, pin_memory=on_gpu)
        )
        if not trainer.is_global_zero:
            return {}
        (stage,) = report.reports
        # The peak of the allocator leaves out what graphs keep for their next replay.
        sizes = {"estimate_gib": stage.estimate.peak, "peak_gib": stage.peak or 0}
        return measure.figures | {name: round(size / GIB, 1) for name, size in sizes.items()}


def rows_of(job: Job, figures: Mapping[str, Any]) -> list[str]:
    """Return the published and the measured row of the table."""
    given = job.card.published
    published = (
        f"| published | {given.gpus} | {given.step_ms or ''} | {given.tokens:,.0f} | "
        f"{given.tflops} | | |"
    )
    kind = "CPU" if job.is_tiny else torch.cuda.get_device_name().removeprefix("NVIDIA ")
    measured = (
        f"| measured | {job.devices} {kind} | {figures['step_ms']} | "
        f"{figures['tokens_per_second_per_rank']:,} | {figures['model_tflops_per_rank']} | "
        f"{figures['peak_gib'] or ''} | {figures['estimate_gib']} |"
    )
    return [published, measured]


def conditions(job: Job) -> str:
    """Return the conditions of both rows, and what differs."""
    card, given = job.card, job.card.published
    lengths = job.lengths
    flops = job.gpt.flops_per_token(seen_length(lengths)) / 1e9
    lora = "all weights" if card.lora is None else f"adapters {asdict(card.lora)}"
    return "\n".join(
        (
            f"Published: {given.conditions}; {1e3 * given.tflops / given.tokens:.2f} GFLOP a token "
            f"({given.source}).",
            f"Measured: {job.config['num_hidden_layers']} layers, {lora}, {job.samples} samples of "
            f"{sum(lengths):,} tokens in {len(lengths)} documents a step and GPU, {flops:.2f} "
            f"GFLOP a token; {json.dumps(job.strategy)}.",
            f"Differs: GPUs, random weights, random tokens, an untrained router; {card.differs}.",
            f"TFLOP/s: {FLOP_RULE}.",
        )
    )


def arguments_of(line: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a command line; None means that of the program."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("name", choices=list(CARDS))
    add("--devices", type=int, choices=[1, 2], help="number of GPUs, by default the card's")
    add("--steps", type=int, default=4, help="measured steps")
    add("--warmup", type=int, default=5, help="steps before the measured steps")
    add("--microbatches", type=int, help="microbatches of a step, by default the card's rows")
    add("--joined", type=int, help="rows that lie end to end in a sample, by default the card's")
    add("--layers", type=int, help="layers of the model, by default all")
    add("--options", default="{}", help="further arguments of the strategy, as JSON")
    add(
        "--profile",
        action="store_true",
        help="print the parts of one more step, and the longest kernels",
    )
    add("--estimate-only", action="store_true", help="estimate the memory, and train nothing")
    add("--tiny", action="store_true", help="a tiny model on the CPU, which shows that it works")
    add("--out", default="runs/cards", help="folder of figures, configurations and traces")
    return parser.parse_args(line)


def main(line: Sequence[str] | None = None) -> None:
    """Train a card, and print both rows."""
    args = arguments_of(line)
    job = Job.of(args)
    if args.estimate_only:
        parts = ("static", "activations", "workspace", "shared", "graphs", "peak")
        memory = job.estimate()
        sizes = (f"{name} {getattr(memory, name) / GIB:.1f}" for name in parts)
        print(f"estimate, GiB a GPU: {', '.join(sizes)}", flush=True)
        return
    figures = job.train(args)
    if figures:
        print("\n".join([*heading(*TITLES), *rows_of(job, figures), "", conditions(job)]))
        print(f"losses: {figures['losses']}", flush=True)


if __name__ == "__main__":
    main()
