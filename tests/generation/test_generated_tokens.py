"""Generated tokens equal the tokens of transformers in every layout."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lightning_megatron import GPT, GPTConfig, ParallelPlanError, UnsupportedError
from lightning_megatron.generation.decoding import generate, generated_tokens, gpt_of
from lightning_megatron.generation.settings import GenerationSettings
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from tests.oracles import float32_as_float64
from tests.swap import expert_models, families
from tests.swap.test_language_models import exact_twin
from tests.sweeps import chosen
from tests.world import run_world

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30, 31, 32, 33, 34, 35]]
NEW_TOKENS = 12
CASES = ("llama", "qwen3", "mistral", "gpt2", "gemma3", "bloom", "phi3")


def twin_of(case: str) -> nn.Module:
    """Return a model of four layers whose generated tokens depend on the prompt."""
    changes: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": None}
    if case == "mixtral":
        return expert_models.exact_twin_of(case, **changes).eval()
    depth = "n_layer" if case in ("gpt2", "bloom") else "num_hidden_layers"
    changes |= {} if case == "gemma3" else {depth: 4}
    twin = exact_twin(case, **changes)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            # With a bias in the last norm, the model would always predict the same token.
            parameter.mul_(0.0 if name.endswith("ln_f.bias") else 5.0)
    return twin


def tokens_of_transformers(case: str, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Return the tokens that transformers generates after left-padded prompts."""
    twin: Any = twin_of(case)
    longest = max(map(len, prompts))
    rows = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with float32_as_float64():
        tokens: Tensor = twin.generate(
            input_ids=rows, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False
        )
    return tokens[:, longest:].tolist()


def replaced(case: str, mesh: ParallelMesh) -> Any:
    root = nn.ModuleDict({"model": twin_of(case)})
    parallelize(root, mesh)
    return root["model"]


@pytest.mark.parametrize(
    "case", chosen([*CASES, "mixtral"], "llama", "gpt2", "gemma3", "phi3", "mixtral")
)
def test_generated_tokens_equal_those_of_transformers(case: str) -> None:
    model = replaced(case, ParallelMesh.single())
    expected = tokens_of_transformers(case)
    assert generate(model, PROMPTS, GenerationSettings(NEW_TOKENS)) == expected
    assert len(set(map(tuple, expected))) > 1


@pytest.mark.parametrize(
    "case", chosen([*CASES, "gemma2", "mixtral"], "mistral", "bloom", "gemma2", "phi3", "mixtral")
)
def test_replaced_models_generate_with_a_cache(case: str) -> None:
    """Each pass reads one new token, and the tokens equal the tokens of passes without a cache."""
    model = replaced(case, ParallelMesh.single()).eval()
    longest = max(map(len, PROMPTS))
    padding = [longest - len(prompt) for prompt in PROMPTS]
    rows = torch.tensor(
        [[0] * num_padded + prompt for num_padded, prompt in zip(padding, PROMPTS, strict=True)]
    )
    mask = torch.tensor([[0] * num_padded + [1] * (longest - num_padded) for num_padded in padding])
    call = {"input_ids": rows, "attention_mask": mask, "max_new_tokens": NEW_TOKENS}
    searches: list[dict[str, Any]] = [
        {"do_sample": False},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "top_k": 9},
    ]
    if case != "phi3":
        searches.append({"do_sample": False, "prefill_chunk_size": 4})
    for search in searches:
        lengths: list[int] = []
        hook = model.gpt.register_forward_pre_hook(
            lambda _, args, lengths=lengths: lengths.append(args[0].shape[1])
        )
        with float32_as_float64():
            torch.manual_seed(3)
            actual = model.generate(**call, **search)
            hook.remove()
            torch.manual_seed(3)
            expected = model.generate(
                **call, **{**search, "prefill_chunk_size": None}, use_cache=False
            )
        assert torch.equal(actual, expected), search
        reads_full_rows = case == "phi3"
        assert (lengths[-1] > 1) == reads_full_rows, lengths


def test_caches_of_transformers_and_assisted_generation_raise() -> None:
    model = replaced("llama", ParallelMesh.single())
    tokens = torch.tensor(PROMPTS[:1])
    # Transformers 5.24 renames the argument.
    arguments = signature(model.prepare_inputs_for_generation).parameters
    name = "cache" if "cache" in arguments else "past_key_values"
    with pytest.raises(UnsupportedError, match=f"takes no {name}: DynamicCache"):
        model.generate(tokens, **{name: DynamicCache()}, max_new_tokens=2)
    with pytest.raises(UnsupportedError, match="'quantized', whose tokens may differ"):
        model.generate(tokens, cache_implementation="quantized", max_new_tokens=2)
    with pytest.raises(UnsupportedError, match="assisted generation was asked for"):
        model.generate(tokens, prompt_lookup_num_tokens=2, max_new_tokens=2)
    for name in ("past_key_values", "cache"):
        with pytest.raises(UnsupportedError, match=name):
            model(tokens, **{name: DynamicCache()})


def test_generation_continues_input_embeddings() -> None:
    twin: Any = twin_of("llama")
    model = replaced("llama", ParallelMesh.single()).eval()
    vectors = twin.get_input_embeddings()(torch.tensor(PROMPTS[:1])).detach()
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    with float32_as_float64():
        expected = twin.generate(inputs_embeds=vectors, **options)
        assert torch.equal(model.generate(inputs_embeds=vectors, **options), expected)


def test_rows_end_with_a_stop_token() -> None:
    model = replaced("llama", ParallelMesh.single())
    unstopped = generate(model, PROMPTS, GenerationSettings(NEW_TOKENS))
    stop = unstopped[0][3]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in unstopped]
    assert generate(model, PROMPTS, GenerationSettings(NEW_TOKENS, stop_tokens=(stop,))) == expected
    steps = list(
        generated_tokens(model, PROMPTS[:1], GenerationSettings(NEW_TOKENS, stop_tokens=(stop,)))
    )
    assert steps == [[token] for token in expected[0]]


def test_generation_keeps_the_training_mode() -> None:
    model = GPT(GPTConfig.gpt2(**SIZES, hidden_dropout=0.5), seed=0)
    tokens = generate(model, PROMPTS, GenerationSettings(NEW_TOKENS))
    assert tokens == generate(model.eval(), PROMPTS, GenerationSettings(NEW_TOKENS))
    assert generate(model.train(), PROMPTS, GenerationSettings(NEW_TOKENS)) == tokens
    assert all(module.training for module in model.modules())


SIZES: dict[str, Any] = {
    "vocab_size": families.V,
    "max_seq_length": 32,
    "num_layers": 4,
    "hidden_size": 16,
    "num_heads": 2,
}


def test_invalid_prompts_and_lengths_raise() -> None:
    model = GPT(GPTConfig.gpt2(**SIZES))
    with pytest.raises(UnsupportedError, match="at least one prompt"):
        generate(model, [])
    with pytest.raises(UnsupportedError, match="prompt 1 is empty"):
        generate(model, [[1], []])
    with pytest.raises(UnsupportedError, match="prompt 0 has 53"):
        generate(model, [[1, 53]])
    with pytest.raises(UnsupportedError, match="Linear has 0"):
        generate(nn.Linear(1, 1), [[1]])
    with pytest.raises(ParallelPlanError, match="at most 29 new tokens"):
        generate(model, [[1, 2, 3]], GenerationSettings(30))
    assert len(generate(model, [[1, 2, 3]], GenerationSettings(29))[0]) == 29


#: Layouts of four ranks, and whether they share the sequence.
LAYOUTS: tuple[tuple[dict[str, Any], bool], ...] = chosen(
    (
        ({"tp": 2}, False),
        ({"tp": 2}, True),
        ({"pp": 2, "tp": 2}, True),
        ({"pp": 2, "vpp": 2}, False),
        ({"ep": 2, "tp": 2}, True),
        ({"ep": 4}, False),
    ),
    ({"tp": 2}, False),
    ({"pp": 2, "tp": 2}, True),
    ({"pp": 2, "vpp": 2}, False),
    ({"ep": 2, "tp": 2}, True),
)


def sampled(model: nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    settings = GenerationSettings(
        NEW_TOKENS, sample=True, temperature=2.0, top_k=20, top_p=0.9, seed=3
    )
    return generate(model, prompts, settings)


def check_layouts(rank: int, size: int, expected: dict[str, Any]) -> None:
    for sizes, shares_sequence in LAYOUTS:
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes), sequence_parallel=shares_sequence)
        dense = chosen(("mistral", "gpt2"), "gpt2" if "vpp" in sizes else "mistral")
        for case in ("mixtral",) if "ep" in sizes else dense:
            model = replaced(case, mesh)
            # Replicas have different numbers and lengths of prompts.
            first = mesh.dp.rank % 2
            prompts, (greedy, drawn) = PROMPTS[first:], expected[case][first]
            label = f"{case}, {sizes}, rank {rank}"
            assert generate(model, prompts, GenerationSettings(NEW_TOKENS)) == greedy, label
            assert sampled(model, prompts) == drawn, label
        mesh.destroy()


def test_every_layout_generates_the_tokens_of_one_process() -> None:
    expected: dict[str, Any] = {}
    for case in ("mistral", "gpt2", "mixtral"):
        model = replaced(case, ParallelMesh.single())
        assert gpt_of(model).mesh.world.size == 1
        expected[case] = [
            (generate(model, prompts, GenerationSettings(NEW_TOKENS)), sampled(model, prompts))
            for prompts in (PROMPTS, PROMPTS[1:])
        ]
    run_world(check_layouts, 4, expected)
