"""Fits by CUDA graphs equal eager fits bit for bit; options that prevent captures are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_megatron import CudaGraphs, MegatronStrategy, UnsupportedError
from lightning_megatron.errors import SpeedWarning
from lightning_megatron.graphs.tape import TapeBackend
from lightning_megatron.groups.launcher import CollectiveLauncher, Work
from lightning_megatron.plan.experts import ExpertsConfig
from tests.graphs.trained import counted_replays
from tests.strategy.graph_fits import FULL, SEGMENTS, Fit, fit, graphs_of, strategy_of
from tests.strategy.tiny import TinyLM, loader
from tests.sweeps import chosen
from tests.world import run_world

EXPERTS = {
    "experts": ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=8, aux_loss=0.01),
    "mlp_bias": False,
}


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
    "dropout": {"model": {"hidden_dropout": 0.1}},
    "accumulation": {"accumulate_grad_batches": 3, "num_samples": 64},
    "last microbatch is smaller": {"num_samples": 19},
    "experts": {"model": EXPERTS},
    "recompute": {"model": {"hidden_dropout": 0.1}, "layout": {"recompute": "selective"}},
    "clipping": {"gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("case", chosen(list(CASES), "accumulation", "recompute", "clipping"))
@pytest.mark.filterwarnings("ignore::lightning_megatron.errors.SpeedWarning")
def test_a_fit_by_graphs_equals_an_eager_fit(case: str) -> None:
    expected = fit(None, max_steps=6, **CASES[case])
    for settings in (SEGMENTS, FULL):
        actual = fit(settings, max_steps=6, **CASES[case])
        assert_same(actual, expected, f"{case}, {settings.mode}")


SETTINGS = [
    CudaGraphs("segments", ("attention",), warmup_steps=2, fixed_shapes=True, check=True),
    CudaGraphs("segments", ("mlp", "head", "embedding"), warmup_steps=2),
    CudaGraphs("full", warmup_steps=2, evaluation=True, check=True),
    CudaGraphs("full", warmup_steps=2, fixed_shapes=True),
]


@pytest.mark.parametrize("settings", chosen(SETTINGS, SETTINGS[0], SETTINGS[2]), ids=str)
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


WORLD_CASES: dict[str, dict[str, Any]] = {
    "tp2": {"layout": {"tp": 2}, "model": {"hidden_dropout": 0.1}},
    "dp2": {"layout": {"bucket_size": 2000}},
    "dp2, clipping": {"layout": {"zero": 0}, "gradient_clip_val": 0.1},
    "pp2": {"layout": {"pp": 2, "microbatch_size": 1}, "model": {"hidden_dropout": 0.1}},
    "pp2 vpp2": {
        "layout": {"pp": 2, "vpp": 2, "microbatch_size": 1},
        "model": {"num_layers": 4},
    },
    "zb-h1": {"layout": {"pp": 2, "schedule": "zb-h1", "microbatch_size": 1}},
    "ep2": {"layout": {"ep": 2, "expert_transport": "all_gather"}, "model": EXPERTS},
}


#: Cases in which sums of gradients and gathers of parameters are pending while graphs run.
LATE_CASES: dict[str, dict[str, Any]] = {
    "dp2": {"layout": {"bucket_size": 2000, "overlap_parameters": True}},
    "ep2": {
        "layout": {"ep": 2, "bucket_size": 2000, "overlap_parameters": True},
        "model": EXPERTS,
    },
}


class LateWork:
    """Collective that runs in its ``wait``."""

    def __init__(self, collective: Callable[[], Work]) -> None:
        self._collective: Callable[[], Work] | None = collective

    def wait(self) -> None:
        collective = self._collective
        self._collective = None
        if collective is not None:
            collective().wait()

    def is_completed(self) -> bool:
        return self._collective is None


def delay_collectives() -> AbstractContextManager[Any]:
    """Run collectives outside of graphs as late as a separate stream could run them.

    A read of the result without a wait then gets old values, and an early write to the operands
    spoils the result.
    """
    start = CollectiveLauncher.start

    def start_late(
        launcher: CollectiveLauncher, collective: Callable[[], Work], *written: Tensor
    ) -> Work:
        if launcher.recorder is not None:
            return start(launcher, collective, *written)
        return LateWork(collective)

    return patch.object(CollectiveLauncher, "start", start_late)


def _fit_layouts(rank: int, size: int) -> dict[str, list[Fit]]:
    fits = {
        name: [fit(settings, size, max_steps=7, **case) for settings in (None, SEGMENTS, FULL)]
        for name, case in chosen(WORLD_CASES, "tp2", "pp2 vpp2", "zb-h1").items()
    }
    for name, case in chosen(LATE_CASES, "ep2").items():
        late = fits[f"{name}, late"] = [fit(None, size, max_steps=7, **case)]
        with delay_collectives():
            late += [fit(settings, size, max_steps=7, **case) for settings in (SEGMENTS, FULL)]
    return fits


def _fit_layouts_with_shapes(rank: int, size: int) -> dict[str, list[Fit]]:
    cases: dict[str, tuple[dict[str, Any], int]] = {
        "pp2": ({"pp": 2}, 19),
        "dp2": ({"bucket_size": 2000}, 38),
        "ep2": ({"ep": 2, "expert_transport": "all_gather"}, 38),
    }
    shapes = {**SHAPES, "num_evaluated": 22}
    fits = {}
    for name, (layout, number) in chosen(cases, "pp2", "ep2").items():
        model = EXPERTS if name == "ep2" else SHAPES["model"]
        options = {**(SHAPES if name == "pp2" else shapes), "model": model, "layout": layout}
        fits[name] = [
            fit(settings, size, num_samples=number, **options) for settings in (None, EVERYTHING)
        ]
    return fits


def test_evaluation_and_each_batch_shape_are_captured_in_every_layout() -> None:
    for rank, fits in enumerate(run_world(_fit_layouts_with_shapes, 2)):
        for name, (eager, graphs) in fits.items():
            assert_same(graphs, eager, f"{name}, rank {rank}")
            # Experts have several static pieces.
            number = graphs.replays["training"] // 12
            assert graphs.replays == {"training": number * 12, "evaluation": number * 18}, name
            assert number >= 1


def test_fits_by_graphs_equal_eager_fits_in_every_layout() -> None:
    for rank, fits in enumerate(run_world(_fit_layouts, 2)):
        for name, (eager, *by_graphs) in fits.items():
            assert any(eager.rows) == ("ep2" in name), "ranks share the experts"
            for actual, mode in zip(by_graphs, ("segments", "full"), strict=True):
                assert_same(actual, eager, f"{name}, {mode}, rank {rank}")


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


@pytest.mark.parametrize("is_async", chosen([False, True], True))
def test_a_checkpoint_load_within_a_fit_keeps_the_graphs_and_results(
    tmp_path: Path, is_async: bool
) -> None:
    layout = {"async_save": is_async}
    actual = fit(SEGMENTS, layout=layout, callbacks=(SaveAndLoad(tmp_path / "a"),))
    expected = fit(None, layout=layout, callbacks=(SaveAndLoad(tmp_path / "b"),))
    assert_same(actual, expected)
    assert actual.losses[3] != actual.losses[4]


def test_a_resumed_fit_by_graphs_equals_a_resumed_eager_fit(tmp_path: Path) -> None:
    fit(SEGMENTS, callbacks=(SaveAndLoad(tmp_path),), max_steps=3)
    path = tmp_path / "saved.ckpt"
    assert_same(fit(SEGMENTS, ckpt_path=path, max_steps=8), fit(None, ckpt_path=path, max_steps=8))


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


@pytest.mark.parametrize(
    ("place", "step"),
    chosen(
        [("on_fit_start", 0), ("on_train_batch_start", 1), ("on_train_epoch_start", 4)],
        ("on_train_batch_start", 1),
    ),
)
def test_hooks_registered_during_a_fit_are_called_and_keep_their_submodule_eager(
    place: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_batches_of_new_shapes_run_eagerly_with_a_warning_or_are_refused() -> None:
    with pytest.warns(SpeedWarning, match="run eagerly .said once") as caught:
        fit(SEGMENTS, num_samples=19, max_epochs=2, max_steps=-1)
    assert len([warning for warning in caught if "said once" in str(warning.message)]) >= 1
    settings = CudaGraphs("segments", warmup_steps=2, on_new_shape="error")
    with pytest.raises(UnsupportedError, match="on_new_shape='error'"):
        fit(settings, num_samples=19)


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


def test_expandable_segments_are_accepted_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert strategy_of(trainer(None, is_gpu=False)).options.graphs is None
