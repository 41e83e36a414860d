"""Run the checks of the kernels in Triton's interpreter on the CPU, and print failures as JSON.

This is a separate program, because Triton decides between interpreter and compiler when a kernel
is defined.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.kernels import triton as kernels
from lightning_megatron.kernels.triton import (
    adamw,
    clone_plan,
    expert_sort,
    norm,
    normed_rotary,
    peer_clones,
    peer_rows,
    route,
    token_rows,
    two_halves,
    weight_slices,
    weighted_swiglu,
)
from lightning_megatron.plan.layout import ParallelLayout
from tests.kernels import expert_checks
from tests.kernels.adam import (
    CASES,
    check_case,
    check_narrow_moments,
    check_narrow_steps,
    check_new_addresses,
)
from tests.kernels.checks import CHECKS, ROUNDOFF, SMALL, Draw, use_kernels_everywhere
from tests.kernels.models import KINDS, compare_model
from tests.kernels.one_shot_checks import check_one_shot
from tests.kernels.pass_checks import check_fused_pass
from tests.kernels.program import report_checks
from tests.kernels.slice_checks import check_slices, check_transposes
from tests.kernels.token_checks import WIDTH, check_token_sums
from tests.layers.noted_casts import CONFIGS, GIVEN, compare_hand_over, given
from tests.oracles import assert_equal
from tests.world import run_world

_patch = interpreter._patch_lang_tensor


def _patch_for_new_numpy(tensor: object, scope: interpreter._LangPatchScope) -> None:
    # The interpreter keeps scalars as arrays of one element, which numpy no longer turns into
    # integers.
    _patch(tensor, scope)
    scope.set_attr(
        tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])
    )


_splat = interpreter.InterpreterBuilder.create_splat


def _splat_truth(
    builder: interpreter.InterpreterBuilder, kind: tl.block_type, value: interpreter.TensorHandle
) -> interpreter.TensorHandle:
    # The handle of a comparison has the dtype of the compared numbers, into which Triton 3.9
    # converts the truth values; masks must have truth values.
    if kind.scalar.is_bool():
        value = interpreter.TensorHandle(value.data.astype(np.bool_), tl.int1)
    return _splat(builder, kind, value)


_dot = interpreter.InterpreterBuilder.create_dot


def _dot_of_bfloat16(
    builder: interpreter.InterpreterBuilder,
    left: interpreter.TensorHandle,
    right: interpreter.TensorHandle,
    *options: object,
) -> interpreter.TensorHandle:
    # The interpreter would multiply the bits of bfloat16 as integers.
    operands = (
        builder.create_fp_ext(operand, tl.float32)
        if operand.dtype.scalar == tl.bfloat16
        else operand
        for operand in (left, right)
    )
    return _dot(builder, *operands, *options)


interpreter._patch_lang_tensor = _patch_for_new_numpy
interpreter.InterpreterBuilder.create_splat = _splat_truth
interpreter.InterpreterBuilder.create_dot = _dot_of_bfloat16
# The interpreter truncates bfloat16 instead of rounding it.
ROUNDOFF[torch.bfloat16] = 2.0**-7
# Small blocks and few programs, so that each program has several rows and blocks, and a slice several
# programs.
norm._PROGRAMS = 4
normed_rotary._PROGRAMS = 3
adamw._CHUNK, adamw._BLOCK = 256, 128
weight_slices._BLOCK = 256
expert_sort._BLOCK, expert_sort._EXPERTS, expert_sort._ROWS = 32, 2, 2
route._TILE = 64
route._PROGRAMS, route._ROWS, route._COLUMNS = 3, 2, 4
clone_plan._BLOCK = 32
token_rows._BLOCK = two_halves._BLOCK = peer_rows._BLOCK = 16
peer_rows._PROGRAMS = peer_clones._PROGRAMS = 3
peer_clones._WEIGHTS = peer_clones._GRADIENTS = 16
weighted_swiglu._BLOCK, weighted_swiglu._PROGRAMS = 64, 3


# Kind of model, recomputed parts, label smoothing.
FULL_MODELS = (
    ("llama", "none", 0.0), ("llama", "full", 0.1), ("gpt2", "selective", 0.0), ("post-norm", "full", 0.0),
    ("dropout", "full", 0.0), ("llama", "selective", 0.0), ("gemma", "none", 0.0), ("neox", "full", 0.0),
    ("glm", "selective", 0.0),
)  # fmt: skip
FUSED_PASSES = ("llama", "window", "qwen")
SHARDED_MODELS = (("llama", "full", 0.1), ("gpt2", "none", 0.0), ("gemma", "selective", 0.0))


def check_models(mesh: ParallelMesh, cases: tuple[tuple[str, str, float], ...]) -> None:
    """Compare models in float32 with themselves on the operators of torch."""
    for kind, recompute, smoothing in cases:
        compare_model(
            KINDS[kind],
            mesh,
            torch.float32,
            recompute,
            lambda a, b, name, where=f"{kind}, {recompute}": assert_equal(
                a, b, f"{where}: {name}", tolerance=1e-5
            ),
            smoothing=smoothing,
        )


def check_fused_passes(mesh: ParallelMesh) -> None:
    """Compare passes over single tokens with passes over full rows."""
    for kind in FUSED_PASSES:
        for dtype in (torch.float16, torch.bfloat16):
            check_fused_pass(KINDS[kind], mesh, dtype)


def check_hand_over() -> None:
    """Compare models in 8 bits whose kernels find magnitudes with the same models without these."""
    for kind, recompute in (("llama", "none"), ("llama", "full"), ("gpt2", "none")):
        mesh = ParallelMesh.single(seed=0)
        casts = compare_hand_over(CONFIGS[kind], mesh, recompute=recompute)
        assert sum(given(casts, "input")) >= 2 * 2 * sum(GIVEN[kind][0]), kind
        assert given(casts, "gradient") == 2 * 2 * [*reversed(GIVEN[kind][1])], kind


def check_shards(rank: int, size: int) -> None:
    """Compare models that are sharded over the tensor axis."""
    use_kernels_everywhere()
    for sequence_parallel in (False, True):
        mesh = ParallelMesh.create(
            ParallelLayout(world_size=2, tp=2), seed=0, sequence_parallel=sequence_parallel
        )
        check_models(mesh, SHARDED_MODELS[int(sequence_parallel) :])
        if not sequence_parallel:
            check_fused_passes(mesh)
        mesh.destroy()


def shared_regions(folder: Path, num_ranks: int, num_bytes: int) -> list[Tensor]:
    """Return the regions of all ranks, as files in memory."""
    folder.mkdir(exist_ok=True)
    options = {"shared": True, "size": num_bytes // 8, "dtype": torch.int64}
    return [torch.from_file(str(folder / str(peer)), **options) for peer in range(num_ranks)]


def check_one_shot_of_rank(rank: int, size: int, folder: str) -> None:
    """Check the kernel between processes whose regions are files in memory."""
    regions = shared_regions(Path(folder), size, kernels.one_shot_bytes(size, 2**13))
    pointers = torch.tensor([region.data_ptr() for region in regions])
    check_one_shot(rank, size, lambda x, op: kernels.reduce_one_shot_(x, pointers, rank, op), "cpu")


def check_token_sums_of_rank(rank: int, size: int, folder: str) -> None:
    """Check sums of sent products between processes whose regions are files in memory."""
    for dtype in (torch.float16, torch.bfloat16):
        # Regions start as zeros.
        regions = shared_regions(
            Path(folder) / str(dtype), size, kernels.token_sum_bytes(size, WIDTH)
        )
        pointers = torch.tensor([region.data_ptr() for region in regions])
        check_token_sums(rank, size, pointers, regions[rank][:1], dtype, "cpu")


def check_shared_files(check: Callable[..., None]) -> None:
    """Check kernels over processes that share files."""
    with tempfile.TemporaryDirectory() as folder:
        run_world(check, 3, folder)


#: Start in the numbers, start in the bytes, size (elements), and weight of each slice.
SLICES = [(64, 0, 2000, 1), (2064, 3000, 900, 0), (3000, 2048, 5, 1), (3100, 5000, 800, 3)]
#: Slices at multiples of 16, of which the kernels read and write several elements at once.
ALIGNED = [(64, 0, 2000, 1), (2064, 3008, 912, 0), (3008, 2048, 16, 1), (3104, 5008, 800, 3)]
TRANSPOSED = ((100, 130), (129, 128), (1, 16), (256, 48))


Checks = dict[str, Callable[[], object]]


def checks_of(dtype: torch.dtype) -> Checks:
    """Return the checks of all kernels but those of experts."""
    use_kernels_everywhere()
    return {
        name: lambda check=check: check(Draw(torch.device("cpu"), dtype), SMALL)
        for name, check in CHECKS.items()
    }


def expert_checks_of_all_types() -> Checks:
    """Return the checks of the kernels of experts."""
    checks: Checks = {}
    for name, check in expert_checks.CHECKS.items():
        is_single = name in expert_checks.ONLY_FLOAT32
        for dtype in (torch.float32,) if is_single else (torch.float32, torch.bfloat16):
            draw = partial(Draw, torch.device("cpu"), dtype)
            checks[f"{name}, {dtype}"] = lambda check=check, draw=draw: check(
                draw(), expert_checks.FEW
            )
    return checks


def adam_checks() -> Checks:
    """Return the checks of Adam's kernel."""
    checks: Checks = {
        # The interpreter truncates bfloat16 instead of rounding it.
        case.name: lambda case=case: check_case(
            case, (1, 15, 256, 900), "cpu", 2.0**-7 if case.half == torch.bfloat16 else None
        )
        for case in CASES
    }
    checks["narrow moments"] = lambda: check_narrow_moments((1, 700, 1000), "cpu")
    checks["narrow steps"] = lambda: check_narrow_steps((700, 500), "cpu")
    checks["new addresses"] = lambda: check_new_addresses("cpu")
    return checks


def slice_checks() -> Checks:
    """Return the checks of casts of weight slices."""
    return {
        f"{slices[:2]}, {dtype}, {strange}": partial(check_slices, slices, dtype, strange)
        for slices in (SLICES, ALIGNED, [])
        for dtype in (torch.float32, torch.bfloat16)
        for strange in (1.0, float("inf"), float("nan"))
    } | {"transposes": partial(check_transposes, TRANSPOSED)}


def model_checks(name: str) -> Checks:
    """Return a check of whole models, or of kernels between processes."""
    use_kernels_everywhere()
    checks: Checks = {
        "models": lambda: check_models(ParallelMesh.single(seed=0), FULL_MODELS),
        "fused passes": lambda: check_fused_passes(ParallelMesh.single(seed=0)),
        "hand-over": check_hand_over,
        "one shot": lambda: check_shared_files(check_one_shot_of_rank),
        "token sums": lambda: check_shared_files(check_token_sums_of_rank),
        "shards": lambda: run_world(check_shards, 2),
    }
    return {name: checks[name]}


def checks_of_group(group: str) -> Checks:
    """Return the checks of a group by name."""
    groups: dict[str, Callable[[], Checks]] = {
        "float32": lambda: checks_of(torch.float32),
        "bfloat16": lambda: checks_of(torch.bfloat16),
        "float16": lambda: checks_of(torch.float16),
        "experts": expert_checks_of_all_types,
        "adam": adam_checks,
        "weight slices": slice_checks,
    }
    return groups[group]() if group in groups else model_checks(group)


if __name__ == "__main__":
    report_checks(checks_of_group(sys.argv[1]))
