"""Changes of the state dict by `on_save_checkpoint` are saved, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import GPTConfig
from lightning_megatron.checkpoint import read_full
from lightning_megatron.checkpoint.consolidate import consolidate
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan.experts import ExpertsConfig
from tests.proof.training import Tokens
from tests.strategy.checkpoint_runs import GPT2, LLAMA, Trained, trainer_of
from tests.world import run_world

EXPERTS = replace(
    LLAMA, num_layers=1, experts=ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=16)
)
NAME = "model.layers.0.attention.qkv.weight"

State = dict[str, Any]


class ChangesState(Trained):
    """Change the state dict on its way into the checkpoint."""

    change: Callable[[ChangesState, State], None]

    def on_save_checkpoint(self, checkpoint: State) -> None:
        type(self).change(self, checkpoint["state_dict"])


def halves(module: ChangesState, state: State) -> None:
    for name in state:
        state[name] = state[name] / 2


def copies(module: ChangesState, state: State) -> None:
    for name in state:
        state[name] = state[name].clone().float()


def adds(module: ChangesState, state: State) -> None:
    state["extra"] = torch.arange(6.0).view(2, 3)


def removes(module: ChangesState, state: State) -> None:
    del state[NAME]


def first_rank_halves(module: ChangesState, state: State) -> None:
    if module.trainer.global_rank == 0:
        halves(module, state)


def last_rank_halves(module: ChangesState, state: State) -> None:
    if module.trainer.global_rank == module.trainer.world_size - 1:
        halves(module, state)


def removes_the_last_expert(module: ChangesState, state: State) -> None:
    for name in [name for name in state if ".experts.3." in name]:
        del state[name]


def transposes_the_last_expert(module: ChangesState, state: State) -> None:
    for name in [name for name in state if ".experts.3.down." in name]:
        state[name] = state[name].t().contiguous()


def transposes(module: ChangesState, state: State) -> None:
    state[NAME] = state[NAME].t().contiguous()


def adds_a_shard(module: ChangesState, state: State) -> None:
    state["shard"] = state[NAME].clone()


def adds_a_number(module: ChangesState, state: State) -> None:
    state["number"] = 3


def save_changed_and_plain(
    change: Callable[[ChangesState, State], None],
    path: Path | str,
    layout: State,
    size: int,
    weights_only: bool = False,
    config: GPTConfig = GPT2,
    **options: Any,
) -> State:
    """Train one step, save with and without the change, and return the full tensors of both."""
    kind = type("ChangesState", (ChangesState,), {"change": change})
    trainer, module = trainer_of(layout, size, 1, **options), kind(config)
    trainer.fit(module, DataLoader(Tokens(), batch_size=8 // trainer.strategy.data_parallel_size))
    trainer.save_checkpoint(f"{path}/changed", weights_only)
    kind.change = lambda module, state: None
    trainer.save_checkpoint(f"{path}/plain", weights_only)
    return {version: read_weights(f"{path}/{version}") for version in ("changed", "plain")}


def read_weights(path: str) -> dict[str, Tensor]:
    """Return the full weights by name."""
    return {
        name.removeprefix("state_dict."): tensor
        for name, tensor in read_full(path).items()
        if name.startswith("state_dict.")
    }


def consolidated_state(path: Path) -> State:
    consolidate(path, path.parent / "file.ckpt", weights_only=True)
    state: State = torch.load(path.parent / "file.ckpt")["state_dict"]
    return state


@pytest.mark.parametrize("weights_only", [False, True])
def test_changed_values_are_saved(weights_only: bool, tmp_path: Path) -> None:
    states = save_changed_and_plain(halves, tmp_path, {}, 1, weights_only)
    for name, value in states["plain"].items():
        torch.testing.assert_close(states["changed"][name], value / 2, rtol=0, atol=0)


def test_copies_are_saved_in_the_precision_of_the_main_parameters(tmp_path: Path) -> None:
    states = save_changed_and_plain(copies, tmp_path, {}, 1, precision="bf16-mixed")
    for name, value in states["plain"].items():
        assert torch.equal(states["changed"][name], value)
    assert any(
        not torch.equal(value, value.bfloat16().float()) for value in states["plain"].values()
    )


def test_added_and_removed_names_reach_the_checkpoint_and_its_consolidated_file(
    tmp_path: Path,
) -> None:
    states = save_changed_and_plain(adds, tmp_path, {}, 1)
    assert torch.equal(states["changed"].pop("extra"), torch.arange(6.0).view(2, 3))
    assert states["changed"].keys() == states["plain"].keys()
    plain = consolidated_state(tmp_path / "changed")
    assert torch.equal(plain["extra"], torch.arange(6.0).view(2, 3))
    module = Trained()
    module.strict_loading = False
    trainer_of({}, 1, 2).fit(module, [], ckpt_path=tmp_path / "changed")
    states = save_changed_and_plain(removes, tmp_path, {}, 1)
    assert states["plain"].keys() - states["changed"].keys() == {NAME}
    assert NAME not in consolidated_state(tmp_path / "changed")


def test_transposed_weight_is_saved_with_its_new_shape(tmp_path: Path) -> None:
    states = save_changed_and_plain(transposes, tmp_path, {}, 1)
    assert torch.equal(states["changed"][NAME], states["plain"][NAME].t())


class TiedModule(pl.LightningModule):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.second = torch.nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.factor = 3.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.second(self.first(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_save_checkpoint(self, checkpoint: State) -> None:
        checkpoint["state_dict"]["first.weight"] = self.first.weight.detach() * 3
        checkpoint["state_dict"]["second.weight"] = self.first.weight.detach() * self.factor


def test_tied_parameter_must_change_equally_under_both_names(tmp_path: Path) -> None:
    trainer, module = trainer_of({}, 1, 1), TiedModule()
    trainer.fit(module, DataLoader(torch.ones(2, 4).double(), batch_size=2))
    trainer.save_checkpoint(tmp_path / "checkpoint")
    plain = consolidated_state(tmp_path / "checkpoint")
    assert all(
        torch.equal(plain[f"{name}.weight"], module.first.weight * 3)
        for name in ("first", "second")
    )
    module.factor = 2.0
    with pytest.raises(
        UnsupportedError, match=r"'second\.weight', but not the parameter's first name"
    ):
        trainer.save_checkpoint(tmp_path / "other")


def test_values_that_are_not_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'number' is a int.*key of their own"):
        save_changed_and_plain(adds_a_number, tmp_path, {}, 1)


class ExtraState(TiedModule):
    """A module with a state that is not a tensor."""

    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("no checkpoint has it")


def test_extra_state_that_is_not_a_tensor_is_named_and_not_saved(tmp_path: Path) -> None:
    trainer, module = trainer_of({}, 1, 1), ExtraState()
    trainer.fit(module, DataLoader(torch.ones(2, 4).double(), batch_size=2))
    with pytest.warns(
        UserWarning, match="_extra_state of the module's state_dict .1 in all. cannot be saved"
    ):
        trainer.save_checkpoint(tmp_path / "checkpoint")
    assert {"first.weight", "second.weight"} >= set(consolidated_state(tmp_path / "checkpoint"))


def save_on_four_ranks(rank: int, size: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, change, layout in (
        ("tp2 dp2", halves, {"tp": 2}),
        ("pp2 dp2", adds, {"pp": 2}),
        ("dp4 first", first_rank_halves, {}),
        ("dp4 last", last_rank_halves, {}),
        ("tp2 first", first_rank_halves, {"tp": 2}),
        ("tp2 transposed", transposes, {"tp": 2}),
        ("tp2 shard", adds_a_shard, {"tp": 2}),
        ("tp2 pp2", adds, {"tp": 2, "pp": 2}),
    ):
        try:
            results[name] = save_changed_and_plain(change, f"{folder}/{name}", layout, size)
        except UnsupportedError as error:
            results[name] = str(error)
    return results


def test_first_data_rank_decides_changes_and_unequal_tensor_ranks_are_refused(
    tmp_path: Path,
) -> None:
    results_of_ranks = run_world(save_on_four_ranks, 4, str(tmp_path))
    for results in results_of_ranks:
        for name, factor in (("tp2 dp2", 0.5), ("dp4 first", 0.5), ("dp4 last", 1.0)):
            for key, value in results[name]["plain"].items():
                torch.testing.assert_close(
                    results[name]["changed"][key], value * factor, rtol=0, atol=0
                )
        for name in ("pp2 dp2", "tp2 pp2"):
            assert torch.equal(results[name]["changed"]["extra"], torch.arange(6.0).view(2, 3))
            assert results[name]["plain"].keys() == results[name]["changed"].keys() - {"extra"}
        assert "alike on all tensor-parallel ranks" in results["tp2 first"]
        assert "only by one of the same shape" in results["tp2 transposed"]
        assert "'shard' is not" in results["tp2 shard"]


def save_experts_on_two_ranks(rank: int, size: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, change, layout in (
        ("all", halves, {"ep": 2}),
        ("first", first_rank_halves, {"ep": 2}),
        ("last", last_rank_halves, {"ep": 2}),
        ("removed", removes_the_last_expert, {"ep": 2}),
        ("transposed", transposes_the_last_expert, {"ep": 2}),
        ("etp2, first", first_rank_halves, {"tp": 2}),
    ):
        try:
            results[name] = save_changed_and_plain(
                change, f"{folder}/{name}", layout, size, config=EXPERTS
            )
        except UnsupportedError as error:
            results[name] = str(error)
    return results


def test_experts_are_saved_as_on_the_first_rank_that_holds_them(tmp_path: Path) -> None:
    results, _ = run_world(save_experts_on_two_ranks, 2, str(tmp_path))
    second_rank_experts = (".experts.2.", ".experts.3.")
    for name, first, second in (("all", 0.5, 0.5), ("first", 0.5, 1.0), ("last", 1.0, 0.5)):
        changed, plain = results[name]["changed"], results[name]["plain"]
        assert changed.keys() == plain.keys()
        for key, value in plain.items():
            factor = second if any(part in key for part in second_rank_experts) else first
            torch.testing.assert_close(
                changed[key], value * factor, rtol=0, atol=0, msg=f"{name}: {key}"
            )
    removed = results["removed"]["plain"].keys() - results["removed"]["changed"].keys()
    assert removed == {
        f"model.layers.0.mlp.experts.3.{part}.weight" for part in ("gate_up", "down")
    }
    for key, value in results["transposed"]["plain"].items():
        expected = value.t() if ".experts.3.down." in key else value
        assert torch.equal(results["transposed"]["changed"][key], expected)
    assert "alike on all tensor-parallel ranks" in results["etp2, first"]
