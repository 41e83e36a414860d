"""Tests that code around blocks in stages trains as on one process, or is refused with the name of
the module and the line.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_megatron import UnsupportedError
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import split_batch
from lightning_megatron.swap import parallelize
from tests.proof import around_blocks
from tests.proof.around_blocks import BLOCKS, make_loader
from tests.proof.fine_tuning import trainer_of
from tests.swap.parts import mesh_of
from tests.sweeps import chosen
from tests.world import run_world

EQUAL = (
    "ResidualInLoop", "ResidualAround", "SkipFromInput", "SkipsBetween", "TwoStreams", "EarlyLoss", "CalledTwice",
    "Checkpointed", "TermsOfBlocks", "BlocksInPlace",
)  # fmt: skip
REFUSED = {
    "NormsBetween": (
        "'body.norms.0' is called between the blocks 'body.blocks'",
        "Wrap every block together",
    ),
    "WrittenInPlace": ("the result of 'body.blocks.0'", "__setitem__ uses it", "x[:, 0] = 0.0"),
    "ReadByTheHost": ("the result of 'body.blocks.0'", "if x.abs().max() > 1e6"),
    "Reentrant": ("with use_reentrant=False", "x = checkpoint(block, x, use_reentrant=True)"),
    "TermsOfModules": (
        "the modules of 'body.blocks' cannot be listed in a step",
        "for part in self.modules()",
    ),
    "WeightsOfBlocks": ("the parameter 'body.blocks.0.0.weight'", "block[0].weight.norm()"),
    "TermsInAList": (
        "'body.blocks.0' must return all its results",
        "changes a list, dictionary or dataclass among its arguments",
    ),
    "OnBothSides": ("'body.enter' is called before and after the blocks",),
    "InnerLists": ("'body.blocks.0.0' is called outside of its block", "x = part(x)"),
    "WrittenByABlock": (
        "'body.blocks.0' has changed it in place",
        "return x + super().middle(x)",
    ),
    "DropoutBeside": ("the result of 'body.enter'", "it depends on random numbers"),
}


def fit(
    kind: str, layout: dict[str, Any] | None, devices: int
) -> tuple[list[float], float, dict[str, Any]]:
    """Train a kind; return its losses, last validation loss, and parameters of this rank."""
    seed_everything(1, verbose=False)
    module_class = getattr(around_blocks, kind)
    is_module = issubclass(module_class, around_blocks.Train)
    module = module_class("ResidualAround") if is_module else around_blocks.Train(kind)
    trainer = trainer_of(layout, devices, 2, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, make_loader(), make_loader(4))
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return module.losses, float(trainer.callback_metrics["val_loss"]), weights


def fit_all(rank: int, size: int) -> dict[tuple[str, str], Any]:
    results: dict[tuple[str, str], Any] = {}
    for kind, name in FITS:
        results[kind, name] = fit(kind, {**LAYOUTS[name], "pipeline_plan": BLOCKS}, size)
    with pytest.raises(UnsupportedError, match="'body.norms.0' is called between the blocks"):
        fit("NormsBetween", {"pp": 2, "pipeline_plan": BLOCKS}, size)
    layer = ("enter", "head")[rank]
    with pytest.raises(
        UnsupportedError, match=f"training_step must not write weights.*'body.{layer}.weight'"
    ):
        fit("WritesWeights", {"pp": 2, "pipeline_plan": BLOCKS}, size)
    return results


LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "pp2 zb-v": {"pp": 2, "vpp": 2, "schedule": "zb-v"},
}
#: The few cases contain every kind and every layout.
FITS = chosen(
    [(kind, name) for kind in EQUAL for name in LAYOUTS],
    ("ResidualInLoop", "pp2"),
    ("ResidualAround", "pp2 vpp2"),
    ("SkipFromInput", "pp2 zb-v"),
    ("SkipsBetween", "pp2 vpp2"),
    ("TwoStreams", "pp2 zb-v"),
    ("EarlyLoss", "pp2"),
    ("CalledTwice", "pp2 zb-v"),
    ("Checkpointed", "pp2 zb-v"),
    ("TermsOfBlocks", "pp2 vpp2"),
    ("BlocksInPlace", "pp2 vpp2"),
)


@pytest.fixture(scope="module")
def reports() -> list[dict[tuple[str, str], Any]]:
    return run_world(fit_all, 2)


@pytest.mark.parametrize("kind", EQUAL)
def test_code_around_blocks_trains_as_on_one_process(
    kind: str, reports: list[dict[tuple[str, str], Any]]
) -> None:
    losses, val_loss, weights = fit(kind, None, 1)
    assert losses[-1] != losses[0]
    names = [name for fitted, name in FITS if fitted == kind]
    assert names
    for report in reports:
        for name in names:
            actual, val_actual, parameters = report[kind, name]
            assert actual == pytest.approx(losses, abs=1e-12), name
            assert val_actual == pytest.approx(val_loss, abs=1e-12), name
            for key, value in parameters.items():
                torch.testing.assert_close(value, weights[key], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("pp_rank", [0, 1])
def test_code_that_cannot_be_cut_into_stages_is_refused_on_every_stage(
    kind: str, pp_rank: int
) -> None:
    module = around_blocks.Train(kind)
    module.configure_model()
    mesh = mesh_of(pp=2, pp_rank=pp_rank)
    parallelize(module, mesh, None, BLOCKS)
    executor = PipelineExecutor(mesh, module.body.blocks)
    with pytest.raises(UnsupportedError) as caught:
        executor.run(module.loss_of, split_batch(next(iter(make_loader())), 2), backward=True)
    for part in REFUSED[kind]:
        assert part in str(caught.value)
