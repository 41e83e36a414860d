"""Hugging Face models that are built without weights, so that each rank reads only its part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.hub import local_folder
from lightning_megatron.models.hugging_face_folder import name_folder_in_errors
from lightning_megatron.swap.families import find_family
from lightning_megatron.swap.pretrained.deferred import (
    Origin,
    ReadOnFirstUse,
    defer,
    is_part_of_deferred,
    origin_of,
    read_deferred,
)
from lightning_megatron.swap.pretrained.unchanged_models import describe_modules
from lightning_megatron.swap.pretrained.without_weights import without_weights
from lightning_megatron.swap.tensors.low_rank import plain_name
from lightning_megatron.swap.tensors.mapping import named
from lightning_megatron.swap.weights.safetensors_folder import QUANTIZATION, SafetensorsFolder
from lightning_megatron.swap.weights.scaled_blocks import is_read_as_numbers


@contextmanager
def call_on_import(name: str, act: Callable[[ModuleType], None]) -> Iterator[None]:
    """Call a function with a module, now or as soon as the module is imported inside the block."""
    if name in sys.modules:
        act(sys.modules[name])
        yield
        return
    finder = _Finder(name, act)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Import finder that delegates to others and runs a callback after the import."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._act(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


#: Arguments of ``from_pretrained`` that affect only where a model is found and how it is read.
_IRRELEVANT = frozenset(
    """
    adapter_kwargs attn_implementation cache_dir code_revision force_download local_files_only
    low_cpu_mem_usage proxies revision token trust_remote_code use_safetensors _commit_hash
    _from_auto
    """.split()
)
#: Those with which Hugging Face's own code looks for a model on the Hub.
_OTHER_PLACES = ("cache_dir", "force_download", "proxies", "subfolder", "token")
#: Keys of the mapping that ``from_pretrained`` also returns with ``output_loading_info=True``.
_LOADING_INFO = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


@contextmanager
def build_on_meta() -> Iterator[None]:
    """Build models of known families on the meta device inside the block.

    Their weights are read when the model is swapped, and only from local folders. All other models,
    and peft's adapters, are built as usual. transformers and peft may be imported before the block
    or inside it.
    """
    with ExitStack() as stack:
        # transformers and peft are not imported here, because that takes most of a second, and not
        # every model needs them.
        for name, patch in (
            ("transformers.modeling_utils", _build_later),
            ("peft.peft_model", _check_adapters),
        ):
            stack.enter_context(call_on_import(name, partial(patch, stack)))
        stack.enter_context(ReadOnFirstUse())
        yield


def _build_later(stack: ExitStack, library: Any) -> None:
    """Patch the methods that build models, until the stack is closed."""
    base = library.PreTrainedModel
    before = {name: base.__dict__[name] for name in ("from_pretrained", "_from_config")}
    load = before["from_pretrained"].__func__
    build = before["_from_config"].__func__
    base.from_pretrained = classmethod(
        lambda cls, *args, **kwargs: _from_pretrained(cls, load, args, kwargs)
    )
    base._from_config = classmethod(
        lambda cls, config, **kwargs: _from_config(cls, build, config, kwargs)
    )
    for name, method in before.items():
        stack.callback(setattr, base, name, method)


def _check_adapters(stack: ExitStack, library: Any) -> None:
    """Check adapters that peft loads, until the stack is closed."""
    wrapper = library.PeftModel
    load = wrapper.load_adapter

    def loaded(self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        result = load(self, model_id, adapter_name, *args, **kwargs)
        _check_adapter(self, model_id, adapter_name, result)
        return result

    wrapper.load_adapter = loaded
    stack.callback(setattr, wrapper, "load_adapter", load)


def _check_adapter(model: Any, folder: Any, name: str, result: Any) -> None:
    """Refuse a saved adapter that peft has loaded in part, or whose values no training survives."""
    if model.peft_config[name].peft_type != "LORA":
        return
    if result.missing_keys or result.unexpected_keys:
        raise CheckpointMismatchError(
            "a saved adapter must have the tensors of the model's adapter, because peft would "
            f"continue without the missing ones: {folder} has {named(result.unexpected_keys)} and "
            f"lacks {named(result.missing_keys)}. Load an adapter of this model, with the names "
            "that peft writes."
        )
    for key, parameter in model.named_parameters():
        is_loaded = f".{name}." in key and not parameter.is_meta
        if is_loaded and not parameter.isfinite().all():
            raise CorruptDataError(
                f"a saved adapter must have finite values: {key} in {folder} has infinite values "
                "or NaN, and so would every loss. Load another adapter."
            )


def read_missing_values(model: Any) -> Callable[[], None]:
    """Read all weights of a deferred model; do not change the model.

    Returns:
        Function that gives the model the weights.
    """
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return lambda: None
    cls = type(model)
    if is_part_of_deferred(model):
        # The model was built as a part of a larger one. A new model of its class would read or
        # initialize other tensors.
        return read_deferred(model)
    origin = origin_of(model)
    folder = None if origin is None else origin.folder
    if folder is not None and SafetensorsFolder(folder).has_scales:
        raise UnsupportedError(
            "weights in 4 or 8 bits are read for models that are replaced: a "
            f"{cls.__name__} from {folder} stays as it is. Leave it out of the plan, or build it "
            "in __init__, where transformers reads the weights."
        )
    settings = {"config": model.config, "dtype": model.dtype}
    full = (
        cls._from_config(**settings) if folder is None else cls.from_pretrained(folder, **settings)
    )
    values = full.state_dict(keep_vars=True)
    filled: dict[str, Tensor] = {}
    shared: dict[int, Tensor] = {}
    for name, old in model.state_dict(keep_vars=True).items():
        if not old.is_meta:
            continue
        if plain_name(name) not in values:
            raise UnsupportedError(
                "a model that is built without its weights must keep the modules that its class "
                f"builds: {name!r} was added to a {cls.__name__} and has no values. Build the "
                "model outside of configure_model, or leave the model out of the plan, so that "
                "the strategy replaces it."
            )
        value = values[plain_name(name)].detach()
        if isinstance(old, nn.Parameter):
            value = nn.Parameter(value, old.requires_grad)
        # Shared tensors stay shared.
        filled[name] = shared.setdefault(id(old), value)
    return partial(model.load_state_dict, filled, strict=False, assign=True)


def _from_config(cls: Any, build: Callable[..., Any], config: Any, kwargs: dict[str, Any]) -> Any:
    if not _is_replaced(cls, config):
        return build(cls, config, **kwargs)
    return _deferred(without_weights(lambda: build(cls, config, **kwargs)), None)


def _is_replaced(cls: Any, config: Any) -> bool:
    """Return whether a model will be replaced if no plan excludes it."""
    family = find_family(cls.__name__)
    return family is not None and not family.unsupported_reason(config.to_dict())


def _deferred(model: Any, folder: str | None) -> Any:
    """Mark a model's weights to be read from a folder, or drawn, later."""
    family = find_family(type(model).__name__)
    assert family is not None, "models of known families are built without their weights"
    config = model.config.to_dict()
    defer(model, Origin(family, config, folder, model.dtype, describe_modules(model)))
    return model


def _from_pretrained(
    cls: Any, load: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    path: Any = kwargs.get("pretrained_model_name_or_path", args[0] if args else None)
    options = {
        name: value
        for name, value in kwargs.items()
        if value is not None and name not in _IRRELEVANT
    }
    dtype = options.pop("dtype", options.pop("torch_dtype", None))
    config = options.pop("config", None)
    options.pop("pretrained_model_name_or_path", None)
    if isinstance(path, str) and not any(kwargs.get(name) for name in _OTHER_PLACES):
        path = _named_on_hub(path, kwargs.get("revision"))
    is_folder = len(args) <= 1 and isinstance(path, (str, Path)) and Path(path).is_dir()
    if not is_folder or not SafetensorsFolder.exists_in(path):
        return load(cls, *args, **kwargs)
    if find_family(cls.__name__) is None:
        return _name_files(path, lambda: load(cls, *args, **kwargs))
    with_info = options.pop("output_loading_info", False)
    if config is None:
        # Fields of the configuration may be among the arguments.
        with name_folder_in_errors(
            str(path), "config.json must be a configuration that transformers reads"
        ):
            config, options = cls.config_class.from_pretrained(
                path, return_unused_kwargs=True, **options
            )
    config = _of_numbers(config)
    if is_read_as_numbers(options.get(QUANTIZATION)):
        del options[QUANTIZATION]
    try:
        is_replaced = not options and _is_replaced(cls, config)
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"{Path(path, 'config.json')}: {error}") from error
    if not is_replaced:
        return _name_files(path, lambda: load(cls, *args, **kwargs))
    if dtype in (None, "auto"):
        dtype = config.dtype or SafetensorsFolder(path).dtype
    with name_folder_in_errors(
        str(path), "config.json must describe a model that transformers builds"
    ):
        model = cls._from_config(config, dtype=dtype)
    _deferred(model, str(path))
    if model.can_generate() and (Path(path) / "generation_config.json").is_file():
        # Hugging Face also ignores a damaged file.
        with suppress(OSError):
            model.generation_config = type(model.generation_config).from_pretrained(path)
    # Tensors that the folder lacks raise an error when the weights are read.
    return (model.eval(), dict.fromkeys(_LOADING_INFO, frozenset())) if with_info else model.eval()


def _named_on_hub(path: str, revision: Any) -> str:
    """Return the local folder of a model by its name on the Hub; other paths stay as they are."""
    # transformers replaces the revision of the caller by a commit, and keeps it in this attribute.
    revision = getattr(revision, "initial", revision)
    # A model without files that shards are read from is left to Hugging Face's code.
    with suppress(UnsupportedError):
        return local_folder(path if revision is None else f"{path}@{revision}")
    return path


def _of_numbers(config: Any) -> Any:
    """Return a configuration without quantization, if weights are read as plain numbers."""
    if not is_read_as_numbers(getattr(config, QUANTIZATION, None)):
        return config
    plain = deepcopy(config)
    delattr(plain, QUANTIZATION)
    return plain


def _name_files(path: str | Path, load: Callable[[], Any]) -> Any:
    """Load a model; if a weight file is damaged, raise an error that names it."""
    try:
        return load()
    except import_extra("safetensors", "hf").SafetensorError as error:
        SafetensorsFolder(path)
        raise CorruptDataError(
            f"a file of weights in {path} is damaged ({error}). Copy the folder again."
        ) from error
