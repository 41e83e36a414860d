"""Measured training of one shape under one layout on random tokens; every rank runs this program.

    torchrun --nproc-per-node 4 -m benchmarks.train_shapes --model llama8b_half --layout dp4

The training uses AdamW (fused, lr 1e-4, weight decay 0.01), gradient clipping at 1.0, float32 main
parameters and gradients, and random tokens from the CPU. The time of a step starts at the end of
the previous step and includes loading the batch and all work of Lightning. The host waits for the
device after each step, or not at all with ``--in-a-row``. Products in 8 bits are an option of the
strategy, ``--options '{"fp8": "tensorwise"}'``; ``--fp8-parameters`` also keeps and gathers weights
in 8 bits."""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.graph_figures import GraphFigures
from benchmarks.host_time import HostTime
from benchmarks.launches import count_launches, launches_of
from benchmarks.measure import Measure, mark_on_device
from benchmarks.routing import RankLoad, set_routing
from benchmarks.stage_times import StageTimes
from benchmarks.step_profile import (
    analyse,
    find_steps,
    kernels_of,
    read_events,
    report,
    whole_window,
)
from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import SpeedWarning
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.clone_cost import CloneCost

SHAPES: dict[str, GPTConfig] = {
    "llama8b_half": GPTConfig.llama(
        vocab_size=131072,
        max_seq_length=4096,
        num_layers=16,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14336,
    ),
    "gpt2_1_2b": GPTConfig.gpt2(
        vocab_size=51200, max_seq_length=1024, num_layers=40, hidden_size=1536, num_heads=16
    ),
    "mixtral_s": GPTConfig.llama(
        vocab_size=32768,
        max_seq_length=4096,
        num_layers=4,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14336,
        experts={"num_experts": 8, "top_k": 2, "ffn_hidden_size": 14336, "aux_loss": 0.01},
    ),
    "qwen3_30b_s": GPTConfig.llama(
        vocab_size=151552,
        max_seq_length=4096,
        num_layers=12,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        ffn_hidden_size=6144,
        experts={"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768, "aux_loss": 0.01},
    ),
    "qwen3_12": GPTConfig.llama(
        vocab_size=151552,
        max_seq_length=4096,
        num_layers=12,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        ffn_hidden_size=6144,
        experts={"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768, "aux_loss": 0.01},
    ),
    "qwen3_48": GPTConfig.llama(
        vocab_size=151552,
        max_seq_length=4096,
        num_layers=48,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        ffn_hidden_size=6144,
        experts={"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768, "aux_loss": 0.01},
    ),
    "tiny": GPTConfig.llama(
        vocab_size=51200,
        max_seq_length=1024,
        num_layers=12,
        hidden_size=768,
        num_heads=12,
        ffn_hidden_size=3072,
    ),
    "tiny_moe": GPTConfig.llama(
        vocab_size=51200,
        max_seq_length=1024,
        num_layers=12,
        hidden_size=1024,
        num_heads=16,
        ffn_hidden_size=2816,
        experts={"num_experts": 32, "top_k": 4, "ffn_hidden_size": 704, "aux_loss": 0.01},
    ),
    "tiny_llama": GPTConfig.llama(
        vocab_size=512,
        max_seq_length=64,
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=96,
    ),
    "tiny_mixtral": GPTConfig.llama(
        vocab_size=512,
        max_seq_length=64,
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=96,
        experts={"num_experts": 4, "top_k": 2, "ffn_hidden_size": 64, "aux_loss": 0.01},
    ),
    "tiny_gpt2": GPTConfig.gpt2(
        vocab_size=512, max_seq_length=64, num_layers=2, hidden_size=64, num_heads=4
    ),
}

#: Minimum memory traffic of the optimizer step per element (bytes): read gradient, main parameter
#: and two moments (4 x 4), write the last three (3 x 4), write the model's parameter in bfloat16
#: (2), and read the gradient for its norm (4).
OPTIMIZER_BYTES = 4 * 4 + 3 * 4 + 2 + 4
#: Speed of a device-to-device copy on an H200, counting bytes read and bytes written (bytes/s).
COPY_RATE = 4.26e12


@dataclass(frozen=True)
class Layout:
    """Sizes of a layout, and samples per data-parallel rank and step for each family of models.

    With pipeline stages a microbatch has one sample.
    """

    devices: int
    tp: int
    llama_batch: int
    gpt2_batch: int = 8
    ep: int = 1
    pp: int = 1

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.devices // (self.tp * self.pp)

    def batch(self, model: str) -> int:
        """Return the samples per data-parallel rank and step."""
        return self.gpt2_batch if "gpt2" in model else self.llama_batch


LAYOUTS = {
    "single": Layout(1, 1, 1),
    "dp2": Layout(2, 1, 1),
    "dp4": Layout(4, 1, 1),
    "tp2": Layout(2, 2, 2),
    "tp4": Layout(4, 4, 4),
    "ep2": Layout(2, 1, 1, ep=2),
    "ep4": Layout(4, 1, 1, ep=4),
    "ep8": Layout(8, 1, 1, ep=8),
    "pp2": Layout(2, 1, 8, pp=2),
    "pp4": Layout(4, 1, 16, pp=4),
    "tp2_pp2": Layout(4, 2, 8, pp=2),
    "pp2_ep2": Layout(4, 1, 8, ep=2, pp=2),
}


class Tokens(Dataset):
    """Dataset of reproducible random tokens."""

    def __init__(self, config: GPTConfig, num_samples: int) -> None:
        self.config = config
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(
            0, self.config.vocab_size, (self.config.max_seq_length + 1,), generator=generator
        )
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


class Trained(LightningModule):
    """GPT that trains on its mean loss and logs nothing.

    Args:
        config: Configuration of the model.
        forced_balance: Whether tokens are routed to experts in turn, independent of the router.
        routing: Name of another routing; see ``benchmarks/routing.py``.
        num_tokens: Number of tokens per microbatch, for routings that draw experts (tokens).
    """

    def __init__(
        self,
        config: GPTConfig,
        forced_balance: bool = False,
        routing: str = "natural",
        num_tokens: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.routing = "balanced" if forced_balance else routing
        self.num_tokens = num_tokens
        self.model: GPT | None = None

    def configure_model(self) -> None:
        """Build this rank's part of the model."""
        if self.model is None:
            self.model = GPT(self.config, mesh=self.device_mesh, seed=1234)
            set_routing(self.model, self.routing, self.num_tokens, self.device_mesh.data.rank)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss."""
        assert self.model is not None, "configure_model runs before the first step"
        return self.model(batch["tokens"], batch["labels"]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.01, fused=True)


class Profile(Callback):
    """Callback that profiles steps on rank 0 and writes an analysis of their time.

    The analysis measures from one optimizer step to the next, so that ``num_steps`` steps give one
    step less. With ``num_steps=1``, it measures from one wait of the host to the next. This needs
    no warm-up step of the profiler, but includes communication that would otherwise overlap with
    the following step, such as gathers of updated parameters. It suits steps that take seconds.

    Args:
        path: File of the trace (``.json.gz``); the analysis has the same name with ``.txt``.
        first: Number of the step after which the profiler starts.
        device_only: Whether to record no host operators, so that the profiler slows the host less.
        num_steps: Number of profiled steps.

    Raises:
        ValueError: If no step is profiled.
    """

    def __init__(
        self, path: Path, first: int, device_only: bool = False, num_steps: int = 3
    ) -> None:
        if num_steps < 1:
            raise ValueError(
                f"the profiler needs at least one step, not {num_steps}: a trace without steps has "
                "no times. Use 1 for steps of seconds, else 3."
            )
        self.path = path
        self.first = first
        self.device_only = device_only
        self.num_steps = num_steps
        self.result: dict[str, Any] = {}
        self._profiler: Any = None

    @property
    def last(self) -> int:
        """Number of the last step that the profiler needs."""
        return self.first + self.num_steps + (self.num_steps > 1)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Start, advance or finish the profiler."""
        if not trainer.is_global_zero:
            return
        step = trainer.global_step
        if step == self.first:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if trainer.strategy.root_device.type == "cuda":
                # Kernels of earlier steps must not run in the first profiled one.
                torch.cuda.synchronize()
                activities.append(torch.profiler.ProfilerActivity.CUDA)
                activities = activities[1:] if self.device_only else activities
            schedule = None
            if self.num_steps > 1:
                schedule = torch.profiler.schedule(
                    wait=0, warmup=1, active=self.num_steps, repeat=1
                )
            self._profiler = torch.profiler.profile(
                activities=activities, schedule=schedule, on_trace_ready=self._read
            )
            self._profiler.start()
        elif self._profiler is not None:
            if self.num_steps > 1:
                self._profiler.step()
            if step == self.last:
                self._profiler.stop()
                self._profiler = None

    def _read(self, profiler: Any) -> None:
        profiler.export_chrome_trace(str(self.path))
        events = read_events(self.path)
        kernels = kernels_of(events)
        steps = find_steps(kernels) if self.num_steps > 1 else whole_window(kernels)
        self.result = analyse(kernels, steps)
        self.result["launches"] = count_launches(launches_of(events), steps)
        text = report(self.result)
        self.path.with_name(self.path.name.split(".")[0] + ".txt").write_text(text + "\n")
        print(text, flush=True)


class OptimizerTime(Callback):
    """Callback that times clipping and the optimizer step on the device.

    The time starts with the reduced gradients and ends with the updated slices of this rank.
    Gathers of the updated parameters overlap with later work on other streams and are not included.

    Args:
        first: Number of the first measured step.
        steps: Number of measured steps.
    """

    #: This callback does not read gradients, so the strategy need not reduce them for its hooks.
    reads_gradients = False

    def __init__(self, first: int, steps: int) -> None:
        self.first = first
        self.stop = first + steps
        self.result: dict[str, Any] = {}
        self._spans: list[list[torch.cuda.Event]] = []

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        """Record the time at which the compute stream has the reduced gradients."""
        if (
            trainer.strategy.root_device.type == "cuda"
            and self.first <= trainer.global_step < self.stop
        ):
            self._spans.append([mark_on_device()])

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Record the end of the step."""
        if self._spans and len(self._spans[-1]) == 1:
            self._spans[-1].append(mark_on_device())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the median with the time of the memory traffic alone."""
        if not self._spans:
            return
        torch.cuda.synchronize()
        groups = trainer.optimizers[0].param_groups
        elements = sum(p.numel() for group in groups for p in group["params"])
        taken = statistics.median(start.elapsed_time(end) for start, end in self._spans)
        floor = elements * OPTIMIZER_BYTES / COPY_RATE * 1e3
        self.result = {
            "elements": elements,
            "optimizer_ms": round(taken, 2),
            "floor_ms": round(floor, 2),
            "ratio": round(taken / floor, 2),
            "rule": f"{OPTIMIZER_BYTES} bytes an element of this rank's slice / "
            f"{COPY_RATE / 1e12} TB/s",
        }
        if trainer.is_global_zero:
            print("optimizer step:", self.result, flush=True)


class SaveStall(Callback):
    """Callback that saves twice in the background and measures the delay of later steps.

    The second save reuses the host buffers of the first.

    Args:
        folder: Folder of the checkpoints.
        measure: Callback with the times of all steps.
        first: Number of the step after which the first save starts.
        steps: Number of steps to measure after each save.
    """

    def __init__(self, folder: Path, measure: Measure, first: int, steps: int) -> None:
        self.folder = folder
        self.measure = measure
        self.first = first
        self.steps = steps
        self.result: dict[str, Any] = {}
        self._calls: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Start a save; its call counts in the next step, because this step is already recorded."""
        if trainer.global_step == self.first + self.steps - 2:
            # The second save waits for the first one. Wait here instead, in an unmeasured step.
            trainer.strategy.finish_saves()
        if trainer.global_step in (self.first, self.first + self.steps):
            start = time.perf_counter()
            trainer.save_checkpoint(self.folder / f"step{trainer.global_step}")
            self._calls.append(time.perf_counter() - start)

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        """Sum the delays of the steps after each save."""
        median = statistics.median(self.measure.counted())
        for number, call in enumerate(self._calls):
            start = self.first + number * self.steps
            after = self.measure.seconds[start : start + self.steps - 2]
            self.result[("first", "second")[number]] = {
                "call_ms": round(call * 1e3, 1),
                "next_step_ms": round(after[0] * 1e3, 1),
                "stall_ms": round(sum(s - median for s in after) * 1e3, 1),
                "in_steps": round(sum(s - median for s in after) / median, 2),
                "looked_at_steps": len(after),
                "first_steps_ms": [round(s * 1e3, 1) for s in after[:8]],
            }
        if trainer.is_global_zero:
            print("background save:", self.result, flush=True)


_WITH_RESULTS = (Profile, OptimizerTime, StageTimes, SaveStall, HostTime, GraphFigures, RankLoad)

#: Cost model of clones: speed of grouped products in bfloat16, and bandwidth of puts, on H200s.
CLONE_COST = CloneCost(products=650e12, bandwidth=350e9)


def rank_load(config: GPTConfig) -> list[RankLoad]:
    """Return the callback that counts expert rows of ranks; empty for a model without experts."""
    experts = config.experts
    if experts is None:
        return []
    return [RankLoad(3 * config.hidden_size * experts.ffn_hidden_size, CLONE_COST)]


def build_callbacks(args: argparse.Namespace, out: Path) -> tuple[list[Any], int]:
    """Return the callbacks, and the number of steps that they need."""
    measure = Measure(
        str(out),
        f"{args.model} {args.layout}",
        warmup=args.warmup,
        steps=args.steps,
        in_a_row=args.in_a_row,
        row_steps=args.row_steps,
    )
    callbacks: list[Any] = [measure]
    end = measure.last_step if args.row_steps else args.warmup + args.steps
    if args.time_host:
        host = HostTime(end)
        callbacks += [host, GraphFigures(measure)]
        end = host.last
    if args.profile:
        profile = Profile(Path(args.profile), end, device_only=args.time_host)
        callbacks.append(profile)
        end = profile.last
    if args.time_optimizer:
        callbacks.append(OptimizerTime(args.warmup, args.steps))
    if args.time_actions:
        callbacks.append(StageTimes(end))
        end += 1
    if args.async_save:
        callbacks.append(SaveStall(Path(args.async_save), measure, end, args.save_steps))
        end += 2 * args.save_steps
    return callbacks, end


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the measurements of this rank."""
    layout = LAYOUTS[args.layout]
    config = SHAPES[args.model]
    if args.layers:
        config = GPTConfig(**{**vars(config), "num_layers": args.layers})
    batch = args.batch or layout.batch(args.model)
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    callbacks, steps = build_callbacks(args, out)
    callbacks += rank_load(config) if layout.ep > 1 else []
    # No callback reads parameters, so gathering them can overlap with the next step.
    options: dict[str, Any] = {"overlap_parameters": True, "async_save": bool(args.async_save)}
    options |= {"zero": args.zero, "microbatch_size": 1 if layout.pp > 1 else batch}
    if args.fp8_parameters:
        options["fp8"] = {"recipe": "tensorwise", "parameters": "fp8"}
    options |= json.loads(args.options)
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=layout.devices,
        strategy=MegatronStrategy(tp=layout.tp, pp=layout.pp, ep=layout.ep, **options),
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
    num_samples = steps * batch * layout.data_ranks
    data = DataLoader(Tokens(config, num_samples), batch_size=batch, drop_last=True)
    num_tokens = batch * config.max_seq_length
    trainer.fit(Trained(config, args.forced_balance, args.routing, num_tokens), data)
    found: dict[str, Any] = {}
    for callback in callbacks:
        if isinstance(callback, Measure):
            found.update(callback.figures)
        elif isinstance(callback, _WITH_RESULTS):
            found[type(callback).__name__] = callback.result
    if trainer.is_global_zero:
        out.write_text(json.dumps(found))
    return found


def parser() -> argparse.ArgumentParser:
    """Build the parser of the options of one training."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--model", default="llama8b_half", choices=list(SHAPES))
    result.add_argument("--layout", default="dp4", choices=list(LAYOUTS))
    result.add_argument("--layers", type=int, default=0, help="number of layers (0: of the shape)")
    result.add_argument(
        "--batch", type=int, default=0, help="samples of one data-parallel rank (0: by the layout)"
    )
    result.add_argument("--steps", type=int, default=8, help="measured steps")
    result.add_argument("--warmup", type=int, default=4, help="steps before the measured ones")
    result.add_argument("--accelerator", default="cuda", choices=["cuda", "cpu"])
    result.add_argument("--zero", type=int, default=1, choices=[0, 1])
    result.add_argument(
        "--options", default="{}", help="further arguments of the strategy, as JSON"
    )
    result.add_argument(
        "--fp8-parameters",
        action="store_true",
        help="products in 8 bits, tensorwise, with weights that are kept and gathered in 8 bits",
    )
    result.add_argument(
        "--in-a-row", action="store_true", help="do not wait for the device between the steps"
    )
    result.add_argument(
        "--row-steps",
        type=int,
        default=0,
        help="after the measured steps, measure as many in a row, for which the host does not wait",
    )
    result.add_argument(
        "--time-host",
        action="store_true",
        help="time the parts of the host's work, and measure CUDA graphs",
    )
    result.add_argument(
        "--profile", default="", help="write a trace of some steps of rank 0 (FILE.json.gz)"
    )
    result.add_argument(
        "--time-optimizer", action="store_true", help="time the optimizer's step alone"
    )
    result.add_argument(
        "--time-actions", action="store_true", help="record the actions of a step on all stages"
    )
    result.add_argument("--async-save", default="", help="save in the background to this folder")
    result.add_argument(
        "--save-steps", type=int, default=20, help="steps to look at after each save"
    )
    result.add_argument(
        "--forced-balance", action="store_true", help="route tokens to experts in turn"
    )
    result.add_argument(
        "--routing",
        default="natural",
        help="balanced, natural, zipf:EXPONENT:random or zipf:EXPONENT:ordered",
    )
    result.add_argument(
        "--out", default="runs/train_shapes.json", help="file for the measurements of rank 0"
    )
    return result


if __name__ == "__main__":
    given = parser().parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("default", category=SpeedWarning)
    # Keep the log messages that name the parts that CUDA graphs capture.
    level = logging.INFO if given.time_host else logging.ERROR
    logging.getLogger("lightning.pytorch").setLevel(level)
    run(given)
