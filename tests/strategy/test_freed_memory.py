"""A finished fit is freed, and its steps leave no tensors that only garbage collection would free."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.graphs.tape import TapeBackend
from tests.graphs.jobs import FULL, SEGMENTS
from tests.strategy.tiny import TinyLM, loader

transformers = pytest.importorskip("transformers")

V, STEPS = 32, 7
SIZES = {
    "vocab_size": V,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", SPECIAL, {}),
    "MixtralForCausalLM": (
        "mixtral",
        {**SPECIAL, "num_local_experts": 4, "num_key_value_heads": 3},
        {},
    ),
    "BertForMaskedLM": ("bert", {}, {}),
    "LlamaForCausalLM, recomputed": ("llama", SPECIAL, {"recompute": "full"}),
}


class FineTunedModel(L.LightningModule):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.live = case, list[int]()
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            kind, settings, _ = CASES[self.case]
            config = transformers.AutoConfig.for_model(kind, **SIZES, **settings)
            self.model = getattr(transformers, self.case.partition(",")[0])._from_config(config)

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
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("without_garbage_collection")
def test_number_of_live_tensors_is_constant_after_the_first_steps(case: str) -> None:
    module = FineTunedModel(case)
    data = DataLoader(torch.randint(V, (4 * STEPS, 8)), batch_size=4)  # type: ignore[arg-type]
    L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        strategy=MegatronStrategy(microbatch_size=1, **CASES[case][2]),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, data)
    assert len(set(module.live[3:])) == 1, module.live


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
