"""Plans for modules of users, chosen where the options name none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.stage import PipelinedModule, computed_by
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap.blocks.rules import rules_of
from lightning_megatron.swap.decide.expert_lists import automatic_experts
from lightning_megatron.swap.decide.kinds import FULL_VIEWS, SWAPPED_AS, split_kind
from lightning_megatron.swap.hugging_face.own_code import is_hugging_face
from lightning_megatron.user_code import is_compiled, refuses_graphs

#: Layers that a plan may name here.
_SHARDED = (nn.Linear, nn.Embedding)
#: Attribute of a parameter with the hooks that run when its gradient is complete.
_GRADIENT_HOOKS = "_post_accumulate_grad_hooks"
#: Number of embeddings of one size that would be the whole model; larger ones are sharded.
_MIN_SHARE = 10
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


def automatic_tensor_plan(root: nn.Module, mesh: ParallelMesh) -> dict[str, str] | None:
    """Return a plan that shards linear layers, vocabularies and lists of experts; None without any.

    User code sees the outputs of these layers in full, so that it needs no change. Models of this
    package and of Hugging Face have plans of their own, and blocks of torch.nn are replaced.
    Compiled code takes no parts for all features: if a module has any, outputs are gathered.
    """
    if any(_has_own_plan(part) or hasattr(part, SWAPPED_AS) for part in root.modules()):
        return None
    tp = mesh.tp.size
    kinds = _pairs(root, tp) | _vocabularies(root) if tp > 1 else {}
    if any(map(is_compiled, root.modules())):
        kinds = {
            name: "column_gather" if split_kind(kind)[0] in FULL_VIEWS else kind
            for name, kind in kinds.items()
        }
    experts = automatic_experts(root, mesh)
    types = {type(root.get_submodule(name)) for name in experts}
    plan = _patterns(root, kinds) | _patterns(root, experts, *types)
    if plan and any("auto" in rules_of(part) for part in root.modules()):
        return {"*": "auto", **plan}
    return plan or None


def suggest_tensor_plan(root: nn.Module, tp: int) -> dict[str, str]:
    """Suggest a plan that shards the linear layers of a module; empty if there are none.

    Without layers whose outputs another layer takes, single layers gather their outputs.
    """
    single = {
        name: "column_gather"
        for name, part in root.named_modules()
        if type(part) is nn.Linear and part.out_features % tp == 0
    }
    return _patterns(root, _pairs(root, tp) | _vocabularies(root) or single)


def _outside_blocks(root: nn.Module) -> dict[str, nn.Module]:
    """Return the modules outside of blocks of torch.nn that are replaced as a whole, by name."""
    modules: dict[str, nn.Module] = {}
    block = None
    for name, part in root.named_modules():
        # Nothing is replaced inside the wrapper that torch.compile returns.
        if "_orig_mod" in name.split(".") or (block is not None and name.startswith(block)):
            continue
        block = f"{name}." if "auto" in rules_of(part) else block
        modules[name] = part
    return modules


def _can_be_replaced(part: nn.Module) -> bool:
    """Return whether another layer can stand for a layer of torch.nn without losing anything."""
    hooks: list[Any] = [part._forward_hooks, part._forward_pre_hooks]
    hooks += [part._backward_hooks, part._backward_pre_hooks]
    for parameter in part.parameters(recurse=False):
        hooks += [parameter._backward_hooks, getattr(parameter, _GRADIENT_HOOKS, None)]
    is_known = type(part) in _SHARDED and part._compiled_call_impl is None
    return is_known and not any(hooks) and not refuses_graphs(part)


def _pairs(root: nn.Module, tp: int) -> dict[str, str]:
    """Return the kinds of linear layers whose outputs another layer of their module takes."""
    names = Counter(
        id(part.weight)
        for _, part in root.named_modules(remove_duplicate=False)
        if isinstance(part, nn.Linear | nn.Embedding)
    )
    kinds: dict[str, str] = {}
    for name, module in _outside_blocks(root).items():
        if "auto" in rules_of(module):
            continue
        prefix = f"{name}." if name else ""
        runs: list[dict[str, nn.Linear]] = [{}]
        for key, child in module.named_children():
            if (
                isinstance(child, nn.Linear)
                and _can_be_replaced(child)
                and names[id(child.weight)] == 1
            ):
                runs[-1][f"{prefix}{key}"] = child
            elif any(parameter.dim() > 1 for parameter in child.parameters()):
                # Layers around a block belong to different parts of the module; those around a
                # norm do not.
                runs.append({})
        for run in runs:
            kinds |= _pairs_of(run, tp, is_chain=isinstance(module, nn.Sequential))
    return kinds


def _pairs_of(layers: Mapping[str, nn.Linear], tp: int, *, is_chain: bool) -> dict[str, str]:
    """Return the kinds of layers that are defined in a row, from the last pair to the first."""
    kinds: dict[str, str] = {}
    names = list(layers)
    while names:
        last = names.pop()
        width = layers[last].in_features
        producers = _producers(layers, names, width)[-1 if is_chain else 0 :]
        found = {name: _kind_of(layers[name], width, tp) for name in producers}
        if width % tp == 0 and found and None not in found.values():
            kinds |= {name: kind for name, kind in found.items() if kind is not None}
            kinds[last] = "row_split"
            del names[-len(producers) :]
    return kinds


def _producers(layers: Mapping[str, nn.Linear], names: Sequence[str], width: int) -> Sequence[str]:
    """Return the last layers whose outputs together form an input of the width."""
    if not names:
        return ()
    nearest = layers[names[-1]]
    start = len(names)
    if _fused_kind(nearest, width) is not None:
        start -= 1
    # Keys and values may have fewer features than queries.
    is_smaller = nearest.out_features < width and width % nearest.out_features == 0
    while is_smaller and start and len(names) - start < 2:
        if layers[names[start - 1]].out_features != nearest.out_features:
            break
        start -= 1
    middle = start
    while start and layers[names[start - 1]].out_features == width:
        if layers[names[start - 1]].in_features != nearest.in_features:
            break
        start -= 1
    return names[start:] if start < middle or nearest.out_features > width else ()


def _kind_of(layer: nn.Linear, width: int, tp: int) -> str | None:
    size = layer.out_features
    fused = _fused_kind(layer, width)
    if fused is None:
        return "column_full" if size % tp == 0 else None
    sizes = [size * share // sum(fused[1]) for share in fused[1]]
    return None if any(part % tp for part in sizes) else fused[0]


def _fused_kind(layer: nn.Linear, width: int) -> tuple[str, tuple[int, ...]] | None:
    """Return the kind and relative sizes of layers fused in one, if a layer of a width follows."""
    size = layer.out_features
    # Queries have the width of the model, and two to a key make as many features as a gated MLP.
    if size == 2 * width and width != layer.in_features:
        return "gate_up", (1, 1)
    if size == 3 * width:
        return "qkv", (1, 1, 1)
    keys, rest = divmod(size - width, 2)
    if rest or not 0 < keys < width or width % keys:
        return None
    return f"qkv({width // keys}, 1)", (width // keys, 1, 1)


def _vocabularies(root: nn.Module) -> dict[str, str]:
    """Return the kinds of embeddings and of the heads over their vocabulary.

    Other embeddings, such as those of positions, are sharded if they are large. Layers that share a
    weight are sharded alike or not at all.
    """
    owners: dict[int, list[str]] = {}
    for name, part in root.named_modules(remove_duplicate=False):
        for parameter in part._parameters.values():
            owners.setdefault(id(parameter), []).append(name)
    modules = _outside_blocks(root)
    total = sum(parameter.numel() for parameter in root.parameters())
    heads = {part.out_features for part in modules.values() if type(part) is nn.Linear}
    chosen: dict[str, str] = {}
    sizes = set()
    for name, part in modules.items():
        if not (_can_be_replaced(part) and type(part) is nn.Embedding) or part.max_norm is not None:
            continue
        is_large = part.weight.numel() * _MIN_SHARE > total
        plain = not (part.scale_grad_by_freq or part.sparse)
        if plain and (part.num_embeddings in heads or is_large):
            sizes.add(part.num_embeddings)
            chosen[name] = "vocab"
    for name, part in modules.items():
        if _can_be_replaced(part) and getattr(part, "out_features", None) in sizes:
            chosen[name] = "vocab"
    return {
        name: kind
        for name, kind in chosen.items()
        if chosen.keys() >= set(owners[id(modules[name].weight)])
    }


def _patterns(root: nn.Module, kinds: Mapping[str, str], *types: type[nn.Module]) -> dict[str, str]:
    """Return the kinds by pattern, where every layer that a pattern matches has its kind."""
    layers = [name for name, part in root.named_modules() if type(part) in (types or _SHARDED)]
    plan: dict[str, str] = {}
    # Equal layers of all blocks share a pattern, which looks at every layer.
    matched: dict[str, set[str | None]] = {}
    for name, kind in kinds.items():
        pattern = re.sub(r"(?<![^.])\d+(?=\.)", "*", name)
        if pattern not in matched:
            matched[pattern] = {kinds.get(other) for other in layers if fnmatchcase(other, pattern)}
        plan[pattern if matched[pattern] == {kind} else name] = kind
    return plan


def yaml_of(plans: Mapping[str, Mapping[str, str] | None]) -> str:
    """Return plans as YAML, by the name of their option, for a recipe."""
    lines = []
    for option, plan in plans.items():
        if plan:
            lines += [f"  {option}:", *(f'    "{name}": {kind}' for name, kind in plan.items())]
    return "\n".join(lines)
