"""A finished fit is freed, and its steps leave no tensors that only garbage collection would free."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.fits import Job, Language, Tokens, trainer_of
from tests.graphs.jobs import FULL, SEGMENTS
from tests.optimizer.fused_fits import SMALL

transformers = pytest.importorskip("transformers")

V, STEPS = 32, 7
SIZES = {
    "vocab_size": V, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 3,
    "pad_token_id": 0,
}  # fmt: skip
SPECIAL = {"bos_token_id": None, "eos_token_id": None}
EXPERTS = {"num_local_experts": 4, "num_key_value_heads": 3}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "MixtralForCausalLM": ("mixtral", {**SPECIAL, **EXPERTS}, {}),
    "BertForMaskedLM": ("bert", {}, {}),
    "LlamaForCausalLM": ("llama", SPECIAL, {"recompute": "full"}),
}


class FineTuned(pl.LightningModule):
    """Train a model of transformers, and count the tensors that live after each step."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.live = case, list[int]()
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            kind, settings, _ = CASES[self.case]
            config = transformers.AutoConfig.for_model(kind, **SIZES, **settings)
            self.model = getattr(transformers, self.case)._from_config(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        tensors = (item for item in gc.get_objects() if isinstance(item, Tensor))
        # Lightning itself sometimes keeps a scalar and the tokens of a batch; neither is counted.
        self.live.append(sum(tensor.dim() > 1 and tensor.is_floating_point() for tensor in tensors))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


@pytest.fixture
def without_garbage_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("without_garbage_collection")
def test_number_of_live_tensors_is_constant_after_the_first_steps(case):
    module = FineTuned(case)
    data = DataLoader(torch.randint(V, (4 * STEPS, 8)), batch_size=4)  # type: ignore[arg-type]
    layout = {"microbatch_size": 1, "job.check_microbatches": True, **CASES[case][2]}
    trainer_of(Job(strategy=layout, precision="32-true", steps=STEPS)).fit(module, data)
    assert len(set(module.live[3:])) == 1, module.live


@pytest.mark.parametrize("graphs", [None, SEGMENTS, FULL], ids=["eager", "segments", "full"])
def test_the_trainer_strategy_and_parameters_of_a_finished_fit_are_freed(graphs, monkeypatch):
    # Without this variable the strategy starts the ranks, as in the first fit of a program.
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    references = fit_with_references(graphs)
    # Cycles through autograd's nodes need more than one collection.
    for _ in range(3):
        gc.collect()
    assert [name for name, reference in references.items() if reference() is not None] == []


def fit_with_references(graphs: Any) -> dict[str, weakref.ref[Any]]:
    """Train, and return weak references to the trainer, strategy, module and parameters."""
    trainer, module = trainer_of(Job(strategy={"cuda_graphs": graphs}, steps=4)), Language(SMALL)
    trainer.fit(module, DataLoader(Tokens(4), batch_size=4))
    objects = {"trainer": trainer, "strategy": trainer.strategy, "module": module}
    return {
        name: weakref.ref(item)
        for name, item in {**objects, **dict(module.named_parameters())}.items()
    }
