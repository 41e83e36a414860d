"""The rules that keep the project readable, checked on the syntax trees of its files: no module is
imported.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_megatron"
FILES = sorted(PACKAGE.rglob("*.py"))

# A room imports itself and the rooms before it. What is beside the rooms (`errors`, `once`, ...) is
# open to all.
ROOMS = (
    *("plan", "kernels", "groups", "layers", "experts", "models", "swap"),
    *("training", "pipeline", "graphs", "generation", "checkpoint", "strategy"),
)
LEAVES = {
    "data": {"plan"},
    "corpus": {"plan", "data"},
    "evaluation": {"plan", "groups", "layers", "models", "swap", "generation", "data"},
    "preferences": {"plan", "groups", "layers", "models", "swap", "data", "evaluation"},
    "finetuning": {"plan", "groups", "models", "swap", "checkpoint", "data"},
}
OPEN_TO_ALL = {
    "disk_sync",
    "errors",
    "extras",
    "half_types",
    "nest",
    "once",
    "recipe_files",
    "shapes",
    "strict_json",
    "user_code",
    "version",
}
# The same inside the rooms that have sub-rooms; "" are the files directly in the room.
SUB_ROOMS = {
    "experts": ("routing", "transport", "compute", ""),
    "swap": (
        "tensors",
        "families",
        "weights",
        "blocks",
        "hugging_face",
        "pretrained",
        "decide",
        "",
    ),
    "strategy": (
        *(
            "private",
            "options",
            "process",
            "optimization",
            "checks",
            "modules",
            "logs",
            "trials",
            "step",
        ),
        *("checkpoints", "", "callbacks"),
    ),
}
# Sub-rooms that do not know each other.
STRANGERS = (
    {"kernels.triton", "kernels.cuda"},
    {"experts.routing", "experts.transport", "experts.compute"},
)

# Lightning is imported by the strategy and by the modules that it offers to recipes.
LIGHTNING_FILES = {
    *("cli/main.py", "cli/model_call.py", "cli/scaling_job.py", "cli/step_timer.py"),
    *("models/token_module.py", "data/datamodule.py"),
    *("data/row_datamodule.py", "data/conversation_datamodule.py", "data/bert_datamodule.py"),
    *("evaluation/datamodules.py", "evaluation/evaluated_lm.py", "preferences/reference.py"),
    *("finetuning/modules.py", "finetuning/datamodule.py"),
}
# Triton comes with the CUDA builds of torch. Kernels are written in its language, so their room
# imports it at once; `layers` imports that room by name, where a GPU has Triton.
TRITON_ROOM = "kernels/triton"
# Optional packages: the only imports allowed inside a function.
EXTRAS = {"matplotlib", "tokenizers", "transformers", "safetensors", "transformer_engine", "triton"}

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 80
DRAWER_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    """Return the first folder below the package, or the file's stem for a file directly in it."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported_modules(path: Path) -> list[tuple[str, int]]:
    """Return (absolute module name, line) of every import of a file that runs, wherever it stands."""
    found: list[tuple[str, int]] = []
    pending: list[ast.AST] = [tree_of(path)]
    while pending:
        node = pending.pop()
        if is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = source_of(node, path)
            # `from torch.distributed import checkpoint` imports torch.distributed.checkpoint, not
            # all of its parent
            whole = module in {"lightning_megatron", "torch", "torch.distributed"}
            found += [
                (f"{module}.{alias.name}" if whole else module, node.lineno) for alias in node.names
            ]
        pending.extend(ast.iter_child_nodes(node))
    return found


def source_of(node: ast.ImportFrom, path: Path) -> str:
    """Return the absolute name of the module from which a file imports names."""
    if not node.level:
        return node.module or ""
    folder = path.relative_to(ROOT).with_suffix("").parts[: -node.level]
    return ".".join((*folder, node.module or "")).rstrip(".")


def name_of_module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_files(path: Path, files: dict[str, Path]) -> set[str]:
    """Return the files of the package that a file imports, by place, those for types included.

    Args:
        path: The file.
        files: Files of the package by the names of their modules.
    """
    names: list[str] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = source_of(node, path)
            parts = [f"{module}.{alias.name}" for alias in node.names]
            names += [part if part in files else module for part in parts]
    return {place(files[name]) for name in names if name in files and files[name] != path}


def is_import_of(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def functions_of(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        n for n in ast.walk(tree_of(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_imports_flow_one_way_through_the_rooms() -> None:
    wrong = []
    for path in FILES:
        room = room_of(path)
        if room not in ROOMS and room not in LEAVES:
            continue  # the public names, the command line and `errors` see every room
        allowed = set(ROOMS[: ROOMS.index(room) + 1]) if room in ROOMS else LEAVES[room] | {room}
        for module, line in imported_modules(path):
            parts = module.split(".")
            if (
                parts[0] == "lightning_megatron"
                and len(parts) > 1
                and parts[1] not in allowed | OPEN_TO_ALL
            ):
                wrong.append(f"{place(path)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def sub_room_of(module: str, room: str) -> str:
    """Return the sub-room of a module of a room; "" for a module directly in the room."""
    parts = module.split(".")
    return parts[2] if len(parts) > 3 or (PACKAGE / room / parts[2]).is_dir() else ""


@pytest.mark.parametrize("room", SUB_ROOMS)
def test_imports_flow_one_way_through_the_sub_rooms_of_a_room(room: str) -> None:
    order = SUB_ROOMS[room]
    folders = {folder.parent.name for folder in (PACKAGE / room).glob("*/__init__.py")}
    assert folders == set(order) - {""}
    wrong = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        if path == PACKAGE / room / "__init__.py":
            continue
        parts = path.relative_to(PACKAGE / room).parts
        own = parts[0] if len(parts) > 1 else ""
        for module, line in imported_modules(path):
            if not module.startswith(f"lightning_megatron.{room}."):
                continue
            if order.index(sub_room_of(module, room)) > order.index(own):
                wrong.append(f"{place(path)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("strangers", STRANGERS, ids=lambda group: " ".join(sorted(group)))
def test_some_sub_rooms_do_not_know_each_other(strangers: set[str]) -> None:
    wrong = [
        f"{place(path)}:{line} imports {module}"
        for own in strangers
        for path in sorted((PACKAGE / own.replace(".", "/")).rglob("*.py"))
        for module, line in imported_modules(path)
        if any(is_import_of(module, f"lightning_megatron.{other}") for other in strangers - {own})
    ]
    assert not wrong, "\n".join(wrong)


def test_no_room_imports_the_triton_kernels_when_it_is_imported() -> None:
    wrong = [
        f"{place(path)}:{line} imports {module}"
        for path in FILES
        if not place(path).startswith(TRITON_ROOM)
        for module, line in imported_modules(path)
        if is_import_of(module, "lightning_megatron.kernels.triton")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {name_of_module(path): path for path in FILES}
    imports = {place(path): imported_files(path, files) for path in FILES}
    assert "models/stage.py" in imports["models/remote_tensor.py"]
    assert "models/config.py" in imports["__init__.py"], "an import for types is missing"
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        # The error lists each file before the one that imports it.
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_file_name_occurs_twice_in_a_room() -> None:
    first: dict[tuple[str, str], Path] = {}
    wrong = []
    for path in FILES:
        if path.name == "__init__.py":
            continue
        other = first.setdefault((room_of(path), path.name), path)
        if other != path:
            wrong.append(f"{place(other)} and {place(path)}")
    assert not wrong, "\n".join(wrong)


def test_plan_needs_the_standard_library_only() -> None:
    wrong = [
        f"{place(path)}:{line} imports {module}"
        for path in FILES
        if room_of(path) in {"plan", "errors"}
        for module, line in imported_modules(path)
        if module.split(".")[0] not in sys.stdlib_module_names | {"lightning_megatron"}
    ]
    assert not wrong, "\n".join(wrong)


def test_only_groups_calls_torch_distributed() -> None:
    wrong = []
    for path in FILES:
        if room_of(path) == "groups":
            continue
        allowed = "torch.distributed.checkpoint" if room_of(path) == "checkpoint" else None
        for module, line in imported_modules(path):
            if is_import_of(module, "torch.distributed") and not (
                allowed and is_import_of(module, allowed)
            ):
                wrong.append(f"{place(path)}:{line} imports {module}")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
                wrong.append(f"{place(path)}:{node.lineno} uses torch.distributed")
    assert not wrong, "\n".join(wrong)


def test_only_the_strategy_and_the_modules_for_recipes_import_lightning() -> None:
    wrong = []
    for path in FILES:
        for module, line in imported_modules(path):
            if is_import_of(module, "pytorch_lightning"):
                wrong.append(
                    f"{place(path)}:{line} imports pytorch_lightning; its classes are not those of "
                    "`lightning`"
                )
            if (
                is_import_of(module, "lightning")
                and room_of(path) != "strategy"
                and place(path) not in LIGHTNING_FILES
            ):
                wrong.append(f"{place(path)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def imports_inside_functions() -> list[tuple[Path, int, str]]:
    return [
        (path, node.lineno, name)
        for path in FILES
        for function in functions_of(path)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or "."]
        )
    ]


def test_only_optional_packages_are_imported_inside_functions() -> None:
    wrong = [
        f"{place(path)}:{line} imports {name} inside a function"
        for path, line, name in imports_inside_functions()
        if name.split(".")[0] not in EXTRAS
    ]
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_optional_packages_are_never_imported_at_module_level() -> None:
    inside = {(path, line) for path, line, _ in imports_inside_functions()}
    wrong = [
        f"{place(path)}:{line} imports {module} when it is itself imported"
        for path in FILES
        for module, line in imported_modules(path)
        if module.split(".")[0] in EXTRAS and (path, line) not in inside
        if not (module.split(".")[0] == "triton" and place(path).startswith(TRITON_ROOM))
    ]
    assert not wrong, "\n".join(wrong)


def test_each_optional_package_is_imported_in_one_file() -> None:
    files: dict[str, set[str]] = {}
    for path, _, name in imports_inside_functions():
        files.setdefault(name.split(".")[0], set()).add(place(path))
    shared = {name: sorted(places) for name, places in files.items() if len(places) > 1}
    assert not shared, shared


def test_files_and_functions_are_small() -> None:
    wrong = []
    for path in FILES:
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_FILE_LINES:
            wrong.append(f"{place(path)} has {num_lines} lines; the limit is {MAX_FILE_LINES}")
        for function in functions_of(path):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > MAX_FUNCTION_LINES:
                wrong.append(
                    f"{place(path)}:{function.lineno} {function.name}: {length} lines of "
                    f"{MAX_FUNCTION_LINES}"
                )
    assert not wrong, "\n".join(wrong)


def test_an_assignment_has_one_value_unless_it_swaps() -> None:
    wrong = []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
                continue
            values = sorted(map(ast.unparse, node.value.elts))
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple | ast.List) else node.value.elts
                if sorted(map(ast.unparse, names)) != values:
                    wrong.append(f"{place(path)}:{node.lineno} {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_a_statement_has_at_most_one_conditional_expression() -> None:
    wrong = []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            number = sum(isinstance(part, ast.IfExp) for part in expressions_of(node))
            if number > 1:
                wrong.append(f"{place(path)}:{node.lineno} has {number} conditional expressions")
    assert not wrong, "\n".join(wrong)


def expressions_of(statement: ast.stmt) -> list[ast.AST]:
    """List the nodes of a statement without those of the statements inside it."""
    inside = (ast.stmt, ast.ExceptHandler, ast.match_case)
    own = [node for node in ast.iter_child_nodes(statement) if not isinstance(node, inside)]
    return [part for node in own for part in ast.walk(node)]


def test_no_global_statement_and_no_broad_except() -> None:
    wrong = []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Global):
                wrong.append(f"{place(path)}:{node.lineno} uses `global`")
            if isinstance(node, ast.ExceptHandler):
                caught = "everything" if node.type is None else ast.unparse(node.type)
                reraises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                if caught in {"everything", "Exception", "BaseException"} and not reraises:
                    wrong.append(f"{place(path)}:{node.lineno} catches {caught} and goes on")
    assert not wrong, "\n".join(wrong)


def test_asserts_carry_a_message() -> None:
    wrong = [
        f"{place(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assert) and node.msg is None
    ]
    assert not wrong, "\n".join(wrong)


def test_environment_variables_are_read_in_the_strategy_and_one_command_only() -> None:
    wrong = [
        f"{place(path)}:{node.lineno}"
        for path in FILES
        if room_of(path) != "strategy" and place(path) != "cli/kernels.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv"}
    ]
    assert not wrong, "\n".join(wrong)


def test_public_names_have_docstrings() -> None:
    wrong = []
    for path in FILES:
        tree = tree_of(path)
        if not ast.get_docstring(tree):
            wrong.append(f"{place(path)} has no docstring")
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                wrong.append(f"{place(path)}:{node.lineno} {node.name} has no docstring")
            if isinstance(node, ast.ClassDef):
                wrong += [
                    f"{place(path)}:{member.lineno} {node.name}.{member.name} has no docstring"
                    for member in node.body
                    if isinstance(member, ast.FunctionDef) and needs_docstring(member)
                ]
    assert not wrong, "\n".join(wrong)


def needs_docstring(method: ast.FunctionDef) -> bool:
    """Tell whether a method is public and not an override, whose base already says what it does."""
    decorators = {ast.unparse(decorator) for decorator in method.decorator_list}
    inherited = "override" in decorators or any(name.endswith(".setter") for name in decorators)
    return not (
        method.name.startswith("_")
        or method.name in {"forward", "backward"}
        or inherited
        or ast.get_docstring(method)
    )


def test_rooms_only_reexport_in_their_init() -> None:
    allowed = (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign, ast.AnnAssign)
    wrong = [
        f"{place(path)}:{node.lineno} {type(node).__name__}"
        for path in FILES
        if path.name == "__init__.py"
        and path.parent != PACKAGE  # the package's own loads its names when first used
        for node in tree_of(path).body
        if not isinstance(node, allowed) and not is_type_checking(node)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_is_a_package() -> None:
    wrong = [place(path) for path in FILES if not (path.parent / "__init__.py").exists()]
    assert not wrong, "packaging leaves these out, their folder has no __init__.py: " + ", ".join(
        wrong
    )


def test_no_drawer_names() -> None:
    words = {path: set(re.split(r"[_/.]", place(path))) for path in FILES}
    wrong = [place(path) for path, parts in words.items() if parts & DRAWER_NAMES]
    wrong += [
        f"{place(path)}:{node.lineno} {node.name}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and node.name.lower().endswith(("manager", "helper", "utils"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("marker", ["TODO", "FIXME", "XXX"])
def test_nothing_is_left_for_later_in_the_code(marker: str) -> None:
    wrong = [
        f"{place(path)}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(rf"#.*\b{marker}\b", line)
    ]
    assert not wrong, "\n".join(wrong)


# Words that were replaced by a standard term, or had several meanings.
RETIRED = (
    *("mains", "take_in", "take_written", "foresee", "foresees", "foreseen", "hold_updates"),
    *("lend", "lent", "loan", "travellers", "stand_in", "stand_ins", "left_behind", "units_of"),
    *("exchange_rows", "run_in_turn", "forgive", "let_finetuning_know", "settled", "crossings"),
    *("way_out", "ways_out", "run_aside", "rows_again", "spread_again", "look_again"),
)
RETIRED_CLASSES = {
    *("Elsewhere", "Turn", "Turns", "Exchange", "Unit", "Position", "Division"),
    *("Crossings", "Form", "Forms"),
}


def test_retired_words_are_not_used_as_names() -> None:
    pattern = re.compile(rf"(^|_)({'|'.join(RETIRED)})(_|$)")
    wrong = [
        f"{place(path)}:{node.lineno} {name}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.stmt | ast.expr | ast.arg)
        and (name := name_of(node))
        and (pattern.search(name) or name in RETIRED_CLASSES)
    ]
    assert not wrong, "\n".join(wrong)


def name_of(node: ast.AST) -> str:
    """Return the name that a node of a syntax tree defines or uses; "" without one."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else getattr(node, "arg", None) or ""


def test_words_of_the_glossary_name_what_exists() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([^|]+?) \|", text, re.MULTILINE)
    assert len(words) == len(set(words))
    named = re.findall(r"\| `([\w.]+)` \|$", text, re.MULTILINE)
    assert len(named) > 30
    missing = [name for name in named if not is_defined(name)]
    assert not missing, missing


def is_defined(name: str) -> bool:
    """Return whether a dotted path below the package is a module, or something at its top level."""
    path = PACKAGE.joinpath(*name.split("."))
    if path.with_suffix(".py").is_file():
        return True
    module = path.parent.with_suffix(".py")
    if not module.is_file():
        return False
    tops = tree_of(module).body
    names = {name_of(node) for node in tops}
    names |= {name_of(t) for node in tops if isinstance(node, ast.Assign) for t in node.targets}
    return path.name in names


def test_no_public_class_name_occurs_in_two_rooms() -> None:
    homes: dict[str, set[str]] = {}
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(room_of(path))
    shared = {name: sorted(rooms) for name, rooms in homes.items() if len(rooms) > 1}
    assert not shared, shared


def test_tests_on_gpus_are_selected_by_marker() -> None:
    # `pytest -m gpu` misses tests that a condition skips.
    conditional = [
        path.name
        for path in (ROOT / "tests" / "gpu").glob("*.py")
        if "skipif(not torch.cuda" in path.read_text(encoding="utf-8")
    ]
    assert not conditional, conditional
