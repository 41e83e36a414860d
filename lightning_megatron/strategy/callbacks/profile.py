"""Profile of steps on all ranks: one trace for Perfetto, and a table of the parts of a step."""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.profiler import ProfilerActivity, profile
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects, broadcast_object
from lightning_megatron.plan.settings import Count, Index, coerced_arguments
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from lightning_megatron.strategy.profiling.ranges import Ranges
from lightning_megatron.strategy.profiling.step_parts import (
    Interval,
    StageTable,
    longest,
    step_parts,
    work_of,
)
from lightning_megatron.strategy.profiling.trace_file import (
    Event,
    clock_offset,
    gather_trace,
    read_trace,
    rows_of_rank,
    title_of,
)

#: Most allocations and frees of a memory snapshot; older ones are left out.
_MEMORY_ENTRIES = 200_000


class Profile(Callback):
    """Record some steps on all ranks, and write one trace and a table of the parts of a step.

    The trace opens in Perfetto (https://ui.perfetto.dev), with a row for each rank, named by its
    coordinates, on one clock. Beside kernels and operators it has ranges: steps, actions (``F chunk
    0 microbatch 3``), layers forward and backward, collectives with axis and purpose, the update of
    the parameters, and replays of CUDA graphs. The table divides a step into products, attention,
    other computation, the optimizer, exposed communication, and time in which nothing runs, by
    pipeline stage; they add up to the step. Communication beside computation is hidden. A kernel of
    a collective also runs while it waits for other ranks, so exposed communication includes their
    imbalance.

    The training is that without the callback, but steps are slower while they are recorded. Before
    and afterwards the callback costs nothing. A step is measured from the end of the step before
    it, which includes the wait for its batch; validation between two steps is left out. On GPUs,
    the host waits for the device before the first step and after the last one.

    The folder gets ``trace_step10.json.gz``, ``parts_step10.md`` and ``parts_step10.json``, and
    with ``memory`` a ``memory_step10_rank0.pickle`` of each rank for
    https://pytorch.org/memory_viz.

    Args:
        step: Optimizer steps before the first recorded one (steps). Graphs, trials and caches of
            the allocator make the first steps untypical.
        count: Recorded steps (steps).
        folder: Folder of the files on rank 0; None takes ``profile`` in the Trainer's
            ``default_root_dir``.
        memory: Whether to record allocations on GPUs, too.
        host: Whether to record operators and ranges of the host. Without them steps with kernels
            are slowed less.

    Raises:
        UnsupportedError: Before processes are launched, if the strategy is not a
            :class:`MegatronStrategy`, the folder cannot be written, the Trainer has another
            profiler of torch, two callbacks record the same step, or ``memory`` or ``host=False``
            is given without GPUs.

    Communication: after the last step gathers of numbers over all ranks, and one transfer from each
        rank to rank 0, on the CPU.
    """

    #: This callback reads no gradients, so the strategy need not reduce them for its hooks.
    reads_gradients = False

    def __init__(
        self,
        step: Index = 10,
        count: Count = 2,
        folder: str | None = None,
        memory: bool = False,
        host: bool = True,
    ) -> None:
        arguments = coerced_arguments(Profile.__init__, locals())
        self.step: int = arguments["step"]
        self.count: int = arguments["count"]
        self.folder: str | None = arguments["folder"]
        self.memory: bool = arguments["memory"]
        self.host: bool = arguments["host"]
        #: Parts of a step on every rank; None before the end of the last recorded step.
        self.table: StageTable | None = None
        self._recording = ExitStack()
        self._profiler: profile | None = None
        #: Intervals of the steps on this rank's clock, by number and piece (ns).
        self._pieces: dict[tuple[int, int], tuple[int, int]] = {}
        self._since: int | None = None
        self._number = 0

    @property
    def steps(self) -> range:
        """Return the numbers of the recorded steps; that of the first step of a training is 0."""
        return range(self.step, self.step + self.count)

    # ---- before the first step

    def check_before_launch(self, trainer: Trainer) -> None:
        """Refuse what cannot be recorded; called before processes are launched."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined]
            raise UnsupportedError(
                "Profile cannot be used with Trainer(profiler='pytorch'): torch records only one "
                "profile at a time. Leave one of them out; profiler='simple' can stay."
            )
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(other, Profile) and other is not self:
                shared = set(self.steps) & set(other.steps)
                if shared:
                    raise UnsupportedError(
                        f"two Profile callbacks must record different steps: both record step "
                        f"{min(shared)}. Change step or count of one of them."
                    )
        device = trainer.strategy.root_device.type
        for name, is_given in (("memory=True", self.memory), ("host=False", not self.host)):
            if is_given and device != "cuda":
                raise UnsupportedError(
                    f"Profile({name}) needs GPUs, because it records the kernels and the memory of "
                    f"torch's allocator for GPUs: the ranks compute on {device}. Leave {name} out."
                )
        self._check_folder(trainer)

    def _check_folder(self, trainer: Trainer) -> None:
        folder = self._folder(trainer)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(f"no permission to write into {folder}")
        except OSError as error:
            raise UnsupportedError(
                f"Profile cannot write its files: {error}. Choose another folder."
            ) from error

    def _folder(self, trainer: Trainer) -> Path:
        return Path(self.folder or Path(trainer.default_root_dir) / "profile")

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, MegatronStrategy):
            raise UnsupportedError(
                "Profile needs MegatronStrategy, whose steps it records: the strategy is "
                f"{type(trainer.strategy).__name__}. Use strategy=MegatronStrategy(...), or leave "
                "the callback out."
            )

    # ---- steps

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.table = None
        self._pieces.clear()
        if trainer.global_step == self.step:
            self._begin(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        number = trainer.global_step
        if self._profiler is None:
            if number == self.step and not self._pieces:
                self._begin(trainer, pl_module)
            return
        if number == self.steps.stop:
            self._finish(trainer)
        elif self._since is None or number > self._number:
            self._end_piece()
            self._begin_piece(number)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profiler is not None:
            self._end_piece()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profiler is not None:
            self._begin_piece(trainer.global_step)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        steps = f"steps {self.steps.start} to {self.steps.stop - 1}"
        if self._profiler is not None and trainer.global_step > self.step:
            rank_zero_warn(f"Profile: the training ended in the {steps} that it should record.")
            self._finish(trainer)
        elif self.table is None:
            self.on_exception(trainer)
            rank_zero_warn(
                f"Profile: nothing was recorded: the training ended after step "
                f"{trainer.global_step - 1}, and did not begin with {steps}. Choose a smaller step."
            )

    @override
    def on_exception(self, trainer: Trainer, *args: Any) -> None:
        self._recording.close()
        self._profiler = None

    def _begin(self, trainer: Trainer, module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy), "setup has checked the strategy"
        device = strategy.root_device
        if torch.autograd._profiler_enabled():
            raise UnsupportedError(
                "torch records one profile at a time: another profiler runs at the first step of "
                "Profile. Stop it before, or leave one of them out."
            )
        activities = [ProfilerActivity.CPU] if self.host else []
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            # The first profile of a process takes seconds to start.
            with profile(activities=activities):
                torch.zeros(1, device=device).add_(1)
            torch.cuda.synchronize(device)
        if self.memory:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_ENTRIES)
            self._recording.callback(torch.cuda.memory._record_memory_history, enabled=None)
        self._profiler = profile(activities=activities)
        self._recording.enter_context(self._profiler)
        if self.host:
            self._recording.enter_context(Ranges(module, strategy.run, strategy.mesh).recording())
        self._begin_piece(trainer.global_step)

    def _begin_piece(self, number: int) -> None:
        self._number = number
        self._since = time.time_ns()

    def _end_piece(self) -> None:
        if self._since is not None:
            self._pieces[self._number, len(self._pieces)] = self._since, time.time_ns()
        self._since = None

    # ---- after the last step

    def _finish(self, trainer: Trainer) -> None:
        """Write the files, and print the table."""
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy), "setup has checked the strategy"
        mesh = strategy.mesh
        profiler = self._profiler
        assert profiler is not None, "steps were recorded"
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        self._end_piece()
        # The training may have ended within a step.
        whole = [key for key in self._pieces if key[0] < trainer.global_step]
        self._pieces = {key: self._pieces[key] for key in whole}
        folder = self._folder(trainer)
        name = f"step{self.step}"
        if self.memory:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"memory_{name}_rank{mesh.rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(file))
        self._recording.close()
        self._profiler = None
        offset = clock_offset(mesh.world_cpu)
        origin = broadcast_object(min(self._pieces.values())[0], mesh.world_cpu) + offset
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = read_trace(path, origin)
        steps: dict[str, Interval] = {}
        for (number, piece), (start, stop) in self._pieces.items():
            is_first = f"step {number}" not in steps
            title = f"step {number}" if is_first else f"step {number}, piece {piece}"
            steps[title] = (start - origin) / 1e3, (stop - origin) / 1e3
        window = list(steps.values())
        num_steps = len({number for number, _ in self._pieces})
        work = work_of(events)
        parts = step_parts(work, window, num_steps)
        ranks = all_gather_objects((mesh.pp.rank, parts), mesh.world_cpu)
        most = broadcast_object(longest(work, window, num_steps), mesh.world_cpu)
        self.table = StageTable.of(ranks, most)
        rows = rows_of_rank(mesh.rank, title_of(mesh), events, steps)
        try:
            self._write(rows, mesh.world_cpu, folder, name)
        except OSError as error:
            rank_zero_warn(f"Profile: the training goes on without files of the profile: {error}.")
        if mesh.world.rank == 0:
            print(self.table.text(), flush=True)

    def _write(self, rows: list[Event], axis: MeshAxis, folder: Path, name: str) -> None:
        """Write the trace and the table on rank 0."""
        assert self.table is not None, "steps were recorded"
        trace = folder / f"trace_{name}.json.gz"
        gather_trace(rows, axis, trace)
        if axis.rank == 0:
            text = self.table.markdown()
            (folder / f"parts_{name}.md").write_text(text + "\n", encoding="utf-8")
            content = json.dumps(self.table.as_dict(), indent=2)
            (folder / f"parts_{name}.json").write_text(content + "\n", encoding="utf-8")
            print(f"trace for https://ui.perfetto.dev: {trace}", flush=True)
