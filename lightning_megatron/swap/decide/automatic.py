"""Plans for modules of users, chosen where the options name none."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_megatron.models.stage import PipelinedModule, computed_by
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap.hugging_face.own_code import is_hugging_face

#: Factor by which the largest list of blocks must exceed every other one to be divided unasked.
_MIN_RATIO = 2


def automatic_pipeline_plan(root: nn.Module, layout: ParallelLayout) -> dict[str, str] | None:
    """Return a plan that divides the one list of equal blocks of a module; None without one.

    Models of this package and of Hugging Face have stages of their own. With a second list of at
    least half the size, such as those of an encoder and a decoder, the choice is the user's.
    """
    if layout.pp == 1 or any(_has_own_plan(part) for part in root.modules()):
        return None
    sizes = _lists_of_blocks(root, layout)
    largest = max(sizes.values(), default=0)
    close = [name for name, size in sizes.items() if size * _MIN_RATIO > largest]
    return suggest_pipeline_plan(root, layout) if len(close) == 1 else None


def suggest_pipeline_plan(root: nn.Module, layout: ParallelLayout) -> dict[str, str] | None:
    """Suggest a plan that divides the largest list of blocks; None if no list is long enough.

    The plan assumes that embeddings run before the blocks, heads over a vocabulary after them, and
    other modules in the order of their definition. If they do not, the first step raises an error.
    """
    sizes = _lists_of_blocks(root, layout)
    # Among lists of equal size, such as those of an encoder and a decoder, choose the last one,
    # which consumes the output of the others.
    best = max(reversed(sizes), key=lambda name: sizes[name], default=None)
    return None if best is None else {best: "blocks"} | _moved_ends(root, best)


def _has_own_plan(part: nn.Module) -> bool:
    is_model = isinstance(part, PipelinedModule) or is_hugging_face(part)
    return is_model or computed_by(part) is not None


def _lists_of_blocks(root: nn.Module, layout: ParallelLayout) -> dict[str, int]:
    """Return the numbers of elements of the outermost lists that are long enough, by name."""
    sizes: dict[str, int] = {}
    for name, part in root.named_modules():
        if type(part) not in (nn.ModuleList, nn.Sequential):
            continue
        kinds = {type(block) for block in part.children()}
        within = any(name.startswith(f"{known}.") for known in sizes)
        if len(kinds) == 1 and len(part) >= layout.pp * layout.vpp and not within:
            sizes[name] = sum(parameter.numel() for parameter in part.parameters())
    return {name: size for name, size in sizes.items() if size}


def _moved_ends(root: nn.Module, blocks: str) -> dict[str, str]:
    """Return the stages of embeddings and heads that are defined on the wrong side of blocks."""
    modules = [
        (name, part)
        for name, part in root.named_modules()
        if not f"{name}.".startswith(f"{blocks}.") and isinstance(part, nn.Linear | nn.Embedding)
    ]
    names = [name for name, _ in root.named_modules()]
    vocabularies = {part.num_embeddings for _, part in modules if isinstance(part, nn.Embedding)}
    stages: dict[str, str] = {}
    for name, part in modules:
        is_before = names.index(name) < names.index(blocks)
        # A stage holds whole modules beside the blocks or around them.
        around = name.rpartition(".")[0]
        is_beside = not around or blocks.startswith(f"{around}.")
        if isinstance(part, nn.Embedding):
            stage = None if is_before else "first"
        else:
            stage = "last" if is_before and part.out_features in vocabularies else None
        if stage is not None and is_beside:
            stages[name] = stage
    return stages


def yaml_of(plans: Mapping[str, Mapping[str, str] | None]) -> str:
    """Return plans as YAML, by the name of their option, for a recipe."""
    lines = []
    for option, plan in plans.items():
        if plan:
            lines += [f"  {option}:", *(f'    "{name}": {kind}' for name, kind in plan.items())]
    return "\n".join(lines)
