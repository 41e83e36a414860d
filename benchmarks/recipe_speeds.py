"""Speed and memory of each recipe that fits on one or two GPUs, by a short training.

    python -m benchmarks.recipe_speeds --devices 1
    python -m benchmarks.recipe_speeds --devices 2 --recipes llama3_8b_sft_8gpus qwen3_8b_sft_8gpus
    python -m benchmarks.recipe_speeds --devices 1 --tiny

Models, weights, tokenizers and data are made up: weights are random in the published shapes, data
are random tokens, words and conversations. No file of a model and no network is needed. A recipe
keeps its own settings, but for the number of GPUs and what the table shows as changed; its batch
becomes ``--microbatches`` microbatches, and its callbacks those that measure. Steps run in a row.
``--tiny`` shrinks every model, and trains on the CPU. A recipe that fails is listed so, and the
program fails at its end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.measure import FLOP_RULE, heading, option_parser
from benchmarks.recipe_runs import figures_of, options_to_measure, run_recipe
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.data.tokenizer import ByteTokenizer
from lightning_megatron.recipe_files import recipe_path, recipes_below

_PUBLISHED = Path(__file__).parents[1] / "tests/swap/published_configs.json"
#: Published configurations, by the names of the models.
CONFIGS = json.loads(_PUBLISHED.read_text("utf-8"))
#: Qwen3 8B is longer, wider and untied; its family is the same as that of the smallest one.
_QWEN3_8B = CONFIGS["Qwen3-0.6B"] | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "tie_word_embeddings": False,
}
#: Published configurations of the models that recipes name, by the beginning of their names.
MODELS: dict[str, dict[str, Any]] = {
    "llama3_8b": CONFIGS["Llama-3.1-8B"],
    "qwen3_8b": _QWEN3_8B,
    "qwen3_30b_a3b": CONFIGS["Qwen3-30B-A3B"],
    "gpt_oss_20b": CONFIGS["gpt-oss-20b"],
    "smollm2_135m": CONFIGS["SmolLM2-135M"],
}
_TINY_MODEL = {"num_hidden_layers": 2, "layer_types": None, "hidden_size": 64, "head_dim": 16}
_TINY_MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
_TINY_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}
_TINY_EXPERTS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
#: Latent attention has keys and values for every head.
_TINY_LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 8}
_TINY_LATENT |= {"num_key_value_heads": 4}
_TINY_CONFIG = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "ffn_hidden_size": 96}
#: Template with the marks of answers.
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|endoftext|>{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
_WORDS = "our union is strong and the people of this nation have built it with their work".split()
TITLES = ("recipe", "GPUs", "changed", "ms a step")
RATES = ("tokens/s", "tokens/s/GPU", "TFLOP/s/GPU", "GiB a GPU")


@dataclass(frozen=True)
class Case:
    """Recipe and the numbers of GPUs on which it is measured.

    Args:
        data: Kind of the recipe's data: token files, sentences, text or conversations.
        gpus: Numbers of GPUs.
        two: Options of the strategy on two GPUs.
    """

    data: str
    gpus: tuple[int, ...] = (1, 2)
    two: dict[str, int] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "gpt_speeches_gpu": Case("tokens"),
    "moe_speeches_gpu": Case("tokens", two={"ep": 2}),
    "pretrain_text": Case("text"),
    "bert_336m_gpu": Case("sentences"),
    "gpt2_355m": Case("tokens"),
    "gpt2_1.2b": Case("tokens"),
    "gpt2_2.5b": Case("tokens", (2,)),
    "llama3_8b_sft_1gpu": Case("chat", (1,)),
    "llama3_8b_lora_1gpu": Case("chat", (1,)),
    "qwen3_8b_lora_1gpu": Case("chat", (1,)),
    "smollm2_135m_sft_laptop": Case("chat", (1,)),
    "llama3_8b_sft_8gpus": Case("chat", (2,)),
    "llama3_8b_lora_8gpus": Case("chat", (2,)),
    "qwen3_8b_sft_8gpus": Case("chat", (2,)),
    "qwen3_30b_a3b_lora_8gpus": Case("chat", (2,), {"ep": 2}),
    "gpt_oss_20b_lora_8gpus": Case("chat", (2,), {"ep": 2}),
}


def text_of(draws: np.random.Generator, num_words: int) -> str:
    """Return sentences of random words."""
    words = draws.choice(_WORDS, num_words)
    words[11::12] = "so."
    return " ".join(words)


def write_folder(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a Hugging Face folder without weights: bytes are its tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ByteTokenizer().files().items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


def shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tiny configuration of the same structure."""
    parts = {key: value for key, value in _TINY_EXPERTS.items() if key in config}
    latent = _TINY_LATENT if "kv_lora_rank" in config else {}
    return {**config, **_TINY_MODEL, **parts, **latent}


def model_options(args: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """Write the folder of a model that a recipe names, and return the options of the model."""
    model = max((name for name in MODELS if recipe.startswith(name)), key=len, default=None)
    if model is None:
        tiny = {f"model.config.{key}": value for key, value in _TINY_CONFIG.items()}
        return tiny if args.tiny else {}
    config = shrunk(MODELS[model]) if args.tiny else MODELS[model]
    folder = Path(args.out, "models", model)
    write_folder(folder, config)
    return {"model.path": folder, "model.from_scratch": "true"}


def data_options(args: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """Write data of the recipe's kind, and return the options that make the recipe read it."""
    kind = CASES[recipe].data
    # Two microbatches of 8 rows of 1,024 tokens: more than any of these recipes has in one.
    num_tokens = args.steps * args.microbatches * args.devices * 2**14
    folder = Path(args.out, "data")
    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(1)
    prefix = folder / f"{kind}_{num_tokens}"
    if kind == "chat":
        path = prefix.with_suffix(".jsonl")
        pairs = [(text_of(draws, 12), text_of(draws, 40)) for _ in range(num_tokens // 200 + 1)]
        rows = [json.dumps({"prompt": asked, "completion": answer}) for asked, answer in pairs]
        path.write_text("\n".join(rows))
        return {"data.train": path, "data.val": path}
    if kind == "text":
        path = prefix.with_suffix(".txt")
        path.write_text(text_of(draws, num_tokens // 4))
        of_bytes = Path(args.out, "models", "bytes")
        write_folder(of_bytes, {})
        sizes = {"data.tokenizer": of_bytes, "model.config.vocab_size": 50257}
        return {"data.train": path, **sizes}
    is_bert = kind == "sentences"
    low, high = (1000, 4096) if is_bert else (0, 50257)
    with TokenFileWriter(prefix, vocab_size=high) as writer:
        for _ in range(num_tokens // 1600 + 1):
            tokens = draws.integers(low, high, 1600)
            writer.add_document(tokens, lengths=[20] * 80 if is_bert else None)
    tokenizer = "speeches-wordpiece" if is_bert else "null"
    given = {"data.train": prefix, "data.tokenizer": tokenizer}
    # The recipes of the speeches have a corpus, and those of own token files shares of the parts.
    return {**given, **({"data.split": "null"} if "gpt2" in recipe else {"data.corpus": "null"})}


def settings_of(recipe: str) -> tuple[dict[str, Any], int]:
    """Return the strategy's options in a recipe, and in those that it changes, and its length.

    Returns:
        Options; tokens of a sample
    """
    path = recipe_path(recipe)
    options: dict[str, Any] = {}
    length = 0
    for file in (*recipes_below(path), path):
        values = yaml.safe_load(file.read_text("utf-8"))
        options |= values["trainer"]["strategy"]["init_args"]
        length = values.get("data", {}).get("init_args", {}).get("seq_length", length)
    return options, length


def options_of(args: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """Return all options of a recipe's training."""
    changed = CASES[recipe].two if args.devices == 2 else {}
    strategy, seq_length = settings_of(recipe)
    strategy |= changed
    ranks = args.devices // (strategy.get("tp", 1) * strategy.get("pp", 1))
    batch = args.microbatches * strategy["microbatch_size"] * ranks
    measure = options_to_measure(args, recipe, in_a_row=True, seq_length=seq_length)
    # It is the recipe's choice.
    del measure["trainer.strategy.optimizer.overlap_parameters"]
    options = {
        **{f"trainer.strategy.{name}": value for name, value in changed.items()},
        **model_options(args, recipe),
        **data_options(args, recipe),
        **measure,
        "trainer.devices": args.devices,
        "trainer.max_steps": args.steps,
        "trainer.default_root_dir": f"{args.out}/{recipe}",
        "data.num_workers": 2,
    }
    if "speeches_gpu" in recipe:
        return options | {"data.batch_size": batch // ranks} | tiny_options(args, recipe)
    return options | {"data.global_batch_size": batch} | tiny_options(args, recipe)


def tiny_options(args: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """Return what else a tiny training changes; empty for one on GPUs."""
    if not args.tiny:
        return {}
    options = {"trainer.accelerator": "cpu", "trainer.precision": "32-true"}
    if "optimizer" in settings_of(recipe)[0]:
        # Moments in bfloat16 need a GPU.
        options["trainer.strategy.optimizer.moments_dtype"] = "float32"
    if CASES[recipe].data == "chat":
        return options | {"data.seq_length": 512}
    return options | {"data.seq_length": 64}


def row(args: argparse.Namespace, recipe: str, figures: dict[str, Any] | None) -> str:
    """Return the row of a recipe in the table."""
    two = CASES[recipe].two if args.devices == 2 else {}
    changed = ", ".join(f"{name} {value}" for name, value in two.items())
    if figures is None:
        return f"| `{recipe}` | {args.devices} | {changed} | failed | | | | |"
    rate = figures["tokens_per_second_per_rank"]
    # Frozen weights have no gradients, which the rule of FLOPs counts.
    flops = "" if "lora" in recipe else figures.get("model_tflops_per_rank", "")
    return (
        f"| `{recipe}` | {args.devices} | {changed} | {figures['step_ms']} | "
        f"{rate * args.devices:,} | {rate:,} | {flops} | {figures['peak_gib'] or ''} |"
    )


def main() -> None:
    """Train by each recipe, and print a table of speeds."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--devices", type=int, default=1, choices=[1, 2], help="number of GPUs")
    add("--recipes", nargs="+", choices=list(CASES), help="by default all for this number of GPUs")
    add("--steps", type=int, default=8, help="steps of a training")
    add("--warmup", type=int, default=3, help="steps left out of the median")
    add("--microbatches", type=int, default=8, help="microbatches of a step and data-parallel rank")
    add("--timeout", type=float, default=300.0, help="seconds of one training")
    add("--tiny", action="store_true", help="tiny models on the CPU, which show that it works")
    add("--out", default="runs/recipe_speeds", help="folder of made-up data and results")
    add("options", nargs="*", help="further options of each recipe, after --")
    args = parser.parse_args()
    rows = []
    for recipe in args.recipes or [name for name in CASES if args.devices in CASES[name].gpus]:
        figures = None
        try:
            run_recipe(args, f"recipe:{recipe}", options_of(args, recipe))
            figures = figures_of(args, recipe)
        except subprocess.SubprocessError as error:
            print(f"{recipe}: {str(error).rpartition('] ')[2]}", file=sys.stderr, flush=True)
        rows.append(row(args, recipe, figures))
        print(rows[-1], flush=True)
    print("\n".join([*heading(*TITLES, *RATES), *rows, "", FLOP_RULE]), flush=True)
    if any(" failed " in line for line in rows):
        raise SystemExit("some recipes failed")


if __name__ == "__main__":
    main()
