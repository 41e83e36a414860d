"""What user code in a step sees of the world outside: loggers, standard output and its rank."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import cache, partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger

from lightning_megatron.groups.collectives import broadcast_object
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.strategy.logs.log_record import Recorder
from lightning_megatron.strategy.logs.output_calls import RecordedMember, Target
from lightning_megatron.strategy.private.loops import replace_method
from lightning_megatron.strategy.process.ranks import RankStrategy

#: Attribute of a logger that holds its recording inside a step.
_RECORDING = "_lightning_megatron_recording"
#: Properties of loggers whose values are those of the first stage.
_PROPERTIES = ("name", "version", "save_dir", "root_dir", "log_dir", "run_id", "experiment_id")


class StepOutput:
    """Loggers, standard output and rank inside of a step that runs more than once for a batch.

    Calls of loggers and of ``self.print`` are recorded, and made for the whole batch. The rank that
    runs the code after the model counts as the first rank of its pipeline, so that code that is
    meant for rank 0 runs once.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._properties: list[dict[str, Any]] | None = None

    def begin(self, module: LightningModule) -> None:
        """Prepare for a batch.

        Communication: at the first batch one broadcast of an object over pp on the CPU.
        """
        if self._properties is not None or self._mesh.pp.size == 1:
            return
        found: list[dict[str, Any]] = [{} for _ in module.trainer.loggers]
        for values, logger in zip(found, module.trainer.loggers, strict=True):
            for name in _PROPERTIES:
                if isinstance(getattr(type(logger), name, None), property):
                    values[name] = getattr(logger, name)
        self._properties = broadcast_object(found, self._mesh.pp_cpu)

    @contextmanager
    def of(
        self, module: LightningModule, recorder: Recorder, executor: PipelineExecutor
    ) -> Iterator[None]:
        """Record or discard what a run of the step does to the world outside, inside the block.

        Args:
            recorder: Record of the run, which drops calls if it is muted.
            executor: Executor of the run. What the run prints is discarded if its other effects
                are, unless it raises an error.
        """
        is_probe = executor.is_probe
        with ExitStack() as undo:
            record = partial(recorder.keep_call, module)
            for index, logger in enumerate(module.trainer.loggers):
                shared = {} if self._properties is None else self._properties[index]
                undo.enter_context(_recording(logger, (index, record, shared)))
            replace_method(
                undo, module, "print", RecordedMember(Target(None, ((False, "print"),)), record)
            )
            if self._mesh.pp.size > 1:
                strategy = module.trainer.strategy
                assert isinstance(strategy, RankStrategy), "the run belongs to this strategy"
                is_end = is_probe or not recorder.is_muted
                undo.enter_context(strategy.showing_rank(self._rank(is_end=is_end)))
            if recorder.is_trial or executor.is_repeated:
                undo.enter_context(_silent(is_probe))
            try:
                yield
            except Exception as error:
                if type(error).__module__.partition(".")[0] == "wandb" and self._mesh.pp.size > 1:
                    error.add_note(
                        "With pp above 1 the run of wandb is on rank 0, and another rank runs the "
                        "code after the model. Use self.logger.experiment.log(...) in the place of "
                        "wandb.log(...): such calls are made on rank 0."
                    )
                raise

    def _rank(self, *, is_end: bool) -> int:
        """Return the rank that user code sees.

        All stages probe the code after the model, but one of them runs it.
        """
        ranks = self._mesh.pp.ranks
        if is_end:
            return ranks[0]
        return ranks[-1] if self._mesh.rank == ranks[0] else self._mesh.rank


@contextmanager
def _recording(logger: Logger, recording: tuple[int, Any, Mapping[str, Any]]) -> Iterator[None]:
    """Let a logger record its calls inside the block; it stays an instance of its class.

    Args:
        recording: Index of the logger, function of the target, the positional and the keyword
            arguments of a call, and values of properties.
    """
    kind = type(logger)
    vars(logger)[_RECORDING] = recording
    logger.__class__ = _recording_class(kind)
    try:
        yield
    finally:
        logger.__class__ = kind
        del vars(logger)[_RECORDING]


@cache
def _recording_class(kind: type[Logger]) -> type[Logger]:
    """Return a subclass of a logger whose calls are recorded."""

    def read(self: Any, name: str) -> Any:
        if name.startswith("__"):
            return kind.__getattribute__(self, name)
        index, record, shared = vars(self)[_RECORDING]
        if name in shared:
            return shared[name]
        if name != "experiment":
            value = kind.__getattribute__(self, name)
            if not callable(value) or name.startswith("_") or isinstance(value, type):
                return value
        return RecordedMember(Target(index, ((False, name),)), record)

    names = {"__slots__": (), "__module__": kind.__module__, "__getattribute__": read}
    return type(kind.__name__, (kind,), names)


@contextmanager
def _silent(is_probe: bool) -> Iterator[None]:
    """Discard what the block prints; print it after all if an error ends the block."""
    text = io.StringIO()
    try:
        with redirect_stdout(text):
            yield
    except Exception:
        # Code after the model may fail in a probe, which is not an error.
        if not is_probe:
            sys.stdout.write(text.getvalue())
        raise
