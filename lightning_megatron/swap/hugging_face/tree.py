"""Module trees of Hugging Face models, which contain the parameters of sharded layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

from torch import nn

from lightning_megatron.groups.shard_spec import set_shard_spec, shard_spec_of
from lightning_megatron.layers.linear.linear import ColumnParallelLinear
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.layered import WORD_EMBEDDING
from lightning_megatron.models.stage import set_computed_by
from lightning_megatron.swap.families import Family
from lightning_megatron.swap.families.layer_names import is_training_only
from lightning_megatron.swap.hugging_face.module_stubs import (
    ModuleStub,
    convert_to_stub,
    set_counterparts,
    share_buffer,
    stub_class,
)
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from lightning_megatron.swap.tensors.low_rank import Adapter, is_factor, plain_name
from lightning_megatron.swap.tensors.packed import ClassParameter, class_parameters_of


@dataclass(frozen=True)
class _Named:
    """Parameter of a layer, with its name in the module tree."""

    owner: str
    path: str
    parameter: nn.Parameter


def install_layers(
    name: str,
    source: Any,
    model: GPT | Encoder,
    family: Family,
    adapter: Adapter | None,
    kind: type[ReplacedModel],
) -> None:
    """Make a Hugging Face model compute with sharded layers, under its module names.

    The model and all its modules stay the same objects, whose parameters become those of the
    layers. If a layer joins several layers of the class, their parameters share one block of
    memory. Parameters of other stages are removed.
    """
    paths = _paths(source, family)
    class_parameters = {
        tensor.target: class_parameters_of(tensor, family.packed)
        for tensor in family.tensors(model.config)
    }
    trained = {
        path: parameter.requires_grad
        for path, parameter in source.named_parameters(remove_duplicate=False)
    }
    named = list(_parameters(name, model, family, adapter, paths, class_parameters))
    own_class = type(source)
    for path, module in list(source.named_modules()):
        convert_to_stub(module, path)
    source.__class__ = stub_class(own_class, kind)
    places = {path: number for number, path in enumerate(trained)}

    def place(tensor: _Named) -> int:
        stack = places.get(tensor.path.rpartition(".")[0], len(places))
        return places.get(tensor.path, stack)

    # Stacks become modules here, in the order of the class.
    for tensor in sorted(named, key=place):
        _place(source, tensor.path, tensor.parameter)
        if not is_factor(tensor.path):
            tensor.parameter.requires_grad_(
                trained.get(tensor.path, trained.get(tensor.path.rpartition(".")[0], True))
            )
    for owner, key, path in _buffers(model, paths, named, class_parameters):
        module, _, name = path.rpartition(".")
        share_buffer(source.get_submodule(module), name, owner, key)
    _pair_modules(source, model, named)
    set_computed_by(source, model)
    vars(source).update(family=family, adapter=adapter, class_order=tuple(trained))


def _paths(source: nn.Module, family: Family) -> dict[str, str]:
    """Return the names in the tree of all tensors, by their names in the unwrapped class."""
    tensors = [name for name, _ in source.named_parameters(remove_duplicate=False)]
    tensors += [name for name, _ in source.named_buffers(remove_duplicate=False)]
    paths: dict[str, str] = {}
    for name in tensors:
        if is_factor(name):
            paths[name] = name
        elif ".original_module." not in name:
            paths[family.present_name(plain_name(name))] = name
    return paths


def _parameters(
    root: str,
    model: GPT | Encoder,
    family: Family,
    adapter: Adapter | None,
    paths: Mapping[str, str],
    class_parameters: Mapping[str, tuple[ClassParameter, ...]],
) -> Iterator[_Named]:
    """List this rank's parameters by their names in the tree; joined layers are split."""
    parameters = dict(class_parameters)
    if adapter is not None:
        for factor in adapter.factors(family.tensors(model.config)):
            parameters[factor.target] = (
                ClassParameter(adapter.own_name(factor.sources[0].name), factor.sources),
            )
    named_parameters = dict(model.named_parameters())
    for name in named_parameters:
        if len(parameters.get(name, ())) > 1 and name.endswith(".weight"):
            joint = model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(joint, ColumnParallelLinear), (
                "layers that join others are cut by their outputs"
            )
            joint.split([target.num_rows for target in parameters[name]])
    for name, parameter in named_parameters.items():
        owner = name.rpartition(".")[0]
        spec = shard_spec_of(parameter)
        if spec.tied_to is not None:
            first = _path_of(parameters[spec.tied_to][0].name, paths)
            set_shard_spec(parameter, replace(spec, tied_to=f"{root}.{first}"))
            yield _Named(owner, paths.get(family.head, family.head), parameter)
            continue
        targets = parameters[name]
        for target, part in zip(targets, _parts(model, name, parameter, len(targets)), strict=True):
            yield _Named(owner, _path_of(target.name, paths), part)
            for copy, original in family.copies:
                if original == target.name and copy in paths:
                    yield _Named(owner, paths[copy], part)
        is_head = name == WORD_EMBEDDING and model.config.tie_embeddings and model.mesh.pp.size == 1
        if is_head and family.head in paths:
            yield _Named(owner, paths[family.head], parameter)


def _parts(
    model: GPT | Encoder, name: str, parameter: nn.Parameter, count: int
) -> Sequence[nn.Parameter]:
    if count == 1:
        return (parameter,)
    owner, _, kind = name.rpartition(".")
    joint = model.get_submodule(owner)
    assert isinstance(joint, ColumnParallelLinear), "the layer has been split"
    stack = joint.weights if kind == "weight" else joint.biases
    assert stack is not None, "the layer has been split"
    return stack.parts


def _path_of(name: str, paths: Mapping[str, str]) -> str:
    """Return the path of a tensor in the tree, below the stack if it is an element of one."""
    if name in paths:
        return paths[name]
    stack, _, index = name.rpartition(".")
    return f"{paths.get(stack, stack)}.{index}" if index.isdecimal() else name


def _place(root: nn.Module, path: str, parameter: nn.Parameter) -> None:
    owner, _, key = path.rpartition(".")
    module = root
    for part in owner.split(".") if owner else ():
        if part not in module._modules:
            # The names of parameters that belong to no module of the class.
            module._modules[part] = ModuleStub()
        child = module._modules[part]
        assert child is not None, "modules with parameters are there"
        module = child
    module._parameters[key] = parameter


def _buffers(
    model: GPT | Encoder,
    paths: Mapping[str, str],
    named: Sequence[_Named],
    class_parameters: Mapping[str, tuple[ClassParameter, ...]],
) -> Iterator[tuple[nn.Module, str, str]]:
    """List the layers' buffers: layer, name in the layer, and name in the tree."""
    module_paths = {tensor.owner: tensor.path.rpartition(".")[0] for tensor in reversed(named)}
    for name, _ in model.named_buffers():
        owner, _, key = name.rpartition(".")
        if is_training_only(name):
            yield model.get_submodule(owner), key, f"{module_paths[owner]}.{key}"
        else:
            yield model.get_submodule(owner), key, _path_of(class_parameters[name][0].name, paths)


def _pair_modules(source: Any, model: nn.Module, named: Sequence[_Named]) -> None:
    """Make every layer follow the training mode of the module that has its parameters."""
    paths_below: dict[str, list[list[str]]] = {}
    # A parameter with several names, such as that of a tied head, is paired by its first name.
    for tensor in {id(tensor.parameter): tensor for tensor in reversed(named)}.values():
        owners = tensor.owner.split(".")
        for length in range(1, len(owners) + 1):
            paths_below.setdefault(".".join(owners[:length]), []).append(
                tensor.path.split(".")[:-1]
            )
    pairs: dict[str, list[nn.Module]] = {}
    path_of = {"": ""}
    for name, layer in model.named_modules():
        if name in paths_below:
            path_of[name] = ".".join(commonprefix(paths_below[name]))
        elif name:
            path_of[name] = path_of[name.rpartition(".")[0]]
        pairs.setdefault(path_of[name], []).append(layer)
    for path, layers in pairs.items():
        set_counterparts(source.get_submodule(path), tuple(layers))
