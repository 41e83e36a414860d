"""The rules that keep the project readable, checked in one pass over the syntax trees of its files:
no module is imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.import_graph import (
    PACKAGE,
    ROOT,
    SourceFile,
    files_of,
    imported_files,
    is_type_checking,
)

# A room imports itself and the rooms before it. What is beside the rooms (`errors`, `once`, ...) is
# open to all.
ROOMS = tuple(
    """
    plan kernels groups layers experts models swap optimizer pipeline graphs
    memory forecast checkpoint strategy
    """.split()
)
LEAVES = {
    "data": {"plan"},
    "generation": {"plan", "groups", "layers", "models", "graphs"},
}
# What tasks import of the package besides themselves and public names of earlier tasks.
PUBLIC_MODULES = set("building_blocks errors extras families shapes".split())
TASKS = tuple("corpus bert chat evaluation preferences finetuning scaling".split())
OPEN_TO_ALL = set(
    """
    disk_sync errors extras half_types hub nest once option_errors recipe_files shapes strict_json
    user_code version
    """.split()
)
# The same inside the rooms that have sub-rooms; "" are the files directly in the room.
SUB_ROOMS = {
    "layers": (
        "parameters",
        "fused",
        "fp8",
        "transformer_engine",
        "linear",
        "loss",
        "attention",
        "context_parallel",
        "",
    ),
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
        "private",
        "options",
        "process",
        "optimization",
        "checks",
        "modules",
        "logs",
        "trials",
        "step",
        "checkpoints",
        "",
        "profiling",
        "callbacks",
    ),
}
# Sub-rooms that do not know each other.
STRANGERS = (
    {"kernels.triton", "kernels.cuda"},
    {"experts.routing", "experts.transport", "experts.compute"},
)
# Lightning is imported by the strategy and by the modules that it offers to recipes.
LIGHTNING_FILES = set(
    """
    cli/main.py cli/model_call.py cli/plan.py
    models/token_module.py data/datamodule.py data/row_datamodule.py
    """.split()
)
# Triton comes with the CUDA builds of torch. Kernels are written in its language, so their room
# imports it at once; `layers` imports that room by name, where a GPU has Triton.
TRITON_ROOM = "kernels/triton"
# Optional packages: the only imports allowed inside a function.
EXTRAS = {"matplotlib", "tokenizers", "transformers", "safetensors", "transformer_engine", "triton"}
# Lines of code, without blank lines, comments and docstrings, that a room may have. Budgets only fall:
# a change that needs more deletes as much elsewhere, or says in its message why it cannot.
BUDGETS: dict[str, int] = {
    "beside rooms": 750,
    "checkpoint": 2850,
    "cli": 3500,
    "data": 3860,
    "experts": 3450,
    "forecast": 2190,
    "generation": 930,
    "graphs": 2540,
    "groups": 2710,
    "kernels": 4750,
    "layers": 7910,
    "memory": 1100,
    "models": 4420,
    "optimizer": 3130,
    "pipeline": 850,
    "plan": 3760,
    "strategy": 14060,
    "swap": 8960,
    "tasks": 4520,
}
MIN_FILE_LINES = 70
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
# Files with fewer lines: each is one idea that several files or subcommands read, the command line
# finds a subcommand by the name of its module, or they alone of their folder import torch.
SMALL_FILES = set(
    """
    __main__.py building_blocks.py cli/clean.py cli/preprocess.py cli/profile.py cli/recipes.py cli/seeds.py disk_sync.py
    errors.py extras.py families.py graphs/user_hooks.py half_types.py
    layers/fused/vector_product.py layers/parameters/remade.py
    models/lora.py plan/columns.py
    public_names.py shapes.py version.py
    """.split()
)
DRAWER_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}
# Words that were replaced by a standard term, or had several meanings.
RETIRED = re.compile(
    r"(^|_)(mains|take_in|take_written|foresee|foresees|foreseen|hold_updates|lend|lent|loan|"
    r"travellers|stand_in|stand_ins|left_behind|units_of|exchange_rows|run_in_turn|forgive|"
    r"let_finetuning_know|settled|crossings|way_out|ways_out|run_aside|rows_again|spread_again|"
    r"look_again)(_|$)"
)
RETIRED_CLASSES = set(
    """
    Elsewhere Turn Turns Exchange Unit Position Division Crossings Form Forms
    """.split()
)
FILES = files_of(PACKAGE)

Fault = tuple[int, str]
Rule = Callable[[SourceFile], Iterator[Fault]]


def is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def imports_flow_one_way_through_the_rooms(file: SourceFile) -> Iterator[Fault]:
    if file.room not in ROOMS and file.room not in LEAVES:
        return  # the public names, the command line and `errors` see every room
    allowed = LEAVES.get(file.room, set()) | OPEN_TO_ALL | {file.room}
    if file.room in ROOMS:
        allowed |= set(ROOMS[: ROOMS.index(file.room)])
    for one in file.imports:
        parts = one.name.split(".")
        if parts[0] == "lightning_megatron" and not one.is_for_types and parts[1] not in allowed:
            yield one.line, f"imports {one.name}"


def tasks_import_public_names_alone(file: SourceFile) -> Iterator[Fault]:
    if file.room not in {"tasks", "cli"}:
        return  # no room imports a task, as a rule above says
    own = file.place.split("/")[1] if file.room == "tasks" else ""
    known = TASKS[: TASKS.index(own)] if own in TASKS else TASKS
    for one in file.imports:
        parts = one.name.split(".")
        if parts[0] != "lightning_megatron":
            continue
        if parts[1] != "tasks":
            is_public = len(parts) == 2 or parts[1] in PUBLIC_MODULES
            if file.room == "tasks" and not is_public:
                yield one.line, f"imports {one.name}, which is not public"
        elif parts[2] != own and (parts[2] not in known or len(parts) > 4):
            yield one.line, f"imports {one.name}, which its task does not list as public"


def imports_flow_one_way_through_the_sub_rooms(file: SourceFile) -> Iterator[Fault]:
    order, place = SUB_ROOMS.get(file.room), file.place.split("/")
    if order is None or place[1:] == ["__init__.py"]:
        return
    own = place[1] if len(place) > 2 else ""
    for one in file.imports:
        parts = one.name.split(".")
        if parts[:2] != ["lightning_megatron", file.room] or one.is_for_types:
            continue
        other = parts[2] if (PACKAGE / file.room / parts[2]).is_dir() else ""
        if order.index(other) > order.index(own):
            yield one.line, f"imports {one.name}"


def some_sub_rooms_do_not_know_each_other(file: SourceFile) -> Iterator[Fault]:
    for group in STRANGERS:
        own = {name for name in group if is_of(file.module, f"lightning_megatron.{name}")}
        for one in file.imports if own else ():
            if any(is_of(one.name, f"lightning_megatron.{other}") for other in group - own):
                yield one.line, f"imports {one.name}"


def plan_needs_the_standard_library_only(file: SourceFile) -> Iterator[Fault]:
    known = sys.stdlib_module_names | {"lightning_megatron"}
    for one in file.imports if file.room in {"plan", "errors"} else ():
        if one.name.split(".")[0] not in known and not one.is_for_types:
            yield one.line, f"imports {one.name}"


def only_groups_calls_torch_distributed(file: SourceFile) -> Iterator[Fault]:
    if file.room == "groups":
        return
    for one in file.imports:
        is_checkpoint = is_of(one.name, "torch.distributed.checkpoint")
        is_allowed = one.is_for_types or (is_checkpoint and file.room == "checkpoint")
        if is_of(one.name, "torch.distributed") and not is_allowed:
            yield one.line, f"imports {one.name}"
    for line, name in dotted_names(file, "distributed"):
        if name == "torch.distributed":
            yield line, f"uses {name}"


def dotted_names(file: SourceFile, *last: str) -> Iterator[Fault]:
    for node in file.nodes:
        if isinstance(node, ast.Attribute) and node.attr in last:
            yield node.lineno, ast.unparse(node)


def only_the_strategy_and_modules_for_recipes_import_lightning(file: SourceFile) -> Iterator[Fault]:
    for one in file.imports:
        if is_of(one.name, "pytorch_lightning"):
            yield one.line, "imports pytorch_lightning, whose classes are not those of `lightning`"
        is_allowed = file.room in {"strategy", "tasks"} or file.place in LIGHTNING_FILES
        if is_of(one.name, "lightning") and not (is_allowed or one.is_for_types):
            yield one.line, f"imports {one.name}"


def optional_packages_are_imported_inside_functions(file: SourceFile) -> Iterator[Fault]:
    for one in file.imports:
        package = one.name.split(".")[0]
        if one.is_in_function and package not in EXTRAS:
            yield one.line, f"imports {one.name} inside a function"
        is_kernel = package == "triton" and file.place.startswith(TRITON_ROOM)
        if package in EXTRAS and not (one.is_in_function or one.is_for_types or is_kernel):
            yield one.line, f"imports {one.name} when it is itself imported"
        is_allowed = one.is_for_types or file.place.startswith(TRITON_ROOM)
        if is_of(one.name, "lightning_megatron.kernels.triton") and not is_allowed:
            yield one.line, f"imports {one.name}, and Triton may be missing"


def files_are_neither_short_nor_long(file: SourceFile) -> Iterator[Fault]:
    num_lines = file.text.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield 1, f"has {num_lines} lines of {MAX_FILE_LINES}"
    may_be_short = file.path.name == "__init__.py" or file.place in SMALL_FILES
    if num_lines < MIN_FILE_LINES and not may_be_short:
        yield 1, f"has {num_lines} lines of at least {MIN_FILE_LINES}"


def functions_are_short(file: SourceFile) -> Iterator[Fault]:
    for function in file.functions:
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield function.lineno, f"{function.name}: {length} lines of {MAX_FUNCTION_LINES}"


def an_assignment_has_one_value_unless_it_swaps(file: SourceFile) -> Iterator[Fault]:
    for node in file.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        values = sorted(map(ast.unparse, node.value.elts))
        for target in node.targets:
            names = target.elts if isinstance(target, ast.Tuple | ast.List) else node.value.elts
            if sorted(map(ast.unparse, names)) != values:
                yield node.lineno, ast.unparse(node)


def no_tuple_is_unpacked_where_it_was_made(file: SourceFile) -> Iterator[Fault]:
    for node in file.nodes:
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
            yield node.lineno, ast.unparse(node)
    for function in file.functions:
        made = {
            ast.unparse(target)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            for target in node.targets
        }
        for node in ast.walk(function):
            is_unpacked = isinstance(node, ast.Starred) and isinstance(node.ctx, ast.Load)
            if is_unpacked and ast.unparse(node.value) in made:
                yield node.lineno, ast.unparse(node)


def a_statement_has_at_most_one_conditional_expression(file: SourceFile) -> Iterator[Fault]:
    for line, number in statements_with_several(file, ast.IfExp):
        yield line, f"has {number} conditional expressions"


def a_statement_has_at_most_one_comprehension(file: SourceFile) -> Iterator[Fault]:
    kinds = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    for line, number in statements_with_several(file, *kinds):
        yield line, f"has {number} comprehensions"


def statements_with_several(file: SourceFile, *kinds: type[ast.AST]) -> Iterator[tuple[int, int]]:
    """Yield lines and numbers of nodes of the kinds, for statements without the ones inside."""
    inside = (ast.stmt, ast.ExceptHandler, ast.match_case)
    for node in file.nodes:
        if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        own = [part for part in ast.iter_child_nodes(node) if not isinstance(part, inside)]
        number = sum(isinstance(one, kinds) for part in own for one in ast.walk(part))
        if number > 1:
            yield node.lineno, number


def nothing_is_global_caught_broadly_or_asserted_without_a_message(
    file: SourceFile,
) -> Iterator[Fault]:
    for node in file.nodes:
        if isinstance(node, ast.Global):
            yield node.lineno, "uses `global`"
        if isinstance(node, ast.Assert) and node.msg is None:
            yield node.lineno, "asserts without a message"
        if isinstance(node, ast.ExceptHandler):
            caught = "everything" if node.type is None else ast.unparse(node.type)
            reraises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            if caught in {"everything", "Exception", "BaseException"} and not reraises:
                yield node.lineno, f"catches {caught} and goes on"


def only_the_strategy_and_four_files_read_environment_variables(
    file: SourceFile,
) -> Iterator[Fault]:
    # main.py asks whether to show tracebacks, of other ranks too, and once.py who started this rank.
    files = {"once.py", "cli/kernels.py", "cli/doctor.py", "cli/main.py"}
    if file.room == "strategy" or file.place in files:
        return
    for line, name in dotted_names(file, "environ", "getenv"):
        if name in {"os.environ", "os.getenv"}:
            yield line, name


def public_names_have_docstrings(file: SourceFile) -> Iterator[Fault]:
    if not ast.get_docstring(file.tree):
        yield 1, "has no docstring"
    for node in file.tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            yield node.lineno, f"{node.name} has no docstring"
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, ast.FunctionDef) and needs_docstring(member):
                yield member.lineno, f"{node.name}.{member.name} has no docstring"


def needs_docstring(method: ast.FunctionDef) -> bool:
    """Tell whether a method is public and not an override, whose base already says what it does."""
    decorators = {ast.unparse(decorator) for decorator in method.decorator_list}
    inherited = "override" in decorators or any(name.endswith(".setter") for name in decorators)
    is_private = method.name.startswith("_") or method.name in {"forward", "backward"}
    return not (is_private or inherited or ast.get_docstring(method))


def rooms_only_reexport_in_their_init(file: SourceFile) -> Iterator[Fault]:
    if not (file.path.parent / "__init__.py").exists():
        yield 1, "packaging leaves its folder out: it has no __init__.py"
    # The package's own file imports its names at their first use.
    if file.path.name != "__init__.py" or file.path.parent == PACKAGE:
        return
    allowed = (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign, ast.AnnAssign)
    for node in file.tree.body:
        if not isinstance(node, allowed) and not is_type_checking(node):
            yield node.lineno, type(node).__name__


def names_are_no_drawers_and_no_retired_words(file: SourceFile) -> Iterator[Fault]:
    if set(re.split(r"[_/.]", file.place)) & DRAWER_NAMES:
        yield 1, "is named after a drawer"
    for node in file.nodes:
        name = name_of(node)
        is_drawer = name.lower().endswith(("manager", "helper", "utils"))
        if isinstance(node, ast.ClassDef) and is_drawer:
            yield node.lineno, name
        if name in RETIRED_CLASSES or RETIRED.search(name):
            yield getattr(node, "lineno", 1), name


def name_of(node: ast.AST) -> str:
    """Return the name that a node of a syntax tree defines or uses; "" without one."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else getattr(node, "arg", None) or ""


def nothing_is_left_for_later(file: SourceFile) -> Iterator[Fault]:
    for number, line in enumerate(file.text.splitlines(), 1):
        if re.search(r"#.*\b(TODO|FIXME|XXX)\b", line):
            yield number, line.strip()


RULES: tuple[Rule, ...] = (
    imports_flow_one_way_through_the_rooms,
    tasks_import_public_names_alone,
    imports_flow_one_way_through_the_sub_rooms,
    some_sub_rooms_do_not_know_each_other,
    plan_needs_the_standard_library_only,
    only_groups_calls_torch_distributed,
    only_the_strategy_and_modules_for_recipes_import_lightning,
    optional_packages_are_imported_inside_functions,
    an_assignment_has_one_value_unless_it_swaps,
    no_tuple_is_unpacked_where_it_was_made,
    a_statement_has_at_most_one_conditional_expression,
    nothing_is_global_caught_broadly_or_asserted_without_a_message,
    only_the_strategy_and_four_files_read_environment_variables,
    public_names_have_docstrings,
    rooms_only_reexport_in_their_init,
    names_are_no_drawers_and_no_retired_words,
    nothing_is_left_for_later,
)
# Benchmarks keep these too.
RULES_OF_SIZE: tuple[Rule, ...] = (
    files_are_neither_short_nor_long,
    functions_are_short,
    a_statement_has_at_most_one_comprehension,
)


@pytest.mark.parametrize("rule", [*RULES, *RULES_OF_SIZE], ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule_that(rule: Rule) -> None:
    files = (*FILES, *files_of(ROOT / "benchmarks")) if rule in RULES_OF_SIZE else FILES
    wrong = [f"{file.place}:{line} {text}" for file in files for line, text in rule(file)]
    assert not wrong, "\n".join(wrong)


def test_sub_rooms_are_those_that_have_an_order() -> None:
    for room, order in SUB_ROOMS.items():
        folders = {folder.parent.name for folder in (PACKAGE / room).glob("*/__init__.py")}
        assert folders == set(order) - {""}


def test_each_task_has_a_folder_of_tests() -> None:
    folders = {file.parent.name for file in (ROOT / "tests" / "tasks").glob("*/test_*.py")}
    assert folders == set(TASKS)


def test_each_building_block_has_a_task_that_uses_it() -> None:
    imports = [one.name for file in FILES if file.room == "tasks" for one in file.imports]
    prefix = "lightning_megatron.building_blocks."
    used = {name.removeprefix(prefix) for name in imports if name.startswith(prefix)}
    stub = (PACKAGE / "building_blocks.pyi").read_text(encoding="utf-8")
    assert set(re.findall(r" as (\w+)$", stub, re.MULTILINE)) == used


def test_code_keeps_the_budget_of_its_room() -> None:
    lines = Counter[str]()
    for file in FILES:
        lines[file.room if "/" in file.place else "beside rooms"] += file.num_code_lines
    over = {room: number for room, number in lines.items() if number > BUDGETS[room]}
    assert not over, f"{over} lines of code: delete as much elsewhere, and say what in the commit"
    loose = {room: lines[room] for room, budget in BUDGETS.items() if budget - lines[room] > 100}
    assert not loose, f"budgets only fall: lower them to {loose}"


def test_tests_are_at_most_two_thirds_as_long_as_the_package() -> None:
    tests = sum(file.text.count("\n") for file in files_of(ROOT / "tests"))
    assert tests <= 0.65 * sum(file.text.count("\n") for file in FILES)


def test_no_files_import_each_other_in_a_circle() -> None:
    modules = {file.module: file for file in FILES}
    imports = {file: imported_files(file, modules) for file in FILES}
    places = {file.place: {one.place for one in found} for file, found in imports.items()}
    assert "models/stage.py" in places["models/remote_tensor.py"], "an import for types is missing"
    try:
        TopologicalSorter(places).prepare()
    except CycleError as error:
        # The error lists each file before the one that imports it.
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_names_of_files_classes_and_optional_packages_have_one_home() -> None:
    homes: dict[str, set[str]] = {}
    for file in FILES:
        if file.path.name != "__init__.py":
            homes.setdefault(f"file {file.path.name} of {file.room}", set()).add(file.place)
        for node in file.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(f"class {node.name}", set()).add(file.room)
        for one in file.imports:
            if one.is_in_function:
                package = one.name.split(".")[0]
                homes.setdefault(f"import of {package}", set()).add(file.place)
    shared = {name: sorted(places) for name, places in homes.items() if len(places) > 1}
    assert not shared, shared


def test_words_of_the_glossary_name_what_exists() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([^|]+?) \|", text, re.MULTILINE)
    assert len(words) == len(set(words))
    named = re.findall(r"\| `([\w.]+)` \|$", text, re.MULTILINE)
    assert len(named) > 20
    missing = [name for name in named if not is_defined(name)]
    assert not missing, missing


@cache
def names_at_the_top() -> dict[str, set[str]]:
    """Return the names that every module defines, by the dotted path of the module."""
    tops = {}
    for file in FILES:
        names = {name_of(node) for node in file.tree.body}
        assigned = [node for node in file.tree.body if isinstance(node, ast.Assign)]
        names |= {name_of(target) for node in assigned for target in node.targets}
        tops[file.module.removeprefix("lightning_megatron.")] = names
    return tops


def is_defined(name: str) -> bool:
    """Return whether a dotted path below the package is a module, or something at its top level."""
    module, _, last = name.rpartition(".")
    return name in names_at_the_top() or last in names_at_the_top().get(module, set())


def test_tests_on_gpus_are_selected_by_marker() -> None:
    # `pytest -m gpu` misses tests that a condition skips.
    files = files_of(ROOT / "tests" / "gpu")
    conditional = [file.place for file in files if "skipif(not torch.cuda" in file.text]
    assert not conditional, conditional
