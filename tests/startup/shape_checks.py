"""Checks of the annotations of shapes in every process of the tests.

With the import hook, ``lightning_megatron.shapes`` has the types of jaxtyping, and functions whose
annotations name dimensions check their arguments and results, once for each combination of shapes.
The hook of jaxtyping wraps all functions and checks all calls: two seconds of each process, and twice
the time of a small fit. ``JAXTYPING_DISABLE=1`` switches the checks off.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import re
import sys
from collections.abc import Callable
from dataclasses import _HAS_DEFAULT_FACTORY  # type: ignore[attr-defined]
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

PACKAGE = "lightning_megatron"
ROOMS = ("layers", "experts", "models", "optimizer", "kernels")
# jaxtyping's name for each name of the package: unsigned integers are integers.
TYPES = {"Bool": "Bool", "Float": "Float", "Int": "Integer", "Shaped": "Shaped"}
ANNOTATION = re.compile(rf"\b({'|'.join(TYPES)})\[")
#: The check of each function that has one.
CHECKS: list[Check] = []


class ShapeChecks(MetaPathFinder):
    """Import hook that checks the annotations of shapes of some rooms."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(tuple(f"{PACKAGE}.{room}" for room in (*ROOMS, "shapes"))):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if fullname == f"{PACKAGE}.shapes":
                import jaxtyping

                vars(module).update({name: getattr(jaxtyping, TYPES[name]) for name in TYPES})
            else:
                check_members(module, fullname)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def check_members(owner: Any, module_name: str) -> None:
    """Wrap the functions, and the methods of the classes, that a module defines."""
    for name, member in list(vars(owner).items()):
        if inspect.isclass(member):
            # A class of another module, or one of an enclosing class that was seen already.
            nested = f"{owner.__qualname__}.{name}" if inspect.isclass(owner) else name
            if member.__module__ == module_name and member.__qualname__ == nested:
                check_members(member, module_name)
            continue
        wrapped = with_checks(member, module_name)
        if wrapped is not member:
            setattr(owner, name, wrapped)


def with_checks(member: Any, module_name: str) -> Any:
    """Return a function, or what a decorator made of it, with checks if its annotations have any."""
    if isinstance(member, staticmethod | classmethod):
        inner = with_checks(member.__func__, module_name)
        return member if inner is member.__func__ else type(member)(inner)
    if isinstance(member, property):
        getter = with_checks(member.fget, module_name)
        return member if getter is member.fget else member.getter(getter)
    if not isinstance(member, FunctionType):
        return member  # a kernel of Triton or an operator of torch
    # The generated `__init__` of a dataclass has no module.
    is_own = member.__module__ == module_name or member.__name__ == "__init__"
    has_shapes = any(ANNOTATION.search(str(text)) for text in member.__annotations__.values())
    return checked(member) if is_own and has_shapes else member


def checked(function: FunctionType) -> Callable[..., Any]:
    """Return a function that checks the shapes of its arguments and of its result."""
    from jaxtyping import config
    from torch import Tensor
    from torch.compiler import is_compiling

    check = Check(function)
    CHECKS.append(check)
    passed: set[Any] = set()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # The compiler cannot trace the checks. A test of wrong shapes may switch them off.
        if is_compiling() or config.jaxtyping_disable:
            return function(*args, **kwargs)
        given = described(args, Tensor), described(kwargs, Tensor)
        if given not in passed:
            check(args, kwargs)
        result = function(*args, **kwargs)
        both = given, described(result, Tensor)
        if both not in passed:
            check(args, kwargs, result)
        if not check.reads_attributes:
            passed.update((given, both))
        return result

    return call


def described(value: Any, tensor_type: type) -> Any:
    """Return what the check of an argument or result depends on: shapes, dtypes, types, numbers."""
    kind = type(value)
    if kind in (bool, int, float, str):
        return kind, value
    if isinstance(value, tensor_type):
        # To read the shape of a tensor of ours may call checked functions: it is always checked.
        is_own = kind.__module__.partition(".")[0] != "torch"
        return (kind, object()) if is_own else (kind, value.shape, value.dtype)
    if isinstance(value, (list, tuple)):
        return kind, tuple([described(one, tensor_type) for one in value])
    if isinstance(value, dict):
        return kind, tuple([(name, described(one, tensor_type)) for name, one in value.items()])
    return kind


class Check:
    """Check of those annotations of a function that name dimensions."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        texts = map(str, function.__annotations__.values())
        #: Whether dimensions depend on more than shapes and numbers.
        self.reads_attributes = any(re.search(r"\{[^}]*\.", text) for text in texts)

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @functools.cached_property
    def hints(self) -> dict[str, Any]:
        """The values of the annotations by argument, that of the result as ``return``."""
        names = inspect.unwrap(self.function).__globals__
        hints = {}
        for name, text in self.function.__annotations__.items():
            if ANNOTATION.search(str(text)):
                hint = eval(text, names) if isinstance(text, str) else text
                parameter = self.signature.parameters.get(name)
                is_rest = parameter is not None and parameter.kind is parameter.VAR_POSITIONAL
                hints[name] = tuple[hint, ...] if is_rest else hint
        return hints

    def __call__(self, args: Any, kwargs: Any, *result: Any) -> None:
        """Check the arguments, and the result if there is one."""
        __tracebackhide__ = True
        from jaxtyping._storage import pop_shape_memo, push_shape_memo
        from torch import Tensor

        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments | dict(zip(["return"], result, strict=False))
        # The `__init__` of a dataclass makes the values of some fields itself.
        values = {name: one for name, one in values.items() if one is not _HAS_DEFAULT_FACTORY}
        # One item of a list is checked, always the same; the generator belongs to the code under test.
        state = random.getstate()
        random.seed(1)
        push_shape_memo(bound.arguments)
        try:
            for name, hint in self.hints.items():
                if name in values and not is_legal(values[name], hint):
                    shapes, where = described(values[name], Tensor), self.function.__qualname__
                    raise TypeError(f"{name} of {where} must be {hint}: it is {shapes}.")
        finally:
            pop_shape_memo()
            random.setstate(state)


def is_legal(value: Any, hint: Any) -> bool:
    """Return whether a value is what an annotation says; an integer is a legal float."""
    from beartype import BeartypeConf
    from beartype.door import is_bearable

    return is_bearable(value, hint, conf=BeartypeConf(is_pep484_tower=True))


def prepare() -> None:
    """Prepare all checks, for processes that are forked from this one."""
    for check in CHECKS:
        for hint in check.hints.values():
            is_legal(None, hint)


def are_on() -> bool:
    """Return whether the annotations of shapes are to be checked."""
    return os.environ.get("JAXTYPING_DISABLE", "0").lower() in {"0", "false"}


def install() -> None:
    """Check the shapes in this process, unless that is switched off."""
    # An environment that a test made may lack the packages of the tests.
    if not (are_on() and find_spec("jaxtyping") and find_spec("beartype")):
        return
    late = [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]
    assert not late, f"these modules were imported before the checks were installed: {late}"
    sys.meta_path.insert(0, ShapeChecks())
