"""Every layout generates the tokens of one process: alone, in hooks and steps of a fit, and by the
command.
"""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_megatron import (
    GPT,
    GenerationSettings,
    GPTConfig,
    HuggingFaceCausalLM,
    generate,
    generated_tokens,
)
from lightning_megatron.cli.main import main
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.generation.session import GenerationSession
from lightning_megatron.generation.token_pass import reason_against_replay
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.side_calls import SideCalls
from lightning_megatron.models.stage import StageCursor
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import split_batch
from lightning_megatron.pipeline.step_plans import Trial
from lightning_megatron.plan.context_transport import ContextLinks
from lightning_megatron.plan.generation_memory import GenerationShape, estimate_generation_memory
from lightning_megatron.plan.layout import ParallelLayout
from tests.fits import Job, Report, run_job
from tests.generation.models import (
    NEXT,
    PROMPTS,
    bytes_of,
    check_passes,
    check_rows,
    padded,
    replaced,
    small_gpt,
)
from tests.generation.test_tokens import SIZES, stops_of
from tests.oracles import float32_as_float64
from tests.swap.parts import mesh_of
from tests.tape import TapeBackend
from tests.tiny_llama import save_tiny_llama
from tests.world import run_world

#: Sizes of four ranks, transport of cp, whether ranks share the sequence, and the model: with a
#: window, learned positions, ALiBi, soft caps with windows, angles that change in long rows, experts.
LAYOUTS: dict[str, tuple[dict[str, int], str, bool, str]] = {
    "tp2 sp pp2": ({"tp": 2, "pp": 2}, "auto", True, "mistral"),
    "pp2 vpp2 dp2": ({"pp": 2, "vpp": 2}, "auto", False, "gpt2"),
    "tp2 sp ep2": ({"tp": 2, "ep": 2}, "auto", True, "mixtral"),
    "cp4 ring": ({"cp": 4}, "ring", False, "bloom"),
    "cp4 ring, phi3": ({"cp": 4}, "ring", False, "phi3"),
    "cp2 tp2 sp": ({"cp": 2, "tp": 2}, "auto", True, "gpt2"),
    "cp2 tp2 sp all_gather": ({"cp": 2, "tp": 2}, "all_gather", True, "gemma2"),
    "cp2 pp2 ring": ({"cp": 2, "pp": 2}, "ring", False, "mistral"),
}
#: Arguments of transformers' generate in two of the layouts. With the last ones, several calls read
#: the prompt.
CALLS: tuple[dict[str, Any], ...] = (
    {"num_beams": 3, "do_sample": False},
    {"prefill_chunk_size": 4, "do_sample": False},
)
CALLED = ("cp2 tp2 sp", "cp2 pp2 ring")
NEW_TOKENS = 6
GREEDY = GenerationSettings(NEW_TOKENS)
DRAWN = GenerationSettings(NEW_TOKENS, sample=True, temperature=2.0, top_k=20, top_p=0.9, seed=3)
#: Transport of two ranks, the number of which the lengths of prompts are multiples, and models.
LOGITS = (
    ("ring", 4, ("gemma3", "deepseek_v3", "gpt_oss")),
    ("all_to_all", 4, ("mistral", "mpt")),
    ("all_gather", 8, ("llama with one key head",)),
)


def tokens_of(model: Any, first: int, stops: tuple[int, ...], calls: bool) -> list[Any]:
    """Return tokens after the prompts that a replica has, chosen in several ways."""
    prompts = PROMPTS[first:]
    tokens: list[Any] = [
        generate(model, prompts, GREEDY),
        generate(model, prompts, DRAWN),
        generate(
            model, prompts, GenerationSettings(NEW_TOKENS, beams=3 - first, stop_tokens=stops)
        ),
    ]
    with float32_as_float64():
        for call in CALLS if calls else ():
            options = {**padded(), **call, "max_new_tokens": NEW_TOKENS}
            tokens.append(model.generate(**options).tolist())
    return tokens


def generate_in_layouts(size: int, stops: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    results = {}
    for name, (sizes, transport, shares_sequence, case) in LAYOUTS.items():
        layout = ParallelLayout(size, **sizes)
        links = ContextLinks.of(transport, layout, size) if "cp" in sizes else None  # type: ignore[arg-type]
        mesh = ParallelMesh.create(layout, sequence_parallel=shares_sequence, context=links)
        # Replicas have different numbers and lengths of prompts.
        first, model = mesh.dp.rank % 2, replaced(case, mesh)
        lengths: list[int] = []
        model.gpt.register_forward_pre_hook(
            lambda _, args, lengths=lengths: lengths.append(args[0].shape[1])
        )
        tokens = tokens_of(model, first, stops[case], name in CALLED)
        if name in CALLED:
            # With a cache, the last pass reads only the last token, padded for tp.
            assert lengths[-1] == (sizes.get("tp", 1) if shares_sequence else 1), name
        results[name] = first, tokens
        mesh.destroy()
    return results


class Generating(HuggingFaceCausalLM):
    """Language model whose hooks and steps generate tokens, also by its own ``generate``."""

    settings = GenerationSettings(4)

    def __init__(self, path: str) -> None:
        super().__init__(path, learning_rate=0.05, schedule="constant")
        self.outcomes: dict[str, Any] = {}

    def keep(self, place: str, value: Any = None) -> None:
        value = generate(self.model, PROMPTS[:2], self.settings) if value is None else value
        self.outcomes.setdefault(place, []).append(value)

    def keep_metrics(self, *names: str) -> None:
        for name in names:
            self.keep(name, float(self.trainer.callback_metrics[name]))

    def on_fit_start(self) -> None:
        self.keep("on_fit_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.keep("on_train_batch_end")
        self.keep_metrics("training_score")

    def on_validation_batch_end(self, *_: Any) -> None:
        self.keep("on_validation_batch_end")

    def on_validation_epoch_end(self) -> None:
        self.keep("own", self.generate_itself(torch.tensor(PROMPTS[:1])))

    def on_validation_end(self) -> None:
        self.keep_metrics("validation_score", "own_score", "val_loss")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        prompts = [row[:4].tolist() for row in batch["tokens"]]
        self.log("training_score", score(generate(self.model, prompts, self.settings)))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().validation_step(batch, batch_idx)
        # The first batch generates after the call of the model, without reading its results.
        if batch_idx != 1:
            prompts = [row[: 3 + batch_idx].tolist() for row in batch["tokens"]]
            ways = (self.settings, GenerationSettings(3, beams=2))
            total = sum(score(generate(self.model, prompts, settings)) for settings in ways)
            self.log("validation_score", total, batch_size=len(prompts))
        self.log("own_score", score(self.generate_itself(batch["tokens"][:, :5])))
        return output

    def generate_itself(self, tokens: Tensor) -> list[list[int]]:
        generated: Tensor = self.model.generate(tokens, max_new_tokens=3, do_sample=False)
        return generated.tolist()


def score(generated: list[list[int]]) -> Tensor:
    """Return a number that depends on every generated token."""
    rows = torch.tensor(generated, dtype=torch.float64)
    return (rows * torch.arange(1, rows.shape[1] + 1)).sum(1).mean()


def fit_of(root: Path) -> Job:
    limits = {"num_sanity_val_steps": 1, "val_check_interval": 1, "limit_val_batches": 2}
    tokens = torch.randint(61, (24, 9), generator=torch.Generator().manual_seed(2))
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    return Job(
        partial(Generating, str(root / "generating")), {"pp": 2, "tp": 2}, steps=1, batch=4,
        trainer={**limits, "log_every_n_steps": 1}, data=lambda: rows, validation=lambda: rows,
    )  # fmt: skip


def commands(root: Path) -> dict[str, list[str]]:
    """Return commands that draw samples on four ranks; the second copy of the model has no rows in
    the last round.
    """
    options = f"generate {root}/command --prompts {root}/prompts.jsonl --seed 5 --json"
    options += " --precision 64-true --accelerator cpu --sample --temperature 2 --top-k 50"
    options += " --top-p 0.9 --samples 3 --max-new-tokens 6 --batch-size 2 --devices"
    return {axis: [*options.split(), "4", f"--{axis}", "2"] for axis in ("pp", "cp")}


def check_refusals(size: int) -> None:
    mesh = ParallelMesh.create(ParallelLayout(size, pp=2))
    gpt = GPT(GPTConfig.gpt2(**SIZES), mesh=mesh, seed=0)
    executor, settings = PipelineExecutor(mesh, gpt), GenerationSettings(4)
    batch = split_batch(torch.arange(4).reshape(2, 2), 1)

    def run(step: Any, name: str) -> list[Any]:
        with torch.no_grad():
            return executor.run(step, batch, trial=Trial(name))

    def step(tokens: Tensor, generates: bool) -> Any:
        generated = generate(gpt, tokens.tolist(), settings) if generates else None
        gpt(tokens)
        return generated

    run(partial(step, generates=False), "later")
    with pytest.raises(UnsupportedError, match="must be called in the first step of its kind"):
        run(partial(step, generates=True), "later")
    generated_in_step = run(partial(step, generates=True), "first")
    expected = [generate(gpt, microbatch.data.tolist(), settings) for microbatch in batch]
    assert generated_in_step == (expected if mesh.pp.is_last else [])
    # A later step does not have to generate.
    assert run(partial(step, generates=False), "first") == [None, None][: len(generated_in_step)]

    def iterate_over_tokens(tokens: Tensor) -> Any:
        return list(generated_tokens(gpt, tokens.tolist(), settings)), gpt(tokens)

    with pytest.raises(UnsupportedError, match="generated_tokens cannot run inside a step"):
        run(iterate_over_tokens, "iterates")
    mesh.destroy()


def run_on_four(rank: int, size: int, root: Path, stops: dict[str, tuple[int, ...]]) -> Any:
    results = generate_in_layouts(size, stops)
    check_refusals(size)
    report, outputs = run_job(fit_of(root), size), {}
    for axis, command in commands(root).items():
        with redirect_stdout(StringIO()) as output:
            main(command)
        outputs[axis] = output.getvalue()
    return results, report, outputs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the models of the fit and of the command."""
    root = tmp_path_factory.mktemp("generation")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=32, initializer_range=0.5,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(root / "generating")
    (root / "command").mkdir()
    save_tiny_llama(root / "command")
    prompts = [json.dumps({"prompt": prompt}) for prompt in ("The state", "Wé")]
    (root / "prompts.jsonl").write_text("\n".join(prompts))
    return root


@pytest.fixture(scope="module")
def stops() -> dict[str, tuple[int, ...]]:
    return {case: stops_of(case, 2) for case in {case for *_, case in LAYOUTS.values()}}


@pytest.fixture(scope="module")
def ranks(root: Path, stops: Any) -> list[Any]:
    return run_world(run_on_four, 4, root, stops)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_generates_the_tokens_of_one_process(
    name: str, ranks: Any, stops: Any
) -> None:
    case = LAYOUTS[name][-1]
    model, expected = replaced(case), {}
    for results, *_ in ranks:
        first, tokens = results[name]
        if first not in expected:
            expected[first] = tokens_of(model, first, stops[case], name in CALLED)
        assert tokens == expected[first]
    assert len(set(map(tuple, expected[0][0]))) > 1


def test_hooks_and_steps_of_a_fit_generate_the_tokens_of_one_process(
    root: Path, ranks: Any
) -> None:
    job = fit_of(root)
    twin: Report = run_job(Job(**{**vars(job), "strategy": {}}))
    expected = twin.outcomes
    # The first epoch is the sanity check.
    assert len(expected["own"]) == 2
    assert len(expected["on_validation_batch_end"]) == 1 + 2
    assert expected["on_fit_start"] != expected["on_train_batch_end"], "training changes the tokens"
    assert len(set(expected["validation_score"])) == 2
    numbers = {"training_score", "validation_score", "own_score", "val_loss"}
    for _, report, _ in ranks:
        assert report.outcomes.keys() == expected.keys()
        for key, value in expected.items():
            close = pytest.approx(value, rel=0, abs=1e-9) if key in numbers else value
            assert report.outcomes[key] == close, key


def test_drawn_samples_of_the_command_are_the_same_in_every_layout(
    root: Path, ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(text: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in text.splitlines()]

    *options, _, _, _ = commands(root)["pp"]
    capsys.readouterr()
    main([*options, "1"])
    expected = rows(capsys.readouterr().out)
    assert [row["sample"] for row in expected] == [0, 1, 2, 0, 1, 2]
    assert len({tuple(row["tokens"]) for row in expected}) == 6
    main([*options, "1", "--seed", "6"])
    assert rows(capsys.readouterr().out) != expected
    for rank, (*_, outputs) in enumerate(ranks):
        for text in outputs.values():
            assert rows(text) == (expected if rank == 0 else [])


def test_prompts_that_depend_on_results_are_refused() -> None:
    # Only the last stage knows them.
    gpt = GPT(GPTConfig.gpt2(**SIZES), mesh_of(pp=2, pp_rank=1))
    tokens = torch.ones(2, 4, dtype=torch.long)
    gpt.cursor = StageCursor(0, [torch.zeros(gpt.boundary(tokens)[0])])
    gpt.side_calls = SideCalls([])
    prompts = gpt(tokens).argmax(-1).tolist()
    with pytest.raises(UnsupportedError, match="before any line that reads a value"):
        generate(gpt, prompts, GenerationSettings(4))


WINDOWS = {"sliding_window": 5, "window_layers": [True, False, True, True]}
LATENT = {"key_value_rank": 12, "query_rank": 20, "plain_dim": 6, "rotary_dim": 4, "value_dim": 8}
#: Models whose caches are measured.
MEASURED = (
    GPTConfig.gpt2(**{**SIZES, "num_heads": 4}),
    GPTConfig.llama(**{**SIZES, "num_heads": 4}, num_kv_heads=2, ffn_hidden_size=48, **WINDOWS),
    GPTConfig.llama(**SIZES, ffn_hidden_size=48, latent_attention=LATENT),
)


def check_memory(layout: ParallelLayout, mesh: ParallelMesh) -> None:
    """The estimate has the sizes of this rank's parameters and of its cache after all tokens."""
    shape = GenerationShape(prompt_length=7, new_tokens=4, rows=2, element_bytes=8)
    for config in MEASURED:
        model = GPT(config, mesh, seed=1).double().eval()
        model._owns_mesh = False
        with torch.no_grad():
            prompts = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3]]
            session = GenerationSession(model, prompts, GenerationSettings(4))
            session.logits(None)
            for _ in range(3):
                session.logits(torch.ones(2, dtype=torch.long))
        estimate = estimate_generation_memory(config.memory_shape(), layout, shape)[mesh.pp.rank]
        weights = sum(parameter.numel() * 8 for parameter in model.parameters())
        assert (estimate.parameters, estimate.cache) == (weights, bytes_of(session._cache)), config


def run_on_two(rank: int, size: int) -> None:
    for transport, multiple, cases in LOGITS:
        layout = ParallelLayout(size, cp=2)
        links = ContextLinks.of(transport, layout, size)  # type: ignore[arg-type]
        mesh = ParallelMesh.create(layout, context=links)
        for case in cases:
            cache = check_rows(small_gpt(case, mesh), PROMPTS, multiple, small_gpt(case), later=1)
            held = cache.held
            assert held is not None
            # Each rank has its part of the first tokens, and every second later token.
            most = -(-9 // multiple) * multiple // 2 + NEXT.shape[1] // 2 + 1
            assert NEXT.shape[1] // 2 < held.cache.length <= most
        mesh.destroy()
    sizes: dict[str, int]
    for sizes, shares, reason in (
        ({"tp": 2}, False, ""),
        ({"tp": 2}, True, "sequence parallelism pads"),
        ({"pp": 2}, False, ""),
        ({"cp": 2}, False, "between ranks (cp=2)"),
    ):
        layout = ParallelLayout(size, **sizes)
        mesh = ParallelMesh.create(layout, sequence_parallel=shares)
        if not shares:
            check_memory(layout, mesh)
        if mesh.pp.size == 1:
            assert reason in (reason_against_replay(small_gpt("llama", mesh)) or "")
        for case in ("gpt2", "gemma3") if "tp" in sizes and not shares else ():
            gpt, backend = small_gpt(case, mesh), TapeBackend(mesh.launcher)
            _, token_pass = check_passes(gpt, PROMPTS, backend, small_gpt(case))
            assert token_pass.is_captured
        mesh.destroy()


def test_logits_with_a_divided_cache_and_replayed_passes_equal_those_of_full_rows() -> None:
    run_world(run_on_two, 2)


def test_one_process_allocates_the_estimated_memory() -> None:
    check_memory(ParallelLayout(1), ParallelMesh.single())
