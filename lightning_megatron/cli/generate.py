"""The subcommand ``generate``: continue prompts with a language model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.cli.arguments import at_least_one
from lightning_megatron.cli.model_call import ModelCall, add_layout, dtype_of, trainer_for
from lightning_megatron.cli.opened_model import OpenedModel
from lightning_megatron.cli.text_generation import PromptText, TextGeneration
from lightning_megatron.data.documents import parse_chunk, read_chunks
from lightning_megatron.data.tokenizer import Tokenizer, encode_prompt, load_tokenizer
from lightning_megatron.errors import CorruptDataError, ParallelPlanError, UnsupportedError
from lightning_megatron.generation.prompts import check_prompts
from lightning_megatron.generation.sampling import GenerationSettings
from lightning_megatron.generation.stop_text import StopStrings

EXAMPLE = """examples:
  lightning-megatron generate --ckpt path/to/folder --prompt "The state of the union"
  lightning-megatron generate --ckpt runs/last.ckpt --tokenizer gpt2 --prompts prompts.txt \\
      --sample --top-p 0.9 --samples 4 --tp 2 --pp 2 --devices 4 --precision bf16-true"""

#: Number of bytes of the file of prompts that are read at once (bytes).
_CHUNK_BYTES = 1 << 20
#: Options that only sampling uses, with their defaults.
_OF_DRAWS = {"temperature": 1.0, "top_k": None, "top_p": 1.0}


def main(args: Sequence[str]) -> None:
    """Run the subcommand; every rank runs it with the same arguments."""
    options = generate_parser().parse_args(args)
    _check_options(options)
    model = OpenedModel.at(options.ckpt, dtype_of(options))
    tokenizer = load_tokenizer(model.tokenizer_name(options.tokenizer))
    adds_special = options.special_tokens
    if adds_special is None:
        # A CausalLM is trained on token files, whose texts have no special tokens before them.
        adds_special = model.folder is not None
    prompts = [
        PromptText(text, encode_prompt(tokenizer, text) if adds_special else tokenizer.encode(text))
        for text in _texts(options)
    ]
    settings = _settings(options, model, tokenizer)
    StopStrings(tokenizer.decode, options.stop)
    # Check the prompts here, so that errors are raised before other processes start.
    check_prompts([prompt.tokens for prompt in prompts], model.module.vocab_size)
    _check_length(prompts, settings.max_new_tokens, model)
    call = TextGeneration(
        prompts,
        tokenizer,
        settings,
        tuple(options.stop),
        options.samples,
        options.batch_size,
        options.json,
    )
    ModelCall(model.module, call).run(trainer_for(options), model.checkpoint)


def _settings(
    options: argparse.Namespace, model: OpenedModel, tokenizer: Tokenizer
) -> GenerationSettings:
    ends = model.end_tokens
    stop_tokens = {*ends, *options.stop_token}
    if not ends and tokenizer.eod is not None:
        stop_tokens.add(tokenizer.eod)
    draws = {name: getattr(options, name) for name in _OF_DRAWS}
    chosen = {name: value for name, value in draws.items() if value is not None}
    return GenerationSettings(
        options.max_new_tokens,
        sample=options.sample,
        stop_tokens=tuple(sorted(stop_tokens)),
        seed=options.seed,
        beams=options.beams,
        length_penalty=1.0 if options.length_penalty is None else options.length_penalty,
        **chosen,
    )


def _texts(options: argparse.Namespace) -> list[str]:
    """Return the prompts that the options give; refuse empty prompts."""
    if options.prompt is not None:
        prompts = [(text, f"--prompt {text!r}") for text in options.prompt]
    else:
        prompts = _texts_of_file(Path(options.prompts))
    for text, place in prompts:
        if not text.strip():
            raise UnsupportedError(
                f"a prompt must have a word, which the model continues: {place} has none. Leave it "
                "out, or write a word."
            )
    return [text for text, _ in prompts]


def _texts_of_file(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        raise UnsupportedError(
            f"the prompts must be a file: {path} is none. Give a text file with a prompt on each "
            'line, or JSON lines such as {"prompt": "..."} (.jsonl).'
        )
    prompts = [
        (text.rstrip("\r\n"), f"{path}:{line}")
        for chunk in read_chunks(path, "line", _CHUNK_BYTES)
        for line, text in zip(chunk.lines, parse_chunk(chunk, "prompt"), strict=True)
    ]
    if not prompts:
        raise CorruptDataError(f"{path} has no prompt. Write one on each line.")
    return prompts


def _check_options(options: argparse.Namespace) -> None:
    """Refuse options that would have no effect."""
    for name in _OF_DRAWS:
        if not options.sample and getattr(options, name) is not None:
            raise UnsupportedError(
                f"--{name.replace('_', '-')} needs --sample: without it the most probable "
                "tokens follow, and nothing is drawn. Add --sample, or leave it out."
            )
    if options.length_penalty is not None and options.beams == 1:
        raise UnsupportedError(
            "--length-penalty needs --beams: only beams of unequal lengths are compared. Use "
            "--beams 4, or leave it out."
        )
    if options.samples > 1 and not options.sample:
        raise UnsupportedError(
            f"--samples {options.samples} needs --sample: without draws all of them would be "
            "equal. Add --sample, or leave --samples out."
        )


def _check_length(prompts: Sequence[PromptText], num_new: int, model: OpenedModel) -> None:
    limit = model.max_length
    if limit is None:
        return
    for number, prompt in enumerate(prompts, start=1):
        length = len(prompt.tokens)
        if length + num_new > limit:
            raise ParallelPlanError(
                f"a prompt and its new tokens must not exceed the model's longest row ({limit} "
                f"tokens): prompt {number} has {length}, and --max-new-tokens is {num_new}. The "
                "model has no later positions. Use --max-new-tokens "
                f"{max(0, limit - length)} or fewer, or a shorter prompt."
            )


def generate_parser() -> argparse.ArgumentParser:
    """Build the parser of the subcommand's options."""
    parser = argparse.ArgumentParser(
        prog="lightning-megatron generate",
        description="Continue prompts with a language model, under any layout. The text "
        "appears as it is produced.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--ckpt",
        required=True,
        metavar="MODEL",
        help="a local Hugging Face folder, or a checkpoint",
    )
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "--prompt", action="append", metavar="TEXT", help="prompt; may be repeated"
    )
    prompts.add_argument(
        "--prompts",
        metavar="FILE",
        help="text with a prompt on each line, or JSON lines with the key `prompt`",
    )
    add("--tokenizer", help="bytes, gpt2 or a path (default: that of the Hugging Face folder)")
    add(
        "--special-tokens",
        action=argparse.BooleanOptionalAction,
        help="whether prompts get the special tokens that the tokenizer adds (default: with a "
        "Hugging Face folder)",
    )
    _add_decoding_options(parser)
    add("--samples", type=at_least_one, default=1, metavar="N", help="rows of each prompt")
    add("--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)")
    add("--batch-size", type=at_least_one, default=1, metavar="N", help="rows at once of a copy")
    add_layout(parser)
    add("--json", action="store_true", help="print a JSON object for each row")
    return parser


def _add_decoding_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--max-new-tokens",
        type=at_least_one,
        default=64,
        metavar="N",
        help="maximum number of tokens after a prompt (default: %(default)s)",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that ends a row; may be repeated",
    )
    add(
        "--stop-token",
        action="append",
        default=[],
        type=int,
        metavar="ID",
        help="further token that ends a row, as the end-of-text token does; may be repeated",
    )

    add("--beams", type=at_least_one, default=1, metavar="N", help="beams of a beam search")
    add("--length-penalty", type=float, metavar="X", help="of beams; above 0 favours long words")
    add("--sample", action="store_true", help="draw tokens, instead of taking the likeliest")
    add("--temperature", type=float, metavar="X", help="divisor of the logits (default: 1)")
    add("--top-k", type=at_least_one, metavar="N", help="draw among the N likeliest tokens")
    add("--top-p", type=float, metavar="X", help="draw among the likeliest with probability X")
