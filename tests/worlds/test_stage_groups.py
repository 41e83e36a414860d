"""Fits on two pipeline stages match one process, also if a stage trains nothing, embeddings are
tied, or parameter groups differ between stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from tests.fits import Job, Module, run_job
from tests.world import run_world

transformers = pytest.importorskip("transformers")

VOCABULARY, BATCH, STEPS_OF_EPOCH = 48, 4, 2
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA = {"intermediate_size": 32, "num_key_value_heads": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "tied llama": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_positions": 16, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
    "bert": (
        "BertForMaskedLM",
        {"intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}


class Tuned(Module):
    """Train the parts of a model of Hugging Face whose names have a word to predict its tokens;
    subclasses choose the optimizer.
    """

    def __init__(self, model: str, trains: str = "") -> None:
        super().__init__()
        self.kind, self.trains, self.model = model, trains, None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(1)
            name, changes = MODELS[self.kind]
            kind = getattr(transformers, name)
            self.model: Any = kind(kind.config_class(**SIZES, **changes)).double()
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(self.trains in name)

    def loss(self, batch: Any) -> Tensor:
        logits = self.model(input_ids=batch[0]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

    def embeddings(self) -> list[nn.Parameter]:
        return [
            p for name, p in self.named_parameters() if any(part in name for part in EMBEDDINGS)
        ]

    def others(self) -> list[nn.Parameter]:
        embedding_ids = set(map(id, self.embeddings()))
        return [p for p in self.parameters() if id(p) not in embedding_ids]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def every_step(optimizer: Any, schedule: Any) -> Any:
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByNames(Tuned):
    """Give embeddings a group with a separate learning rate and schedule."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.others(), "weight_decay": 0.3},
            {"params": self.embeddings(), "weight_decay": 0.0, "lr": 2e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        rates = [lambda step: 1.0, lambda step: 0.5**step]
        return every_step(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rates))


class ByLayers(Tuned):
    """Give every parameter a group, with a learning rate that grows with its layer."""

    def configure_optimizers(self) -> Any:
        groups = []
        for name, parameter in self.model.named_parameters():
            numbers = [int(part) + 1 for part in name.split(".") if part.isdecimal()]
            is_embedding = any(part in name for part in EMBEDDINGS)
            depth = numbers[0] if numbers else (0 if is_embedding else 4)
            groups.append({"params": [parameter], "lr": 1e-2 * 0.6 ** (4 - depth)})
        optimizer = torch.optim.AdamW(groups)
        return every_step(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7))


class Thaws(Tuned):
    """Train embeddings only from the second epoch on, or only in the first."""

    def __init__(self, model: str, in_first: bool) -> None:
        super().__init__(model)
        self.in_first = in_first

    def configure_model(self) -> None:
        super().configure_model()
        for parameter in self.embeddings():
            parameter.requires_grad_(self.in_first)

    def on_train_epoch_start(self) -> None:
        for parameter in self.embeddings():
            parameter.requires_grad_((self.current_epoch == 0) == self.in_first)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Adds(Tuned):
    """Freeze embeddings, and add them to the optimizer in the second epoch, as Lightning's callback
    does.
    """

    def configure_model(self) -> None:
        super().configure_model()
        for parameter in self.embeddings():
            parameter.requires_grad_(False)

    def configure_callbacks(self) -> Any:
        return Finetuning()


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        """Do nothing: the module has frozen the embeddings."""

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            parts = [part for name, part in pl_module.named_modules() if name.endswith(EMBEDDINGS)]
            self.unfreeze_and_add_param_group(parts, optimizer, lr=4e-3)


class LooksUp(Tuned):
    """Give the model vectors that only the first stage can look up."""

    def loss(self, batch: Any) -> Tensor:
        vectors = self.model.get_input_embeddings()(batch[0])
        return self.model(inputs_embeds=vectors).logits.square().mean()


BLOCKS = {"pp": 2, "microbatch_size": 2, "pipeline_plan": {"blocks": "blocks"}}


class Layered(Module):
    """A model whose learning rates grow with depth, in groups by layer or by parameter."""

    def __init__(self, groups: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.groups = groups
        self.first = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 3, bias=False)
        self.double()

    def loss(self, batch: Any) -> Tensor:
        hidden = self.first(F.one_hot(batch[0] % 8, 8).double())
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return F.cross_entropy(self.last(hidden).flatten(0, 1), batch[0].flatten() % 3)

    def configure_optimizers(self) -> Any:
        depths = {"first": 0, "blocks.0": 1, "blocks.1": 2, "last": 3}
        named = [(depths[name.rpartition(".")[0]], p) for name, p in self.named_parameters()]
        # Each stage has three parameters, so the numbers of groups by parameter are equal.
        pairs = [(depth, [parameter]) for depth, parameter in named]
        if self.groups == "by layer":
            pairs = [(depth, [p for of, p in named if of == depth]) for depth in range(4)]
        groups = [{"params": params, "lr": 0.1 * 0.5 ** (3 - depth)} for depth, params in pairs]
        optimizer = torch.optim.AdamW(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return every_step(optimizer, schedule)


#: Modules, and whether a third epoch resumes from a checkpoint.
CASES: dict[str, tuple[Callable[[], Module], bool]] = {
    "only the head of Llama": (partial(Tuned, "llama", "lm_head"), False),
    "only the first block of Llama": (partial(Tuned, "llama", "layers.0"), False),
    "embeddings of BERT apart": (partial(ByNames, "bert"), False),
    "a group for each parameter of a tied Llama": (partial(ByLayers, "tied llama"), False),
    "thawed embeddings of GPT-2": (partial(Thaws, "gpt2", False), False),
    "frozen embeddings of a tied Llama": (partial(Thaws, "tied llama", True), False),
    "added embeddings of GPT-2": (partial(Adds, "gpt2"), True),
    "groups by layer": (partial(Layered, "by layer"), True),
}
#: Modules, whether a callback saves, and phrases of the refusals.
REFUSED: list[tuple[Callable[[], Module], bool, str]] = [
    (partial(Tuned, "llama", "nothing"), False, "must have parameters on some pipeline stage"),
    (
        partial(LooksUp, "gpt2"),
        False,
        "cannot be called with pp above 1.*Only the first stage has the embedding",
    ),
    (partial(ByLayers, "gpt2"), True, "must have equally many parameter groups"),
    (partial(Layered, "by parameter"), True, r"'initial_lr' of group 0 .* is \[0.0125, 0.05\]"),
]


def tokens() -> Dataset:
    drawn = torch.randint(4, VOCABULARY, (8, 8), generator=torch.Generator().manual_seed(0))
    return TensorDataset(drawn)


def job_of(make: Any, folder: str, size: int, **trainer: Any) -> Job:
    """Return a job of two epochs."""
    layout = BLOCKS if make.func is Layered else {"pp": 2, "microbatch_size": 4}
    return Job(
        make, layout if size > 1 else None, steps=2 * STEPS_OF_EPOCH, data=tokens, batch=BATCH,
        trainer={"default_root_dir": folder, "gradient_clip_val": None, **trainer}, norms=False,
    )  # fmt: skip


def losses_of(name: str, folder: str, size: int = 1) -> list[float]:
    """Return the losses of two epochs, and those of a resumed third one."""
    make, resumes = CASES[name]
    job = job_of(make, folder, size)
    if not resumes:
        return run_job(job, size).losses
    path = f"{folder}/{name}.ckpt"
    losses = run_job(replace(job, save=path), size).losses
    return losses + run_job(replace(job, steps=3 * STEPS_OF_EPOCH, resume=path), size).losses


def world_of_two(rank: int, size: int, folder: str) -> dict[str, list[float]]:
    for make, saves, message in REFUSED:
        with pytest.raises((ValueError, UnsupportedError, CheckpointMismatchError), match=message):
            run_job(job_of(make, folder, size, enable_checkpointing=saves), size)
    # Without a callback that saves, groups are compared when a checkpoint is made.
    job = replace(job_of(partial(Layered, "by parameter"), folder, size), save=f"{folder}/not.ckpt")
    with pytest.raises(
        CheckpointMismatchError, match="the same parameter groups and hyperparameters"
    ):
        run_job(job, size)
    return {name: losses_of(name, folder, size) for name in CASES}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    """Check the refusals, and return the losses."""
    return run_world(world_of_two, 2, str(tmp_path_factory.mktemp("stages")))


@pytest.mark.parametrize("name", CASES)
def test_losses_of_two_pipeline_stages_match_one_process(
    name: str, ranks: Any, tmp_path: Path
) -> None:
    expected = losses_of(name, str(tmp_path))
    assert len(set(expected)) == len(expected) >= 2 * STEPS_OF_EPOCH
    for losses in ranks:
        # Hugging Face's norms compute in float32.
        assert losses[name] == pytest.approx(expected, abs=1e-6)
