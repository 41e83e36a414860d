"""Sums and clipping of gradients in every kind of layout match one process that holds the full
tensors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.training import (
    DistributedOptimizerConfig,
    MainParameters,
    clip_by_norm_,
    clip_by_value_,
    grad_norm,
)
from lightning_megatron.training.shared_gradients import (
    original_name,
    overlapping_pieces,
    resolve_ties,
)
from lightning_megatron.training.ties import TiedCopies, check_ties
from tests.training.logs import recorded_messages
from tests.training.runs import Run
from tests.training.synthetic import HEAD, WORD, full_gradients, parameters, pieces, set_gradients
from tests.world import run_world

LAYOUTS = ({"tp": 4}, {"tp": 2, "pp": 2}, {"pp": 4}, {"tp": 2}, {"pp": 2}, {})
DIVISIONS = (
    DistributedOptimizerConfig(),
    DistributedOptimizerConfig(bucket_size=40),
    DistributedOptimizerConfig(zero=0, bucket_size=40),
    DistributedOptimizerConfig(slices="parameters"),
)


def distance(run: Run, truth: dict[str, Tensor]) -> float:
    """Return the largest difference of this rank's finished gradients from the full gradients."""
    largest = 0.0
    for name, main_slice in run.main.slices.items():
        assert main_slice.main.grad is not None, f"{name} has a gradient"
        for box, view in main_slice.placement.local_views(main_slice.main.grad):
            full = truth[WORD if name == HEAD else name]
            for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                full = full.narrow(dim, start, size)
            largest = max(largest, (view - full).abs().max().item())
    return largest


def errors_of_layout(mesh: ParallelMesh, division: DistributedOptimizerConfig) -> dict[str, float]:
    run = Run(parameters(mesh), mesh, division)
    named = dict(parameters(mesh))
    set_gradients(named, mesh)
    halves = {name: p.grad / 2 for name, p in named.items() if p.grad is not None}
    truth, errors = full_gradients(mesh.data.size), {}
    # The second step starts its sums inside the backward pass.
    for step in range(2):
        run.zero_grad()
        run.backward(halves, is_last=False)
        run.backward(halves)
        run.finish()
        errors[f"gradient {step}"] = distance(run, truth)
    twins = [nn.Parameter(torch.zeros_like(full)) for full in truth.values()]
    for twin, full in zip(twins, truth.values(), strict=True):
        twin.grad = full.clone()
    expected_norm = torch.nn.utils.clip_grad_norm_(twins, 0.5)
    errors["norm"] = abs(clip_by_norm_(run.main, 0.5).item() - expected_norm.item())
    clipped = {
        name: twin.grad for name, twin in zip(truth, twins, strict=True) if twin.grad is not None
    }
    errors["clip"] = distance(run, clipped)
    # A norm below the limit must leave the gradients bitwise as they are.
    before = [gradient.clone() for gradient in run.main.gradients()]
    clip_by_norm_(run.main, 100.0)
    changes = [
        (a - b).abs().max().item() for a, b in zip(run.main.gradients(), before, strict=True)
    ]
    errors["clip below the limit"] = max(changes, default=0.0)
    errors |= update_error(run, mesh, clipped)
    return errors


def update_error(run: Run, mesh: ParallelMesh, gradients: dict[str, Tensor]) -> dict[str, float]:
    """Step, gather, and compare the parameters of this rank with those of one process."""
    before = {name: run.main.parameter(name).detach().clone() for name in run.main.names}
    run.optimizer.step()
    run.main.publish()
    largest = 0.0
    for name, piece in pieces(mesh).items():
        gradient = piece.spec.shard(gradients[WORD if name == HEAD else name], piece.local_size)
        expected = before[name] - 0.1 * gradient
        largest = max(largest, (run.main.parameter(name) - expected).abs().max().item())
    return {"update": largest}


def unused_gradients(rank: int, mesh: ParallelMesh) -> dict[str, Any]:
    """Return gradients and messages if some, or all, ranks of a data-parallel group leave gradients out."""
    run = Run(
        {name: nn.Parameter(torch.ones(200)) for name in ("everywhere", "somewhere", "nowhere")},
        mesh,
    )
    with recorded_messages() as records:
        for _ in range(2):
            run.zero_grad()
            gradients = {"everywhere": torch.full((200,), float(rank))}
            if rank == 0:
                gradients["somewhere"] = torch.full((200,), 8.0)
            run.backward(gradients)
            run.finish()
    grads = {name: main_slice.main.grad for name, main_slice in run.main.slices.items()}
    values = {
        name: None if grad is None else sorted(set(grad.tolist())) for name, grad in grads.items()
    }
    run.backward({"nowhere": torch.full((200,), 4.0 * rank)})
    run.finish()
    later = _value(run, "nowhere")
    run.zero_grad()
    run.backward({"everywhere": torch.ones(200)})
    run.finish()
    at_last = [name for name, entry in run.main.slices.items() if entry.main.grad is not None]
    return {"grads": values, "records": records, "later": later, "at last": at_last}


def used_ties(mesh: ParallelMesh) -> list[list[str]]:
    """Return the tied parameters with a gradient if no stage uses them, and if one does."""
    run = Run(parameters(mesh), mesh)
    found = []
    for left_out in ((WORD, HEAD), (WORD,)):
        run.zero_grad()
        run.backward(
            {name: run.main.parameter(name) for name in run.main.names if name not in left_out}
        )
        run.finish()
        held = [entry.name for entry in run.main.slices.values() if entry.main.grad is not None]
        found.append([name for name in held if name in (WORD, HEAD)])
    return found


def _value(run: Run, name: str) -> float | None:
    main_slice = run.main.slices.get(name)
    return (
        None
        if main_slice is None or main_slice.main.grad is None
        else main_slice.main.grad[0].item()
    )


def late_gradient(mesh: ParallelMesh) -> str:
    """Use a parameter once in the first step and twice in the second."""
    run = Run({"weight": nn.Parameter(torch.ones(3))}, mesh)
    weight = run.main.parameter("weight")
    try:
        for uses in (1, 2):
            run.reducer.begin_last_backward(0)
            for _ in range(uses):
                weight.sum().backward()
            run.reducer.start_reduction(0)
            run.finish()
    except RuntimeError as error:
        return str(error)
    return "no error"


def tie_errors(mesh: ParallelMesh) -> list[str]:
    """Return the errors of optimizers that have the embedding and its copy in one group, and in two."""
    messages = []
    for split in (False, True):
        named = parameters(mesh)
        first_group = [parameter for name, parameter in named.items() if name != HEAD or not split]
        second_group = [parameter for name, parameter in named.items() if name == HEAD and split]
        main = MainParameters(named, mesh)
        optimizer = torch.optim.SGD(
            [{"params": first_group}, {"params": second_group, "weight_decay": 0.1}], lr=0.1
        )
        main.attach(optimizer)
        try:
            check_ties(optimizer, main)
        except UnsupportedError as error:
            messages.append(str(error))
    return messages


def follow_original(mesh: ParallelMesh) -> dict[str, Any]:
    """Let a copy follow its original into a group, out of all groups, and into being frozen."""
    named = parameters(mesh)
    main = MainParameters(named, mesh)
    word = [parameter for name, parameter in named.items() if name == WORD]
    other_parameters = [parameter for name, parameter in named.items() if name != WORD]
    groups: list[dict[str, Any]] = [
        {"params": other_parameters},
        {"params": word, "weight_decay": 0.1},
    ]
    optimizer_with_word = torch.optim.SGD(groups, lr=0.1)
    optimizer_without_word = torch.optim.SGD(other_parameters, lr=0.1)
    copies, outcome = TiedCopies(main), dict[str, Any]()
    copies.follow([optimizer_with_word, optimizer_without_word])
    outcome["group"] = [
        [name in names for name in (WORD, HEAD)] for names in main.names_of(optimizer_with_word)
    ]
    outcome["left out"] = HEAD in main.names_of(optimizer_without_word)[0]
    main.attach(optimizer_with_word)
    check_ties(optimizer_with_word, main)
    for parameter in word:
        parameter.requires_grad_(False)
    try:
        copies.check()
    except UnsupportedError as error:
        outcome["message"] = str(error)
    copies.follow([optimizer_with_word, optimizer_without_word])
    copies.check()
    outcome["frozen"] = [not named[name].requires_grad for name in (WORD, HEAD) if name in named]
    return outcome


def _check_every_layout(rank: int, size: int) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    for sizes in LAYOUTS:
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes))
        outcomes[str(sizes)] = [errors_of_layout(mesh, division) for division in DIVISIONS]
        if not sizes:
            outcomes["unused"] = unused_gradients(rank, mesh)
            outcomes["late"] = late_gradient(mesh)
            bfloat16_run = Run(
                {"weight": nn.Parameter(torch.zeros(512, dtype=torch.bfloat16))}, mesh
            )
            bfloat16_run.backward({"weight": torch.full((512,), float(rank), dtype=torch.bfloat16)})
            bfloat16_run.finish()
            (gradient,) = bfloat16_run.main.gradients()
            outcomes["bf16"] = (str(gradient.dtype), gradient.shape, sorted(set(gradient.tolist())))
        if sizes == {"pp": 2}:
            try:
                Run({"outside.weight": nn.Parameter(torch.ones(1))}, mesh)
            except UnsupportedError as error:
                outcomes["on several stages"] = str(error)
            outcomes["ties"] = tie_errors(mesh)
            outcomes["used ties"] = used_ties(mesh)
            outcomes["followed"] = follow_original(mesh)
        mesh.destroy()
    return outcomes


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_world(_check_every_layout, 4)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "index", range(len(DIVISIONS)), ids=[str(division) for division in DIVISIONS]
)
def test_gradient_sums_norm_clipping_and_update_match_one_process(
    results: list[dict[str, Any]], sizes: dict[str, int], index: int
) -> None:
    for rank, result in enumerate(results):
        errors = result[str(sizes)][index]
        assert all(error < 1e-10 for error in errors.values()), f"rank {rank}: {errors}"
        assert errors["clip below the limit"] == 0


def test_parameter_has_no_gradient_in_a_step_in_which_no_rank_uses_it(
    results: list[dict[str, Any]],
) -> None:
    gradients: dict[str, Any] = {}
    for result in results:
        gradients |= result["unused"]["grads"]
    assert gradients == {"everywhere": [1.5], "somewhere": [2.0], "nowhere": None}
    assert {result["unused"]["later"] for result in results} - {None} == {6.0}
    assert {name for result in results for name in result["unused"]["at last"]} == {"everywhere"}


def test_tied_parameters_have_no_gradient_in_a_step_in_which_no_stage_uses_them(
    results: list[dict[str, Any]],
) -> None:
    used = [result["used ties"] for result in results]
    assert [first for first, _ in used] == [[]] * 4
    assert {name for _, second in used for name in second} == {WORD, HEAD}


def test_unused_parameters_are_named_once_in_the_log(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        records = result["unused"]["records"]
        assert sum("nowhere" in record and "on any rank" in record for record in records) == 1
        assert sum("somewhere" in record and "on this rank" in record for record in records) == (
            0 if rank == 0 else 1
        )
        assert not any("everywhere" in record for record in records[:2])


def test_gradient_that_arrives_after_its_sum_has_started_is_refused(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert "'weight' received a second gradient afterwards" in result["late"]
        assert "overlap_gradients=False" in result["late"]


def test_bfloat16_gradients_without_main_parameters_are_averaged_in_bfloat16(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert result["bf16"] == ("torch.bfloat16", (128,), [1.5])


def test_a_parameter_on_several_stages_is_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "several pipeline stages have" in result["on several stages"]
        assert "'outside.weight'" in result["on several stages"]


def test_a_tied_embedding_in_different_groups_is_refused_on_every_stage(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        (message,) = result["ties"]
        assert f"{WORD!r} is in group 0" in message
        assert f"its copy {HEAD!r} in group 1" in message


def test_tied_copy_follows_its_original_into_groups_and_when_it_is_frozen(
    results: list[dict[str, Any]],
) -> None:
    for rank, result in enumerate(results):
        outcome, is_first = result["followed"], rank < 2
        assert outcome["group"] == [[False, False], [is_first, not is_first]]
        assert not outcome["left out"]
        assert outcome["frozen"] == [True]
        assert ("message" in outcome) == is_first
        assert f"{WORD!r} has requires_grad=False now" in outcome.get(
            "message", f"{WORD!r} has requires_grad=False now"
        )


def test_norm_without_gradients_is_a_float32_zero() -> None:
    run = Run({"weight": nn.Parameter(torch.ones(2))}, ParallelMesh.single())
    norm = grad_norm(run.main)
    assert norm.dtype == torch.float32
    assert norm.item() == 0
    clip_by_norm_(run.main, 1.0)
    clip_by_value_(run.main, 1.0)


def test_norm_of_half_precision_gradients_is_summed_in_float32() -> None:
    run = Run(
        {"weight": nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))}, ParallelMesh.single()
    )
    gradient = torch.full((4096,), 0.01, dtype=torch.bfloat16)
    run.backward({"weight": gradient})
    run.finish()
    assert grad_norm(run.main).item() == pytest.approx(gradient.double().norm().item(), rel=1e-5)


def test_norm_follows_replaced_and_changed_gradients() -> None:
    run = Run({name: nn.Parameter(torch.ones(2)) for name in "abc"}, ParallelMesh.single())
    for step in (1, 2):
        run.backward({name: torch.full((2,), float(step)) for name in "abc"})
        run.finish()
        assert grad_norm(run.main).item() == pytest.approx(step * 6**0.5)
        assert grad_norm(run.main, {"b", "c"}).item() == pytest.approx(step * 2.0)
        run.main.main("a").grad = torch.full((2,), 5.0)
        assert grad_norm(run.main).item() == pytest.approx((50 + 4 * step**2) ** 0.5)
        run.main.main("b").grad.fill_(0.0)
        assert grad_norm(run.main).item() == pytest.approx((50 + 2 * step**2) ** 0.5)
        run.main.main("c").grad = None
        assert grad_norm(run.main).item() == pytest.approx(50**0.5)


def test_norm_and_clipping_can_be_limited_to_names() -> None:
    run = Run({name: nn.Parameter(torch.ones(1)) for name in "ab"}, ParallelMesh.single())
    run.backward({name: torch.tensor([4.0]) for name in "ab"})
    run.finish()
    assert clip_by_norm_(run.main, 1.0, names=["b"]).item() == 4.0
    assert run.main.main("a").grad.item() == 4.0
    assert run.main.main("b").grad.item() == pytest.approx(1.0)


def test_clip_by_value_equals_torch() -> None:
    run = Run({"weight": nn.Parameter(torch.ones(5))}, ParallelMesh.single())
    run.backward({"weight": torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0])})
    run.finish()
    clip_by_value_(run.main, 0.75)
    assert run.main.main("weight").grad.tolist() == [-0.75, -0.5, 0.0, 0.5, 0.75]


def test_gradients_start_from_zero_after_a_step_without_zero_grad() -> None:
    run = Run({"weight": nn.Parameter(torch.ones(1))}, ParallelMesh.single())
    with recorded_messages() as records:
        for _ in range(3):
            run.backward({"weight": torch.tensor([4.0])})
            run.finish()
    assert run.main.main("weight").grad.item() == 4.0
    (record,) = records
    assert "zero_grad() was not called" in record


def test_sparse_gradients_are_refused() -> None:
    run = Run({"weight": nn.Parameter(torch.ones(4, 2))}, ParallelMesh.single())
    out = nn.functional.embedding(torch.tensor([1]), run.main.parameter("weight"), sparse=True)
    with pytest.raises(UnsupportedError, match="sparse=False"):
        out.sum().backward()


def test_overlapping_pieces_are_the_ranges_of_several_ranks() -> None:
    assert overlapping_pieces([[(0, 4), (8, 10)], [(4, 8), (8, 10)]]) == [(8, 10)]
    assert overlapping_pieces([[(0, 4)], [(0, 4)]]) == [(0, 4)]
    assert overlapping_pieces([[(0, 4)], [(2, 6)]]) == [(2, 4)]
    assert overlapping_pieces([[(0, 4)], [(4, 8)]]) == []
    assert overlapping_pieces([[(0, 0)], [(0, 4)]]) == []


def test_a_tied_copy_finds_its_original_below_the_longest_common_prefix() -> None:
    names = {"word.weight", "model.word.weight"}
    assert original_name("model.head.weight", "word.weight", names) == "model.word.weight"
    assert original_name("head.weight", "word.weight", names) == "word.weight"
    assert original_name("head.weight", "absent.weight", names) is None
    with pytest.raises(UnsupportedError, match="no stage holds"):
        resolve_ties([[("a", None)], [("head", "b")]])
