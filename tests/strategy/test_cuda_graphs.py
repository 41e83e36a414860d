"""What the graphs of a fit capture and leave eager; options that prevent captures are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import BERTPretraining, CudaGraphs, EncoderConfig
from lightning_megatron.errors import SpeedWarning, UnsupportedError
from lightning_megatron.strategy.step import run_graphs as of_run
from tests.fits import Job, Language, Regress, Tokens, Vectors, strategy_with, trainer_of
from tests.graphs.jobs import DROPOUT, MODES, differences, run_graphs, strategy_of
from tests.graphs.trained import counted_replays
from tests.models.flash_stand_in import without_masks
from tests.optimizer.fused_fits import SMALL

#: Graphs are captured in the third step.
SEGMENTS, FULL = (replace(mode, warmup_steps=2, on_failure="eager") for mode in MODES)
#: Captures each shape of training and evaluation batches, and looks for changes at every step.
EVERYTHING = replace(SEGMENTS, evaluation=True, on_new_shape="capture", check=True)
#: The last batch of a validation (the third) has a microbatch of one sample.
SHAPES = Job(
    DROPOUT,
    {},
    steps=8,
    trainer={"val_check_interval": 2},
    data=partial(Tokens, 24, 24),
    validation=partial(Tokens, 11, 11),
    batch=4,
)


def job(model: Any = SMALL, steps: int = 6, layout: Any = None, **options: Any) -> Job:
    """Return a job whose epochs have four batches."""
    return Job(model, layout or {}, steps=steps, **{"data": partial(Tokens, 32, 32), **options})


@pytest.fixture
def said(monkeypatch):
    """Record what is logged of graphs."""
    lines: list[str] = []
    monkeypatch.setattr(of_run, "rank_zero_info", lines.append)
    return lines


def without_times(lines: list[str]) -> list[str]:
    return [line.partition(", captured in")[0] for line in lines]


def test_validation_batches_of_an_uncaptured_shape_run_eagerly_with_a_warning():
    words = r"CUDA graphs: microbatch tokens \(1, 16\), captured for \(2, 16\): run eagerly"
    with pytest.warns(SpeedWarning, match=words):
        actual = run_graphs(SHAPES, replace(SEGMENTS, evaluation=True))
    assert differences(actual, run_graphs(SHAPES)) == []
    assert actual.outcomes["replays"] == {"training": 6 * 2, "evaluation": 4 * (3 * 2 - 1)}


class Evaluated(Language):
    """Test and predict with a small GPT."""

    test_step = Language.validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        return self.model(batch["tokens"]).argmax(-1)


def test_evaluation_without_training_captures_segments_after_eager_batches(said):
    results: list[Any] = []
    for graphs in (None, EVERYTHING, replace(EVERYTHING, mode="full")):
        trainer, module = trainer_of(Job(strategy={"cuda_graphs": graphs})), Evaluated(DROPOUT)
        data = DataLoader(Tokens(15, 15), batch_size=4)
        with counted_replays() as replays:
            tested = trainer.test(module, data, verbose=False)
            predicted: Any = trainer.predict(module, data)
        results.append((tested, torch.cat(predicted).tolist(), replays))
    assert results[0][:2] == results[1][:2] == results[2][:2]
    # In each run two of four batches are eager; the last batch has a microbatch of another shape.
    assert [replays for *_, replays in results] == [{}, {"evaluation": 2 * 2 * 2}, {}]
    segments = "CUDA graphs (segments): embedding, layers 0..1, head in "
    full = "CUDA graphs (full): whole steps up to the optimizer in 1 graph (1 for evaluation)"
    one = [
        f"{segments}1 graph (1 slot, 1 for evaluation)",
        f"{segments}2 graphs (1 slot, 2 shapes, 2 for evaluation)",
    ]
    assert without_times(said) == [*one, *one, full, full]


class HookLater(pl.Callback):
    """Register a forward hook in a layer in some step, and remove it eight steps later."""

    def __init__(self, place: str, step: int) -> None:
        self.step, self.handle, self.outcomes = step, None, {"hooked": 0}
        setattr(self, place, self.register)

    def register(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if self.handle is None and trainer.global_step == self.step:
            part = module.get_submodule("model.layers.1.mlp")
            self.handle: Any = part.register_forward_hook(self.count)
        elif self.handle is not None and trainer.global_step == self.step + 8:
            self.handle.remove()

    def count(self, *_: Any) -> None:
        self.outcomes["hooked"] += 1


def test_hooks_of_users_are_called_and_keep_their_submodule_eager(said):
    work = job(steps=16, callbacks=lambda: [HookLater("on_train_batch_start", 1)])
    actual = run_graphs(work, SEGMENTS)
    assert differences(actual, run_graphs(work)) == []
    assert actual.outcomes["hooked"] > 0
    assert any("Eager: layers.1.mlp: hook" in line for line in said)
    assert actual.graphs[-1] > 0


def test_a_hook_registered_during_a_fit_ends_the_graphs_of_full_steps():
    work = job(steps=12, callbacks=lambda: [HookLater("on_train_epoch_start", 4)])
    with pytest.warns(SpeedWarning, match="model.layers.1.mlp must run eagerly .hook "):
        actual = run_graphs(work, FULL)
    assert differences(actual, run_graphs(work)) == []
    assert actual.outcomes["hooked"] > 0
    assert actual.graphs[3] > 0 == actual.graphs[-1]


class FailCaptures(pl.Callback):
    """Let every capture fail."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        def begin(*_):
            raise RuntimeError("no memory")

        graphs: Any = strategy_of(trainer).run.graphs
        graphs._captures._tools.backend.begin = begin


def test_failed_captures_and_models_without_segments_leave_the_fit_eager():
    plain: Any = partial(Regress, partial(nn.Linear, 8, 8))
    for work, words in (
        (job(callbacks=lambda: [FailCaptures()]), "are off: rank 0 .*RuntimeError: no memory"),
        (job(plain, data=Vectors), "nothing is captured. Regress has 0 models with segments"),
    ):
        expected = run_graphs(replace(work, callbacks=tuple))
        with pytest.warns(SpeedWarning, match=words):
            actual = run_graphs(work, SEGMENTS)
        assert differences(actual, expected) == []
        assert not any(actual.graphs)


# ---- refusals before any process exists


def trainer(graphs: Any, is_gpu: bool = True, **options: Any) -> pl.Trainer:
    strategy = strategy_with(cuda_graphs=graphs, **options)
    if is_gpu:
        strategy._make_backend = lambda mesh: pytest.fail("nothing must be captured")
    return pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)


def test_options_that_prevent_captures_are_refused(monkeypatch):
    experts = {"mode": "segments", "scopes": ["experts"]}
    options: Any
    for graphs, options, words in (
        ("segments", {"is_gpu": False}, "needs GPUs: the device is 'cpu'"),
        ("segments", {"pp": 2, "schedule": "gpipe"}, "cannot be used with schedule 'gpipe'"),
        (experts, {"ep": 2, "experts.transport": "all_to_all"}, "needs messages of static size"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            trainer(graphs, **options)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(UnsupportedError, match="needs NCCL_GRAPH_REGISTER=0"):
        trainer("segments")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    assert strategy_of(trainer("segments")).options.graphs == CudaGraphs("segments")


def test_manual_optimization_and_torch_compile_with_its_own_graphs_are_refused():
    manual, compiled = Language(), Language()
    manual.automatic_optimization = False
    with pytest.raises(UnsupportedError, match="needs automatic optimization"):
        trainer("segments").fit(manual, [])
    compiled.extra = nn.Linear(2, 2)
    compiled.extra.compile(mode="reduce-overhead")
    with pytest.raises(UnsupportedError, match="mode='reduce-overhead'"):
        trainer("segments").fit(compiled, [])


# ---- encoders


class PaddedPairs(Dataset):
    """Repeatable sentence pairs of different lengths, with a mask and optionally with lengths."""

    def __init__(self, has_lengths: bool) -> None:
        self.has_lengths = has_lengths

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        true = torch.randint(4, 61, (32,), generator=draw)
        size = int(torch.randint(6, 33, (), generator=draw))
        valid = torch.arange(32) < size
        masked = (torch.rand(32, generator=draw) < 0.3) & valid
        row = {
            "tokens": torch.where(masked, 3, true).masked_fill(~valid, 0),
            "labels": true.masked_fill(~masked, -100),
            "token_types": (torch.arange(32) >= size // 2).long() * valid,
            "valid": valid,
            "order": torch.tensor(index % 2),
        }
        return row | ({"lengths": torch.tensor(size)} if self.has_lengths else {})


def bert_job(
    has_lengths: bool = True, order: str = "pre", dropout: tuple[float, float] = (0.0, 0.0)
) -> Job:
    """Return a job of six steps on rows with padding, by norms before or after blocks, and dropout
    of hidden states and attention weights.
    """
    sizes: dict[str, Any] = {
        "vocab_size": 61, "num_positions": 32, "num_layers": 2, "hidden_size": 64, "num_heads": 2,
        "ffn_hidden_size": 96, "hidden_dropout": dropout[0], "attention_dropout": dropout[1],
    }  # fmt: skip
    config = EncoderConfig.bert(**sizes, norm_position=order, init_std=0.2)
    # On the CPU the host reads the number of tokens, which a graph of a step must not do.
    settings: dict[str, Any] = {"learning_rate": 0.01, "max_steps": 6, "token_weighted": False}
    make = partial(BERTPretraining, config, **settings)
    data = partial(PaddedPairs, has_lengths)
    return Job(make, {"optimizer.zero": 0}, steps=6, data=data, batch=4, norms=False)


@pytest.mark.parametrize(("graphs", "order"), [(SEGMENTS, "post"), (FULL, "pre")])
def test_fits_of_bert_by_graphs_equal_eager_fits_on_padded_rows(graphs, order):
    work = bert_job(order=order, dropout=(0.1, 0.0))
    with without_masks() as spans:
        eager, actual = run_graphs(work), run_graphs(work, graphs)
    assert spans
    assert actual.graphs[-1] > 0
    assert differences(actual, eager) == []
