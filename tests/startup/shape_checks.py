"""Checks of the annotations of shapes in every process of the tests.

In a process with the import hook, ``lightning_megatron.shapes`` has the types of jaxtyping, and
every function whose annotations name dimensions checks its arguments and its result. The hook of
jaxtyping wraps every function of a module while the module is imported, for 0.4 seconds of each
process, and checks all annotations at every call. This one wraps only functions with such
annotations, checks no others, prepares a check at the first call, and remembers what has passed. ``JAXTYPING_DISABLE=1``
switches the checks off.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

PACKAGE = "lightning_megatron"
ROOMS = ("layers", "experts", "models", "training", "kernels")
SHAPES = f"{PACKAGE}.shapes"
# jaxtyping's name for each name of the package: unsigned integers are integers.
TYPES = {"Bool": "Bool", "Float": "Float", "Int": "Integer", "Shaped": "Shaped"}
ANNOTATION = re.compile(rf"\b({'|'.join(TYPES)})\[")
#: Types of what is described by its value.
NUMBERS = frozenset((bool, int, float, str))
#: Prepares the check of each function that has one: see :func:`prepare`.
PREPARATIONS: list[Callable[[], Check]] = []


class ShapeChecks(MetaPathFinder):
    """Import hook that checks the annotations of shapes of some rooms."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find a module of these rooms, and prepare it when it has run."""
        if not fullname.startswith(tuple(f"{PACKAGE}.{room}" for room in (*ROOMS, "shapes"))):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if fullname == SHAPES:
                use_jaxtyping(module)
            else:
                check_members(module, fullname)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def use_jaxtyping(module: ModuleType) -> None:
    """Put the types of jaxtyping in the place of those that check nothing."""
    import jaxtyping

    for name, type_name in TYPES.items():
        setattr(module, name, getattr(jaxtyping, type_name))


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
    return checked(member) if is_own and has_shapes(member) else member


def has_shapes(function: FunctionType) -> bool:
    """Return whether an annotation of a function names dimensions."""
    return any(ANNOTATION.search(str(text)) for text in function.__annotations__.values())


def checked(function: FunctionType) -> Callable[..., Any]:
    """Return a function that checks the shapes of its arguments and of its result.

    Shapes that have passed once pass again: jaxtyping sees each combination of shapes once, and
    most calls look it up, in a tenth of the time.
    """
    from jaxtyping import config
    from torch import Tensor
    from torch.compiler import is_compiling

    prepared = functools.cache(functools.partial(Check, function))
    PREPARATIONS.append(prepared)
    passed: set[tuple[Any, Any]] = set()
    passed_arguments: set[Any] = set()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # The compiler cannot trace the checks. A test of wrong shapes may switch them off.
        if is_compiling() or config.jaxtyping_disable:
            return function(*args, **kwargs)
        check = prepared()
        if not check.depends_on_shapes:
            return check(args, kwargs)
        given = described(args, Tensor), described(kwargs, Tensor) if kwargs else None
        if given not in passed_arguments:
            result = check(args, kwargs)
            passed_arguments.add(given)
            passed.add((given, described(result, Tensor)))
            return result
        result = function(*args, **kwargs)
        both = given, described(result, Tensor)
        if both not in passed:
            result = check(args, kwargs, [result])
            passed.add(both)
        return result

    return call


def prepare() -> None:
    """Prepare all checks at once, for processes that are forked from this one.

    Each of them would spend most of the seconds of its first fit on those that it uses.
    """
    for one in PREPARATIONS:
        one()


def described(value: Any, tensor_type: type) -> Any:
    """Return what the check of an argument or result depends on: shapes, dtypes, types, numbers."""
    kind = type(value)
    if kind in NUMBERS:
        return kind, value
    if kind is tensor_type:
        return kind, value.shape, value.dtype
    if isinstance(value, tensor_type):
        if kind.__module__.partition(".")[0] != "torch":
            # To read its shape may call checked functions. Equal to nothing, it is always checked.
            return kind, object()
        return kind, value.shape, value.dtype
    if isinstance(value, (list, tuple)):
        return kind, tuple([described(one, tensor_type) for one in value])
    if isinstance(value, dict):
        return kind, tuple([(name, described(one, tensor_type)) for name, one in value.items()])
    # A kind of number of its own, such as the index of a captured batch, may refuse to be read.
    return kind


class Check:
    """Call of a function with jaxtyping's checks of those annotations that name dimensions.

    Args:
        function: Function to call.
    """

    def __init__(self, function: FunctionType) -> None:
        texts = [
            str(text) for text in function.__annotations__.values() if ANNOTATION.search(str(text))
        ]
        #: Whether equal shapes and numbers are always judged alike: dimensions read no attribute.
        self.depends_on_shapes = not any(re.search(r"\{[^}]*\.", text) for text in texts)
        self._given = threading.local()
        self._call = with_jaxtyping(function, self._given)

    def __call__(self, args: Any, kwargs: Any, results: list[Any] | None = None) -> Any:
        """Call the function, or take the result that a call with these arguments had."""
        __tracebackhide__ = True
        self._given.results = list(results or ())
        try:
            return self._call(*args, **kwargs)
        finally:
            self._given.results = []


def with_jaxtyping(function: FunctionType, given: threading.local) -> Callable[..., Any]:
    """Return a function with jaxtyping's checks of those annotations that name dimensions.

    It returns the result in ``given.results``, if there is one, and calls ``function`` otherwise.
    """
    from beartype import BeartypeConf, beartype
    from beartype._check.code import codemain
    from beartype._util.kind.integer import utilintget
    from jaxtyping import jaxtyped

    # beartype checks one item of a list, which it draws from Python's generator. The state of that
    # generator belongs to the code under test, and every run must check the same item: the second,
    # or the only one.
    codemain.getrandbits = second_item  # type: ignore[attr-defined]
    utilintget.getrandbits = second_item  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return given.results.pop() if given.results else function(*args, **kwargs)

    signature = inspect.signature(function)
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            parameter.replace(annotation=shapes_in(function, parameter.annotation))
            for parameter in signature.parameters.values()
        ],
        return_annotation=shapes_in(function, signature.return_annotation),
    )
    # An integer is a legal float.
    conf = BeartypeConf(is_pep484_tower=True)
    return jaxtyped(call, typechecker=beartype(conf=conf))


def second_item(num_bits: int) -> int:
    """Return the number whose remainder by the length of a list is the item to check."""
    return 1


def shapes_in(function: FunctionType, annotation: Any) -> Any:
    """Return the value of an annotation that names dimensions, else Any."""
    if not ANNOTATION.search(str(annotation)):
        return Any
    inner = inspect.unwrap(function)
    return eval(annotation, inner.__globals__) if isinstance(annotation, str) else annotation


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
