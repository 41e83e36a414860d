"""Search for the first step and tensors in which a training by CUDA graphs leaves the eager one.

    python -m benchmarks.graph_drift
    python -m benchmarks.graph_drift --model tiny --layout single --settings eager segments full

Each setting trains a few steps, and is compared bit by bit with the eager training (its twin): the
loss, then the gradients, then the updated parameters of each step. All settings run in one process
of each rank, the most telling ones first; one line follows each.

What the lines tell, if ``segments`` differs:

* ``eager again`` differs: eager steps are not deterministic, so no graph can equal them.
* ``segments again`` (compared with ``segments``) differs: the order of kernels decides, which means
  a race or a kernel that sums in the order in which its parts arrive. If it is equal, the graphs
  compute something else.
* ``no overlap``, ``no cuts``, ``one bucket`` are equal: the sums of gradients that run while graphs
  are replayed decide; with ``math attention`` and ``few blocks of NCCL`` also equal, attention's
  backward pass, whose sums depend on the multiprocessors that it gets. The first line, in which it
  runs beside other work, shows that directly.
* ``deterministic`` is equal, in which torch takes deterministic algorithms alone (attention by
  flash in place of cuDNN): cuDNN's backward pass of attention.
* ``synchronised`` is equal: a replay begins before something that it reads is complete. Only
  ``serial`` is equal: collectives and replays disturb each other.
* ``gathered at once`` is equal: a forward pass reads parameters before they have arrived.
* ``all-gather`` is equal: the one-sided puts of tokens.
* ``only ...``: the scope that differs alone.

A gradient that differs in single bits (gaps below 1e-4) points to the order of sums; one that
differs as a whole, to a tensor that was read too early or overwritten.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from benchmarks.attention_repeats import attention_repeats
from benchmarks.drift_settings import Setting, chosen_settings, deterministic, settings_of
from benchmarks.ranks import gpu_of, run_ranks
from benchmarks.step_trace import Trace, Tracer, first_difference, largest_gap
from benchmarks.train_shapes import LAYOUTS, SHAPES, Tokens, Trained
from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import CaptureError, ParallelPlanError, UnsupportedError
from lightning_megatron.graphs.tape import TapeBackend
from lightning_megatron.models.config import GPTConfig

#: Start of the lines of rank 0 that the program prints again.
_MARK = "DRIFT "


def config_of(args: argparse.Namespace) -> GPTConfig:
    """Return the configuration of the model."""
    config = SHAPES[args.model]
    return GPTConfig(**{**vars(config), "num_layers": args.layers or config.num_layers})


def settings_in(args: argparse.Namespace) -> list[Setting]:
    """Return the settings to compare, in the order of their trainings."""
    return chosen_settings(settings_of(config_of(args), LAYOUTS[args.layout]), args.settings)


class Search:
    """Trainings of one process, each compared with its twin.

    Args:
        args: Arguments of the program.
        say: Function that prints a line.
    """

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._args = args
        self._say = say
        self._config = config_of(args)
        self._traces: dict[str, list[Trace]] = {}

    def run(self, setting: Setting) -> None:
        """Train with a setting, and print in what it differs from its twin."""
        start = time.perf_counter()
        try:
            found = self._compared(setting)
        except (CaptureError, ParallelPlanError, UnsupportedError) as error:
            # All ranks raise it together, before they communicate further.
            found = f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"
        self._say(f"{setting.name}: {found}, {time.perf_counter() - start:.1f} s")

    def _compared(self, setting: Setting) -> str:
        twin = setting.twin
        if setting.has_own_twin:
            twin = f"{setting.name}, eager"
            self._train(Setting(twin, None, setting.options, setting.around))
        tracer = self._train(setting)
        losses = tracer.traces[0].losses
        if setting.name == twin:
            transports = f", experts by {', '.join(tracer.transports)}" if tracer.transports else ""
            return f"losses {losses[0]:.4f} to {losses[-1]:.4f}{transports}"
        if twin not in self._traces:
            return f"not compared: {twin} has failed"
        expected = self._traces[twin]
        difference = first_difference(expected, tracer.traces)
        graphs = f"{tracer.num_graphs} graphs"
        if difference is None:
            return f"equal to {twin} in all bits of {len(losses)} steps, {graphs}"
        gap = largest_gap(expected, tracer.traces)
        return (
            f"differs from {twin} first in {difference}; losses at most {gap:.1e} apart, {graphs}"
        )

    def _train(self, setting: Setting) -> Tracer:
        """Train, keep the traces, and return what has been recorded."""
        args = self._args
        layout = LAYOUTS[args.layout]
        batch = layout.batch(args.model)
        options: dict[str, Any] = {
            "microbatch_size": 1 if layout.pp > 1 else batch,
            # No callback reads parameters, so gathering them can overlap with the next step.
            "overlap_parameters": layout.data_ranks > 1,
            **json.loads(args.options),
            **setting.options,
        }
        if setting.graphs is not None:
            options["cuda_graphs"] = setting.graphs
        strategy = MegatronStrategy(tp=layout.tp, pp=layout.pp, ep=layout.ep, **options)
        if setting.graphs is not None and args.accelerator == "cpu":
            strategy._make_backend = lambda mesh: TapeBackend(mesh.launcher)
        tracer = Tracer(waits=not args.in_a_row)
        trainer = Trainer(
            accelerator=args.accelerator,
            devices=layout.devices,
            strategy=strategy,
            precision="bf16-mixed",
            max_steps=args.steps,
            gradient_clip_val=1.0,
            callbacks=[tracer],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tempfile.gettempdir(),
        )
        data = Tokens(self._config, args.steps * batch * layout.data_ranks)
        with setting.around():
            trainer.fit(
                Trained(self._config, args.forced_balance),
                DataLoader(data, batch_size=batch, drop_last=True),
            )
        self._traces[setting.name] = tracer.traces
        del trainer, strategy
        gc.collect()
        if args.accelerator == "cuda":
            torch.cuda.empty_cache()
        return tracer


def search(args: argparse.Namespace) -> None:
    """Run all chosen settings as one of the ranks."""
    rank = int(os.environ["RANK"])
    is_gpu = args.accelerator == "cuda"
    device = gpu_of(rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        timeout=timedelta(seconds=args.seconds),
        device_id=device if is_gpu else None,
    )

    def say(line: str) -> None:
        if rank == 0:
            print(_MARK + line, flush=True)

    for title, around in (("", nullcontext), (" by deterministic algorithms", deterministic)):
        with around():
            alone, beside = attention_repeats(config_of(args), device)
        other = "" if beside is None else f", {beside} of 40 beside other work"
        say(f"attention's backward pass{title}: {alone} of 40 repeats differ alone{other}")
    one = Search(args, say)
    for setting in settings_in(args):
        one.run(setting)
    dist.barrier()
    dist.destroy_process_group()


def parser() -> argparse.ArgumentParser:
    """Build the parser of the options."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--model", default="tiny_moe", choices=list(SHAPES))
    result.add_argument("--layout", default="ep2", choices=list(LAYOUTS))
    result.add_argument("--layers", type=int, default=0, help="number of layers (0: of the shape)")
    result.add_argument("--steps", type=int, default=12, help="steps of each training")
    result.add_argument("--settings", nargs="*", default=[], help="names of settings (default all)")
    result.add_argument("--options", default="{}", help="more arguments of the strategy, as JSON")
    result.add_argument(
        "--no-forced-balance",
        dest="forced_balance",
        action="store_false",
        help="route tokens by score, not in turn",
    )
    result.add_argument(
        "--in-a-row", action="store_true", help="do not wait for the device between the steps"
    )
    result.add_argument("--accelerator", default="cuda", choices=["cuda", "cpu"])
    result.add_argument("--seconds", type=float, default=230.0, help="time for all settings")
    result.add_argument("--log", default="runs/graph_drift.log", help="file of all output")
    result.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    return result


def lines_of(arguments: Sequence[str]) -> tuple[list[str], str]:
    """Run the search on all ranks; return its lines, and why it ended early (empty if it did not).

    Args:
        arguments: Arguments of the program.

    Raises:
        ValueError: If a setting is unknown.
    """
    args = parser().parse_args(arguments)
    settings_in(args)
    line = ["-m", "benchmarks.graph_drift", *arguments, "--as-rank"]
    outcome = run_ranks(line, LAYOUTS[args.layout].devices, Path(args.log), args.seconds)
    found = [text for text in outcome.output.splitlines() if text.startswith(_MARK)]
    return [text.removeprefix(_MARK) for text in found], outcome.failure


def main() -> None:
    """Run the search and print its lines."""
    args = parser().parse_args()
    if args.as_rank:
        warnings.filterwarnings("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        search(args)
        return
    lines, failure = lines_of(sys.argv[1:])
    print("\n".join([*lines, *([f"ended early: {failure}"] if failure else [])]), flush=True)


if __name__ == "__main__":
    main()
