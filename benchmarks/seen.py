"""What watching a training costs, and whether it tells the truth; every rank runs this program.

    torchrun --nproc-per-node 2 -m benchmarks.seen --model llama8b_half --layout pp2

Blocks of steps alternate in one training: with ``TrainingMetrics`` and ``StragglerWatch``, and
without. A logger writes the loss in both. ``StragglerWatch`` measures a fifth of the steps, as by
default. The last steps are profiled, and every one of them is logged. The program prints a line of
JSON: time of a step with and without, TFLOP/s and MFU of ``TrainingMetrics`` beside those of the
benchmarks' rule, its bubble beside that of the actions in the trace, and its exposed communication
beside the table of ``Profile``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import re
import warnings
from pathlib import Path
from statistics import fmean, harmonic_mean, median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.measure import Measure, option_parser
from benchmarks.shapes import LAYOUTS, Tokens, Trained, changed
from benchmarks.train_shapes import add_training, trainer_of
from lightning_megatron import Profile, StragglerWatch, TrainingMetrics
from lightning_megatron.strategy.callbacks.training_metrics import published_peak
from lightning_megatron.strategy.private.loops import callbacks_of
from lightning_megatron.strategy.profiling.step_parts import (
    ON_DEVICE,
    OPTIMIZER,
    Interval,
    inside,
    length,
    part_of,
    union,
)

_ACTION = re.compile(r"[FBIW] chunk \d+ microbatch \d+")
#: Parts of a step outside of the passes.
_NO_PASSES = ("communication", OPTIMIZER)
#: Longest gap between two kernels of an action (µs).
_LAUNCH_GAP = 200.0


class Logged(Trained):
    """GPT that logs its loss."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss, and log it."""
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


class InTurn(Callback):
    """Callback that switches others on and off after every block of steps; at first they are on.

    Args:
        first: Number of steps before the first block.
        block: Number of steps of a block.
        last: Number of the step from which on they stay on, and all steps are logged.
    """

    def __init__(self, watching: list[Callback], first: int, block: int, last: int) -> None:
        self.watching = watching
        self.first = first
        self.block = block
        self.last = last
        #: What ``TrainingMetrics`` measured, by the number of steps before the end of its step.
        self.values: dict[int, dict[str, float]] = {}

    def is_on(self, step: int) -> bool:
        """Return whether the callbacks are on in a step."""
        return step >= self.last or step < self.first or (step - self.first) // self.block % 2 == 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Keep the values of the step, and switch for the next one."""
        done = trainer.global_step
        if self.is_on(done - 1):
            for metrics in (one for one in self.watching if isinstance(one, TrainingMetrics)):
                self.values[done - 1] = metrics.values
        if done == self.last:
            trainer.log_every_n_steps = 1  # type: ignore[attr-defined]
        if self.is_on(done) == self.is_on(done - 1) and done != self.first:
            return
        others = [one for one in callbacks_of(trainer, Callback) if one not in self.watching]
        for one in self.watching:
            one.on_exception(trainer, pl_module, KeyboardInterrupt())
        if self.is_on(done):
            for one in self.watching:
                one.on_train_start(trainer, pl_module)
            others = [*self.watching, *others]
        trainer.callbacks = others  # type: ignore[attr-defined]
        # The loader calls the functions that were there when the epoch began.
        loop = trainer.fit_loop
        fetcher: Any = loop._data_fetcher
        fetcher._start_profiler = loop.epoch_loop._on_before_fetch
        fetcher._stop_profiler = loop.epoch_loop._on_after_fetch


def bubbles_of(trace: Path) -> list[float]:
    """Return the share of each step's schedule in which a rank does not compute, by a trace.

    Without GPUs the actions count. On GPUs the kernels of the passes do, because ranges of the host
    do not contain those of backward passes: the schedule lasts from the first product of any rank
    to the end of the last one, and shorter gaps than ``_LAUNCH_GAP`` belong to an action.
    """
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = [one for one in json.load(file)["traceEvents"] if one["ph"] == "X"]
    work = [(one["pid"], _interval(one)) for one in events if _ACTION.fullmatch(one["name"])]
    core = [span for _, span in work]
    kernels = [one for one in events if one["cat"] in ON_DEVICE]
    if kernels:
        named = [(part_of(one["name"]), one) for one in kernels]
        core = [_interval(one) for part, one in named if part in ("products", "attention")]
        work = [(one["pid"], _interval(one)) for part, one in named if part not in _NO_PASSES]
    gap = _LAUNCH_GAP if kernels else 0.0
    num_ranks = len({rank for rank, _ in work})
    bubbles = []
    for step in (one for one in events if one["cat"] == "step" and one["pid"] == 0):
        spans = inside(core, [_interval(step)])
        begin, end = min(spans)[0], max(stop for _, stop in spans)
        busy = 0.0
        for rank in range(num_ranks):
            own = inside([span for one, span in work if one == rank], [(begin, end)])
            whole = union((start, stop + gap) for start, stop in own)
            busy += length(whole) - gap * len(whole)
        bubbles.append(1 - busy / (end - begin) / num_ranks)
    return bubbles


def _interval(event: dict[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def figures_of(
    args: argparse.Namespace, measure: Measure, turns: InTurn, trainer: Trainer, flops: float
) -> dict[str, Any]:
    """Return the figures of the blocks.

    Args:
        flops: FLOPs of a step on one rank.
    """
    blocks = [
        measure.seconds[start : start + args.block]
        for start in range(turns.first, turns.last, args.block)
    ]
    seen = [fmean(block) for block in blocks[::2]]
    unseen = [fmean(block) for block in blocks[1::2]]
    logged = [
        values
        for step, values in turns.values.items()
        if turns.first <= step < turns.last and (step + 1) % args.every == 0
    ]
    tflops = {
        "TrainingMetrics": harmonic_mean([one["train/tflops_per_gpu"] for one in logged]),
        "Measure": flops / fmean(seen) / 1e12,
    }
    figures: dict[str, Any] = {
        "label": f"{args.model} {args.layout}",
        "seen_ms": _milliseconds(seen),
        "unseen_ms": _milliseconds(unseen),
        "cost": median(seen) / median(unseen) - 1,
        "tflops": tflops,
        "tflops_ratio": tflops["TrainingMetrics"] / tflops["Measure"],
    }
    peak = published_peak(trainer)
    if peak is not None:
        mfu = harmonic_mean([one["train/mfu"] for one in logged])
        figures["mfu"] = {"TrainingMetrics": mfu, "Measure": tflops["Measure"] / peak}
    return figures


def _milliseconds(seconds: list[float]) -> list[float]:
    return [round(one * 1e3, 3) for one in seconds]


def profiled(args: argparse.Namespace, turns: InTurn, profile: Profile) -> dict[str, Any]:
    """Return bubble and exposed communication of the profiled steps, measured in two ways."""
    assert profile.table is not None, "steps were profiled"
    values = [turns.values[step] for step in profile.steps]
    stages = profile.table.stages
    exposed = [stage["communication, exposed"] / stage["step"] for stage in stages]
    figures: dict[str, dict[str, Any]] = {}
    for name in ("bubble", "exposed_communication"):
        figures[name] = {"TrainingMetrics": [one.get(f"train/{name}") for one in values]}
    figures["exposed_communication"]["Profile"] = [fmean(exposed)]
    if LAYOUTS[args.layout].pp > 1:
        trace = Path(args.folder) / f"trace_step{profile.step}.json.gz"
        figures["bubble"]["trace"] = bubbles_of(trace)
    return figures


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the figures; print them on rank 0."""
    layout = LAYOUTS[args.layout]
    config = changed(args.model, layers=args.layers, length=args.length, vocabulary=args.vocabulary)
    batch = layout.batch(args.model)
    last = args.warmup + 2 * args.blocks * args.block
    steps = last + args.profile_steps
    watch = StragglerWatch(num_steps=max(args.block // 5, 1), interval=args.block)
    watching: list[Callback] = [TrainingMetrics(), watch]
    turns = InTurn(watching, args.warmup, args.block, last)
    label = f"{args.model} {args.layout}"
    out = Path(args.folder)
    out.mkdir(parents=True, exist_ok=True)
    measure = Measure(str(out / "measure.json"), label, args.warmup, in_a_row=True)
    profile = Profile(last, args.profile_steps, folder=str(out))
    trainer = trainer_of(
        args,
        batch,
        {},
        max_steps=steps,
        log_every_n_steps=args.every,
        callbacks=[*watching, measure, turns, profile],
        logger=CSVLogger(out, "losses"),
    )
    samples = Tokens(config, steps * batch * layout.data_ranks)
    trainer.fit(Logged(config), DataLoader(samples, batch_size=batch, drop_last=True))
    num_tokens = batch * layout.data_ranks * config.max_seq_length
    flops = num_tokens * config.flops_per_token(config.max_seq_length) / layout.devices
    figures = figures_of(args, measure, turns, trainer, flops)
    if trainer.is_global_zero:
        figures |= profiled(args, turns, profile)
        print(json.dumps(figures), flush=True)
    return figures


def parser() -> argparse.ArgumentParser:
    """Build the parser of the options."""
    result = option_parser(__doc__)
    add_training(result)
    add = result.add_argument
    add("--layout", default="pp2", choices=list(LAYOUTS))
    add("--length", type=int, default=0, help="tokens of a row (0: as in the shape)")
    add("--every", type=int, default=10, help="steps from one logged step to the next")
    add("--block", type=int, default=40, help="steps of a block, a multiple of --every")
    add("--blocks", type=int, default=3, help="blocks with callbacks, and as many without")
    add("--folder", default="runs/seen", help="folder for trace, table and losses")
    result.set_defaults(warmup=10)
    return result


if __name__ == "__main__":
    given = parser().parse_args()
    if given.block % given.every or given.warmup % given.every:
        raise SystemExit(
            f"--block ({given.block}) and --warmup ({given.warmup}) must be multiples of --every "
            f"({given.every}), so that all blocks have as many logged steps."
        )
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    run(given)
