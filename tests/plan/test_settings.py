"""Settings of any type and size are accepted, or refused by name, for every dataclass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, fields
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_megatron import MegatronStrategy, ParallelPlanError, UnsupportedError
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.rotary_scaling import RotaryScaling
from lightning_megatron.plan.settings import (
    Count,
    Positive,
    coerced,
    coerced_arguments,
    describe,
    shown,
)
from lightning_megatron.strategy.options.strategy_options import StrategyOptions

EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 16}
SCALING = {"kind": "yarn", "original_length": 8}
#: Every dataclass with legal settings, and a function that returns the dataclass.
RECORDS: dict[str, tuple[type, Callable[..., Any], dict[str, Any]]] = {
    "strategy": (StrategyOptions, lambda **values: MegatronStrategy(**values).options, {}),
    "layout": (ParallelLayout, ParallelLayout, {"world_size": 8}),
    "gpt": (
        GPTConfig,
        GPTConfig,
        {
            "vocab_size": 96,
            "max_seq_length": 16,
            "num_layers": 2,
            "hidden_size": 32,
            "num_heads": 4,
        },
    ),
    "encoder": (
        EncoderConfig,
        EncoderConfig,
        {
            **{"vocab_size": 96, "num_positions": 16, "num_layers": 2},
            **{"hidden_size": 32, "num_heads": 4, "ffn_hidden_size": 64},
        },
    ),
    "experts": (ExpertsConfig, ExpertsConfig, EXPERTS),
    "rotary scaling": (RotaryScaling, RotaryScaling, SCALING),
    "CUDA graphs": (CudaGraphs, CudaGraphs, {"mode": "segments"}),
    "clones": (ExpertClones, ExpertClones, {"places": 1}),
}
FIELDS = [
    (record, field.name) for record, (kind, _, _) in RECORDS.items() for field in fields(kind)
]
ODD = (
    *(None, True, False, 0, -1, 2**31, 2**63, -(2**64), 10**5000),
    *(0.0, -0.5, 1.0, 1.5, 1e308, math.nan, math.inf, -math.inf, 1j),
    *("", "2", "none", "x" * 5000, "\0", b"2", bytearray(b"2")),
    *(
        [],
        [[]],
        [None],
        ["x"],
        [2],
        (),
        (1.5,),
        [math.nan],
        {},
        {"x": "y"},
        {1: 2},
        {"x": {}},
        {2, 3},
        range(3),
    ),
    *(
        np.int64(-3),
        np.float64("nan"),
        np.bool_(True),
        np.array([1, 2]),
        torch.tensor(2),
        torch.ones(2),
    ),
    *(
        Decimal("NaN"),
        Fraction(-1, 3),
        timedelta(0),
        timedelta(-1),
        timedelta.max,
        object(),
        object,
        len,
        iter(()),
    ),
)
ANY = st.one_of(
    st.sampled_from(ODD),
    st.integers(max_value=0),
    st.integers(min_value=2**31),
    st.floats(),
    st.text(max_size=20),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=5,
    ),
)


def build(record: str, **values: Any) -> Any:
    _, make, legal = RECORDS[record]
    return make(**(legal | values))


def nested_values(value: Any) -> Iterator[Any]:
    yield value
    for inner in (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, tuple | list)
        else ()
    ):
        yield from nested_values(inner)


@pytest.mark.parametrize(("record", "name"), FIELDS, ids=lambda part: str(part))
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(value=ANY)
def test_any_value_becomes_its_setting_type_or_an_error_that_names_the_setting(
    record: str, name: str, value: Any
) -> None:
    try:
        built = build(record, **{name: value})
    except (ParallelPlanError, UnsupportedError) as error:
        refusal = str(error)
    else:
        refusal, taken = None, asdict(built)[name]
        assert record == "strategy" or hash(built)
    if refusal is not None:
        # Sizes whose product is too large are refused by the world_size that they need.
        assert name in refusal or (record == "strategy" and "world_size" in refusal)
        assert len(refusal) < 600
        return
    for part in nested_values(taken):
        assert part is None or type(part) in (
            bool,
            int,
            float,
            str,
            tuple,
            list,
            dict,
            timedelta,
        ), (value, part)
        assert not isinstance(part, float) or math.isfinite(part)
        assert not isinstance(part, int) or abs(part) < 2**63


@pytest.mark.parametrize(("record", "name"), FIELDS, ids=lambda part: str(part))
def test_every_odd_value_of_another_type_is_refused(record: str, name: str) -> None:
    kind, make, legal = RECORDS[record]
    field = next(candidate for candidate in fields(kind) if candidate.name == name)
    hint = str(get_type_hints(kind)[name])
    words = {
        "bool": bool,
        "int": int,
        "float": (int, float),
        "str": str,
        "Literal": (str, int),
        "dict": dict,
        "Callable": (type, type(len)),
    }
    words |= {
        "tuple": (list, tuple),
        "list": (list, tuple),
        "timedelta": timedelta,
        "Config": dict,
        "RotaryScaling": dict,
        "Recomputation": dict,
        "FP8": dict,
    }
    types = tuple(
        kind
        for word, kinds in words.items()
        if word in hint
        for kind in np.ravel(np.array(kinds, object))
    )
    assert types, f"{name} of {record} has a type that this test does not know: {hint}"
    default = None if field.default is MISSING else field.default
    for value in ODD:
        is_truth = isinstance(value, bool) and "bool" not in hint
        if isinstance(value, types) and not is_truth:
            continue
        is_number = isinstance(
            value, np.integer | np.floating | Decimal | Fraction | torch.Tensor | np.ndarray
        )
        if (
            (value is None and "None" in hint)
            or value is default
            or is_number
            or isinstance(value, range)
        ):
            continue
        if value is None and (record, name) in (("layout", "etp"), ("strategy", "microbatch_size")):
            continue  # None stands for another value
        with pytest.raises((ParallelPlanError, UnsupportedError), match=name):
            build(record, **{name: value})


def test_numpy_numbers_and_integers_become_python_numbers() -> None:
    config = build("gpt", num_layers=np.int32(3), hidden_dropout=np.float32(0.5), rotary_base=10000)
    assert [
        type(value) for value in (config.num_layers, config.hidden_dropout, config.rotary_base)
    ] == [
        int,
        float,
        float,
    ]
    assert (config.num_layers, config.hidden_dropout) == (3, 0.5)
    assert config == GPTConfig(**asdict(config))


@pytest.mark.parametrize(
    ("record", "values", "message"),
    [
        (
            "strategy",
            {"tp": "2"},
            "tp must be a whole number of at least 1: it is '2', of type str.",
        ),
        (
            "strategy",
            {"tp": True},
            "tp must be a whole number of at least 1: it is True, of type bool.",
        ),
        (
            "strategy",
            {"tp": 2.0},
            "tp must be a whole number of at least 1: it is 2.0, of type float.",
        ),
        ("strategy", {"zero": 2}, "zero must be 0 or 1: it is 2."),
        ("strategy", {"async_save": 1}, "async_save must be True or False: it is 1, of type int."),
        (
            "strategy",
            {"timeout": math.nan},
            (
                "timeout must be a finite number above 0 and at most 1000000000, timedelta or "
                "None: it is nan."
            ),
        ),
        (
            "strategy",
            {"bucket_size": 10**5000},
            "bucket_size must be a whole number of at least 1 and at most 9223372036854775807: it is a whole number of "
            "5001 digits.",
        ),
        (
            "strategy",
            {"pipeline_plan": {"layers": 3}},
            "pipeline_plan['layers'] must be text: it is 3, of type int.",
        ),
        (
            "gpt",
            {"num_kv_heads": 0},
            "num_kv_heads must be a whole number of at least 1 or None: it is 0.",
        ),
        (
            "gpt",
            {"hidden_dropout": 1},
            "hidden_dropout must be a finite number of at least 0 and below 1: it is 1.",
        ),
        (
            "gpt",
            {"window_layers": [True, 1]},
            "window_layers[1] must be True or False: it is 1, of type int.",
        ),
        (
            "gpt",
            {"experts": {"num_expert": 4}},
            "experts has no setting 'num_expert'. Its settings are num_experts, top_k, ",
        ),
        (
            "gpt",
            {"experts": {"num_experts": 4}},
            "experts must have top_k, ffn_hidden_size: it has num_experts.",
        ),
        (
            "gpt",
            {"experts": {**EXPERTS, "top_k": "2"}},
            "experts.top_k must be a whole number of at least 1: it is '2', of type str.",
        ),
        (
            "gpt",
            {"rotary_scaling": 3},
            (
                "rotary_scaling must be RotaryScaling or a mapping of its settings or None: it is "
                "3, of type int."
            ),
        ),
        (
            "rotary scaling",
            {"factor": 0},
            "rotary_scaling.factor must be a finite number above 0: it is 0.",
        ),
    ],
)
def test_error_messages_name_the_setting_the_legal_values_and_the_value(
    record: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParallelPlanError) as caught:
        build(record, **values)
    assert str(caught.value).startswith(message)


def test_arguments_of_a_function_are_checked_by_its_annotations() -> None:
    def function(
        size: Count, pair: tuple[float, float] = (0.9, 0.9), names: list[str] | None = None
    ) -> None: ...

    actual = coerced_arguments(
        function, {"size": np.int8(3), "pair": [1, 0.5], "names": ("a",), "other": 3}
    )
    assert actual == {"size": 3, "pair": (1.0, 0.5), "names": ["a"]}
    with pytest.raises(ParallelPlanError, match=r"pair must have 2 elements: it is \[1\]"):
        coerced_arguments(function, {"pair": [1]})
    with pytest.raises(ParallelPlanError, match=r"pair\[1\] must be a finite number: it is None"):
        coerced_arguments(function, {"pair": [1, None]})


def test_values_are_shown_on_a_short_line() -> None:
    nested: list[Any] = []
    nested.append(nested)
    assert len(shown("x" * 10_000)) < 100
    assert len(shown(nested)) < 100
    assert shown(-(10**5000)) == "a whole number of 5001 digits"
    assert describe(Positive | None) == "a finite number above 0 or None"
    assert coerced("x", Fraction(1, 2), Positive) == 0.5
