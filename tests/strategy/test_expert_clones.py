"""The option ``expert_clones``: refusals, results of fits, and its use with other options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_megatron import (
    GPT,
    ExpertClones,
    HuggingFaceCausalLM,
    MegatronStrategy,
    ParallelPlanError,
    UnsupportedError,
)
from lightning_megatron.plan.cloning import CloneSettings
from lightning_megatron.strategy.logs import run_table
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from tests.strategy import graph_fits
from tests.strategy.limited_fits import EXPERTS, Excess, Record, Watched, fit
from tests.strategy.tiny import loader
from tests.world import run_world

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}


def options_of(clones: Any) -> StrategyOptions:
    return MegatronStrategy(ep=2, expert_clones=clones).options


def test_expert_clones_accepts_a_number_a_mapping_or_settings() -> None:
    assert MegatronStrategy().options.clones is None
    assert options_of(0).clones is None
    assert options_of(2).clones == ExpertClones(2)
    for option in ({"places": 2, "min_rows": 7}, ExpertClones(2, 7)):
        assert options_of(option).clones == ExpertClones(2, min_rows=7)


def test_min_rows_of_clones_defaults_to_a_value_from_gpu_speed() -> None:
    default, explicit = ExpertClones(1), ExpertClones(3, min_rows=40)
    assert default.on("cuda") == CloneSettings(1, 2476)
    assert default.on("cpu") == CloneSettings(1, 0)
    assert explicit.on("cuda") == explicit.on("cpu") == CloneSettings(3, 40)
    assert default.reason_on("cuda") == (
        "of at least 2,476 rows: fewer save less time at 650 TFLOP/s than 8 bytes a parameter take "
        "at 350 GB/s"
    )
    assert explicit.reason_on("cuda") == "of at least 40 rows, as asked for"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"expert_clones": -1, "ep": 2}, "expert_clones must be .* it is -1"),
        ({"expert_clones": {"places": 0}, "ep": 2}, "expert_clones.places must be .* it is 0"),
        ({"expert_clones": {"rows": 1}, "ep": 2}, "expert_clones has no setting 'rows'"),
        (
            {"expert_clones": {"places": 1, "min_rows": 0.5}, "ep": 2},
            "expert_clones.min_rows must be .* it is 0.5",
        ),
        ({"expert_clones": 1}, r"expert_clones \(1\) needs ep above 1"),
        *(
            (
                {"expert_clones": 1, "ep": 2, "expert_transport": transport},
                f"needs expert_transport of one_sided or auto: it is {transport}",
            )
            for transport in ("all_gather", "all_to_all")
        ),
    ],
)
def test_invalid_expert_clones_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParallelPlanError, match=words):
        MegatronStrategy(**options)


@pytest.mark.parametrize("is_own", [True, False])
def test_more_places_than_experts_of_other_ranks_are_refused_before_a_launch(
    is_own: bool, tmp_path: Path
) -> None:
    module: Any = Watched(mlp_bias=False, experts=EXPERTS)
    if not is_own:
        transformers = pytest.importorskip("transformers")
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        module = HuggingFaceCausalLM(str(tmp_path))
    strategy = MegatronStrategy(ep=4, expert_clones=4)
    trainer = Trainer(accelerator="cpu", devices=4, logger=False, strategy=strategy)
    with pytest.raises(ParallelPlanError, match=r"expert_clones \(4\) must be at most 3: with ep"):
        trainer.fit(module, loader())


def test_clones_of_experts_with_biases_are_refused_before_a_launch() -> None:
    module: Any = Watched(mlp_bias=False, experts={**EXPERTS, "linear_bias": True})
    strategy = MegatronStrategy(ep=4, expert_clones=1)
    trainer = Trainer(accelerator="cpu", devices=4, logger=False, strategy=strategy)
    with pytest.raises(UnsupportedError, match="expert_clones needs experts without biases"):
        trainer.fit(module, loader())


def test_too_many_places_are_refused_when_only_the_built_model_shows_its_experts(
    ranks: Any,
) -> None:
    for results in ranks:
        assert results["too many"].startswith(
            "expert_clones (3) must be at most 2: with ep (2) the"
        )


#: Rows above an even share, in several layers and steps, and in validation.
UNEVEN: Excess = {
    ("train", 0, 0, 0): 12,
    ("train", 1, 1, 1): -100,
    ("train", 2, 0, 1): 5,
    ("val", 0, 0, 0): 9,
}
#: Twelve rows are enough for a clone, and one row is not.
TOO_FEW: Excess = {("train", 1, 0, 0): 12, ("train", 1, 0, 1): 1}
AT_LEAST_TWO = {"places": 1, "min_rows": 2}


CAPTURED = {"ep": 2, "expert_clones": 1}
MODEL = {"experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}, "mlp_bias": False}


class FrozenExperts(Watched):
    """Freeze the experts whose numbers are in ``numbers``."""

    numbers = "01"

    def configure_model(self) -> None:
        super().configure_model()
        for name, parameter in self.named_parameters():
            expert = re.search(r"\.experts\.(\d)\.", name)
            parameter.requires_grad_(expert is None or expert.group(1) not in self.numbers)


class AllExpertsFrozen(FrozenExperts):
    numbers = "0123"


class FreezesExperts(Watched):
    """Freeze all experts in the third step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(batch_idx < 2 or ".experts." not in name)


class HidesConfiguration(Watched):
    """Have no configuration until the model is built."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sizes, self.config = self.config, None  # type: ignore[assignment]

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        self.net = GPT(self.sizes, mesh=mesh)


def refusal(kind: type[Watched], clones: int = 1) -> str:
    """Return the message of the refusal to train a module with clones."""
    with pytest.raises((ParallelPlanError, UnsupportedError)) as raised:
        fit(None, {}, kind=kind, expert_clones=clones)
    return str(raised.value)


def world_of_two(rank: int, size: int) -> dict[str, Any]:
    results: dict[str, Any] = {"without": fit(None, UNEVEN)}
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_table, "rank_zero_info", messages.append)
        results["clones"] = fit(None, UNEVEN, expert_clones=1, expert_transport="auto")
    results["table"] = messages
    results["limit"] = fit(1.0, UNEVEN, expert_clones=1)
    results["enough"] = fit(None, TOO_FEW, expert_clones=AT_LEAST_TWO)
    results["too small"] = fit(1.0, TOO_FEW, expert_clones=AT_LEAST_TWO)
    for name, clones in (("frozen", 0), ("frozen, clones", 1)):
        results[name] = fit(None, UNEVEN, kind=AllExpertsFrozen, expert_clones=clones)
    results["eager"] = graph_fits.fit(None, 2, CAPTURED, model=MODEL)
    for graphs in (graph_fits.SEGMENTS, graph_fits.FULL):
        results[graphs.mode] = graph_fits.fit(graphs, 2, CAPTURED, model=MODEL)
    results["some frozen"] = refusal(FrozenExperts)
    results["freezing"] = refusal(FreezesExperts)
    results["too many"] = refusal(HidesConfiguration, 3)
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(world_of_two, 2)


def assert_close(actual: Record, expected: Record) -> None:
    """Assert that results of two fits are the same but for the order of sums."""
    assert actual.losses == pytest.approx(expected.losses, rel=1e-12)
    assert actual.logged == pytest.approx(expected.logged, rel=1e-12)
    assert actual.loads == expected.loads, "routers count the same experts"
    for name, weight in actual.weights.items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("pair", [("clones", "without"), ("frozen, clones", "frozen")])
def test_a_fit_with_clones_matches_a_fit_without_clones(ranks: Any, pair: tuple[str, str]) -> None:
    for results in ranks:
        actual, expected = (results[name] for name in pair)
        assert_close(actual, expected)
        assert actual.differences_from(expected), "some rows were computed elsewhere"
        assert set(actual.logged) > {"val_loss"}


def test_the_run_table_shows_clones_and_the_transport_that_they_need(ranks: Any) -> None:
    rows = [line for text in ranks[0]["table"] for line in text.splitlines()]
    (clones,) = [re.split(r" {2,}", row.strip()) for row in rows if "clones of experts" in row]
    assert clones == ["clones of experts", "at most 1 per rank", "of any number of rows on cpu"]
    (transport,) = [row for row in rows if "expert transport" in row]
    assert "one_sided" in transport
    assert transport.endswith("to experts and their clones: expert_clones needs it")


def test_clones_keep_rows_within_a_limit(ranks: Any) -> None:
    for results in ranks:
        assert results["limit"].num_failures == 0
        assert results["limit"].differences_from(results["clones"]) == []


def test_a_step_over_the_row_limit_despite_clones_equals_a_step_without_a_limit(
    ranks: Any,
) -> None:
    for results in ranks:
        assert results["too small"].num_failures == 1
        assert results["too small"].differences_from(results["enough"]) == []
    (warning,) = ranks[0]["too small"].warnings
    assert "layer 1 needed 129 rows on rank 0, expert_rows=1 has 128" in warning


@pytest.mark.parametrize("mode", ["segments", "full"])
def test_captured_steps_with_clones_equal_eager_steps(ranks: Any, mode: str) -> None:
    for results in ranks:
        assert results[mode].differences_from(results["eager"]) == []
        assert results[mode].num_graphs[-1] > 0


def test_experts_frozen_on_some_ranks_or_within_an_epoch_are_refused(ranks: Any) -> None:
    for results in ranks:
        assert "gate_up" not in results["some frozen"]
        assert (
            "up of some experts of layer 0, on [0] of the 2 ranks of ep, is frozen"
            in results["some frozen"]
        )
        assert "only between epochs" in results["freezing"]
        assert "after the beginning of epoch 0" in results["freezing"]
