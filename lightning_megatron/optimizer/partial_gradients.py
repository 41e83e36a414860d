"""Detection of unsharded parameters that are used on a part of the features."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.collectives import BoundaryGradients
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.stage import pipelined_modules
from lightning_megatron.models.staged_blocks import StagedBlocks

#: State of a gradient on this rank: ``whole`` if it is complete, ``part`` if it is this rank's part
#: of a sum or of the features, ``mixed`` if it is wrong because a layer takes a part for the whole,
#: ``unknown`` if a compiled region or the start of the graph hides its state.
Region = Literal["whole", "part", "mixed", "unknown"]


class PartialGradientSearch:
    """Search for unsharded parameters whose gradients are partial sums over the tensor axis.

    A parameter that is used between a ``column`` and a ``row`` layer (a norm of heads, a PReLU)
    gets gradients only from the features of its rank. The autograd graph reveals such uses: the
    layers of this package declare which of their gradients are partial, and the nodes between two
    layers do not change that. Parameters of this package's models are skipped, because their shard
    specs declare partial gradients.

    Args:
        module: Module that is trained.
        mesh: Process groups of this rank.
        whole: Names of the parameters that every rank of tp has in full.
    """

    def __init__(self, module: nn.Module, mesh: ParallelMesh, whole: Collection[str]) -> None:
        self._mesh = mesh
        self._replicated = frozenset(whole)
        models = [model for _, model in pipelined_modules(module)]
        model_parameter_ids = {
            id(parameter)
            for model in models
            if not isinstance(model, StagedBlocks)
            for parameter in model.parameters()
        }
        # Only parameters outside of the package's own models need the walk over the graph.
        self._names: Mapping[int, str] = (
            {
                id(parameter): name
                for name, parameter in module.named_parameters()
                if id(parameter) not in model_parameter_ids
            }
            if mesh.tp.size > 1
            else {}
        )
        #: Names of the unsharded parameters that got partial gradients.
        self.partial_names: set[str] = set()

    def inspect(self, node: Any, is_loss: bool = True) -> None:
        """Examine the graph that a backward pass is about to run through.

        Args:
            node: Root of the graph: the node of the loss, or of the tensor that a pipeline stage
                sends; None if there is no graph.
            is_loss: Whether ``node`` belongs to the loss.

        Raises:
            ParallelPlanError: If the gradient of a parameter would be neither complete nor a part
                of a sum.
        """
        if not self._names or node is None:
            return
        start: Region = "unknown" if not is_loss and self._mesh.sequence_parallel else "whole"
        for parameter, regions in _leaves(node, start).values():
            name = self._names.get(id(parameter))
            if name is not None and "unknown" not in regions:
                self._classify(name, parameter, regions)

    def _classify(self, name: str, parameter: Tensor, regions: set[Region]) -> None:
        spec = shard_spec_of(parameter)
        is_whole = name in self._replicated
        if "mixed" in regions or (is_whole and len(regions) > 1):
            raise ParallelPlanError(
                "all values between a 'column' and a 'row' layer must come from 'column' layers: a "
                f"value computed from {name!r} is used there directly, so the gradient of {name!r} "
                "mixes complete values with this rank's parts, and neither a sum over tp nor the "
                "gradient itself is correct. Pass this value through the 'column' layer, or give "
                "the layers around it the kind 'replicate' in tensor_parallel_plan."
            )
        if not is_whole:
            if "whole" in regions:
                raise ParallelPlanError(
                    f"a parameter that is cut over tp must be used only by its own layer: {name!r} "
                    f"is read by other code, which gets this rank's part, {tuple(parameter.shape)} "
                    f"of {spec.full_shape}. Leave the parameter out of such code, or give its "
                    "layer the kind 'replicate' in tensor_parallel_plan."
                )
        elif spec.partial and "part" not in regions:
            raise ParallelPlanError(
                "the kind 'partial' is for parameters between a 'column' and a 'row' layer: "
                f"{name!r} is used on all features, so its gradient would be counted once for each "
                "rank of tp. Leave its module out of tensor_parallel_plan."
            )
        elif not spec.partial and "part" in regions:
            self.partial_names.add(name)


def _leaves(root: Any, start: Region) -> dict[int, tuple[Tensor, set[Region]]]:
    """Return the parameters that a graph reaches, each with the states of its gradients."""
    leaves: dict[int, tuple[Tensor, set[Region]]] = {}
    visited: set[tuple[Any, Region]] = set()
    waiting: list[tuple[Any, Region]] = [(root, start)]
    while waiting:
        node, region = waiting.pop()
        if (node, region) in visited:
            continue
        visited.add((node, region))
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.setdefault(id(leaf), (leaf, set()))[1].add(region)
            continue
        children = [child for child, _ in node.next_functions]
        regions = _regions_of_inputs(node, region, len(children))
        waiting += [
            (child, child_region)
            for child, child_region in zip(children, regions, strict=True)
            if child is not None
        ]
    return leaves


def _regions_of_inputs(node: Any, region: Region, count: int) -> list[Region]:
    function = getattr(type(node), "_forward_cls", None)
    describe = getattr(function, "border", None)
    border: BoundaryGradients | None = None if describe is None else describe(node)
    if border is None:
        # A compiled region is one opaque node, so its uses are not known.
        return ["unknown" if "Compiled" in type(node).__name__ else region] * count
    if region == "part" and not border.takes_parts:
        return ["mixed"] * count
    return ["part" if is_part else "whole" for is_part in border.gives_parts[:count]]
