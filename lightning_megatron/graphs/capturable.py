"""Segments of a chunk that graphs may capture, and why the others run eagerly."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import nn

from lightning_megatron.graphs.segments import SegmentList
from lightning_megatron.graphs.user_hooks import modules_with_user_hooks, user_hook_of
from lightning_megatron.plan.cuda_graphs import expanded_scopes
from lightning_megatron.user_code import is_compiled


def must_be_called(module: nn.Module) -> bool:
    """Return whether a module must be called itself, and not its parts one by one."""
    return is_compiled(module) or user_hook_of(module) is not None


def without_hooked(segments: SegmentList) -> SegmentList:
    """Return the opened list of a chunk, in which segments with users' hooks are not static.

    A replay calls no hooks. Equal to the list itself, hooks included.

    Args:
        segments: Segments of a chunk.
    """
    opened = segments.expand(must_be_called)
    static_or_eager = [
        replace(segment, is_static=segment.is_static and _hook_in(segment.modules) is None)
        for segment in opened
    ]
    return SegmentList(static_or_eager, opened.inputs, opened.outputs)


def eager_reasons(segments: SegmentList, scopes: Collection[str]) -> Mapping[str, str]:
    """Return why segments run eagerly, by their names.

    Args:
        segments: Result of :func:`without_hooked`.
        scopes: Scopes that graphs capture.
    """
    captured_scopes = expanded_scopes(scopes)
    reasons = {}
    for segment in segments:
        hook = _hook_in(segment.modules)
        outside = [scope for scope in segment.scopes if scope not in captured_scopes]
        if hook is not None:
            reasons[segment.name] = f"hook {hook}"
        elif not segment.is_static:
            reasons[segment.name] = "the host reads sizes"
        elif outside:
            reasons[segment.name] = f"scope {outside[0]} is not chosen"
    return reasons


def _hook_in(modules: Collection[nn.Module]) -> str | None:
    """Return the name of a user's hook on one of the modules, or inside of it."""
    return next(
        (hook for module in modules for hook in modules_with_user_hooks(module).values()), None
    )
