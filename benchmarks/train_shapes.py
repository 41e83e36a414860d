"""Measured training of one shape under one layout on random tokens; every rank runs this program.

    torchrun --nproc-per-node 4 -m benchmarks.train_shapes --model llama8b_half --layout dp4
    torchrun --nproc-per-node 4 -m benchmarks.train_shapes --layout cp4 --length 32768 --rows packed

The training uses AdamW (fused, lr 1e-4, weight decay 0.01), gradient clipping at 1.0, float32 main
parameters and gradients, and random tokens from the CPU. The time of a step starts at the end of
the previous step and includes loading the batch and all work of Lightning. The host waits for the
device after each step, or not at all with ``--in-a-row``. Products in 8 bits are an option of the
strategy, ``--options '{"fp8": "tensorwise"}'``. ``--rows packed`` gives the model the lengths of
random documents in each row, and ``--rows mask`` describes the same documents by a dense mask.
``--workloads W1,W2`` measures one workload of experts after the other (``benchmarks/routing.py``;
without names, all eight). ``benchmarks/step.py`` runs this program with several options and prints
a table.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from benchmarks.measure import FLOP_RULE, QUIET, Measure, merged, option_parser
from benchmarks.routing import WORKLOADS
from benchmarks.shapes import (
    LAYOUTS,
    ROWS,
    SHAPES,
    PackedTokens,
    Tokens,
    Trained,
    TrainedOnDocuments,
    changed,
    document_lengths,
    seen_length,
)
from benchmarks.step_callbacks import GraphFigures, OptimizerTime, SaveStall, StageTimes
from benchmarks.workload_figures import WorkloadFigures, steps_each
from lightning_megatron import MegatronStrategy, Profile
from lightning_megatron.errors import SpeedWarning
from lightning_megatron.models.config import GPTConfig

_WITH_RESULTS = (OptimizerTime, StageTimes, SaveStall, GraphFigures, WorkloadFigures)


def build_callbacks(
    args: argparse.Namespace, out: Path, lengths: list[int]
) -> tuple[list[Any], int]:
    """Return the callbacks, and the number of steps that they need."""
    names = args.workloads.split(",") if args.workloads else []
    end = len(names) * steps_each(args) or args.warmup + args.steps
    measure = Measure(
        str(out),
        f"{args.model} {args.layout}",
        warmup=args.warmup,
        steps=end - args.warmup,
        in_a_row=args.in_a_row or bool(names),
        seq_length=seen_length(lengths),
        row_steps=args.row_steps,
    )
    callbacks: list[Any] = [measure, GraphFigures()]
    if names:
        return [*callbacks, WorkloadFigures(names, args.warmup, args.steps)], end
    end = measure.last_step if args.row_steps else end
    if args.profile:
        host = not args.device_only or args.accelerator == "cpu"
        profile = Profile(end, args.profile_steps, folder=args.profile, host=host)
        callbacks.append(profile)
        end = profile.steps.stop
    if args.time_optimizer:
        callbacks.append(OptimizerTime(args.warmup, args.steps))
    if args.time_actions:
        callbacks.append(StageTimes(end))
        end += 1
    if args.async_save:
        callbacks.append(SaveStall(Path(args.async_save), measure, end, args.save_steps))
        end += 2 * args.save_steps
    return callbacks, end


def module_and_data(
    args: argparse.Namespace, config: GPTConfig, num_samples: int, batch: int, lengths: list[int]
) -> tuple[Trained, Tokens]:
    """Return the module and the dataset of a kind of rows."""
    if args.rows == "whole":
        num_tokens = microbatch_of(args, batch) * config.max_seq_length
        routing = args.workloads or ("balanced" if args.forced_balance else args.routing)
        steps = steps_each(args) if args.workloads else 0
        module = Trained(config, routing, num_tokens, steps)
        return module, Tokens(config, num_samples)
    module = TrainedOnDocuments(config, lengths, args.rows == "mask")
    return module, PackedTokens(config, num_samples, lengths)


def microbatch_of(args: argparse.Namespace, batch: int) -> int:
    """Return the samples of a microbatch."""
    usual = 1 if LAYOUTS[args.layout].pp > 1 else batch
    return int(json.loads(args.options).get("microbatch_size", usual))


def trainer_of(
    args: argparse.Namespace, batch: int, options: Mapping[str, Any], **trainer: Any
) -> Trainer:
    """Return the Trainer of one shape under the layout of ``args``.

    Args:
        batch: Samples of one data-parallel rank.
        options: Arguments of the strategy, below those of ``--options``.
        trainer: Further arguments of the Trainer.
    """
    layout = LAYOUTS[args.layout]
    # No callback reads parameters, so gathering them can overlap with the next step.
    usual: dict[str, Any] = {
        "optimizer": {"overlap_parameters": True},
        "microbatch_size": microbatch_of(args, batch),
    }
    chosen = merged(usual, options, json.loads(args.options))
    return Trainer(
        accelerator=args.accelerator,
        devices=layout.devices,
        strategy=MegatronStrategy(tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep, **chosen),
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        **(QUIET | trainer),
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the measurements of this rank."""
    layout = LAYOUTS[args.layout]
    config = changed(args.model, layers=args.layers, length=args.length, vocabulary=args.vocabulary)
    length = config.max_seq_length
    lengths = [length] if args.rows == "whole" else document_lengths(length)
    batch = args.batch or layout.batch(args.model)
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    callbacks, steps = build_callbacks(args, out, lengths)
    saves = {"async_save": bool(args.async_save)}
    trainer = trainer_of(args, batch, saves, max_steps=steps, callbacks=callbacks)
    num_samples = steps * batch * layout.data_ranks
    module, samples = module_and_data(args, config, num_samples, batch, lengths)
    trainer.fit(module, DataLoader(samples, batch_size=batch, drop_last=True))
    results: dict[str, Any] = {"documents": len(lengths)}
    for callback in callbacks:
        if isinstance(callback, Measure):
            results.update(callback.figures)
        elif isinstance(callback, Profile) and callback.table is not None:
            results["Profile"] = callback.table.as_dict()
        elif isinstance(callback, _WITH_RESULTS):
            results[type(callback).__name__] = callback.result
    if trainer.is_global_zero:
        out.write_text(json.dumps(results))
        print(FLOP_RULE, flush=True)
    return results


def add_training(result: argparse.ArgumentParser) -> None:
    """Add the options of one training that its callers have, too."""
    add = result.add_argument
    add("--model", default="llama8b_half", choices=list(SHAPES))
    add("--layers", type=int, default=0, help="number of layers (0: as in the shape)")
    add("--vocabulary", type=int, default=0, help="size of the vocabulary (0: as in the shape)")
    add("--steps", type=int, default=8, help="measured steps")
    add("--warmup", type=int, default=4, help="steps before the measured steps")
    add(
        "--row-steps",
        type=int,
        default=0,
        help="steps to measure in a row after the measured ones, without waits of the host",
    )
    add("--profile-steps", type=int, default=3, help="profiled steps")
    add("--forced-balance", action="store_true", help="route tokens to experts in turn")
    add("--options", default="{}", help="further arguments of the strategy, as JSON")
    add("--accelerator", default="cuda", choices=["cuda", "cpu"])


def parser() -> argparse.ArgumentParser:
    """Build the parser of the options of one training."""
    result = option_parser(__doc__)
    add_training(result)
    add = result.add_argument
    add("--layout", default="dp4", choices=list(LAYOUTS))
    add("--length", type=int, default=0, help="tokens of a row (0: as in the shape)")
    add("--rows", default="whole", choices=ROWS, help="documents in a row")
    add("--batch", type=int, default=0, help="samples of one data-parallel rank (0: by the layout)")
    add("--in-a-row", action="store_true", help="do not wait for the device between the steps")
    add("--profile", default="", help="folder for a trace and the parts of some steps")
    add("--device-only", action="store_true", help="profile no operators of the host")
    add("--time-optimizer", action="store_true", help="time the optimizer's step alone")
    add("--time-actions", action="store_true", help="record the actions of a step on all stages")
    add("--async-save", default="", help="save in the background to this folder")
    add("--save-steps", type=int, default=20, help="steps to measure after each save")
    add(
        "--routing",
        default="natural",
        help="natural, balanced or a workload, such as W2; see benchmarks/routing.py",
    )
    add(
        "--workloads",
        nargs="?",
        const=",".join(WORKLOADS),
        default="",
        help="workloads of experts to measure one after the other, separated by commas",
    )
    add("--out", default="runs/train_shapes.json", help="file for the measurements of rank 0")
    return result


def training_line(
    args: argparse.Namespace, options: Mapping[str, Any], **changes: Any
) -> list[str]:
    """Return the command line of one training, without its file of measurements.

    Args:
        args: Options of the calling program; those that this program has are passed on.
        options: Arguments of the strategy, on top of ``--options``.
        changes: Options of this program that replace those of ``args``.
    """
    given = {**vars(args), **changes}
    given["options"] = json.dumps(merged(json.loads(args.options), options))
    line: list[str] = []
    for name, default in vars(parser().parse_args([])).items():
        value = given.get(name, default)
        if name == "out" or value == default:
            continue
        flag = "--" + name.replace("_", "-")
        line += [flag] if value is True else [flag, str(value)]
    return line


if __name__ == "__main__":
    given = parser().parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("default", category=SpeedWarning)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    run(given)
