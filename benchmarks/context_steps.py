"""Measured training on long rows, whole or packed; all context-parallel ranks run this program.

    torchrun --nproc-per-node 4 -m benchmarks.context_steps --cp 4 --length 32768 --rows packed

``benchmarks/context_parallel.py`` runs this program and prints the table. The training is that of
``benchmarks/train_shapes.py``, with one row per step. ``--rows packed`` gives the model the lengths
of the documents; ``--rows mask`` describes the same documents by a dense mask. With
``--rows transformers``, Hugging Face's model trains on them in a single process, with the attention
that ``--attention`` names.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.measure import Measure, flops_per_token
from benchmarks.packed_attention import ATTENTIONS, choose_attention, packed_inputs, register
from benchmarks.shapes import SHAPES, Tokens, Trained
from benchmarks.step_callbacks import OptimizerTime, Profile
from lightning_megatron import MegatronStrategy
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.models.config import GPTConfig

#: Kinds of rows: one document; documents by lengths, by a dense mask, or with transformers.
ROWS = ("whole", "packed", "mask", "transformers")
#: Length of the shortest random document (tokens).
_SHORTEST = 64


def document_lengths(length: int) -> list[int]:
    """Return random log-uniform document lengths up to half of the row, which fill it (tokens)."""
    generator = torch.Generator().manual_seed(length)
    lengths: list[int] = []
    remaining = length
    while remaining > 0:
        fraction = float(torch.rand((), generator=generator))
        drawn_length = int(_SHORTEST * (max(2 * _SHORTEST, length // 2) / _SHORTEST) ** fraction)
        lengths.append(min(drawn_length, remaining))
        remaining -= lengths[-1]
    return lengths


def seen_length(lengths: list[int]) -> int:
    """Return the length of a single document with equally many attention pairs per token."""
    return round(sum(length * length for length in lengths) / sum(lengths))


def shape_of(args: argparse.Namespace) -> GPTConfig:
    """Return the configuration of the model that is trained."""
    fields = {**vars(SHAPES[args.model]), "max_seq_length": args.length}
    if args.layers:
        fields["num_layers"] = args.layers
    if args.vocabulary:
        fields["vocab_size"] = args.vocabulary
    return GPTConfig(**fields)


class Rows(Tokens):
    """Dataset of random token rows, with the lengths of the documents in each row."""

    def __init__(self, config: GPTConfig, num_samples: int, lengths: list[int]) -> None:
        super().__init__(config, num_samples)
        self.lengths = lengths

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "lengths": torch.tensor(self.lengths)}


class TrainedOnDocuments(Trained):
    """GPT that trains on packed rows; lengths or a dense mask describe the documents."""

    def __init__(self, config: GPTConfig, lengths: list[int], has_mask: bool) -> None:
        super().__init__(config)
        self.lengths = lengths
        self.has_mask = has_mask
        self._mask: AttentionSpan | None = None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss."""
        assert self.model is not None, "configure_model runs before the first step"
        span = AttentionSpan(batch["lengths"], max(self.lengths))
        if self.has_mask:
            self._mask = self._mask or self._dense(batch["tokens"].device)
            span = self._mask
        return self.model(batch["tokens"], batch["labels"], span=span).mean()

    def _dense(self, device: torch.device) -> AttentionSpan:
        sizes = torch.tensor(self.lengths, device=device)
        documents = torch.arange(len(self.lengths), device=device).repeat_interleave(sizes)
        positions = torch.cat([torch.arange(size, device=device) for size in self.lengths])
        mask = (documents[:, None] == documents)[None, None]
        return AttentionSpan(mask=mask, positions=positions[None])


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train under the strategy, and return the measurements."""
    config = shape_of(args)
    lengths = [args.length] if args.rows == "whole" else document_lengths(args.length)
    out = Path(args.out)
    measure = Measure(
        str(out),
        f"{args.model} cp{args.cp} {args.length} {args.rows}",
        args.warmup,
        args.steps,
        seq_length=seen_length(lengths),
        row_steps=args.row_steps,
    )
    callbacks: list[Any] = [measure, OptimizerTime(args.warmup, args.steps)]
    steps = measure.last_step if args.row_steps else args.warmup + args.steps
    profile = Profile(
        out.with_suffix(".trace.json.gz"), steps, device_only=True, num_steps=args.profile_steps
    )
    if args.profile:
        callbacks.append(profile)
        steps = profile.last
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.cp,
        strategy=MegatronStrategy(
            cp=args.cp,
            cp_transport=args.transport,
            microbatch_size=1,
            overlap_parameters=True,
            **json.loads(args.options),
        ),
        precision="bf16-mixed",
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.gettempdir(),
    )
    module = Trained(config)
    data = Tokens(config, steps)
    if args.rows != "whole":
        module = TrainedOnDocuments(config, lengths, args.rows == "mask")
        data = Rows(config, steps, lengths)
    trainer.fit(module, DataLoader(data, batch_size=1))
    figures = {**measure.figures, "documents": len(lengths), "profile": profile.result}
    if trainer.is_global_zero:
        out.write_text(json.dumps(figures))
    return figures


def train_transformers(args: argparse.Namespace) -> dict[str, Any]:
    """Train Hugging Face's Llama of the shape on packed rows, and return the measurements."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = shape_of(args)
    lengths = document_lengths(args.length)
    device = torch.device(args.accelerator)
    attention = choose_attention(args.attention, device)
    register()
    peer_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=args.length,
    )
    torch.manual_seed(1)
    with device:
        model = LlamaForCausalLM._from_config(
            peer_config, dtype=torch.bfloat16, attn_implementation=ATTENTIONS[attention]
        )
    model.train()
    if json.loads(args.options).get("recompute") == "full":
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    data = Tokens(config, args.warmup + args.steps)
    seconds, losses = [], []
    for index in range(len(data)):
        start = time.perf_counter()
        tokens = data[index]["tokens"][None].to(device)
        documents = packed_inputs(lengths, device)
        # With a key/value cache, transformers would not detect documents from the positions.
        loss = model(input_ids=tokens, labels=tokens, use_cache=False, **documents).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
    median_seconds = statistics.median(seconds[args.warmup :])
    peak_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    flops = flops_per_token(config, seen_length(lengths)) * args.length
    figures = {
        "step_ms": round(median_seconds * 1e3, 2),
        "fastest_ms": round(min(seconds[args.warmup :]) * 1e3, 2),
        "tokens_per_second_per_rank": round(args.length / median_seconds),
        "model_tflops_per_rank": round(flops / median_seconds / 1e12, 1),
        "peak_gib": round(peak_bytes / 2**30, 2),
        "losses": losses,
        "documents": len(lengths),
        "attention": attention,
    }
    Path(args.out).write_text(json.dumps(figures))
    return figures


def parser() -> argparse.ArgumentParser:
    """Build the parser of the options of one training."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--model", default="llama8b_half", choices=list(SHAPES))
    result.add_argument(
        "--layers", type=int, default=0, help="number of layers (0: as in the shape)"
    )
    result.add_argument(
        "--vocabulary", type=int, default=0, help="size of the vocabulary (0: as in the shape)"
    )
    result.add_argument("--cp", type=int, default=1, help="ranks that share a row")
    result.add_argument("--transport", default="auto", help="cp_transport of the strategy")
    result.add_argument("--length", type=int, default=4096, help="length of the rows (tokens)")
    result.add_argument("--rows", default="whole", choices=ROWS)
    result.add_argument(
        "--attention",
        default="auto",
        choices=["auto", *ATTENTIONS],
        help="attention of transformers (auto: flash attention on a GPU, else a dense mask)",
    )
    result.add_argument("--steps", type=int, default=6, help="measured steps")
    result.add_argument("--warmup", type=int, default=3, help="steps before the measured steps")
    result.add_argument("--row-steps", type=int, default=0, help="later steps in a row")
    result.add_argument(
        "--options", default="{}", help="further arguments of the strategy, as JSON"
    )
    result.add_argument("--profile", action="store_true", help="measure exposed communication")
    result.add_argument(
        "--profile-steps", type=int, default=3, help="profiled steps (1 suits steps of seconds)"
    )
    result.add_argument("--accelerator", default="cuda", choices=["cuda", "cpu"])
    result.add_argument("--out", default="runs/context_steps.json", help="file of the measurements")
    return result


if __name__ == "__main__":
    options = parser().parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    (train_transformers if options.rows == "transformers" else train)(options)
