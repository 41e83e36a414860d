"""Calls inside plain code that a pass sees from outside: of modules, and of methods."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.graphs.user_hooks import reason_against_graphs
from lightning_megatron.layers.block import Block
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.recomputed_block import is_recomputed
from lightning_megatron.models.layered import LayeredModule
from lightning_megatron.plan.cuda_graphs import expanded_scopes
from lightning_megatron.user_code import is_compiled

#: Attribute of a module that torch calls in place of the module, if it is set.
_CALL = "_compiled_call_impl"
_HOST_READS = "the host reads sizes"
_FOREIGN = "the layer is not a block of this package"
_NORMS = (LayerNorm, RMSNorm)


@dataclass(frozen=True, eq=False)
class Interception:
    """Call that a pass intercepts.

    Args:
        owner: The module, or the object with the method.
        attribute: Name of the method; that of torch's call for a module itself.
        name: Name of the part that the call runs, such as ``layers.3.mlp``.
        parameters: Parameters that it reads.
        reason: Why no graph may hold the call; None if graphs hold it.
    """

    owner: Any
    attribute: str
    name: str
    parameters: tuple[nn.Parameter, ...] = ()
    reason: str | None = None


#: Runs an intercepted call, given the call, the original function and its arguments.
OnCall = Callable[..., Any]


@contextmanager
def intercepted(interceptions: Sequence[Interception], on_call: OnCall) -> Iterator[None]:
    """Let a function run the intercepted calls inside the block.

    Args:
        interceptions: The calls.
        on_call: Function that runs each of them.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for place in interceptions:
            attributes = vars(place.owner)
            before.append((attributes, place.attribute, attributes.get(place.attribute)))
            original = getattr(place.owner, place.attribute)
            if original is None:
                original = place.owner._call_impl
            attributes[place.attribute] = partial(on_call, place, original)
        yield
    finally:
        for attributes, name, value in before:
            if value is None:
                del attributes[name]
            else:
                attributes[name] = value


def _call_of(module: nn.Module, name: str, reason: str | None = None) -> Interception:
    return Interception(module, _CALL, name, tuple(module.parameters()), reason)


def interceptions_of(
    model: LayeredModule, chunk: int, scopes: Collection[str]
) -> list[Interception]:
    """Return the calls of a chunk at which a graph may begin, or which no graph may hold.

    A replay calls no hooks, so calls of modules with hooks of users are not captured. Nor is a
    module that says ``is_capturable = False``, a layer that is not a block of this package, or an
    exchange of tokens whose sizes the host reads.

    Args:
        model: A GPT or an encoder.
        scopes: Scopes that graphs capture; ``all`` means every scope.
    """
    chosen = expanded_scopes(scopes)
    found: list[Interception] = []
    embedding: Any = getattr(model, "embedding", None)
    if model.is_first_stage(chunk):
        found.append(_call_of(embedding, "embedding", _reason(embedding, "embedding", chosen)))
    for index in model.layers_of_chunk[chunk]:
        found += _of_layer(model.layers[str(index)], f"layers.{index}", chosen)
    if model.is_last_stage(chunk):
        norm: Any = getattr(model, "final_norm", None)
        if norm is not None:
            found.append(_call_of(norm, "head", _reason_in(norm)))
        head: Any = getattr(model, "head", None)
        parameters = () if head is None else tuple(head.parameters())
        reason = _reason(head, "head", chosen)
        found.append(Interception(model, "result", "head", parameters, reason))
    return found


def _of_layer(layer: nn.Module, name: str, scopes: Collection[str]) -> list[Interception]:
    """Return the calls of a layer: the layer itself, or its attention, its MLP and their norms."""
    block: Any = getattr(layer, "_orig_mod", layer)
    if not isinstance(block, Block):
        return [_call_of(layer, name, reason_against_graphs(layer) or _FOREIGN)]
    parts = _of_block(block, name, scopes)
    own_reason = reason_against_graphs(layer)
    is_whole = is_recomputed(block) or is_compiled(layer)
    # Of a layer without a captured sublayer, graphs hold nothing.
    sublayers = [part for part in parts if not isinstance(part.owner, _NORMS)]
    is_outside = all(part.reason is not None for part in sublayers)
    if own_reason is None and not is_whole and not is_outside:
        return parts
    # These layers are called as a whole.
    reasons = (part.reason for part in parts)
    first = next((reason for reason in reasons if reason is not None), None)
    return [_call_of(layer, name, own_reason or first)]


def _of_block(block: Block, name: str, scopes: Collection[str]) -> list[Interception]:
    parts = []
    for child_name, child in block.named_children():
        # A norm is named with its sublayer.
        sublayer = child_name.removesuffix("_norm").removesuffix("_output")
        place = f"{name}.{sublayer}"
        if isinstance(child, MixtureOfExperts):
            parts += _of_mixture(child, place, scopes)
            continue
        if sublayer == "mlp" and isinstance(block.mlp, MixtureOfExperts):
            place += ".combine" if child_name == "mlp_output_norm" else ".route"
        scope = child_name if child_name in ("attention", "mlp") else None
        parts.append(_call_of(child, place, _reason(child, scope, scopes)))
    return parts


def _of_mixture(
    mixture: MixtureOfExperts, name: str, scopes: Collection[str]
) -> list[Interception]:
    """Return the calls of a mixture of experts: its steps, or the exchange of tokens as a whole."""
    own_reason = reason_against_graphs(mixture)
    if own_reason is not None:
        return [_call_of(mixture, name, own_reason)]

    def step(method: str, scope: str, module: nn.Module | None = None) -> Interception:
        parameters = () if module is None else tuple(module.parameters())
        reason = _reason(module, scope, scopes)
        return Interception(mixture, method, f"{name}.{method}", parameters, reason)

    inner = [
        step("dispatch", "experts", mixture.shared),
        step("compute", "experts", mixture.experts),
        step("send_back", "experts"),
    ]
    is_static = mixture.transport_choice.dispatcher.is_static
    first = next((part.reason for part in inner if part.reason is not None), None)
    reason = first if is_static else _HOST_READS
    if reason is not None:
        parameters = tuple(parameter for part in inner for parameter in part.parameters)
        inner = [Interception(mixture, "exchange", f"{name}.exchange", parameters, reason)]
    route = step("route", "router", mixture.router)
    return [route, step("prepare", "preprocess"), *inner, step("combine", "combine")]


def _reason(module: nn.Module | None, scope: str | None, scopes: Collection[str]) -> str | None:
    """Return why no graph may hold a part of a scope; None if it may."""
    reason = None if module is None else _reason_in(module)
    if reason is not None:
        return reason
    return f"scope {scope} is not chosen" if scope is not None and scope not in scopes else None


def _reason_in(module: nn.Module) -> str | None:
    """Return why a module, or a part of it, refuses graphs; None if none does."""
    reasons = map(reason_against_graphs, module.modules())
    return next((reason for reason in reasons if reason is not None), None)
