"""Fine-tuning of a local Hugging Face folder under several layouts: equal losses, and speed.

    python -m benchmarks.finetune --create FOLDER --tokenizer tokenizer.json
    python -m benchmarks.finetune --folder FOLDER --layouts tp4 tp2_pp2 dp4
    python -m benchmarks.finetune --folder FOLDER --layouts tp2_pp2 --export trained --steps 4
    python -m benchmarks.finetune --folder FOLDER --layouts dp4 --chat conversations.jsonl

``--create`` writes random weights of a shape with transformers (``--shape``, by default
Llama-3-8B). Every layout sees the same samples in every step. Times are those of whole steps, after
each of which the host waits for the device. ``benchmarks/measure.py`` computes tokens, FLOPs
(causal half) and memory. ``--export`` converts the recipe's checkpoint to a Hugging Face folder.
With ``--chat``, samples are packed conversations; their FLOPs count attention to the whole sample,
as if it were one document. The command fails if the losses of two layouts differ by more than
``--tolerance``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import FLOP_RULE, heading, option_parser
from benchmarks.recipe_runs import (
    add_run_arguments,
    check_same,
    figures_of,
    options_of_layout,
    options_to_measure,
    run_recipe,
)
from benchmarks.shapes import LAYOUTS

SHAPES: dict[str, dict[str, Any]] = {
    "llama3_8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "tiny": {
        "vocab_size": 50304,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
    },
}
TITLES = (
    "layout",
    "ms a step",
    "fastest",
    "tokens/s/GPU",
    "TFLOP/s/GPU",
    "GiB a GPU",
    "start to first step, s",
    "losses",
)


def create(folder: Path, shape: str, tokenizer: str) -> None:
    """Write a folder of random weights in bfloat16, generated on a GPU if available."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1234)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**SHAPES[shape]), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    if Path(tokenizer).is_dir():
        shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    else:
        shutil.copy(tokenizer, folder / "tokenizer.json")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(
        f"{folder}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters, "
        f"{size / 1e9:.1f} GB",
        flush=True,
    )


def options_of(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the options of the recipe for a layout."""
    options = {
        **options_of_layout(args, name),
        "model.path": args.folder,
        "model.dtype": "auto",
        "model.warmup_steps": 2,
        "trainer.max_steps": args.steps,
        "trainer.log_every_n_steps": 1,
        "trainer.default_root_dir": f"{args.out}/{name}",
        "data.seq_length": args.seq_length,
        "data.tokenizer": args.folder,
    }
    if args.chat:
        options |= {"data.train": args.chat, "data.val": args.chat}
        options |= {"data.global_batch_size": args.batch}
    else:
        options |= {
            "data.batch_size": args.batch // LAYOUTS[name].data_ranks,
            "data.data_dir": f"{args.out}/data",
        }
    if args.export:
        return options | {"trainer.val_check_interval": args.steps, "trainer.limit_val_batches": 1}
    return options | options_to_measure(args, name, seq_length=args.seq_length)


def train(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Run the recipe under a layout and return the measurements of its steps."""
    recipe = "sft_hf" if args.chat else "finetune_hf"
    start = time.perf_counter()
    run_recipe(args, f"recipe:{recipe}", options_of(args, name))
    seconds = time.perf_counter() - start
    if args.export:
        print(f"{name}: trained and saved in {seconds:.0f} s", flush=True)
        return {}
    return figures_of(args, name)


def export(args: argparse.Namespace, name: str) -> None:
    """Convert the checkpoint of the recipe to a Hugging Face folder."""
    (checkpoint,) = Path(args.out, name).glob("**/checkpoints/*.ckpt")
    start = time.perf_counter()
    command = [sys.executable, "-m", "lightning_megatron", "convert", str(checkpoint), args.export]
    subprocess.run(
        [*command, "--dtype", "bfloat16", "--tokenizer", args.folder],
        check=True,
        timeout=args.timeout,
    )
    size = sum(file.stat().st_size for file in Path(args.export).iterdir())
    print(f"{args.export}: {size / 1e9:.1f} GB in {time.perf_counter() - start:.0f} s", flush=True)


def row(name: str, figures: dict[str, Any]) -> str:
    """Return the row of a layout in the table."""
    losses = " ".join(f"{loss:.4f}" for loss in figures["losses"])
    return (
        f"| {name} | {figures['step_ms']} | {figures['fastest_ms']} | "
        f"{figures['tokens_per_second_per_rank']:,} | "
        f"{figures['model_tflops_per_rank']} | {figures['peak_gib']} | "
        f"{figures['seconds_to_first_step']} | {losses} |"
    )


def main() -> None:
    """Create the folder, or train from it."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--create", metavar="FOLDER", help="write a folder of random weights")
    add("--shape", default="llama3_8b", choices=list(SHAPES), help="shape of the random weights")
    add("--tokenizer", help="tokenizer.json, or its folder, to copy into the created folder")
    add("--folder", help="Hugging Face folder to fine-tune")
    add("--chat", metavar="FILE", help="conversations (.jsonl) that sft_hf packs into samples")
    add("--seq-length", type=int, default=4096, help="tokens of a sample")
    add("--export", metavar="FOLDER", help="save a checkpoint, and export it to this folder")
    add_run_arguments(
        parser,
        layouts=["tp4", "tp2_pp2", "dp4"],
        steps=12,
        batch=4,
        tolerance=0.05,
        timeout=500.0,
        out="runs/finetune",
    )
    args = parser.parse_args()
    if args.create:
        create(Path(args.create), args.shape, args.tokenizer)
        return
    figures_by_layout = {name: train(args, name) for name in args.layouts}
    if args.export:
        export(args, args.layouts[-1])
        return
    rows = [row(name, figures) for name, figures in figures_by_layout.items()]
    print("\n".join([*heading(*TITLES), *rows, "", FLOP_RULE]), flush=True)
    check_same(figures_by_layout, args.tolerance)


if __name__ == "__main__":
    main()
