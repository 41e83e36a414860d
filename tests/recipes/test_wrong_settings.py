"""Tests that wrong types and sizes of settings are refused by name, in recipes and in modules that
recipes name.
"""

from __future__ import annotations

import inspect
import math
import operator
import sys
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from hypothesis import given

from lightning_megatron import CausalLM, GPTConfig, TokenDataModule
from lightning_megatron.cli.main import main
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.models.hugging_face_lm import HuggingFaceCausalLM
from lightning_megatron.models.token_module import TokenModule
from lightning_megatron.optimizer.loss_scale import DynamicLossScale
from tests.plan.test_settings import ANY

SIZES = {"vocab_size": 16, "max_seq_length": 8, "num_layers": 1, "hidden_size": 8, "num_heads": 2}
QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
RECIPE: dict[str, Any] = {
    "trainer": {
        **{"accelerator": "cpu", "devices": 1, "max_steps": 1, **dict.fromkeys(QUIET, False)},
        "strategy": {"class_path": "lightning_megatron.MegatronStrategy", "init_args": {}},
    },
    "model": {"class_path": "lightning_megatron.CausalLM", "init_args": {"config": SIZES}},
    "data": {"class_path": "lightning_megatron.TokenDataModule", "init_args": {"train": "text"}},
}
#: Class that takes settings, class whose constructor declares them, and the required arguments.
OWNERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "training": (CausalLM, TokenModule, {"config": SIZES}),
    "model": (CausalLM, CausalLM, {"config": SIZES}),
    "folder": (HuggingFaceCausalLM, HuggingFaceCausalLM, {"path": "nowhere"}),
    "data": (TokenDataModule, TokenDataModule, {"train": "text"}),
    "loss scale": (DynamicLossScale, DynamicLossScale, {}),
}
ARGUMENTS = [
    (owner, name)
    for owner, (_, kind, _) in OWNERS.items()
    for name, parameter in inspect.signature(kind.__init__).parameters.items()
    if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
]


@given(value=ANY)
def test_any_argument_of_a_module_is_accepted_or_refused_by_name(value):
    for owner, name in ARGUMENTS:
        make, _, required = OWNERS[owner]
        try:
            make(**(required | {name: value}))
        except (ParallelPlanError, UnsupportedError) as error:
            refusal = str(error)
            word = "loss scale" if name in ("initial", "minimum") else name
            is_folder = owner == "folder" and "path must be a local folder" in refusal
            assert name in refusal or word in refusal or is_folder, (owner, name, value)


def test_values_that_are_not_finite_or_of_a_wrong_type_are_refused_by_name():
    for owner, name in ARGUMENTS:
        make, kind, required = OWNERS[owner]
        hint = str(get_type_hints(kind.__init__)[name])
        takes_none = "None" in hint or "Optional" in hint
        odd = [math.nan, -math.inf, b"2", object(), len, {2}]
        for value in odd if takes_none else [*odd, None]:
            with pytest.raises(ParallelPlanError, match=name):
                make(**(required | {name: value}))


def test_modules_hold_the_converted_values_of_arguments():
    module = CausalLM(SIZES, learning_rate=1, betas=[0.5, 0.6])  # type: ignore[arg-type]
    assert (module.learning_rate, module.config) == (1.0, GPTConfig(**SIZES))
    assert module.betas == module.hparams["betas"] == (0.5, 0.6)
    data: Any = TokenDataModule(train={Path("a") / "b": 2}, seq_length=8)  # type: ignore[dict-item]
    assert (data.files["train"], data.weights) == (["a/b"], [2.0])


SCHEDULE = {
    "class_path": "lightning_megatron.CosineSchedule",
    "init_args": {"num_steps": 5, "warmup_steps": 5},
}
STRATEGY, MODEL = "trainer.strategy.init_args", "model.init_args"
WRONG: list[tuple[str, Any, str]] = [
    (f"{STRATEGY}.tp", "two", ": tp: expected int: two is given."),
    (f"{STRATEGY}.job", {"timeout": -1}, "job.timeout must be a finite number above 0"),
    (f"{STRATEGY}.job", {"time_out": 1}, "job has no setting 'time_out'. Its settings are"),
    (f"{MODEL}.config.num_layers", "many", ": config.num_layers: expected int: many is given."),
    (f"{MODEL}.config.hidden_dropout", math.nan, "hidden_dropout must be a finite number"),
    (f"{MODEL}.lr_schedule", SCHEDULE, "lr_schedule (CosineSchedule): warmup_steps (5) must be"),
    ("data.init_args.seq_length", 0, "seq_length must be a whole number of at least 1: it is 0"),
]


def test_a_wrong_setting_in_a_recipe_is_reported_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning-megatron"])
    for path, value, words in WRONG:
        wrong = deepcopy(RECIPE)
        *folders, last = path.split(".")
        reduce(operator.getitem, folders, wrong)[last] = value
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(wrong))
        with pytest.raises(SystemExit, match="^2$"):
            main(["fit", "-c", str(tmp_path / "recipe.yaml")])
        assert words in capsys.readouterr().err, path
