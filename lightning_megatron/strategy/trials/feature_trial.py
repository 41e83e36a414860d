"""Trial step that compares layers that a plan shards with the same layers in full."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import TypeGuard

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_megatron.errors import ParallelPlanError, SpeedWarning
from lightning_megatron.graphs.backend import CAPTURE_ERRORS
from lightning_megatron.groups.collectives import all_gather_objects, gather_some, is_true_anywhere
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.linear.feature_shard import ShardUse
from lightning_megatron.models.stage import named_layers
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.strategy.trials.part_draws import PartDraws, UserDraw, listed
from lightning_megatron.strategy.trials.trial_step import (
    Run,
    TrialStep,
    is_close,
    undo_changes,
    without_compilation,
)
from lightning_megatron.strategy.trials.weight_writes import WeightWrites
from lightning_megatron.swap.blocks.cut_modules import FullColumnLinear
from lightning_megatron.swap.whole_features import (
    CutLayer,
    LayerInput,
    cut_layers,
    full_layers,
    record_inputs,
)
from lightning_megatron.user_code import is_compiled

log = logging.getLogger(__name__)

#: Largest relative distance between the inputs of a layer in both runs, by the tolerance of the
#: logged values. Kernels over more features may round differently even if the code is correct.
_MAX_DISTANCES = {1e-9: 1e-7, 1e-5: 1e-3, 5e-3: 3e-2, 2e-2: 1e-1}
_SHAPE_ERROR = re.compile(
    r"size|shape|dimension|split|must match|out of (range|bounds)|mat1|expected", re.IGNORECASE
)
_NUM_SHOWN = 4


@dataclass(frozen=True)
class _Difference:
    """Location on one rank at which two runs differ.

    Args:
        number: Index of the call (calls of cut layers).
        kind: Kind of the layer in the plan, such as ``column`` or ``row``.
        distance: Relative distance between the inputs of both runs; None if their shapes differ.
    """

    number: int
    layer: str
    kind: str
    before: tuple[str, ...]
    distance: float | None

    @property
    def is_inside(self) -> bool:
        """Whether features differ between a column and a row layer, where they are sharded."""
        return self.kind in ("row", "row_split") and self.distance is not None


@dataclass
class _Result:
    """Outputs and recorded inputs of one run.

    Args:
        values: Loss and logged values of the last stage, by name.
        error: Error of the user's code; empty if the step ran.
    """

    values: dict[str, float] = field(default_factory=dict)
    inputs: Sequence[LayerInput] = ()
    error: str = ""
    draws: Sequence[UserDraw] = ()


class FeatureTrials:
    """Comparison of sharded with full features, once for each kind of step.

    Between a ``column`` and a ``row`` layer each rank has its shard of the features. User code
    there is correct if it treats every feature, or every head, separately. The trial detects other
    code: it runs the step with sharded features and again with all features on every rank. Random
    functions there must draw other numbers on every rank. The trial finds them, because they draw
    more numbers with all features, and later steps give them streams of their own.

    The trial computes no gradients, and restores weights, buffers, attributes and random states.
    Constants replace torch's random numbers, and dropout is off. Side effects outside the module,
    such as files, occur at least two more times, except for prints and calls of loggers.
    """

    def __init__(self, module: LightningModule, mesh: ParallelMesh) -> None:
        self._module = module
        self._mesh = mesh
        self._tried: set[str] = set()
        #: Random functions that later steps call for sharded features.
        self.draws = PartDraws(mesh.random)

    def check(self, step: str, part: Microbatch, run: Run) -> None:
        """Try a step at its first batch, if a plan cuts layers.

        Args:
            step: Name of the step, such as ``training_step``.

        Communication: at the first batch, that of two or three forward passes, with an all-gather
        over tp for each ``column`` layer, and gathers of objects over all ranks on the CPU.
        """
        if self._mesh.tp.size == 1 or step in self._tried:
            return
        self._tried.add(step)
        full = full_layers(self._module)
        layers = [*cut_layers(self._module), *full]
        # Stages have different layers, but the trial is collective: all stages run it, or none.
        if not is_true_anywhere(bool(layers), self._mesh.world_cpu):
            return
        uses = {layer.name: layer.module.use for layer in full if _is_seen_in_full(layer.module)}
        has_compiled = any(is_compiled(part) for _, part in named_layers(self._module))
        for use in uses.values():
            use.records = True
            # Before the trial has found them, random functions draw for all features.
            use.draws_on_parts |= step == "training_step" and not has_compiled
        with undo_changes(self._module, self._mesh) as state, without_compilation(self._module):
            trial = _FeatureTrial(
                self._mesh,
                step,
                run,
                state,
                module=self._module,
                layers=layers,
                user_draws=self.draws,
            )
            trial.compare(part)
        self._warn_of_gathers(uses)

    def _warn_of_gathers(self, uses: Mapping[str, ShardUse]) -> None:
        """Name the code that gathers all features of layers whose outputs are sharded."""
        found: dict[str, list[str]] = {}
        for name, use in uses.items():
            use.records = False
            for function, line in use.gathers.items():
                found.setdefault(f"{function} ({line})", []).append(re.sub(r"\d+", "*", name))
            use.gathers.clear()
        for stage in all_gather_objects(found, self._mesh.pp_cpu):
            for place, names in stage.items():
                layers = listed(list(dict.fromkeys(map(repr, names))))
                rank_zero_warn(
                    f"all features of {layers} are gathered in every step by {place}. The results "
                    f"are right, but every rank of tp ({self._mesh.tp.size}) computes what follows "
                    "for all features. Treat every head separately, or give a fused layer the "
                    "kind of its layout: 'qkv(HEADS, GROUPS)', or 'column_full' if the features "
                    "of a group follow one another.",
                    category=SpeedWarning,
                )


def _is_seen_in_full(module: nn.Module) -> TypeGuard[FullColumnLinear]:
    return isinstance(module, FullColumnLinear)


@dataclass(kw_only=True)
class _FeatureTrial(TrialStep):
    """One trial: two runs of a step and their comparison."""

    module: LightningModule
    layers: Sequence[CutLayer]
    user_draws: PartDraws

    def compare(self, part: Microbatch) -> None:
        """Run the step with sharded features, and again with all features on every rank."""
        cut = self._run(part, is_whole=False)
        whole = self._run(part, is_whole=True)
        self._separate_draws(cut, whole)
        tolerance = self.tolerance()
        errors = [*gather_some(whole.error or None, self.mesh.world_cpu).values()]
        if errors:
            self._warn(
                "code between cut layers works only on this rank's part of the features "
                f"({errors[0]})"
            )
            return
        values = _differences(cut, whole, tolerance)
        difference = _first_difference(cut.inputs, whole.inputs, tolerance)
        if not self.any_rank(bool(values) or difference is not None):
            return
        # The difference may come from random numbers of Python or NumPy, which the trial cannot
        # make equal for a shard and for all features. A second sharded run with another seed
        # changes them: if its values differ from the first, the comparison is not valid.
        again = self._run(part, is_whole=False, seed=int(self.any_rank(self.has_other_draws)))
        unrepeatable = bool(_differences(cut, again, tolerance)) or _first_difference(
            cut.inputs, again.inputs, tolerance
        )
        if self.any_rank(bool(unrepeatable)):
            self._warn("its values depend on random numbers of Python or NumPy, or on the time")
            return
        self._refuse_difference(values, difference)

    def _run(self, part: Microbatch, *, is_whole: bool, seed: int = 0) -> _Result:
        result = _Result()
        writes = WeightWrites(self.module)
        with record_inputs(self.layers, self.mesh.tp, is_whole=is_whole) as result.inputs:
            try:
                with writes:
                    readings = self.read([part], seed)
                result.values = {
                    name: value
                    for results in readings
                    for name, (value, _) in results.values.items()
                }
            except CAPTURE_ERRORS as error:
                if not is_whole:
                    raise
                if self.mesh.pp.size > 1:
                    # Other stages wait for this one, so that the trial cannot end with a warning.
                    error.add_note(
                        f"{self.name} was tried with all features on every rank of tp. "
                        f"{_IF_INTENDED}"
                    )
                    raise
                result.error = f"{type(error).__name__}: {error}"
            finally:
                result.draws = self.draws
                writes.undo()
                self.state.restore()
        return result

    def _separate_draws(self, cut: _Result, whole: _Result) -> None:
        """Find random functions on sharded features, and refuse those without an own stream."""
        found, refused = self.user_draws.find(self.module, cut.draws, whole.draws, whole.error)
        if found and any(is_compiled(part) for _, part in named_layers(self.module)):
            refused += [f"{place}, in a module with compiled parts" for place in found]
        results = all_gather_objects((refused, list(map(str, found))), self.mesh.world_cpu)
        refused = list(dict.fromkeys(line for lines, _ in results for line in lines))
        places = list(dict.fromkeys(place for _, lines in results for place in lines))
        if refused:
            raise ParallelPlanError(
                "random numbers between a 'column' and a 'row' layer must differ on the ranks of "
                f"tp ({self.mesh.tp.size}), because each has its part of the features, and all "
                f"ranks would draw the same at {listed(refused)}. Give nn.Dropout there the kind "
                "'dropout' in tensor_parallel_plan, or the layers around the code the kinds "
                f"'column_gather' and 'row_split', or 'replicate'. {_IF_INTENDED}"
            )
        if places:
            rank_zero_info(f"Each rank of tp draws its own random numbers at {listed(places)}.")

    def _refuse_difference(
        self, values: dict[str, tuple[float, float]], difference: _Difference | None
    ) -> None:
        """Refuse a difference, and name the location that the first rank found."""
        results_by_rank = all_gather_objects((values, difference), self.mesh.world_cpu)
        # Features are not sharded at the input of a column layer. A difference there has its cause
        # in earlier code, and is not reported by itself.
        differences = [difference for _, difference in results_by_rank if difference is not None]
        first = min(differences, key=lambda difference: difference.number, default=None)
        located = next((values for values, _ in results_by_rank if values), None) or {}
        if not located and (first is None or not first.is_inside):
            return
        tp = self.mesh.tp.size
        texts = [
            f"{name} is {cut:.9g}, and {whole:.9g} with all features"
            for name, (cut, whole) in located.items()
        ]
        if first is not None and first.is_inside:
            texts.append(
                f"the input of {first.layer!r} differs by {first.distance:.2g} of its size"
            )
        raise ParallelPlanError(
            f"{self.name} must give the same values on the features of one rank of tp ({tp}) and "
            f"on all features: {'; '.join(texts[:_NUM_SHOWN])}. Code {self._place_of(first)} works "
            "across features, but each rank has only a part of them (a sum, a mean, chunk, or a "
            "division by the size). Give these layers the kinds 'column_gather' and 'row_split', "
            "or 'replicate', in tensor_parallel_plan (which replaces the plan of a Hugging Face "
            f"model), or compute per head, or after the 'row' layer. {_IF_INTENDED}"
        )

    def _place_of(self, difference: _Difference | None) -> str:
        """Name the layers between which user code mixes features."""
        if difference is None or (difference.kind == "column" and not difference.before):
            columns = [repr(layer.name) for layer in self.layers if layer.kind == "column"]
            return f"after a 'column' layer ({listed(columns)})"
        before = listed(list(map(repr, difference.before))) or "the input"
        return f"between {before} and {difference.layer!r} ({difference.kind!r})"

    def _warn(self, reason: str) -> None:
        if self.mesh.world_cpu.rank == 0:
            log.warning("%s cannot be checked on all features: %s.", self.name, reason)


def _differences(
    first: _Result, second: _Result, tolerance: float
) -> dict[str, tuple[float, float]]:
    return {
        name: (value, second.values[name])
        for name, value in first.values.items()
        if name in second.values and not is_close(value, second.values[name], tolerance)
    }


def _first_difference(
    cut: Sequence[LayerInput], whole: Sequence[LayerInput], tolerance: float
) -> _Difference | None:
    """Return the first module call whose input differs, or None."""
    before: list[str] = []
    for number, (cut_input, whole_input) in enumerate(zip(cut, whole, strict=False)):
        distance = cut_input.distance(whole_input)
        if distance is None or distance > _MAX_DISTANCES[tolerance]:
            return _Difference(
                number,
                cut_input.layer.name,
                cut_input.layer.kind,
                tuple(dict.fromkeys(before)),
                distance,
            )
        before = [] if cut_input.layer.kind == "row" else [*before, cut_input.layer.name]
    return None


@contextmanager
def name_cut_layers(root: nn.Module, mesh: ParallelMesh) -> Iterator[None]:
    """Add the layers whose features are cut to errors in the block that may come from sizes."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        layers = cut_layers(root) if mesh.tp.size > 1 else []
        # An assertion of sizes often has no message.
        if layers and (isinstance(error, AssertionError) or _SHAPE_ERROR.search(str(error))):
            error.add_note(_note_on_sizes(layers, mesh.tp.size, _innermost_module(root, error)))
        raise


def _innermost_module(root: nn.Module, error: Exception) -> str:
    """Return the name of the innermost module that was called; empty for the outermost one."""
    names = {id(module): name for name, module in root.named_modules()}
    name = ""
    for frame, _ in walk_tb(error.__traceback__):
        name = names.get(id(frame.f_locals.get("self")), name)
    return name


def _note_on_sizes(layers: Sequence[CutLayer], tp: int, where: str) -> str:
    cut = listed([f"{layer.name!r} ({layer.kind!r})" for layer in layers])
    place = f"The error came up in {where!r}. " if where else ""
    return (
        f"{place}The plan cuts features over tp ({tp}): what is between a 'column' and the next "
        f"'row' layer gets 1/{tp} of them. These layers are cut: {cut}. If sizes do not fit for "
        "this reason, take sizes from the tensors (x.shape[-1], or -1 for the number of heads). "
        "Give the linear layer that follows a 'column' layer the kind 'row', a module with a row "
        "of parameters for every feature the kind 'features', and move a norm of all features "
        "after the 'row' layer; or give the layers around the code the kinds 'column_gather' and "
        "'row_split', or 'replicate', in tensor_parallel_plan."
    )


_IF_INTENDED = "If this is intended, use job.check_microbatches=False."
