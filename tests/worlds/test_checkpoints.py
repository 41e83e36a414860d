"""What several ranks save is what one process has trained, and a rank that fails leaves no other rank
waiting.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint import (
    CheckpointWriter,
    Entry,
    load_metadata,
    load_optimizer,
    load_rank_state,
    load_tensors,
    model_tensors,
    read_full,
    read_header,
    save_checkpoint,
    verify_checkpoint,
)  # fmt: skip
from lightning_megatron.checkpoint.entries import boxes_to_write
from lightning_megatron.checkpoint.save import CollectiveSave
from lightning_megatron.errors import (
    CheckpointMismatchError,
    CheckpointSaveError,
    CorruptDataError,
)
from lightning_megatron.groups.collectives import all_gather_objects, barrier
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import (
    FlatSlice,
    ShardSpec,
    copy_from_full,
    replicated_spec,
)
from lightning_megatron.optimizer import DistributedOptimizerConfig
from lightning_megatron.optimizer.sharding import BufferPlanner
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.shards import even_range
from tests.checkpoint.pieces import fill_disk, names_in
from tests.optimizer.runs import Run
from tests.optimizer.synthetic import (
    HEAD,
    WORD,
    full_gradients,
    full_parameters,
    parameters,
    pieces,
    set_gradients,
)
from tests.world import run_world

#: Sizes and division of the optimizer. Buckets are small, so that slices end anywhere inside of
#: parameters.
ELEMENTS = DistributedOptimizerConfig(bucket_size=40)
#: Each rank trains whole parameters, as for optimizers that need them.
WHOLE = DistributedOptimizerConfig()
ZERO0 = DistributedOptimizerConfig(zero=0, bucket_size=40)
LAYOUTS: dict[str, tuple[dict[str, int], DistributedOptimizerConfig]] = {
    "tp2 pp2": ({"tp": 2, "pp": 2}, ELEMENTS),
    "tp4": ({"tp": 4}, ELEMENTS),
    "dp4": ({}, ELEMENTS),
    "dp4 whole parameters": ({}, WHOLE),
    "dp2 pp2 zero0": ({"pp": 2}, ZERO0),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
}
SAVED = (
    ("tp2 pp2", "AdamW"),
    ("tp4", "Adagrad"),
    ("dp4", "SGD"),
    ("dp4 whole parameters", "AdamW"),
    ("dp2 pp2 zero0", "AdamW"),
)
STEPS = 2


def groups_of(named: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in named.values() if parameter.ndim == 2]
    others = [parameter for parameter in named.values() if parameter.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


class Trained(Run):
    """The part of a model and its optimizer that this rank holds, with the mesh."""

    def __init__(self, mesh: ParallelMesh, optimizer: str, layout: str = "") -> None:
        self.named, division = parameters(mesh), LAYOUTS[layout][1] if layout else ELEMENTS
        make = OPTIMIZERS[optimizer]
        with ExitStack() as patches:
            if division is WHOLE:
                whole = patch.object(BufferPlanner, "granularity_for", lambda *_: "parameters")
                patches.enter_context(whole)
            super().__init__(self.named, mesh, division, lambda _: make(groups_of(self.named)))

    def train(self) -> None:
        for _ in range(STEPS):
            source = parameters(self.mesh)
            set_gradients(source, self.mesh)
            self.zero_grad()
            gradients = {name: p.grad for name, p in source.items() if p.grad is not None}
            self.backward(gradients, is_last=self.mesh.pp.size == 1)
            self.finish()
            self.step()
        self.optimizer.param_groups[1]["lr"] = 0.125


def mesh_of(layout: str, size: int) -> ParallelMesh:
    return ParallelMesh.create(ParallelLayout(size, **LAYOUTS[layout][0]))


def save_layouts(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Train and save under every layout, and load the state of the ranks."""
    outcomes: dict[str, Any] = {"names": set()}
    meshes = {layout: mesh_of(layout, size) for layout in LAYOUTS}
    for layout, optimizer in SAVED:
        run = Trained(meshes[layout], optimizer, layout)
        run.train()
        run.save(folder / layout / optimizer)
        outcomes["names"] |= {box.name for box in boxes_to_write(run.tensors(), meshes[layout])}
        again = Trained(meshes[layout], optimizer, layout)
        again.load(folder / layout / optimizer)
        assert [group["lr"] for group in again.optimizer.param_groups] == [0.01, 0.125]
        loaded = again.tensors()
        for name, entry in run.tensors().items():
            saved, read = (e.placement.local_views(e.tensor) for e in (entry, loaded[name]))
            for (_, expected), (_, actual) in zip(saved, read, strict=True):
                # A tied copy is loaded from its original.
                assert HEAD in name or torch.equal(actual, expected), name
    for source, optimizer in SAVED[:3]:
        outcomes[source] = load_rank_state(folder / source / optimizer, meshes["tp2 pp2"])
    for mesh in meshes.values():
        mesh.destroy()
    return outcomes


def refuse(rank: int, size: int, folder: Path) -> dict[str, str]:
    """Load what does not fit, and save what cannot be saved."""
    mesh, outcomes = mesh_of("tp2 pp2", size), {}
    run = Trained(mesh, "SGD", "tp2 pp2")
    run.train()
    path, entries = folder / "good", run.tensors()
    run.save(path)
    tensors = model_tensors(nn.Module(), run.main)
    renamed = {name.replace("qkv", "query"): entry for name, entry in tensors.items()}
    # One rank cannot write: no rank sees a new checkpoint, and the old one of that name stays.
    state = {"broken": (lambda: None) if rank == 1 else 1}
    word, metadata = pieces(ParallelMesh.single())[WORD].spec, load_metadata(path)["optimizer"]
    longer = {"state_dict.model.final_norm.weight": Entry(torch.ones(word.full_shape), word)}
    longer = longer if mesh.pp.is_last else {}
    regrouped = torch.optim.SGD(list(run.named.values()), lr=0.1)
    for case, action in {
        "names": lambda: load_tensors(path, renamed, mesh, prefix="state_dict."),
        "shape": lambda: load_tensors(path, longer, mesh, strict=False),
        "groups": lambda: load_optimizer(path, 0, regrouped, run.main, mesh, metadata),
        "save": lambda: save_checkpoint(path, entries, {"new": True}, state, mesh),
    }.items():
        with pytest.raises((CheckpointMismatchError, RuntimeError)) as caught:
            action()
        outcomes[case] = str(caught.value)
        barrier(mesh.world_cpu)
    loose = load_tensors(path, renamed, mesh, strict=False, prefix="state_dict.")
    assert len(loose.missing) == len(loose.unexpected) == 4
    assert names_in(folder) == ["good"]
    assert list(load_metadata(path)) == ["optimizer"]
    barrier(mesh.world_cpu)
    run.save(path)
    assert names_in(folder) == ["good"], "replaced"
    mesh.destroy()
    return outcomes


SHAPE = (6, 5)
CALLS = 5000


def full_tensor(value: float) -> Tensor:
    return value * torch.arange(30.0).view(SHAPE)


def sliced(mesh: ParallelMesh, value: float) -> dict[str, Entry]:
    """Return a tensor whose tensor-parallel rows are divided into flat slices of the data ranks,
    and a tensor that all ranks hold.
    """
    spec = ShardSpec(SHAPE, (even_range(SHAPE[0], mesh.tp.size, mesh.tp.rank),))
    local = (SHAPE[0] // mesh.tp.size, SHAPE[1])
    size, part = local[0] * local[1], mesh.data.rank
    start, stop = size * part // mesh.data.size, size * (part + 1) // mesh.data.size
    flat, values = FlatSlice(spec, local, start, stop), torch.empty(stop - start)
    copy_from_full(flat, values, full_tensor(value))
    shared = torch.full((30_000,), value)
    copies = Entry(shared, replicated_spec(shared, mesh.tp.rank))
    return {"sliced": Entry(values, flat, True), "shared": copies}


def is_right(path: object, value: float) -> bool:
    full = read_full(str(path))
    is_equal = torch.equal(full["sliced"], full_tensor(value))
    return is_equal and set(full["shared"].tolist()) == {value}


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except (CheckpointSaveError, CorruptDataError) as error:
        return str(error)
    return "no error"


def call_that_raises(writer: CheckpointWriter, delay: float) -> tuple[int, str]:
    """Poll as training does, and return the number of the call that raised and its message."""
    for call in range(CALLS):
        error = error_of(writer.poll)
        if error != "no error" or writer.pending is None:
            return call, error
        time.sleep(delay)
    return CALLS, "never over"


def raising(kind: type) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise kind("out of order")

    return fail


def save_in_background(rank: int, mesh: ParallelMesh, folder: Path) -> dict[str, Any]:
    """Save with ranks of different speeds, then with a full disk on one rank."""
    writer, outcomes, path = CheckpointWriter(mesh), {}, folder / "good"
    tensors = sliced(mesh, 1.0)
    metadata = {"global_step": 7, "epoch": 2}
    writer.save(path, tensors, metadata, {"rank": rank}, background=True)
    for entry in tensors.values():
        entry.tensor.fill_(-1)
    outcomes["good"] = call_that_raises(writer, 0.004 * (mesh.world.size - rank))
    barrier(mesh.world_cpu)
    assert is_right(path, 1.0)
    assert load_rank_state(path, mesh).values["rank"] == rank
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            fill_disk(patch, ".distcp", 300)
        writer.save(path, sliced(mesh, 2.0), {}, {}, background=True)
        outcomes["full disk"] = call_that_raises(writer, 0.001 + 0.003 * rank)
    barrier(mesh.world_cpu)
    assert is_right(path, 1.0)
    assert names_in(folder) == ["good"]
    writer.close()
    return outcomes


#: Step: the rank that fails in it, the function, and an error that does not come from a disk.
FAILURES: dict[str, tuple[int, str, type]] = {
    "collect": (3, "writer.boxes_to_write", MemoryError),
    "index": (0, "save.TensorIndex.of", KeyError),
    "write": (2, "tensor_index._alone", MemoryError),
    "verify": (3, "save.read_record", ValueError),
    "header": (0, "header.Header.write", TypeError),
}


def fail_in_every_step(rank: int, mesh: ParallelMesh, folder: Path) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    writer = CheckpointWriter(mesh)
    for number, (step, (failing, target, kind)) in enumerate(FAILURES.items()):

        def attempt(background: bool = number % 2 == 0) -> None:
            tensors = sliced(mesh, 2.0)
            writer.save(folder / "never", tensors, {}, {}, background=background)
            writer.wait()

        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(f"lightning_megatron.checkpoint.{target}", raising(kind))
            outcomes[step] = error_of(attempt)
        barrier(mesh.world_cpu)
        assert names_in(folder) == [], step
        barrier(mesh.world_cpu)
    writer.close()
    return outcomes


def damage_files(rank: int, mesh: ParallelMesh, folder: Path) -> dict[str, Any]:
    """Verify on all ranks a checkpoint with a damaged file that only one rank reads."""
    for step in (1, 2):
        metadata = {"global_step": step}
        save_checkpoint(folder / f"step={step}", sliced(mesh, step), metadata, {}, mesh)
    path, outcomes = folder / "step=2", {}
    verify_checkpoint(path, mesh=mesh)
    for name in (".metadata", "__3_0.distcp"):
        content = (path / name).read_bytes()
        barrier(mesh.world_cpu)
        if rank == 0:
            (path / name).write_bytes(content[:-9] + b"_" + content[-8:])
        barrier(mesh.world_cpu)
        outcomes[name] = error_of(partial(verify_checkpoint, path, mesh=mesh))
        barrier(mesh.world_cpu)
        if rank == 0:
            (path / name).write_bytes(content)
        barrier(mesh.world_cpu)
    return outcomes


def save_repeatedly(rank: int, mesh: ParallelMesh, folder: Path) -> dict[str, Any]:
    """Save several times under the same name, while some ranks are slow to read their own files."""
    writer, write, path = CheckpointWriter(mesh), CollectiveSave._write, folder / "last"

    def sleep_then_write(self: CollectiveSave, *arguments: Any) -> Any:
        time.sleep(0.05 * rank)
        return write(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CollectiveSave, "_write", sleep_then_write)
        for step in range(3):
            writer.save(path, sliced(mesh, step), {"global_step": step}, {}, background=True)
            if step % 2:
                writer.poll()
        writer.close()
    states = all_gather_objects((is_right(path, 2), names_in(folder)), mesh.world_cpu)
    assert states == [(True, ["last"])] * mesh.world.size
    assert load_metadata(path)["global_step"] == 2
    return {}


Part = Callable[[int, Any, Path], dict[str, Any]]
OF_WRITERS: tuple[Part, ...] = (
    save_in_background,
    fail_in_every_step,
    damage_files,
    save_repeatedly,
)


def world(rank: int, size: int, folder: Path) -> dict[str, dict[str, Any]]:
    outcomes = {
        part.__name__: part(rank, size, folder / part.__name__) for part in (save_layouts, refuse)
    }
    mesh = ParallelMesh.create(ParallelLayout(size, tp=2))
    for part in OF_WRITERS:
        (folder / part.__name__).mkdir(parents=True, exist_ok=True)
        outcomes[part.__name__] = part(rank, mesh, folder / part.__name__)
        barrier(mesh.world_cpu)
    mesh.destroy()
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_world(world, 4, folder)


def of(results: list[dict[str, Any]], part: Part) -> list[dict[str, Any]]:
    return [result[part.__name__] for result in results]


@pytest.mark.parametrize(("layout", "optimizer"), SAVED)
def test_one_process_continues_the_training_of_any_layout(results, folder, layout, optimizer):
    path = folder / "save_layouts" / layout / optimizer
    run = Trained(ParallelMesh.single(), optimizer)
    run.load(path)
    # The reference: one process that takes the same steps.
    twins = {name: nn.Parameter(full) for name, full in full_parameters().items()}
    twin_optimizer = OPTIMIZERS[optimizer](groups_of(twins))
    for _ in range(STEPS):
        gradients = full_gradients(ParallelLayout(4, **LAYOUTS[layout][0]).dp)
        for name, gradient in gradients.items():
            twins[name].grad = gradient
        twin_optimizer.step()
    for name, twin in twins.items():
        rows = slice(len(twin)) if twin.ndim else ...  # without the padded vocabulary
        pairs = [(run.named[name].data, twin.data)]
        state = run.optimizer.state[run.main.main(name)]
        pairs += [(state[key], value) for key, value in twin_optimizer.state[twin].items()]
        for actual, expected in pairs:
            actual = actual[rows] if actual.ndim else actual
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    run.optimizer.step()


def test_entries_are_the_full_tensors_without_tied_copies(results, folder):
    weights = {f"state_dict.{name}" for name in full_parameters()}
    states = {f"optimizer.0.state.{name}.momentum_buffer" for name in full_parameters()}
    assert set(read_full(folder / "save_layouts" / "dp4" / "SGD")) == weights | states
    for outcomes in of(results, save_layouts):
        assert not any(HEAD in name for name in outcomes["names"])


def test_rank_state_comes_from_the_same_position_of_the_mesh_or_the_nearest(results):
    for rank, outcomes in enumerate(of(results, save_layouts)):
        same, nearest = outcomes["tp2 pp2"], outcomes["tp4"]
        assert (same.rank, same.same_data) == (rank, True)
        assert nearest.values["place"] == {"tp": rank % 2, "cp": 0, "dp": 0, "pp": 0}
        assert nearest.same_data
        assert not outcomes["dp4"].same_data


REASONS = {
    "names": "missing in the checkpoint: state_dict.model.layers.0.query.weight.*unexpected in the checkpoint",
    "shape": r"final_norm.weight is \(4,\) in the checkpoint and \(10, 4\) in the model",
    "groups": "2 groups were saved, the optimizer has 1",
    "save": r"refuse/good.* failed on 1 of 4 rank\(s\): rank 1:.*lambda",
}


def test_every_rank_raises_an_error_that_describes_the_problem(results):
    for outcomes in of(results, refuse):
        for case, words in REASONS.items():
            assert re.search(words, outcomes[case], re.DOTALL), outcomes[case]


def test_all_ranks_see_the_end_of_a_save_in_the_same_call(results, folder):
    for case in ("good", "full disk"):
        (end,) = {outcomes[case] for outcomes in of(results, save_in_background)}
        assert 0 < end[0] < CALLS
        is_good = end[1] == "no error"
        failed = "failed on 1 of 4 rank(s): rank 2: OSError: [Errno 28] No space left"
        assert is_good if case == "good" else failed in end[1]
    header = read_header(folder / "save_in_background" / "good")
    assert (header.global_step, header.epoch, header.layout.tp) == (7, 2, 2)


def test_a_rank_that_fails_in_any_step_leaves_no_rank_waiting_and_no_files(results):
    for outcomes in of(results, fail_in_every_step):
        for step, (rank, _, kind) in FAILURES.items():
            assert f"rank {rank}: {kind.__name__}: " in outcomes[step], step


def test_damage_that_one_rank_finds_is_refused_by_all_ranks(results: list[dict[str, Any]]) -> None:
    for outcomes in of(results, damage_files):
        assert all(f"step=2/{name}" in error for name, error in outcomes.items())
