"""Settings of any type and size are accepted, or refused by name, for every dataclass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, get_type_hints

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.rotary_scaling import RotaryScaling
from lightning_megatron.plan.settings import Count, coerced_arguments, shown
from lightning_megatron.strategy.options.records import (
    ContextOptions,
    ExpertOptions,
    JobOptions,
    LinearOptions,
    OptimizerOptions,
    PipelineOptions,
)
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from tests.refusals import check_refusals

SIZES = {"vocab_size": 96, "num_layers": 4, "hidden_size": 32, "num_heads": 4}
EXPERTS: dict[str, Any] = {"num_experts": 12, "top_k": 2, "ffn_hidden_size": 16}
OPTION_RECORDS = (
    ContextOptions, ExpertOptions, JobOptions, LinearOptions, OptimizerOptions, PipelineOptions,
)  # fmt: skip
#: Every dataclass with a function that returns it, and legal settings.
RECORDS: dict[str, tuple[type, Callable[..., Any], dict[str, Any]]] = {
    "strategy": (StrategyOptions, lambda **values: MegatronStrategy(**values).options, {}),
    "layout": (ParallelLayout, ParallelLayout, {"world_size": 8}),
    "gpt": (GPTConfig, GPTConfig, {**SIZES, "max_seq_length": 16}),
    "encoder": (
        EncoderConfig,
        EncoderConfig,
        {**SIZES, "num_positions": 16, "ffn_hidden_size": 64},
    ),
    "experts": (ExpertsConfig, ExpertsConfig, EXPERTS),
    "rotary scaling": (RotaryScaling, RotaryScaling, {"kind": "yarn", "original_length": 8}),
    "CUDA graphs": (CudaGraphs, CudaGraphs, {"mode": "segments"}),
    "clones": (ExpertClones, ExpertClones, {"places": 1}),
    **{kind.__name__: (kind, kind, {}) for kind in OPTION_RECORDS},
}
FIELDS = [
    (record, field.name) for record, (kind, _, _) in RECORDS.items() for field in fields(kind)
]
ODD = (
    None,
    True,
    False,
    0,
    -1,
    2**31,
    2**63,
    -(2**64),
    10**5000,
    0.0,
    -0.5,
    1.0,
    1.5,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    1j,
    "",
    "2",
    "none",
    "x" * 5000,
    "\0",
    b"2",
    bytearray(b"2"),
    [],
    [[]],
    [None],
    ["x"],
    [2],
    (),
    (1.5,),
    [math.nan],
    {2, 3},
    range(3),
    {},
    {"x": "y"},
    {1: 2},
    {"x": {}},
    object(),
    object,
    len,
    iter(()),
    np.int64(-3),
    np.float64("nan"),
    np.bool_(True),
    np.array([1, 2]),
    torch.tensor(2),
    torch.ones(2),
    Decimal("NaN"),
    Fraction(-1, 3),
    timedelta(0),
    timedelta(-1),
    timedelta.max,
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
PLAIN = (bool, int, float, str, tuple, list, dict, timedelta)


def build(record: str, **values: Any) -> Any:
    _, make, legal = RECORDS[record]
    return make(**(legal | values))


def parts_of(value: Any) -> Iterator[Any]:
    yield value
    inner = value.values() if isinstance(value, dict) else value
    for part in inner if isinstance(inner, tuple | list | type({}.values())) else ():
        yield from parts_of(part)


def check_taken_or_refused(record: str, name: str, value: Any) -> None:
    """Check that a setting becomes a plain value of its type, or is refused by its name."""
    what, refusal = f"{name} of {record}: {shown(value)}", ""
    try:
        built = build(record, **{name: value})
    except (ParallelPlanError, UnsupportedError) as error:
        refusal = str(error)
    if refusal:
        # Sizes whose product is too large are refused by the world_size that they need.
        names = (name, "world_size") if record == "strategy" else (name,)
        assert any(word in refusal for word in names), f"{what}: {refusal}"
        assert len(refusal) < 600, what
        return
    has_mappings = record in ("strategy", "JobOptions", "PipelineOptions")
    assert has_mappings or hash(built)
    taken, hint = asdict(built)[name], str(get_type_hints(RECORDS[record][0])[name])
    if taken is None or (callable(taken) and "Callable" in hint):
        return
    for part in parts_of(taken):
        assert part is None or type(part) in PLAIN, what
        assert not isinstance(part, float) or math.isfinite(part), what
        assert not isinstance(part, int) or abs(part) < 2**63, what
    kind = type(taken).__name__
    words = {
        "dict": (
            "dict",
            "Config",
            "RotaryScaling",
            "Recomputation",
            "FP8",
            "Options",
            "ExpertClones",
        ),
        "str": ("str", "Literal"),
        "int": ("int", "Literal"),
    }
    assert any(word in hint for word in words.get(kind, (kind,))), f"{what} is taken as {kind}"


def test_every_odd_value_becomes_its_setting_type_or_an_error_that_names_the_setting():
    for record, name in FIELDS:
        for value in ODD:
            check_taken_or_refused(record, name, value)


@settings(suppress_health_check=list(HealthCheck))
@given(ANY)
def test_any_value_becomes_its_setting_type_or_an_error_that_names_the_setting(value):
    for record, name in FIELDS:
        check_taken_or_refused(record, name, value)


def test_numpy_numbers_and_integers_become_python_numbers():
    config = build("gpt", num_layers=np.int32(3), hidden_dropout=np.float32(0.5), rotary_base=10000)
    values = [config.num_layers, config.hidden_dropout, config.rotary_base]
    assert repr(values) == "[3, 0.5, 10000.0]"


def test_errors_name_the_setting_the_legal_values_and_the_value():
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("strategy", {"tp": "2"}, "tp must be a whole number of at least 1: it is '2'."),
        (
            "strategy",
            {"job": {"timeout": math.nan}},
            "at most 1000000000, timedelta or None: it is nan.",
        ),
        ("OptimizerOptions", {"bucket_size": 10**5000}, "it is a whole number of 5001 digits."),
        ("strategy", {"pipeline_plan": {"layers": 3}}, "['layers'] must be text: it is 3."),
        ("gpt", {"hidden_dropout": 1}, "a finite number of at least 0 and below 1: it is 1."),
        ("gpt", {"experts": {"num_expert": 4}}, "experts has no setting 'num_expert'. Its"),
        ("gpt", {"experts": {"num_experts": 4}}, "experts must have top_k, ffn_hidden_size: it"),
        ("gpt", {"experts": {**EXPERTS, "top_k": "2"}}, "experts.top_k must be a whole number"),
        ("rotary scaling", {"factor": 0}, "rotary_scaling.factor must be a finite number above 0"),
    ]
    for record, values, phrase in cases:
        check_refusals(build, [({"record": record, **values}, phrase)])


def test_arguments_of_a_function_are_checked_by_its_annotations():
    def function(
        size: Count, pair: tuple[float, float] = (0.9, 0.9), names: list[str] | None = None
    ) -> None: ...

    given = {"size": np.int8(3), "pair": [1, 0.5], "names": ("a",), "other": 3}
    expected = {"size": 3, "pair": (1.0, 0.5), "names": ["a"]}
    assert coerced_arguments(function, given) == expected
    check_refusals(
        coerced_arguments,
        [
            ((function, {"pair": [1]}), "pair must have 2 elements: it is [1]"),
            ((function, {"pair": [1, None]}), "pair[1] must be a finite number: it is None"),
        ],
    )


def test_invalid_or_contradictory_settings_of_experts_are_refused():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"top_k": 13}, "top_k (13) of experts must be at most num_experts (12)"),
        ({"shared_gate": True}, "be False without shared_ffn_hidden_size"),
        ({"expert_bias_rate": 0.001}, "be 0 without expert_bias"),
        ({"num_groups": 5}, "num_groups (5) of experts must be 1, 2, 3, 4 or 6"),
        ({"num_groups": 3, "top_k_groups": 4}, "at most num_groups (3)"),
        ({"num_groups": 6, "top_k": 3}, "at most 2, the experts of top_k_groups (1)"),
        ({"layers": (False, False)}, "have a true value"),
    ]
    check_refusals(ExpertsConfig, [({**EXPERTS, **given}, phrase) for given, phrase in cases])


MODEL: dict[str, Any] = {**SIZES, "max_seq_length": 16}


def test_experts_that_do_not_fit_the_model_or_the_layout_are_refused():
    check_refusals(
        lambda bias=False, **settings: GPTConfig(
            **MODEL, bias=bias, experts={**EXPERTS, **settings}
        ),
        [
            ({"layers": (True, False)}, "for each of num_layers (4): it has 2"),
            ({"bias": True}, "mlp_bias (True) must be False with experts"),
        ],
    )
    config = GPTConfig(**MODEL, bias=False, experts=ExpertsConfig(**EXPERTS))
    config.check_layout(ParallelLayout(4, ep=4))
    check_refusals(
        lambda **sizes: config.check_layout(ParallelLayout(**sizes)),
        [
            ({"world_size": 8, "ep": 8}, "num_experts (12) must be a multiple of ep (8)"),
            ({"world_size": 3, "etp": 3}, "of experts (16) must be a multiple of etp (3)"),
        ],
    )


def test_every_nth_layer_or_the_layers_of_a_list_have_experts():
    alternate = ExpertsConfig(**EXPERTS, layers=2)
    assert [alternate.is_in(layer) for layer in range(5)] == [False, True, False, True, False]
    # A settings file has lists and mappings.
    mask = [False, True, True, False]
    config = GPTConfig(**MODEL, bias=False, experts={**EXPERTS, "layers": mask})
    assert config.experts == ExpertsConfig(**EXPERTS, layers=tuple(mask))
    assert [config.has_experts_in(layer) for layer in range(4)] == mask
