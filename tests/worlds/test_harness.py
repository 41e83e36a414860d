"""Tasks of lm-eval have the results of its own model `hf`, and every layout those of one process."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_megatron.cli.main import main
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from tests.oracles import float32_as_float64
from tests.tiny_llama import save_tiny_llama, save_tiny_mixtral
from tests.world import run_world

pytest.importorskip("lm_eval")
pytest.importorskip("datasets")
pytestmark = pytest.mark.extras

from lightning_megatron.tasks.evaluation.harness import harness_lm  # noqa: E402

#: Contexts, choices and texts. The last text is longer than the model's 64 positions.
DOCUMENTS = [
    {"question": "ab", "choices": ["cd", "e", "fgh"], "answer": 1, "text": "Two words."},
    {"question": "The state ", "choices": ["x", "yy", "z"], "answer": 0, "text": "Ü and é."},
    {"question": "Why?", "choices": ["no", "yes", "?"], "answer": 2, "text": "a b c d e " * 20},
]
TASKS: dict[str, dict[str, Any]] = {
    "own_choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "answer",
        "doc_to_choice": "choices", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "own_text": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "own_answer": {
        "output_type": "generate_until", "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}", "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["Q", "\n"], "max_gen_toks": 12, "do_sample": False},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model, its tokenizer and the tasks."""
    path = tmp_path_factory.mktemp("harness")
    save_tiny_llama(path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    data = path / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    (path / "tasks").mkdir()
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        settings = {"task": name, "test_split": "test", **source, **task}
        (path / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    return path


def results_of_hf(folder: Path) -> dict[str, Any]:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu")
    tasks = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    with float32_as_float64():
        results = simple_evaluate(lm, tasks=list(TASKS), task_manager=tasks, log_samples=True)
    assert results is not None
    return results


def numbers(results: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {
        (task, metric): value
        for task, values in results.items()
        for metric, value in values.items()
        if isinstance(value, float) and "stderr" not in metric
    }


def arguments(folder: Path, *more: str) -> list[str]:
    options = f"harness {folder} {' '.join(TASKS)} --include-path {folder / 'tasks'}"
    options += " --own-tasks-only --batch-size 2 --json --precision 64-true --accelerator cpu"
    return [*options.split(), *more]


def test_results_match_the_hf_model_of_lm_eval(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    expected = results_of_hf(folder)
    capsys.readouterr()
    main(arguments(folder))
    actual = numbers(json.loads(capsys.readouterr().out))
    expected_numbers = numbers(expected["results"])
    assert {task for task, _ in expected_numbers} == set(TASKS)
    assert actual == pytest.approx(expected_numbers, rel=1e-9)
    answers = [entry["resps"][0][0] for entry in expected["samples"]["own_answer"]]
    assert len(set(answers)) == len(DOCUMENTS)
    mesh, tokenizer = ParallelMesh.single(), load_tokenizer(str(folder))
    lm = harness_lm(parallel_model(folder, mesh), tokenizer, prefix_token=256)
    kwargs = TASKS["own_answer"]["generation_kwargs"]
    assert (
        lm.generate_until([Request((entry["question"], kwargs)) for entry in DOCUMENTS]) == answers
    )
    outputs = run_world(outputs_of_layouts, 2, folder)
    assert numbers(json.loads(outputs[0])) == pytest.approx(actual, rel=1e-10)


def outputs_of_layouts(rank: int, size: int, folder: Path) -> str:
    with redirect_stdout(StringIO()) as output:
        main(arguments(folder, "--cp=2", f"--devices={size}"))
    return output.getvalue()


class Request(NamedTuple):
    """Request as the harness makes it."""

    args: tuple[Any, ...]


def answers_of(model: nn.Module, folder: Path, batch_size: int = 2) -> list[list[Any]]:
    tokens: Any = {"prefix_token": 256, "end_tokens": (256,)}
    lm = harness_lm(model, load_tokenizer(str(folder)), **tokens, batch_size=batch_size)
    pairs = [("ab", "cd"), ("The state", " of"), ("", "x"), ("Why? ", "not"), ("abc" * 40, "d")]
    texts = [(item["text"],) for item in DOCUMENTS]
    kwargs = {"until": ["Q"], "max_gen_toks": 8}
    contexts = [(item["question"], kwargs) for item in DOCUMENTS]
    contexts.append(("ab", {"num_beams": 3, "max_gen_toks": 5}))
    return [
        lm.loglikelihood([Request(item) for item in pairs], disable_tqdm=True),
        lm.loglikelihood_rolling([Request(item) for item in texts]),
        lm.generate_until([Request(item) for item in contexts]),
    ]


def parallel_model(folder: Path, mesh: ParallelMesh) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    root = nn.ModuleDict({"model": model})
    parallelize(root, mesh)
    return root["model"]


def check_layouts(rank: int, size: int, folders: list[Path], expected_answers: list[Any]) -> None:
    cases = (
        (0, {"tp": 2, "pp": 2}, True),
        (0, {}, False),
        (0, {"cp": 2, "tp": 2}, True),
        (0, {"cp": 2, "pp": 2}, False),
        (1, {"ep": 2, "tp": 2}, True),
        (1, {"ep": 2, "cp": 2}, False),
    )
    for kind, sizes, shares_sequence in cases:
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes), sequence_parallel=shares_sequence)
        answers = answers_of(parallel_model(folders[kind], mesh), folders[0])
        for actual, expected in zip(answers[0], expected_answers[kind][0], strict=True):
            assert actual[0] == pytest.approx(expected[0], rel=1e-10), f"{sizes}, rank {rank}"
            assert actual[1] == expected[1]
        assert answers[1] == pytest.approx(expected_answers[kind][1], rel=1e-10), (
            f"{sizes}, rank {rank}"
        )
        assert answers[2] == expected_answers[kind][2], f"{sizes}, rank {rank}"
        mesh.destroy()


def test_every_layout_answers_like_one_process(folder: Path, tmp_path: Path) -> None:
    save_tiny_mixtral(tmp_path)
    folders = [folder, tmp_path]
    expected = [answers_of(parallel_model(path, ParallelMesh.single()), folder) for path in folders]
    # Batches do not change the answers.
    unbatched = answers_of(parallel_model(folder, ParallelMesh.single()), folder, batch_size=1)
    assert unbatched[2] == expected[0][2]
    assert unbatched[1] == pytest.approx(expected[0][1], rel=1e-9)
    run_world(check_layouts, 4, folders, expected)


def test_unknown_tasks_and_unsupported_requests_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = f"--include-path {folder / 'tasks'} --own-tasks-only"
    for options, message in {
        f"own_choise {own}": "'own_choise' is none. Did you mean own_choice?",
        own: "required: tasks",
        f"own_text --include-path {folder / 'none'}": "must be a folder",
    }.items():
        with pytest.raises(SystemExit, match="^2$"):
            main(["harness", str(folder), *options.split()])
        assert message in capsys.readouterr().err
    model = parallel_model(folder, ParallelMesh.single())
    lm = harness_lm(model, load_tokenizer(str(folder)), prefix_token=None)
    with pytest.raises(UnsupportedError, match="needs a token before it"):
        lm.loglikelihood([Request(("", "x"))], disable_tqdm=True)
    with pytest.raises(UnsupportedError, match="no_repeat_ngram_size would be ignored"):
        lm.generate_until([Request(("a", {"no_repeat_ngram_size": 2, "max_gen_toks": 4}))])
    with pytest.raises(ParallelPlanError, match="the task asks for 64"):
        lm.generate_until([Request(("a", {"max_gen_toks": 64}))])
    with pytest.raises(UnsupportedError, match="at most 64"):
        lm.loglikelihood([Request(("a", "b" * 65))], disable_tqdm=True)
