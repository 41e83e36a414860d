"""The trainer, the strategy and the parameters of a finished fit are freed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lightning_megatron import MegatronStrategy
from lightning_megatron.graphs.tape import TapeBackend
from tests.strategy.graph_fits import FULL, SEGMENTS
from tests.strategy.tiny import TinyLM, loader


@pytest.mark.parametrize("graphs", [None, SEGMENTS, FULL], ids=["eager", "segments", "full"])
def test_the_trainer_strategy_and_parameters_of_a_finished_fit_are_freed(
    graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without this variable the strategy starts the ranks, as in the first fit of a program.
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    references = fit_with_references(graphs)
    # Cycles through autograd's nodes need more than one collection.
    for _ in range(3):
        gc.collect()
    assert [name for name, reference in references.items() if reference() is not None] == []


def fit_with_references(graphs: Any) -> dict[str, weakref.ref[Any]]:
    """Train, and return weak references to the trainer, strategy, module and parameters."""
    strategy = MegatronStrategy(cuda_graphs=graphs)
    strategy._make_backend = lambda mesh: TapeBackend(mesh.launcher)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = TinyLM()
    trainer.fit(module, loader(4))
    parameters = {name: weakref.ref(parameter) for name, parameter in module.named_parameters()}
    assert parameters
    return {
        "trainer": weakref.ref(trainer),
        "strategy": weakref.ref(strategy),
        "module": weakref.ref(module),
        **parameters,
    }
