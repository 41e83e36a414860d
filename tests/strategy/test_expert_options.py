"""The options ``expert_rows`` and ``expert_clones``: what they accept, and what a step saves for
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron import (
    ExpertClones,
    HuggingFaceCausalLM,
    MegatronStrategy,
    ParallelPlanError,
    UnsupportedError,
)
from lightning_megatron.experts.transport.row_limit import RowLimit
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.plan.cloning import CloneSettings
from lightning_megatron.strategy.step.limited_rows import LimitedRows
from tests.strategy.tiny import TinyLM, loader

EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"expert_rows": 0.99, "ep": 2}, "at least 1"),
    ({"expert_rows": 1.25}, r"expert_rows \(1.25\) needs ep above 1"),
    (
        {"expert_rows": 1.25, "ep": 2, "expert_transport": "all_to_all"},
        "needs expert_transport of one_sided, all_gather or auto",
    ),
    ({"expert_clones": -1, "ep": 2}, "expert_clones must be .* it is -1"),
    ({"expert_clones": {"places": 0}, "ep": 2}, "expert_clones.places must be .* it is 0"),
    ({"expert_clones": {"rows": 1}, "ep": 2}, "expert_clones has no setting 'rows'"),
    (
        {"expert_clones": {"places": 1, "min_rows": 0.5}, "ep": 2},
        "expert_clones.min_rows must be .* it is 0.5",
    ),
    ({"expert_clones": 1}, r"expert_clones \(1\) needs ep above 1"),
    (
        {"expert_clones": 1, "ep": 2, "expert_transport": "all_gather"},
        "needs expert_transport of one_sided or auto: it is all_gather",
    ),
]


def module_of(**experts: Any) -> TinyLM:
    return TinyLM(mlp_bias=False, experts={**EXPERTS, **experts})


def refusal(module: LightningModule, accumulates: int = 1, **layout: Any) -> str:
    """Return the message with which a fit is refused before processes start."""
    trainer = Trainer(
        accelerator="cpu",
        devices=layout["ep"],
        logger=False,
        strategy=MegatronStrategy(**layout),
        accumulate_grad_batches=accumulates,
    )
    with pytest.raises((ParallelPlanError, UnsupportedError)) as raised:
        trainer.fit(module, loader())
    return str(raised.value)


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_invalid_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParallelPlanError, match=words):
        MegatronStrategy(**options)


def test_expert_clones_accepts_a_number_a_mapping_or_settings() -> None:
    def clones_of(value: Any) -> Any:
        return MegatronStrategy(ep=2, expert_clones=value).options.clones

    assert clones_of(0) is None
    assert clones_of(2) == ExpertClones(2)
    for option in ({"places": 2, "min_rows": 7}, ExpertClones(2, 7)):
        assert clones_of(option) == ExpertClones(2, min_rows=7)


def test_min_rows_of_clones_defaults_to_a_value_from_gpu_speed() -> None:
    default, explicit = ExpertClones(1), ExpertClones(3, min_rows=40)
    assert default.on("cuda") == CloneSettings(1, 2476)
    assert default.on("cpu") == CloneSettings(1, 0)
    assert explicit.on("cuda") == explicit.on("cpu") == CloneSettings(3, 40)
    assert "2,476 rows: fewer save less time" in default.reason_on("cuda")


def test_more_places_than_experts_of_other_ranks_are_refused_before_a_launch(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**sizes, **heads, num_local_experts=4)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for module in (module_of(), HuggingFaceCausalLM(str(tmp_path))):
        text = refusal(module, ep=4, expert_clones=4)
        assert "expert_clones (4) must be at most 3: with ep" in text


def test_steps_that_cannot_be_repeated_and_experts_with_biases_are_refused_before_a_launch() -> (
    None
):
    text = refusal(module_of(linear_bias=True), ep=4, expert_clones=1)
    assert "expert_clones needs experts without biases" in text
    text = refusal(module_of(), accumulates=3, ep=2, expert_rows=1.25)
    assert "TinyLM.on_after_backward, which may change" in text
    module = module_of()
    module.automatic_optimization = False
    assert "needs automatic optimization" in refusal(module, ep=2, expert_rows=1.25)


class Launches(TorchDispatchMode):
    """Record the names of operators that would launch kernels or copies."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(value.alias_info is not None for value in func._schema.returns) and not any(
            value.alias_info is not None and value.alias_info.is_write
            for value in func._schema.arguments
        )
        if not is_view and "empty" not in func.__name__:
            self.names.append(func.__name__)
        return result


class BufferModule(LightningModule):
    """Module of a user with many buffers of one dtype."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(20):
            self.register_buffer(f"one{number}", torch.full((3,), float(number)))


class Routers:
    """State of many routers."""

    def __init__(self) -> None:
        sums = [torch.zeros(9, dtype=torch.float64) for _ in range(48)]
        self.step_tensors = [*sums, *(torch.zeros(4) for _ in range(48))]


def test_the_state_before_a_step_is_saved_by_three_grouped_copies_and_restored() -> None:
    mesh = ParallelMesh.single()
    module, routers = BufferModule(), Routers()
    limit = RowLimit(1.0, mesh)
    executor = PipelineExecutor(mesh, None)
    limited = LimitedRows(module, mesh, limit, cast("Any", routers), executor, cast("Any", None))

    def first_run() -> None:
        assert executor.after_forwards is not None
        limit.note(0, 128, torch.tensor([129], dtype=torch.int32))
        module.one3 += 1.0
        routers.step_tensors[50] += 1.0
        executor.after_forwards()()

    def second_run() -> str:
        assert module.one3.tolist() == [3.0] * 3
        assert routers.step_tensors[50].tolist() == [0.0] * 4
        limit.note(0, 128, torch.tensor([129], dtype=torch.int32))
        return "again"

    with Launches() as launches:
        limited._before()
    # Buffers of the module, statistics, and buffers of the routers.
    assert launches.names == ["_foreach_copy_.default"] * 3
    assert limited.run(first_run, second_run) == "again"
    assert limited.num_failures == 1
