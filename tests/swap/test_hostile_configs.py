"""Every field of a configuration has a type and a range, and fields that no Hugging Face class reads
are ignored.
"""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.checkpoint.hugging_face import import_model
from lightning_megatron.cli.main import OUR_ERRORS
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from lightning_megatron.families import families, family_of
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.swap.families.field_kinds import KINDS
from lightning_megatron.swap.families.fields import IRRELEVANT
from tests.swap.families import CASES, config_of, transformers

NAN, HUGE = float("nan"), 10**400
ODD_VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 7, 2**40, HUGE, -HUGE, 0.5, 1.5, -0.5, 1e300, NAN, float("inf"), True, False, None),
    *(
        "",
        "3",
        "gelu",
        "\ud800",
        [],
        [1],
        [[1]],
        ["full_attention"],
        [None] * 3,
        {},
        {"a": 1},
        {1: 2},
        {"factor": "2"},
    ),
    *(
        {"rope_type": []},
        {"rope_type": "yarn", "factor": NAN},
        {"rope_type": "linear", "factor": 0},
    ),
    *(
        {"rope_type": "longrope", "short_factor": ["x"], "long_factor": [1]},
        {"rope_type": "yarn", "factor": True},
    ),
    *(
        {"rope_type": "longrope", "short_factor": [0], "long_factor": [1]},
        {"rope_theta": -1},
        {"type": {}},
    ),
    *(
        {
            "rope_type": "longrope",
            "short_factor": [1.5],
            "long_factor": [1],
            "original_max_position_embeddings": 1,
        },
    ),
)


def nested_mapping(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def recursive_mapping() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["a"] = value
    return value


@pytest.mark.parametrize("family", families(), ids=lambda family: family.architecture)
def test_odd_values_give_a_configuration_or_an_error_of_this_package(family: Any) -> None:
    base = getattr(transformers, family.architecture).config_class().to_dict()
    names = sorted(family.config.names | IRRELEVANT)
    for seed in range(60):
        draw = random.Random(seed)
        changes = {
            draw.choice(names): draw.choice(
                (*ODD_VALUES, nested_mapping(3000), recursive_mapping())
            )
            for _ in range(1 + seed % 2)
        }
        config = None
        try:
            config = family.config({**base, **changes})
        except OUR_ERRORS as error:
            assert len(str(error)) < 2000  # noqa: PT017
        assert config is None or isinstance(config, (GPTConfig, EncoderConfig)), changes


WRONG_VALUES = {
    "int": ("3", 1.5, True, [1], {}, NAN, HUGE, -HUGE, -1),
    "float": ("0.1", True, [0.1], {}, NAN, HUGE, -1.0),
}
WRONG_VALUES |= {"bool": ("yes", 1, 0, [], {}, 0.0), "str": (1, True, [], {})}


@pytest.mark.parametrize("case", CASES)
def test_a_value_of_a_wrong_type_is_refused_with_its_field_and_the_legal_values(case: str) -> None:
    table, base = family_of(CASES[case][0]).config, config_of(case).to_dict()
    checked = 0
    for rule in table.fields:
        kind = next((name for name in WRONG_VALUES if type(rule.default).__name__ == name), None)
        if (
            kind is None
            or rule.allowed is not None
            or rule.name in ("hidden_act", "activation_function")
        ):
            continue
        for value in WRONG_VALUES[kind]:
            if rule.name == "pad_token_id" and value == -1:
                continue  # -1 is the last token
            with pytest.raises(
                CheckpointMismatchError,
                match=f"{rule.name} of a .* configuration must be .*: it is ",
            ):
                table({**base, rule.name: value})
            checked += 1
    assert checked > 50


def test_every_field_that_a_table_reads_has_a_kind() -> None:
    without_kind = set()
    for family in families():
        for table in (family.config, *family.config.parts.values()):
            without_kind |= {
                rule.name for rule in table.fields if rule.allowed is None and rule.kind is None
            } - KINDS.keys()
    assert without_kind == {"expert_settings"}, "ExpertsConfig checks these"


@pytest.mark.parametrize("config", [None, [], "x", 3, {1: 2}, {None: 1}])
def test_configurations_that_are_not_mappings_of_fields_are_refused(config: Any) -> None:
    with pytest.raises(
        CheckpointMismatchError, match="a Llama configuration must be a mapping of fields"
    ):
        family_of("llama").config(config)


# ---- fields that no class reads


def test_fields_of_unsloth_and_trainers_are_ignored_silently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    extra_fields = {
        "unsloth_fixed": True,
        "unsloth_version": "2025.1.5",
        "neftune_noise_alpha": 5.0,
    }
    for case in CASES:
        family, theirs = family_of(CASES[case][0]), config_of(case).to_dict()
        assert family.config({**theirs, **extra_fields}) == family.config(theirs)
    assert not caplog.records


def test_unknown_fields_of_users_are_ignored_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for case in ("llama", "mistral", "qwen2", "gpt2"):
        family, theirs = family_of(CASES[case][0]), config_of(case).to_dict()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                changed = {
                    **theirs,
                    f"my_note_{case}": "tuned on speeches",
                    "my_list": [{"a": 1}],
                    "my_zero": None,
                }
                assert family.config(changed) == family.config(theirs)
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1
        assert f"'my_list', 'my_note_{case}' of a" in lines[0]
        assert "Hugging Face's class does not read them" in lines[0]


@pytest.mark.parametrize("name", ["logit_scale", "embedding_multiplier", "use_mrope"])
def test_ignored_fields_do_not_change_the_hugging_face_model(name: str) -> None:
    tokens = torch.arange(8)[None]
    results = []
    for extra_fields in ({}, {name: 0.5}):
        torch.manual_seed(0)
        config = config_of("llama")
        model = transformers.AutoModelForCausalLM.from_config(
            type(config)(**{**config.to_dict(), **extra_fields})
        ).eval()
        results.append(model(tokens).logits)
        family_of("llama").config(model.config.to_dict())
    assert torch.equal(*results)


def test_unknown_fields_are_refused_without_transformers_or_a_model_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family, theirs = family_of("llama"), config_of("llama").to_dict()
    with pytest.raises(UnsupportedError, match="my_note of a Llama"):
        family.config({**theirs, "model_type": None, "my_note": 1})
    monkeypatch.setattr(
        "lightning_megatron.swap.families.unknown_fields._known_of", lambda model_type: (None, "")
    )
    with pytest.raises(UnsupportedError, match="my_note of a Llama"):
        family.config({**theirs, "my_note": 1})
    family.config({**theirs, "unsloth_fixed": True})


# ---- files


def save_llama(path: Path, **changes: Any) -> Path:
    model = transformers.AutoModelForCausalLM.from_config(config_of("llama"))
    model.save_pretrained(path)
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**content, **changes}))
    return path


def test_configuration_files_must_be_strict_json_of_limited_size_and_depth(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "model")
    valid_text = (folder / "config.json").read_text()
    import_model(folder, tmp_path / "whole")
    for number, text in enumerate(
        (
            *(
                "",
                "[]",
                "null",
                valid_text[:50],
                valid_text.replace("{", '{"vocab_size": 7, ', 1),
                '{"a":' * 3000,
            ),
            *(
                valid_text.replace("{", '{"a": NaN, ', 1),
                '{"x": "' + "x" * 10_000_000 + '"}',
                "[" * 100_000,
                "\ud800",
            ),
            *(
                valid_text.replace("{", '{"a": ' + "[" * 40 + "]" * 40 + ", ", 1),
                valid_text.replace("{", '{"a": 1e999, ', 1),
            ),
        )
    ):
        (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(CorruptDataError, match=r"model/config\.json"):
            import_model(folder, tmp_path / f"out{number}")
        assert not (tmp_path / f"out{number}").exists()


@pytest.mark.parametrize(
    "changes",
    [{"architectures": 3}, {"architectures": []}, {"architectures": [3]}, {"architectures": "LlamaForCausalLM"},
     {"architectures": [], "model_type": 3}, {"architectures": {"a": 1}}, {"architectures": [[]]},
     {"vocab_size": 10**9}, {"num_hidden_layers": 9999}, {"hidden_size": 2**28, "head_dim": 4}],
)  # fmt: skip
def test_folders_with_invalid_configurations_are_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_llama(tmp_path / "model", **changes)
    if changes == {"architectures": []}:
        import_model(folder, tmp_path / "out")  # model_type names the family
        return
    with pytest.raises(OUR_ERRORS):
        import_model(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
