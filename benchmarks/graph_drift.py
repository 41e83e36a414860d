"""Search for the first step and tensors in which training by CUDA graphs differs from eager.

    python -m benchmarks.graph_drift
    python -m benchmarks.graph_drift --model tiny --layout single --settings eager segments full

Each setting trains a few steps, and the program compares it bit by bit with another training (its
twin), by default the eager one: the loss, then the gradients, then the updated parameters of each
step. All settings run in the same process of each rank, the most informative ones first. The
program prints one line for each setting.

If ``segments`` differs, the other lines mean:

* ``eager again`` differs: eager steps are not deterministic, so graphs cannot equal them.
* ``segments again`` (twin: ``segments``) differs: the result depends on the order of kernels, by a
  race or by a kernel that adds partial sums in their order of arrival. If it is equal, the graphs
  deterministically compute other values than eager steps.
* ``no overlap``, ``no cuts`` and ``one bucket`` are equal: the cause is the gradient sums that run
  during replays. If ``math attention`` and ``few blocks of NCCL`` are also equal, the cause is
  attention's backward pass, whose order of sums depends on the available multiprocessors. The first
  lines of the output show this directly: they report repeats of this pass beside other work.
* ``deterministic`` (``deterministic full``) is equal, with only deterministic algorithms of torch
  (flash attention in place of cuDNN): the cause is cuDNN's backward pass of attention.
* ``synchronised`` is equal: a replay begins before a tensor that it reads is complete. Only
  ``serial`` is equal: collectives and replays interfere with each other.
* ``gathered at once`` is equal: a forward pass reads parameters before they have arrived.
* ``all-gather`` is equal: the cause is the one-sided puts of tokens.
* ``only ...`` differs: the cause is in this scope.

A gradient that differs in its last bits (gaps below 1e-4) indicates another order of sums. A
gradient that differs as a whole indicates a tensor that was read too early or overwritten.
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
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.drift_settings import Setting, chosen_settings, deterministic, settings_of
from benchmarks.ranks import gpu_of, run_ranks
from benchmarks.shapes import LAYOUTS, SHAPES, Tokens, Trained
from benchmarks.step_trace import Trace, Tracer, first_difference, largest_gap
from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import CaptureError, ParallelPlanError, UnsupportedError
from lightning_megatron.layers.attention.core import attend
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.models.config import GPTConfig
from tests.tape import TapeBackend

#: Prefix of the lines of rank 0 that the main process prints.
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
        """Train with a setting, and print the first difference from its twin."""
        start = time.perf_counter()
        try:
            result = self._compared(setting)
        except (CaptureError, ParallelPlanError, UnsupportedError) as error:
            # All ranks raise these errors together, before further communication.
            result = f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"
        self._say(f"{setting.name}: {result}, {time.perf_counter() - start:.1f} s")

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
        """Train with a setting, keep its traces, and return the callback that recorded them."""
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
            num_alone, num_beside = attention_repeats(config_of(args), device)
        ending = "" if num_beside is None else f", {num_beside} of 40 beside other work"
        say(f"attention's backward pass{title}: {num_alone} of 40 repeats differ alone{ending}")
    comparison = Search(args, say)
    for setting in settings_in(args):
        comparison.run(setting)
    dist.barrier()
    dist.destroy_process_group()


def parser() -> argparse.ArgumentParser:
    """Build the parser of the options."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--model", default="tiny_moe", choices=list(SHAPES))
    result.add_argument("--layout", default="ep2", choices=list(LAYOUTS))
    result.add_argument(
        "--layers", type=int, default=0, help="number of layers (0: that of the shape)"
    )
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
    result.add_argument("--seconds", type=float, default=230.0, help="seconds for all settings")
    result.add_argument("--log", default="runs/graph_drift.log", help="file of all output")
    result.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    return result


def lines_of(arguments: Sequence[str]) -> tuple[list[str], str]:
    """Run the search on all ranks; return its lines, and the reason for an early end or "".

    Args:
        arguments: Arguments of the program.

    Raises:
        ValueError: If a setting is unknown.
    """
    args = parser().parse_args(arguments)
    settings_in(args)
    command = ["-m", "benchmarks.graph_drift", *arguments, "--as-rank"]
    outcome = run_ranks(command, LAYOUTS[args.layout].devices, Path(args.log), args.seconds)
    lines = [line for line in outcome.output.splitlines() if line.startswith(_MARK)]
    return [line.removeprefix(_MARK) for line in lines], outcome.failure


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


def attention_repeats(
    config: GPTConfig, device: torch.device, repeats: int = 40
) -> tuple[int, int | None]:
    """Count the runs of attention's backward pass whose bits differ from the first run.

    Args:
        config: Model that gives the number of heads and the sequence length.
        device: Device that computes.
        repeats: Number of runs after the first run.

    Returns:
        Number of differing runs without other work, and number of differing runs while matrix
        products on another stream occupy multiprocessors; the second is None on a CPU.
    """
    generator = torch.Generator(device).manual_seed(3)

    def drawn(heads: int) -> Tensor:
        shape = (config.max_seq_length, 1, heads, config.head_size)
        values = torch.randn(shape, device=device, generator=generator)
        return values.bfloat16().requires_grad_()

    query, key, value = (
        drawn(heads) for heads in (config.num_heads, config.kv_heads, config.kv_heads)
    )
    grad_output = drawn(config.num_heads).detach().flatten(2)

    def gradients() -> tuple[Tensor, ...]:
        output = attend(query, key, value, AttentionSpan())
        return torch.autograd.grad(output, (query, key, value), grad_output)

    first_gradients = gradients()

    def count(start_other_work: Callable[[], None]) -> int:
        num_differing = 0
        for _ in range(repeats):
            start_other_work()
            pairs = zip(gradients(), first_gradients, strict=True)
            num_differing += not all(torch.equal(*pair) for pair in pairs)
        return num_differing

    num_differing_alone = count(lambda: None)
    if device.type != "cuda":
        return num_differing_alone, None
    factor = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()

    def multiply() -> None:
        with torch.cuda.stream(stream):
            for _ in range(8):
                torch.mm(factor, factor)

    stream.wait_stream(torch.cuda.current_stream())
    return num_differing_alone, count(multiply)
