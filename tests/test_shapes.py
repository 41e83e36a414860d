"""Tests of shape annotations: public functions have them, and every test process checks them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lightning_megatron.layers
from lightning_megatron.layers.attention.core import attend
from lightning_megatron.layers.attention.span import AttentionSpan
from tests.startup.shape_checks import ROOMS, TYPES, are_on
from tests.world import run_world

PACKAGE = Path(lightning_megatron.layers.__file__).parents[1]
FILES = sorted(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py"))
# Files whose tensors may have any shape.
OF_ANY_TENSOR = {
    "models/remote_tensor.py": "placeholders of any tensor",
    "models/outer_modules.py": "parameters and buffers of modules",
    "models/stage_boundaries.py": "placeholders of any tensor",
    "models/stage.py": "values of any shape that stages send, and functions of the caller",
    "models/cut_blocks.py": "parameters and results of blocks",
}
# Functions whose tensors may have any shape.
OF_ANY_PARAMETER = {
    "layers/fused/choose_kernels.py": {"fused_kernels", "is_served"},
    "layers/parameters/gradient_slot.py": {
        "GradientSlot.__init__",
        "GradientSlot.add",
        "slot_of",
        "slots_of",
        "set_slot",
    },
}
needs_checks = pytest.mark.skipif(not are_on(), reason="JAXTYPING_DISABLE is set")


def test_functions_with_tensors_name_their_dimensions():
    wrong = []
    for path in FILES:
        file = path.relative_to(PACKAGE).as_posix()
        if file in OF_ANY_TENSOR:
            continue
        for name, function in public_functions(ast.parse(path.read_text(encoding="utf-8"))):
            if name in OF_ANY_PARAMETER.get(file, ()):
                continue
            args = function.args
            arguments = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs]
            wrong += [
                f"{file}:{annotation.lineno} {name}: {ast.unparse(annotation)}"
                for annotation in [a.annotation for a in arguments if a] + [function.returns]
                if annotation is not None and has_bare_tensor(annotation)
            ]
    assert not wrong, "name the dimensions, as in Float[Tensor, 'seq batch']:\n" + "\n".join(wrong)


def public_functions(
    node: ast.Module | ast.ClassDef, prefix: str = ""
) -> list[tuple[str, ast.FunctionDef]]:
    """Return the public functions and methods, and the constructors and calls, by name."""
    functions = []
    for member in node.body:
        if isinstance(member, ast.ClassDef) and not member.name.startswith("_"):
            functions += public_functions(member, f"{prefix}{member.name}.")
        elif isinstance(member, ast.FunctionDef) and (
            not member.name.startswith("_") or member.name in {"__init__", "__call__"}
        ):
            functions.append((prefix + member.name, member))
    return functions


def has_bare_tensor(annotation: ast.expr) -> bool:
    """Return whether an annotation has a tensor without dimensions, except inside callables."""
    if isinstance(annotation, ast.Name):
        return annotation.id == "Tensor"
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in {
        *TYPES,
        "Callable",
    }:
        return False
    return any(
        has_bare_tensor(child)
        for child in ast.iter_child_nodes(annotation)
        if isinstance(child, ast.expr)
    )


def test_the_legend_lists_every_name_of_a_dimension():
    legend = lightning_megatron.layers.__doc__ or ""
    head = legend.partition("A number is the size itself")[0]
    listed = {
        name for line in re.findall(r"^- (.*?):", head, re.M) for name in re.findall(r"\w+", line)
    }
    used: dict[str, str] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) in TYPES:
                assert isinstance(node.slice, ast.Tuple), ast.unparse(node)
                text = ast.literal_eval(node.slice.elts[1])
                # Names in braces are names of arguments.
                names = re.findall(r"[a-z]\w*", re.sub(r"\{.*?\}", "", text))
                used |= dict.fromkeys(names, path.relative_to(PACKAGE).as_posix())
    missing = {name: file for name, file in used.items() if name not in listed}
    assert not missing, f"the docstring of layers has to list {missing}"
    assert not listed - set(used), f"no annotation has {listed - set(used)}"


@needs_checks
def test_a_tensor_of_a_wrong_shape_is_refused():
    query = torch.zeros(5, 2, 4, 8)
    assert attend(query, query, query, AttentionSpan()).shape == (5, 2, 32)
    with pytest.raises(TypeError, match="value of attend must be"):
        attend(query, query, query[:, :1], AttentionSpan())
    with pytest.raises(TypeError, match="key of attend must be"):
        attend(query, query.long(), query, AttentionSpan())
    # Fields of a dataclass are checked, too.
    lengths, positions = torch.zeros(2, 3, dtype=torch.long), torch.zeros(1, 5, dtype=torch.long)
    with pytest.raises(TypeError, match=r"positions of AttentionSpan\.__init__ must be"):
        AttentionSpan(lengths=lengths, positions=positions)


def is_refused(rank: int, size: int) -> bool:
    """Return whether this process checks the annotations."""
    try:
        test_a_tensor_of_a_wrong_shape_is_refused()
    except pytest.fail.Exception:
        return False
    return True


@needs_checks
def test_processes_of_a_world_check_shapes_too():
    assert run_world(is_refused, 1) == [True]


def test_disabled_annotations_need_no_jaxtyping_and_check_nothing():
    program = (
        "import sys, torch; from lightning_megatron.layers.mlp import activate\n"
        "activate(torch.zeros(2, 3, dtype=torch.float64), 'relu')\n"
        "print(hasattr(activate, '__wrapped__'), 'jaxtyping' in sys.modules)"
    )
    environment = {**os.environ, "JAXTYPING_DISABLE": "1"}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False False"
