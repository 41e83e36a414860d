"""Fits by CUDA graphs equal eager fits bit for bit; options that prevent captures are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lightning_megatron import CudaGraphs, MegatronStrategy, UnsupportedError
from lightning_megatron.errors import SpeedWarning
from lightning_megatron.graphs.tape import TapeBackend
from tests.graphs.trained import counted_replays
from tests.models.flash_stand_in import without_masks
from tests.strategy.bert_fits import bert_fit
from tests.strategy.graph_fits import FULL, SEGMENTS, Fit, fit, graphs_of, strategy_of
from tests.strategy.tiny import TinyLM, loader


def assert_same(actual: Fit, expected: Fit, case: str = "") -> None:
    """Assert that a fit captured graphs and has the same bits as an eager fit."""
    assert actual.differences_from(expected) == [], case
    assert expected.num_graphs == [0] * len(expected.losses)
    assert actual.num_graphs[:2] == [0, 0], case
    # In mode full each batch of an accumulation has its own eager steps and graphs, and the first
    # two steps of several ranks compare replicas eagerly.
    first = 2 if actual.mode == "segments" else 5
    assert len(actual.losses) > first, case
    assert all(actual.num_graphs[first:]), (case, actual.num_graphs)


CASES: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 3, "num_samples": 64},
    "recompute": {"model": {"hidden_dropout": 0.1}, "layout": {"recompute": "selective"}},
    "clipping": {"gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::lightning_megatron.errors.SpeedWarning")
def test_a_fit_by_graphs_equals_an_eager_fit(case: str) -> None:
    expected = fit(None, max_steps=6, **CASES[case])
    for settings in (SEGMENTS, FULL):
        actual = fit(settings, max_steps=6, **CASES[case])
        assert_same(actual, expected, f"{case}, {settings.mode}")


SETTINGS = [
    CudaGraphs("segments", ("attention",), warmup_steps=2, fixed_shapes=True, check=True),
    CudaGraphs("full", warmup_steps=2, evaluation=True, check=True),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_setting_of_graphs_equals_an_eager_fit_bit_for_bit(settings: CudaGraphs) -> None:
    assert_same(fit(settings, max_steps=6), fit(None, max_steps=6))


#: Captures each shape of training and evaluation batches.
EVERYTHING = CudaGraphs("segments", warmup_steps=2, evaluation=True, on_new_shape="capture")

#: The last batch of an epoch (the fifth) and of a validation (the third) has a microbatch of one
#: sample.
SHAPES: dict[str, Any] = {
    "model": {"hidden_dropout": 0.1},
    "max_steps": 8,
    "limit_val_batches": 1.0,
    "num_evaluated": 11,
}


def test_evaluation_and_each_batch_shape_are_captured_by_segments(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        actual = fit(EVERYTHING, num_samples=19, **SHAPES)
    assert_same(actual, fit(None, num_samples=19, **SHAPES))
    # Steps 3 to 8, and three validations of three batches each after the sanity check.
    assert actual.replays == {"training": 6 * 2, "evaluation": 3 * 3 * 2}
    assert actual.num_graphs[-1] == 3 * 2 + 2, "no step begins with the small microbatch"
    lines = [message for message in caplog.messages if message.startswith("CUDA graphs")]
    assert lines[-1].startswith(
        "CUDA graphs (segments): embedding, layers 0..1, head in 8 graphs (1 slot, 2 shapes, "
        "2 for evaluation), captured in "
    )


def test_validation_batches_of_an_uncaptured_shape_run_eagerly_with_a_warning() -> None:
    settings = CudaGraphs("segments", warmup_steps=2, evaluation=True)
    words = r"CUDA graphs: microbatch tokens \(1, 8\), captured for \(2, 8\): run eagerly"
    with pytest.warns(SpeedWarning, match=words):
        actual = fit(settings, **SHAPES)
    assert_same(actual, fit(None, **SHAPES))
    assert actual.replays == {"training": 6 * 2, "evaluation": 4 * (3 * 2 - 1)}


def test_evaluation_without_training_captures_segments_after_eager_batches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    full = replace(EVERYTHING, mode="full")
    results: list[Any] = []
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        for graphs in (None, EVERYTHING, full):
            trainer = new_trainer(graphs)
            with counted_replays() as replays:
                module = TinyLM(hidden_dropout=0.1)
                tested = trainer.test(module, loader(15), verbose=False)
                predicted = trainer.predict(module, loader(15))
            assert predicted is not None
            results.append((tested, torch.cat(predicted), replays))
    eager, *by_graphs = results
    for tested, predicted, _ in by_graphs:
        assert tested == eager[0]
        assert torch.equal(predicted, eager[1])
    # In each run two of four batches are eager; the last batch has a microbatch of another shape.
    assert [replays for *_, replays in results] == [{}, {"evaluation": 2 * 2 * 2}, {}]
    lines = [
        message.partition(", capt")[0]
        for message in caplog.messages
        if message.startswith("CUDA graphs")
    ]
    assert (
        lines
        == [
            "CUDA graphs (segments): embedding, layers 0..1, head in 1 graph (1 slot, 1 for evaluation)",
            "CUDA graphs (segments): embedding, layers 0..1, head in 2 graphs (1 slot, 2 shapes, "
            "2 for evaluation)",
        ]
        * 2
        + ["CUDA graphs (full): whole steps up to the optimizer in 1 graph (1 for evaluation)"] * 2
    )


def new_trainer(graphs: CudaGraphs | None) -> Trainer:
    """Return a trainer on one CPU."""
    strategy = MegatronStrategy(microbatch_size=2, check_microbatches=False, cuda_graphs=graphs)
    if graphs is not None:
        strategy._make_backend = lambda mesh: TapeBackend(mesh.launcher)
    return Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def test_a_users_hook_keeps_full_steps_eager() -> None:
    with pytest.warns(SpeedWarning, match="hook on net.layers.1.mlp .*would not run at a replay"):
        result = fit(FULL, module=HookedLM())
    assert result.num_graphs == [0] * 5


class SaveAndLoad(Callback):
    """Save a checkpoint after the third step, and load it after the fourth."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "saved.ckpt")

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)
        elif trainer.global_step == 4:
            strategy = strategy_of(trainer)
            strategy.finish_saves()
            strategy.load_checkpoint(self.path)


def test_a_checkpoint_load_within_a_fit_keeps_the_graphs_and_results(tmp_path: Path) -> None:
    layout = {"async_save": True}
    actual = fit(SEGMENTS, layout=layout, callbacks=(SaveAndLoad(tmp_path / "a"),))
    expected = fit(None, layout=layout, callbacks=(SaveAndLoad(tmp_path / "b"),))
    assert_same(actual, expected)
    assert actual.losses[3] != actual.losses[4]


class ThawLayer(Callback):
    """Train a frozen layer from the second epoch on."""

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        layer = module.get_submodule("net.layers.1")
        for parameter in layer.parameters():
            parameter.requires_grad_(trainer.current_epoch > 0)


def test_graphs_are_captured_again_when_a_frozen_layer_is_thawed() -> None:
    options: dict[str, Any] = {"max_steps": 9, "num_samples": 16, "callbacks": (ThawLayer(),)}
    options["val_check_interval"] = 1.0
    actual = fit(SEGMENTS, **options)
    expected = fit(None, **options)
    assert actual.differences_from(expected) == []
    # An epoch has four steps; one eager step follows the change.
    assert [bool(number) for number in actual.num_graphs] == [False] * 2 + [True] * 2 + [
        False,
        *[True] * 4,
    ]


class HookedLM(TinyLM):
    """Register a user's forward hook in a layer."""

    def configure_model(self) -> None:
        super().configure_model()
        assert self.net is not None
        self.calls = 0
        self.net.layers["1"].mlp.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1


def test_a_submodule_with_a_users_hook_stays_eager_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    by_graphs, eager = HookedLM(), HookedLM()
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        result = fit(SEGMENTS, module=by_graphs)
    assert_same(result, fit(None, module=eager))
    assert by_graphs.calls == eager.calls > 0
    lines = [message for message in caplog.messages if message.startswith("CUDA graphs (segments)")]
    assert len(lines) == 1
    assert "Eager: layers.1.mlp: hook" in lines[0]


class HookLater(Callback):
    """Register a forward hook in a layer, and remove it eight steps later.

    Args:
        place: Name of the callback's method that registers the hook.
        step: Number of steps before the registration (steps).
    """

    def __init__(self, place: str, step: int) -> None:
        self.calls = 0
        self._step = step
        self._handle: Any = None
        setattr(self, place, self._register)

    def _register(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if self._handle is None and step == self._step:
            part = module.get_submodule("net.layers.1.mlp")
            self._handle = part.register_forward_hook(self._count)
        elif self._handle is not None and step == self._step + 8:
            self._handle.remove()

    def _count(self, *_: Any) -> None:
        self.calls += 1


def test_hooks_registered_during_a_fit_are_called_and_keep_their_submodule_eager(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place, step = "on_train_batch_start", 1
    options: dict[str, Any] = {"max_steps": 16, "num_samples": 16, "val_check_interval": 1.0}
    later, eager = HookLater(place, step), HookLater(place, step)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        actual = fit(SEGMENTS, callbacks=(later,), **options)
    assert actual.differences_from(fit(None, callbacks=(eager,), **options)) == []
    assert later.calls == eager.calls > 0
    lines = [line for line in caplog.messages if line.startswith("CUDA graphs (segments)")]
    assert any("Eager: layers.1.mlp: hook" in line for line in lines)
    assert actual.num_graphs[-1] > 0


def test_a_hook_registered_during_a_fit_ends_the_graphs_of_full_steps() -> None:
    options: dict[str, Any] = {"max_steps": 12, "num_samples": 16, "val_check_interval": 1.0}
    later, eager = (HookLater("on_train_epoch_start", 4) for _ in range(2))
    with pytest.warns(SpeedWarning, match="hook on net.layers.1.mlp .*would not run at a replay"):
        actual = fit(FULL, callbacks=(later,), **options)
    assert actual.differences_from(fit(None, callbacks=(eager,), **options)) == []
    assert later.calls == eager.calls > 0
    assert actual.num_graphs[3] > 0 == actual.num_graphs[-1]


class FailCaptures(Callback):
    """Let every capture fail."""

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        graphs = graphs_of(trainer)
        assert graphs is not None

        def capture(*_: Any) -> Any:
            raise RuntimeError("no memory")

        strategy_of(trainer).run.graphs._captures._runner._tools.backend.capture = capture


def test_a_failed_capture_leaves_the_fit_eager() -> None:
    with pytest.warns(SpeedWarning, match="CUDA graphs are off: rank 0 .*RuntimeError: no memory"):
        actual = fit(SEGMENTS, callbacks=(FailCaptures(),))
    expected = fit(None)
    assert actual.differences_from(expected) == []
    assert actual.num_graphs == [0] * 5


class Plain(TinyLM):
    """Module without a model that has segments."""

    def configure_model(self) -> None:
        self.net = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))  # type: ignore[assignment]

    def forward(self, batch: Any) -> Any:
        logits = self.net(batch["tokens"])  # type: ignore[misc]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def test_a_model_without_segments_runs_eagerly_with_a_warning() -> None:
    with pytest.warns(SpeedWarning, match="nothing is captured. Plain has 0 models with segments"):
        result = fit(SEGMENTS, module=Plain())
    assert result.num_graphs == [0] * 5


# ---- refusals before any process exists


def trainer(graphs: Any, is_gpu: bool = True, **options: Any) -> Trainer:
    strategy = MegatronStrategy(cuda_graphs=graphs, **options)
    if is_gpu:
        strategy._make_backend = lambda mesh: pytest.fail("nothing must be captured")
    return Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)


@pytest.mark.parametrize(
    ("graphs", "options", "words"),
    [
        ("segments", {"is_gpu": False}, "needs GPUs: the device is 'cpu'"),
        ("segments", {"pp": 2, "schedule": "gpipe"}, "cannot be used with schedule 'gpipe'"),
        (
            {"mode": "segments", "scopes": ["experts"]},
            {"ep": 2, "expert_transport": "all_to_all"},
            "needs messages of static size",
        ),
    ],
)
def test_options_that_prevent_captures_are_refused(
    graphs: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        trainer(graphs, **options)


class ManualLM(TinyLM):
    """Use manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_manual_optimization_and_torch_compile_with_its_own_graphs_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="needs automatic optimization"):
        trainer("segments").fit(ManualLM(), [])
    module = TinyLM()
    module.extra = nn.Linear(2, 2)
    module.extra.compile(mode="reduce-overhead")
    with pytest.raises(UnsupportedError, match="mode='reduce-overhead'"):
        trainer("segments").fit(module, [])


def test_expandable_segments_need_nccl_graph_register_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(UnsupportedError, match="needs NCCL_GRAPH_REGISTER=0"):
        trainer("segments")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    assert strategy_of(trainer("segments")).options.graphs == CudaGraphs("segments")


# ---- encoders


@pytest.mark.parametrize("graphs", [SEGMENTS, FULL], ids=["segments", "full"])
def test_fits_of_bert_by_graphs_equal_eager_fits_on_padded_rows(graphs: CudaGraphs) -> None:
    order = "pre" if graphs is FULL else "post"
    with without_masks() as spans:
        eager = bert_fit(None, order=order, dropout=(0.1, 0.0))
        assert spans
        actual = bert_fit(graphs, order=order, dropout=(0.1, 0.0))
    assert actual.num_graphs[-1] > 0
    assert actual.differences_from(eager) == []


def test_training_of_bert_with_lengths_matches_training_with_masks() -> None:
    expected = bert_fit(None, has_lengths=False)
    with without_masks() as spans:
        actual = bert_fit(None)
    assert spans
    assert actual.losses == pytest.approx(expected.losses, rel=1e-9)
    assert len(set(expected.losses)) == len(expected.losses)
