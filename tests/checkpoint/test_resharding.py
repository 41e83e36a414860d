"""A checkpoint saved under one layout loads under every other layout with the same tensors,
optimizer state and hyperparameters.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.checkpoint import (
    Entry,
    load_metadata,
    load_model,
    load_optimizer,
    load_rank_state,
    load_tensors,
    model_tensors,
    read_full,
    save_checkpoint,
)
from lightning_megatron.checkpoint.entries import assign_writers, boxes_to_write
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.groups.collectives import barrier
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.training import MainParameters
from tests.checkpoint.trained import (
    LAYOUTS,
    OPTIMIZERS,
    STEPS,
    Trained,
    difference,
    groups_of,
    mesh_of,
)
from tests.training.synthetic import HEAD, WORD, full_gradients, full_parameters, pieces
from tests.world import run_world

# With AdamW, every layout loads its own checkpoint and those of two other layouts. With every other
# optimizer, slices load into full parameters, and the reverse.
NAMES = list(LAYOUTS)
CASES = [
    (source, NAMES[(i + step) % len(NAMES)], "AdamW")
    for i, source in enumerate(NAMES)
    for step in (0, 1, 3)
]
OTHER_OPTIMIZERS = [optimizer for optimizer in OPTIMIZERS if optimizer != "AdamW"]
CASES += [
    (*pair, optimizer)
    for pair in (("dp4", "tp2 pp2"), ("tp4", "dp4"))
    for optimizer in OTHER_OPTIMIZERS
]
STATES = [("tp2 pp2", "tp2 pp2"), ("tp4", "tp2 pp2"), ("dp4", "tp4")]
SAVED = list(dict.fromkeys((source, optimizer) for source, _, optimizer in CASES))
GPTS = {
    "gpt2 tied": GPTConfig.gpt2(
        vocab_size=50, max_seq_length=8, num_layers=4, hidden_size=16, num_heads=4, vocab_multiple=4
    ),
    "llama": GPTConfig.llama(
        vocab_size=50,
        max_seq_length=8,
        num_layers=4,
        hidden_size=16,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=24,
        vocab_multiple=4,
    ),
}


def reshard(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Save under every layout, load under others, save again, and compare the files' contents."""
    outcomes: dict[str, Any] = {}
    meshes = {layout: mesh_of(layout, size) for layout in LAYOUTS}
    for layout, optimizer in SAVED:
        run = Trained(meshes[layout], optimizer, layout)
        run.train()
        run.save(folder / layout / optimizer)
        outcomes[f"names {layout}"] = {
            box.name for box in boxes_to_write(run.tensors(), meshes[layout])
        }
    fulls = {saved: read_full(folder / saved[0] / saved[1]) for saved in SAVED}
    for source, layout, optimizer in CASES:
        run = Trained(meshes[layout], optimizer, layout)
        run.load(folder / source / optimizer)
        outcomes[f"{source} -> {layout}, {optimizer}"] = difference(fulls[source, optimizer], run)
        outcomes[f"lr {source} -> {layout}, {optimizer}"] = [
            group["lr"] for group in run.optimizer.param_groups
        ]
    for source, layout in STATES:
        outcomes[f"state {source} -> {layout}"] = load_rank_state(
            folder / source / "AdamW", meshes[layout]
        )
    for layout, mesh in meshes.items():
        saved_again = folder / "again" / layout
        run = Trained(mesh, "AdamW", layout)
        run.load(folder / "tp2 pp2" / "AdamW")
        run.save(saved_again)
        first, second = fulls["tp2 pp2", "AdamW"], read_full(saved_again)
        outcomes[f"round trip {layout}"] = sorted(first) == sorted(second) and all(
            torch.equal(first[name], second[name]) for name in first
        )
        mesh.destroy()
    # A mesh of a single process, although process groups exist.
    single = Trained(ParallelMesh.single(), "AdamW")
    single.load(folder / "tp2 pp2" / "AdamW")
    outcomes["single"] = difference(fulls["tp2 pp2", "AdamW"], single)
    return outcomes


def gpt_world(rank: int, size: int, folder: Path) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    for name, config in GPTS.items():
        for layout in LAYOUTS:
            mesh = mesh_of(layout, size)
            model = GPT(config, mesh, seed=3)
            main = MainParameters(dict(model.named_parameters()), mesh)
            if layout == "tp2 pp2":
                save_checkpoint(folder / name, model_tensors(model, main), {}, {}, mesh)
            before = {key: value.detach().clone() for key, value in model.named_parameters()}
            with torch.no_grad():
                for key, entry in model_tensors(model, main).items():
                    for _, view in entry.placement.local_views(entry.tensor):
                        view.fill_(7)
                    assert key.startswith("state_dict."), key
            load_model(folder / name, model, main, mesh)
            wrong = [
                key
                for key, value in model.named_parameters()
                if not torch.equal(value, before[key])
            ]
            outcomes[f"{name} {layout}"] = wrong
            mesh.destroy()
    return outcomes


def errors_world(rank: int, size: int, folder: Path) -> dict[str, str]:
    mesh = mesh_of("tp2 pp2", size)
    run = Trained(mesh, "SGD")
    run.train()
    run.save(folder / "good")
    outcomes: dict[str, str] = {}

    def attempt(case: str, action: Callable[[], object]) -> None:
        try:
            action()
        except (CheckpointMismatchError, RuntimeError, UnsupportedError) as error:
            outcomes[case] = f"{type(error).__name__}: {error}"
        barrier(mesh.world_cpu)

    tensors = model_tensors(nn.Module(), run.main)
    fewer = {name: entry for name, entry in tensors.items() if "scale" not in name}
    attempt("unexpected", lambda: load_tensors(folder / "good", fewer, mesh, prefix="state_dict."))
    renamed = {name.replace("qkv", "query"): entry for name, entry in tensors.items()}
    attempt("missing", lambda: load_tensors(folder / "good", renamed, mesh, prefix="state_dict."))
    word = pieces(ParallelMesh.single())[WORD].spec
    longer = {"state_dict.model.final_norm.weight": Entry(torch.ones(word.full_shape), word)}
    attempt(
        "shape",
        lambda: load_tensors(
            folder / "good", longer if mesh.pp.is_last else {}, mesh, strict=False
        ),
    )
    loose = load_tensors(folder / "good", renamed, mesh, strict=False, prefix="state_dict.")
    outcomes["loose"] = f"{len(loose.missing)} missing, {len(loose.unexpected)} unexpected"

    metadata = load_metadata(folder / "good")["optimizer"]
    regrouped = torch.optim.SGD(list(run.named.values()), lr=0.1)
    attempt(
        "groups", lambda: load_optimizer(folder / "good", 0, regrouped, run.main, mesh, metadata)
    )

    # One rank cannot write: no rank sees a new checkpoint, and the old checkpoint of that name
    # stays.
    state = {"broken": (lambda: None) if rank == 1 else 1}
    attempt(
        "save", lambda: save_checkpoint(folder / "good", run.tensors(), {"new": True}, state, mesh)
    )
    attempt(
        "metadata",
        lambda: save_checkpoint(folder / "bad", run.tensors(), {"broken": lambda: None}, {}, mesh),
    )
    outcomes["files"] = " ".join(sorted(path.name for path in folder.iterdir()))
    outcomes["still"] = " ".join(load_metadata(folder / "good"))
    barrier(mesh.world_cpu)
    run.save(folder / "good")
    outcomes["replaced"] = " ".join(sorted(path.name for path in folder.iterdir()))
    mesh.destroy()
    return outcomes


def world(rank: int, size: int, folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "reshard": reshard(rank, size, folder / "reshard"),
        "gpt": gpt_world(rank, size, folder / "gpt"),
        "errors": errors_world(rank, size, folder / "errors"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_world(world, 4, folder)


@pytest.mark.parametrize(("source", "layout", "optimizer"), CASES)
def test_every_layout_loads_checkpoints_of_other_layouts_bitwise(
    results: list[dict[str, Any]], source: str, layout: str, optimizer: str
) -> None:
    for result in results:
        outcomes = result["reshard"]
        assert outcomes[f"{source} -> {layout}, {optimizer}"] == []
        assert outcomes[f"lr {source} -> {layout}, {optimizer}"] == [0.01, 0.125]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saving_a_loaded_checkpoint_again_gives_the_same_tensors(
    results: list[dict[str, Any]], layout: str
) -> None:
    assert all(result["reshard"][f"round trip {layout}"] for result in results)


@pytest.mark.parametrize(("layout", "optimizer"), SAVED)
def test_one_process_continues_the_training_of_any_layout(
    results: list[dict[str, Any]], folder: Path, layout: str, optimizer: str
) -> None:
    path = folder / "reshard" / layout / optimizer
    run = Trained(ParallelMesh.single(), optimizer)
    run.load(path)
    assert difference(read_full(path), run) == []
    # The reference: one process that takes the same steps.
    twins = {name: nn.Parameter(full) for name, full in full_parameters().items()}
    twin_optimizer = OPTIMIZERS[optimizer](groups_of(twins))
    for _ in range(STEPS):
        for name, gradient in full_gradients(ParallelLayout(4, **LAYOUTS[layout]).dp).items():
            twins[name].grad = gradient
        twin_optimizer.step()
    for name, twin in twins.items():
        rows = slice(len(twin)) if twin.ndim else ...  # without the padded vocabulary
        torch.testing.assert_close(run.named[name].data[rows], twin.data, rtol=0, atol=1e-12)
        for key, expected in twin_optimizer.state[twin].items():
            actual = run.optimizer.state[run.main.main(name)][key]
            torch.testing.assert_close(
                actual[rows] if actual.ndim else actual, expected, rtol=0, atol=1e-12
            )
    run.optimizer.step()


def test_entries_are_the_full_tensors_without_tied_copies(
    results: list[dict[str, Any]], folder: Path
) -> None:
    names = set(read_full(folder / "reshard" / "dp4" / "SGD"))
    assert names == {f"state_dict.{name}" for name in full_parameters()} | {
        f"optimizer.0.state.{name}.momentum_buffer" for name in full_parameters()
    }
    for layout in LAYOUTS:
        written = set().union(*(result["reshard"][f"names {layout}"] for result in results))
        assert not any(HEAD in name for name in written)
        assert {f"state_dict.{name}" for name in full_parameters()} < written


def test_a_mesh_of_a_single_process_inside_a_job_loads_checkpoints(
    results: list[dict[str, Any]],
) -> None:
    assert all(result["reshard"]["single"] == [] for result in results)


def test_rank_state_comes_from_the_same_position_of_the_mesh_or_the_nearest(
    results: list[dict[str, Any]],
) -> None:
    for rank, result in enumerate(results):
        outcomes = result["reshard"]
        same = outcomes["state tp2 pp2 -> tp2 pp2"]
        assert (same.rank, same.same_data) == (rank, True)
        nearest = outcomes["state tp4 -> tp2 pp2"]
        assert nearest.values["place"] == {"tp": rank % 2, "cp": 0, "dp": 0, "pp": 0}
        assert nearest.same_data
        assert not outcomes["state dp4 -> tp4"].same_data


def test_data_parallel_ranks_divide_the_writing() -> None:
    large, small = 10 * 65536, 100
    writers = assign_writers([large, small, large, large, small, large], 2)
    assert writers[1] == writers[4] == 0
    assert sorted(writers[index] for index in (0, 2, 3, 5)) == [0, 0, 1, 1]
    assert assign_writers([], 3) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GPTS)
def test_gpt_saved_under_tp2_pp2_loads_under_every_layout(
    results: list[dict[str, Any]], name: str, layout: str
) -> None:
    assert all(result["gpt"][f"{name} {layout}"] == [] for result in results)


@pytest.mark.parametrize("name", GPTS)
def test_gpt_of_one_process_loads_a_checkpoint_of_tp2_pp2(
    results: list[dict[str, Any]], folder: Path, name: str
) -> None:
    saved_model, model = GPT(GPTS[name], seed=3), GPT(GPTS[name], seed=4)
    mesh = ParallelMesh.single()
    load_model(
        folder / "gpt" / name, model, MainParameters(dict(model.named_parameters()), mesh), mesh
    )
    vocab = GPTS[name].vocab_size
    for (key, actual), expected in zip(
        model.named_parameters(), saved_model.parameters(), strict=True
    ):
        rows = slice(vocab) if "word" in key or "head" in key else slice(None)
        assert torch.equal(actual[rows], expected[rows]), key


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (
            "unexpected",
            [
                (
                    "unexpected in the checkpoint: state_dict.model.layers.0.scale, "
                    "state_dict.model.layers.1.scale"
                ),
                "strict=False",
            ],
        ),
        (
            "missing",
            [
                "missing in the checkpoint: state_dict.model.layers.0.query.weight",
                "unexpected in the checkpoint",
            ],
        ),
        (
            "shape",
            [
                (
                    "state_dict.model.final_norm.weight is (4,) in the checkpoint and (10, 4) in "
                    "the model"
                )
            ],
        ),
        (
            "groups",
            ["2 groups were saved, the optimizer has 1", "is in group 0, but was saved in 1"],
        ),
        ("save", ["failed on 1 of 4 rank(s): rank 1:", "errors/good", "lambda"]),
        ("metadata", ["saving", "errors/bad", "failed on 1 of 4 rank(s): rank 0:"]),
    ],
)
def test_every_rank_raises_an_error_that_describes_the_problem(
    results: list[dict[str, Any]], case: str, parts: list[str]
) -> None:
    for result in results:
        for part in parts:
            assert part in result["errors"][case]


def test_loading_without_strict_reports_missing_and_unexpected_names(
    results: list[dict[str, Any]],
) -> None:
    assert all(result["errors"]["loose"] == "4 missing, 4 unexpected" for result in results)


def test_a_failed_save_leaves_only_the_old_checkpoint(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert result["errors"]["files"] == "good"
        assert result["errors"]["still"] == "optimizer"
        assert result["errors"]["replaced"] == "good"
